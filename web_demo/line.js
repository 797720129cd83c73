/**
 * A line to the server, whichever way there is: WebRTC first, the WebSocket where that does not work.
 */

import { Connection, ConnectionError } from "./connection.js";
import { WebRtcLine } from "./webrtc-line.js";

/** @typedef {import("./connection.js").RealtimeEvent} RealtimeEvent */

/**
 * @typedef {object} LineOptions
 * @property {"auto" | "webrtc" | "websocket"} transport
 * @property {string} apiKey "" for none
 * @property {MediaStreamTrack | null} track the microphone's
 * @property {(event: RealtimeEvent) => void} onEvent
 * @property {(error: ConnectionError) => void} onLost called once, after the session was open
 * @property {(stream: MediaStream) => void} onVoice the server's voice, where it comes on a track
 * @property {(isMending: boolean, leftS: number) => void} onMending the line broke, and is being
 *   mended for so many seconds more
 */

/** @typedef {Connection | WebRtcLine} Line */

/**
 * @param {LineOptions} options
 * @returns {Promise<Line>} with an open session
 * @throws {ConnectionError}
 */
export async function openLine(options) {
  const { transport, apiKey, onEvent, onLost } = options;
  if (transport !== "websocket" && "RTCPeerConnection" in window) {
    try {
      return await WebRtcLine.open(options);
    } catch (error) {
      const known = error instanceof ConnectionError;
      if (!known || error.reason === "unavailable") {
        if (transport === "webrtc") throw cannot(known ? error.message : String(error));
      } else {
        throw error;
      }
    }
  }
  return await Connection.open(apiKey, onEvent, onLost);
}

/**
 * @param {string} why
 * @returns {ConnectionError}
 */
function cannot(why) {
  const words = "No call over WebRTC came about. A firewall may be in the way of UDP; the settings";
  return new ConnectionError("refused", `${words} offer the WebSocket instead. ${why}`.trim());
}
