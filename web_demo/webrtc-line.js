/**
 * The line to the server over WebRTC: the voice on a media track, the events on a data channel.
 *
 * A line that breaks is mended: a new offer goes on with the same call, and nothing is forgotten.
 */

import { ConnectionError } from "./connection.js";
import { sendReport } from "./playout-report.js";
import { Pulse } from "./pulse.js";
import { RemotePlayout } from "./remote-playout.js";

/** @typedef {import("./connection.js").RealtimeEvent} RealtimeEvent */

const CALLS = "v1/realtime/calls";
const OPEN_TIMEOUT_MS = 6000;
/** The server waits 20 s for a caller who is gone. */
const MEND_FOR_MS = 18000;
const MEND_EVERY_MS = 1000;

export class WebRtcLine {
  /**
   * @param {import("./line.js").LineOptions} options
   * @returns {Promise<WebRtcLine>} with an open session
   * @throws {ConnectionError} with the reason "unavailable" when another way may work
   */
  static async open(options) {
    const line = new WebRtcLine(options);
    try {
      await line.connect("");
    } catch (error) {
      line.close();
      throw error;
    }
    return line;
  }

  /** @param {import("./line.js").LineOptions} options */
  constructor(options) {
    this.kind = "webrtc";
    this.options = options;
    this.track = options.track;
    this.callId = "";
    this.isClosed = false;
    this.isMending = false;
    this.lastError = "";
    this.numSent = 0;
    /** @type {RTCPeerConnection | null} */
    this.peer = null;
    /** @type {RTCDataChannel | null} */
    this.channel = null;
    /** @type {RTCRtpSender | null} */
    this.sender = null;
    /** @type {Pulse | null} of the connection that there is */
    this.pulse = null;
    const send = (/** @type {string} */ id, /** @type {Record<string, number>} */ report) =>
      void sendReport(options.apiKey, id, report);
    this.playout = new RemotePlayout(() => this.counts(), send);
  }

  /** @returns {Promise<any>} what the browser counts of the voice that comes; null: nothing */
  async counts() {
    const report = await this.peer?.getStats();
    for (const entry of report?.values() ?? []) {
      if (entry.type === "inbound-rtp" && entry.kind === "audio") return entry;
    }
    return null;
  }

  /**
   * @param {RealtimeEvent} event
   * @returns {string} the event's id, by which an error about it can be known
   */
  send(event) {
    const id = `page_${++this.numSent}`;
    if (this.channel?.readyState === "open") {
      this.channel.send(JSON.stringify({ ...event, event_id: id }));
    }
    return id;
  }

  /** The voice travels on the track. */
  sendAudio() {}

  /** @param {MediaStreamTrack | null} track the microphone's, or none for now */
  setTrack(track) {
    this.track = track;
    void this.sender?.replaceTrack(track);
  }

  /** Ends the conversation; `onLost` is not called. */
  close() {
    this.isClosed = true;
    this.drop();
  }

  /** @param {string} resumed the id of a call to go on with, "" for a new one */
  async connect(resumed) {
    const peer = new RTCPeerConnection();
    const channel = peer.createDataChannel("oai-events");
    const { sender } = peer.addTransceiver("audio", { direction: "sendrecv" });
    // Not closed yet: it would say goodbye, and the server would take that for the end of the call.
    const before = { peer: this.peer, channel: this.channel };
    Object.assign(this, { peer, channel, sender });
    await sender.replaceTrack(this.track);
    peer.ontrack = ({ track }) => this.options.onVoice(new MediaStream([track]));
    const opened = this.sessionOf(channel, peer);
    // Reported by whoever awaits it below, or not at all when something else fails before.
    opened.catch(() => {});
    await peer.setLocalDescription(await peer.createOffer());
    let answer;
    try {
      answer = await this.post(peer.localDescription?.sdp ?? "", resumed);
    } finally {
      release(before.peer, before.channel);
    }
    await peer.setRemoteDescription({ type: "answer", sdp: answer });
    await opened;
    peer.onconnectionstatechange = () => {
      if (["disconnected", "failed"].includes(peer.connectionState)) void this.mend(peer);
    };
    channel.onclose = () => {
      if (this.peer === peer && !this.isMending) this.lost("closed", this.lastError);
    };
    this.pulse?.stop();
    const packets = async () => (await this.counts())?.packetsReceived ?? 0;
    this.pulse = new Pulse(packets, () => void this.mend(peer));
  }

