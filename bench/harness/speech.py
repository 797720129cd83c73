"""Recorded speech with transcripts, the installed speech models, and word error rates.

Data sets are folders with a MANIFEST.tsv (columns file, set, transcript). Word error rates need the
extra `test`: jiwer, and the text normaliser of Whisper's authors in transformers.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.recognizer import Recognizer
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.text.normalize.english import normalize
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel


def installed_model(setting: str) -> Path:
    """Folder of the model that the setting ``asr_model``, ``tts_model``... names."""
    settings = load_settings()
    return ModelStore(settings.home).resolve(getattr(settings, setting))


def installed_recognizer() -> Recognizer:
    return Recognizer(installed_model("asr_model"))


def installed_voice() -> tuple[Synthesizer, VadModel]:
    """The voice that speaks scripts, and the detector that finds where it is voiced."""
    return Synthesizer(installed_model("tts_model")), VadModel()


def manifest(data: Path, part: str = "") -> list[dict[str, str]]:
    """Rows of ``data``/MANIFEST.tsv, those of the set ``part`` alone if it is given."""
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [row for row in rows if part in ("", row["set"])]


def transcripts(data: Path) -> dict[str, str]:
    """Reference transcript by file name."""
    return {Path(row["file"]).name: row["transcript"] for row in manifest(data)}


def load_speech(path: Path) -> Samples:
    """A recording as float32 [n] at 16 kHz."""
    return resample(*read_audio(path), SPEECH_RATE)


def comparable(text: str) -> str:
    """Text for word error rates: normalised as Whisper's authors do, digit strings split."""
    words = _whisper_normalizer()(normalize(text)).split()
    return " ".join(" ".join(word) if word.isdigit() else word for word in words) or "nothing"


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Over all texts together, after ``comparable``."""
    import jiwer

    pair = ([comparable(text) for text in texts] for texts in (references, hypotheses))
    return float(jiwer.wer(*pair))


@cache
def _whisper_normalizer() -> Any:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalizer: Any = EnglishTextNormalizer
    return normalizer({})
