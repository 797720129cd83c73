"""WER and latency of `parley talk` over recordings with known transcripts.

    python -m bench.voice.speech_set ../shared/data/speech/*.flac [--url URL] [--raw OUT]

References come from MANIFEST.tsv in the parent folder of the recordings. Spoken replies are
transcribed by the same recogniser, so their word error rate is an upper bound on what is
unintelligible in them. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from audio.asr.recognizer import Recognizer
from bench.harness.figures import percentiles
from bench.harness.results import Result, add_json_option, report
from bench.harness.speech import installed_recognizer, load_speech, transcripts, word_error_rate


def talk(files: list[Path], replies: Path, url: str | None) -> list[dict[str, Any]]:
    """Output of `parley talk --json` for all files, one conversation each."""
    command = [sys.executable, "-m", "app", "talk", "--json", "--out", str(replies)]
    command += ["--url", url] if url else []
    done = subprocess.run([*command, *map(str, files)], stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def spoken_words(reply: Path, recognizer: Recognizer) -> str:
    """Transcript of a reply; "" where there was none."""
    return recognizer.transcribe(load_speech(reply)).text if reply.is_file() else ""


def measure(results: list[dict[str, Any]], references: dict[str, str], replies: Path) -> Result:
    """A row for each recording, and the summary over all of them as notes."""
    recognizer = installed_recognizer()
    table = Result(("recording", "WER", "WER of the spoken reply"))
    names = [Path(result["file"]).name for result in results]
    wanted = [references[name] for name in names]
    heard = [result.get("transcript", "") for result in results]
    written = [" ".join(t["reply"] for t in result.get("turns", [])) for result in results]
    spoken = [spoken_words(replies / f"{Path(n).stem}.reply.wav", recognizer) for n in names]
    for number, name in enumerate(names):
        wer = word_error_rate([wanted[number]], [heard[number]])
        reply_wer = word_error_rate([written[number]], [spoken[number]])
        table.add(name, round(wer, 4), round(reply_wer, 4))
    wer, reply_wer = word_error_rate(wanted, heard), word_error_rate(written, spoken)
    table.add("all recordings", round(wer, 4), round(reply_wer, 4))
    turns = [turn for result in results for turn in result.get("turns", [])]
    answered = [turn for turn in turns if turn["voice_to_voice_ms"] is not None]
    for turn in answered:
        assert abs(sum(turn["stages_ms"].values()) - turn["voice_to_voice_ms"]) < 1e-6
    v2v = percentiles([turn["voice_to_voice_ms"] for turn in answered])
    lag = [t["facts"]["loop_lag_p99_ms"] for t in turns if t["facts"].get("loop_lag_p99_ms")]
    table.notes = (
        f"{len(names)} recordings, {v2v['n']} turns answered. Voice to voice p50 "
        f"{v2v.get('p50', 0):.0f} ms, p95 {v2v.get('p95', 0):.0f} ms; the stages of every turn add "
        f"up to it. Loop lag, p99 of a turn: median {median(lag):.1f} ms, worst {max(lag):.1f} ms."
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--raw", type=Path, help="write the raw results here, one object a file")
    add_json_option(parser)
    options = parser.parse_args()
    references = transcripts(options.files[0].parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        results = talk(options.files, Path(folder), options.url)
        if options.raw is not None:
            options.raw.write_text("".join(json.dumps(r) + "\n" for r in results))
        report(measure(results, references, Path(folder)), options)


if __name__ == "__main__":
    main()