  /**
   * @param {string} sdp
   * @param {string} resumed
   * @returns {Promise<string>} the answer
   */
  async post(sdp, resumed) {
    const url = new URL(CALLS, document.baseURI);
    if (resumed) url.searchParams.set("resume", resumed);
    const { apiKey } = this.options;
    const key = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
    let reply;
    try {
      reply = await fetch(url, {
        method: "POST",
        headers: { "Content-Type": "application/sdp", ...key },
        body: sdp,
        signal: AbortSignal.timeout(OPEN_TIMEOUT_MS),
      });
    } catch {
      throw new ConnectionError("unavailable", "");
    }
    if (reply.status === 201) {
      this.callId = reply.headers.get("Location")?.split("/").pop() ?? "";
      return await reply.text();
    }
    throw await refusal(reply, apiKey);
  }

  /**
   * Listens to a channel; resolves when the server has opened the session on it.
   *
   * @param {RTCDataChannel} channel
   * @param {RTCPeerConnection} peer
   * @returns {Promise<void>}
   */
  sessionOf(channel, peer) {
    return new Promise((resolve, reject) => {
      const fail = () => reject(new ConnectionError("unavailable", ""));
      const timer = setTimeout(fail, OPEN_TIMEOUT_MS);
      peer.onconnectionstatechange = () => {
        if (peer.connectionState === "failed") fail();
      };
      channel.onclose = fail;
      channel.onmessage = (message) => {
        if (this.isClosed || this.channel !== channel) return;
        const event = JSON.parse(message.data);
        if (event.type === "error") this.lastError = event.error.message;
        if (event.type === "session.created") {
          clearTimeout(timer);
          resolve();
        }
        this.playout.handle(event);
        this.options.onEvent(event);
      };
    });
  }

  /** @param {RTCPeerConnection} peer the one that has broken */
  async mend(peer) {
    if (this.isClosed || this.isMending || this.peer !== peer) return;
    this.isMending = true;
    const until = performance.now() + MEND_FOR_MS;
    while (!this.isClosed && performance.now() < until) {
      this.options.onMending(true, Math.ceil((until - performance.now()) / 1000));
      try {
        await this.connect(this.callId);
        this.isMending = false;
        this.options.onMending(false, 0);
        return;
      } catch (error) {
        // Gone for good, or not reachable yet.
        if (/** @type {ConnectionError} */ (error).reason !== "unavailable") break;
        await new Promise((resolve) => setTimeout(resolve, MEND_EVERY_MS));
      }
    }
    if (!this.isClosed) this.lost("closed", "The connection was lost.");
  }

  /**
   * @param {import("./connection.js").Reason} reason
   * @param {string} message
   */
  lost(reason, message) {
    if (this.isClosed) return;
    this.close();
    this.options.onLost(new ConnectionError(reason, message));
  }

  /** Lets go of the connection that there is. */
  drop() {
    this.pulse?.stop();
    release(this.peer, this.channel);
    this.peer = this.channel = this.sender = null;
  }
}

/**
 * @param {RTCPeerConnection | null} peer
 * @param {RTCDataChannel | null} channel
 */
function release(peer, channel) {
  if (channel) channel.onclose = channel.onmessage = null;
  if (!peer) return;
  peer.onconnectionstatechange = peer.ontrack = null;
  peer.close();
}

/**
 * @param {Response} reply
 * @param {string} apiKey
 * @returns {Promise<ConnectionError>}
 */
async function refusal(reply, apiKey) {
  let message = "";
  try {
    message = (await reply.json()).error.message;
  } catch {
    // Not from our server: a proxy, or an older version.
  }
  if (reply.status === 401) {
    return new ConnectionError("key", apiKey ? "The server does not accept this key." : "");
  }
  if ([400, 403, 503].includes(reply.status) && message) {
    return new ConnectionError(reply.status === 503 ? "closed" : "refused", message);
  }
  // A call that is over, or a server that takes no calls.
  return new ConnectionError(reply.status === 404 && message ? "closed" : "unavailable", message);
}
