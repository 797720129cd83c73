/**
 * The line to the server over a WebSocket: events and audio in one stream of messages.
 */

/** @typedef {{type: string, [field: string]: any}} RealtimeEvent */

/**
 * Why there is no line (any more).
 *
 * @typedef {"key" | "away" | "refused" | "closed" | "unavailable"} Reason
 */

export class ConnectionError extends Error {
  /**
   * @param {Reason} reason
   * @param {string} message
   */
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

const OPEN_TIMEOUT_MS = 10000;
/** Close codes after which the same attempt would fail again. */
const FINAL_CODES = new Set([1003, 1008, 1009]);
/** When the line is this far behind, microphone audio is dropped: late speech is of no use. */
const MAX_BUFFERED_BYTES = 1 << 20;

export class Connection {
  /**
   * @param {string} apiKey "" for none
   * @param {(event: RealtimeEvent) => void} onEvent
   * @param {(error: ConnectionError) => void} onLost called once, after the session was open
   * @returns {Promise<Connection>} with an open session
   * @throws {ConnectionError}
   */
  static async open(apiKey, onEvent, onLost) {
    const connection = new Connection(apiKey, onEvent, onLost);
    try {
      await connection.opened;
    } catch (error) {
      connection.close();
      throw await explained(/** @type {ConnectionError} */ (error), apiKey);
    }
    return connection;
  }

  /**
   * @param {string} apiKey
   * @param {(event: RealtimeEvent) => void} onEvent
   * @param {(error: ConnectionError) => void} onLost
   */
  constructor(apiKey, onEvent, onLost) {
    this.kind = "websocket";
    this.onEvent = onEvent;
    this.onLost = onLost;
    this.isOpen = false;
    this.lastError = "";
    this.numSent = 0;
    /** @type {Promise<void>} */
    this.opened = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.timer = setTimeout(
      () => this.fail("away", "The server did not answer in time."),
      OPEN_TIMEOUT_MS,
    );
    try {
      const protocols = ["realtime", ...(apiKey ? [`openai-insecure-api-key.${apiKey}`] : [])];
      this.socket = new WebSocket(realtimeUrl(), protocols);
    } catch {
      // The browser takes only some characters here.
      this.fail("key", "A key cannot contain spaces or characters like / or @.");
      return;
    }
    this.socket.onmessage = (message) => this.take(message.data);
    this.socket.onclose = (event) => this.ended(event.code, event.reason);
  }

  /**
   * @param {RealtimeEvent} event
   * @returns {string} the event's id, by which an error about it can be known
   */
  send(event) {
    const id = `page_${++this.numSent}`;
    if (this.isOpen) this.socket?.send(JSON.stringify({ ...event, event_id: id }));
    return id;
  }

  /** @param {string} audio base64 */
  sendAudio(audio) {
    if (!this.isOpen || !this.socket || this.socket.bufferedAmount > MAX_BUFFERED_BYTES) return;
    this.socket.send(`{"type":"input_audio_buffer.append","audio":"${audio}"}`);
  }

  /** The voice travels in messages. */
  setTrack() {}

  /** Ends the conversation; `onLost` is not called. */
  close() {
    clearTimeout(this.timer);
    this.isOpen = false;
    if (!this.socket) return;
    this.socket.onmessage = null;
    this.socket.onclose = null;
    this.socket.close(1000);
  }

  /** @param {string} data */
  take(data) {
    const event = JSON.parse(data);
    if (event.type === "error") this.lastError = event.error.message;
    if (event.type === "session.created") {
      clearTimeout(this.timer);
      this.isOpen = true;
      this.resolve?.();
    }
    // An error before the session is the reason why there will be none: `fail` tells it.
    if (this.isOpen) this.onEvent(event);
  }

  /**
   * @param {number} code
   * @param {string} reason
   */
  ended(code, reason) {
    const words = this.lastError || reason;
    if (FINAL_CODES.has(code)) this.fail("refused", words || `The server closed with ${code}.`);
    else if (code === 1006) this.fail("away", "");
    else this.fail("closed", words);
  }

  /**
   * @param {Reason} reason
   * @param {string} message
   */
  fail(reason, message) {
    clearTimeout(this.timer);
    const error = new ConnectionError(reason, message);
    const wasOpen = this.isOpen;
    this.isOpen = false;
    if (wasOpen) this.onLost(error);
    else this.reject?.(error);
  }
}

/** @returns {URL} the endpoint beside this page */
function realtimeUrl() {
  const url = new URL("v1/realtime", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url;
}

/**
 * Browsers hide why a WebSocket was refused, so a plain request asks whether a key is needed.
 *
 * @param {ConnectionError} error
 * @param {string} apiKey
 * @returns {Promise<ConnectionError>}
 */
async function explained(error, apiKey) {
  if (error.reason !== "away") return error;
  try {
    const url = new URL("v1/traces?limit=1", document.baseURI);
    const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : undefined;
    const answer = await fetch(url, { headers, signal: AbortSignal.timeout(5000) });
    if (answer.status === 401) {
      const words = apiKey ? "The server does not accept this key." : "";
      return new ConnectionError("key", words);
    }
    if (answer.status === 403) {
      return new ConnectionError("refused", "The server does not allow this page to connect.");
    }
  } catch {
    // No answer at all: it is away indeed.
  }
  return error;
}
