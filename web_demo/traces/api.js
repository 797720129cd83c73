/** Questions to the server; `app/api/traces.py` has the other side. */

export class ApiError extends Error {
  /**
   * @param {"key" | "refused" | "away"} reason
   * @param {string} message
   */
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

export class TracesApi {
  constructor() {
    /** Kept in this page's memory only. */
    this.apiKey = "";
  }

  /**
   * @param {string} path below /v1/traces
   * @param {Record<string, string | number | boolean | null | undefined>} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  async ask(path, parameters, signal) {
    return (await this.fetch(path, parameters, signal)).json();
  }

  /**
   * The recording of a turn, as an address for a player. Whoever asks for it revokes it.
   *
   * @param {string} turnId
   * @returns {Promise<string>}
   */
  async recording(turnId) {
    const answer = await this.fetch(`/${encodeURIComponent(turnId)}/audio`, {});
    return URL.createObjectURL(await answer.blob());
  }

  /**
   * @param {string} path
   * @param {Record<string, string | number | boolean | null | undefined>} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<Response>}
   */
  async fetch(path, parameters, signal) {
    const url = new URL(`v1/traces${path}`, document.baseURI);
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== null && value !== undefined && value !== "" && value !== false) {
        url.searchParams.set(name, String(value));
      }
    }
    const headers = this.apiKey ? { Authorization: `Bearer ${this.apiKey}` } : undefined;
    let answer;
    try {
      answer = await fetch(url, { headers, signal });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("away", "The server does not answer.");
    }
    if (answer.ok) return answer;
    const words = await answer.json().then((body) => body.error.message, () => answer.statusText);
    throw new ApiError(answer.status === 401 ? "key" : "refused", words);
  }
}
