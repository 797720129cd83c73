"""Every recording of a set through `parley talk`: what was heard, what was answered, how fast.

    python -m bench.voice.speech_set ../shared/data/speech/*.flac

Needs the `test` extra (jiwer, and transformers for Whisper's text normaliser). References come from
MANIFEST.tsv beside the recordings' folder. Replies are transcribed back by the same recogniser, so
their word error rate is an upper bound on what is unintelligible in them.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jiwer
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE
from audio.resample import resample
from audio.text.normalize.english import normalize


def main() -> None:
    """Run the set and print a table for people and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--json", type=Path, help="write the raw results here, one object a file")
    options = parser.parse_args()
    references = read_manifest(options.files[0].parent.parent / "MANIFEST.tsv")
    with tempfile.TemporaryDirectory() as folder:
        results = talk(options.files, Path(folder), options.url)
        if options.json is not None:
            options.json.write_text("".join(json.dumps(r) + "\n" for r in results))
        settings = load_settings()
        recognizer = Recognizer(ModelStore(settings.home).resolve(settings.asr_model))
        rows = [judge(r, references, Path(folder), recognizer) for r in results]
    report(rows, [t for r in results for t in r.get("turns", [])])


def read_manifest(path: Path) -> dict[str, str]:
    """File name -> reference transcript."""
    with path.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        return {Path(row["file"]).name: row["transcript"] for row in rows}


def talk(files: list[Path], replies: Path, url: str | None) -> list[dict[str, Any]]:
    """`parley talk --json` over all files, one conversation each."""
    command = [sys.executable, "-m", "app", "talk", "--json", "--out", str(replies)]
    command += ["--url", url] if url else []
    done = subprocess.run([*command, *map(str, files)], stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


_whisper = EnglishTextNormalizer({})


def words(text: str) -> str:
    """Text for comparison: numbers as words, digit strings split, as Whisper's authors do it."""
    spaced = " ".join(" ".join(w) if w.isdigit() else w for w in _whisper(normalize(text)).split())
    return spaced or "nothing"


def judge(
    result: dict[str, Any], references: dict[str, str], replies: Path, recognizer: Recognizer
) -> dict[str, Any]:
    """Word error rates of the transcript and of the reply as it sounds."""
    name = Path(result["file"]).name
    reply_file = replies / f"{Path(name).stem}.reply.wav"
    heard_back = ""
    if reply_file.is_file():
        speech = resample(*read_audio(reply_file), SPEECH_RATE)
        heard_back = recognizer.transcribe(speech).text
    return {
        "name": name,
        "reference": words(references[name]),
        "transcript": words(result.get("transcript", "")),
        "reply": words(" ".join(t["reply"] for t in result.get("turns", []))),
        "heard_back": words(heard_back),
        "error": result.get("error"),
    }


def report(rows: list[dict[str, Any]], turns: list[dict[str, Any]]) -> None:
    """Print the table and the summary."""
    print("| recording | WER | reply heard back, WER |\n|---|---|---|")
    for row in rows:
        heard = jiwer.wer(row["reference"], row["transcript"])
        spoken = jiwer.wer(row["reply"], row["heard_back"])
        print(f"| {row['name']} | {heard:.0%} | {spoken:.0%} |")
    wer = jiwer.wer([r["reference"] for r in rows], [r["transcript"] for r in rows])
    back = jiwer.wer([r["reply"] for r in rows], [r["heard_back"] for r in rows])
    v2v = sorted(t["voice_to_voice_ms"] for t in turns if t["voice_to_voice_ms"] is not None)
    lag = [t["facts"]["loop_lag_p99_ms"] for t in turns if t["facts"].get("loop_lag_p99_ms")]
    for turn in turns:
        if turn["voice_to_voice_ms"] is not None:
            assert abs(sum(turn["stages_ms"].values()) - turn["voice_to_voice_ms"]) < 1e-6
    print(f"\nrecordings {len(rows)}, turns answered {len(v2v)}")
    print(f"transcripts: WER {wer:.2%}; replies heard back: WER {back:.2%}")
    p95 = v2v[int(len(v2v) * 0.95)]
    print(f"voice to voice: p50 {statistics.median(v2v):.0f} ms, p95 {p95:.0f} ms")
    print(f"the stages add up to it in all {len(v2v)} turns")
    print(f"loop lag, p99 of a turn: median {statistics.median(lag):.1f}, worst {max(lag):.1f} ms")


if __name__ == "__main__":
    main()
