/**
 * Notices that the server of a call has fallen silent. It sends fifty packets of sound a second, of
 * silence too; a browser takes some seven seconds to find out by itself that nothing comes any more,
 * and the page would say "Speaking" all that time.
 */

const BEAT_MS = 500;
/** So long without a packet happens on a bad line: the server is asked whether it is there. */
const ASK_AFTER_MS = 1500;
const ANSWER_WITHIN_MS = 1000;
/** The server takes a call for broken after as long. */
const BROKEN_AFTER_MS = 3500;

export class Pulse {
  /**
   * @param {() => Promise<number>} count the packets that have come
   * @param {() => void} onSilence called once; the line is to be made anew
   */
  constructor(count, onSilence) {
    this.count = count;
    this.onSilence = onSilence;
    this.packets = -1;
    this.heardAt = performance.now();
    this.isStopped = false;
    this.wait();
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.timer);
  }

  wait() {
    this.timer = setTimeout(() => void this.beat(), BEAT_MS);
  }

  async beat() {
    const packets = await this.count();
    const now = performance.now();
    if (packets !== this.packets) {
      this.packets = packets;
      this.heardAt = now;
    }
    const silentMs = now - this.heardAt;
    const isGone =
      silentMs >= BROKEN_AFTER_MS || (silentMs >= ASK_AFTER_MS && !(await serverAnswers()));
    if (this.isStopped) return;
    if (!isGone) {
      this.wait();
      return;
    }
    this.stop();
    this.onSilence();
  }
}

/**
 * Any answer will do, also that of a proxy which would have people sign in again elsewhere.
 *
 * @returns {Promise<boolean>}
 */
async function serverAnswers() {
  try {
    const signal = AbortSignal.timeout(ANSWER_WITHIN_MS);
    const url = new URL("healthz", document.baseURI);
    await fetch(url, { cache: "no-store", redirect: "manual", signal });
    return true;
  } catch {
    return false;
  }
}
