"""The embedded models as they really come: out of the package index, and as installed here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from app.cli.models import configured_models
from app.config import load_settings
from app.errors import ModelStoreError
from app.models.catalog import CATALOG
from app.models.store import ModelStore
from audio.endpointing.smart_turn import SmartTurnModel
from audio.frame import SPEECH_RATE, silence
from tests.support.speech import DOG_OR_CAT, WEATHER, Voice

VOICE = "package:piper-en_US-joe-medium"
TURN_MODEL = "package:smart-turn-v3.2"


def fetch(store: ModelStore, name: str) -> Path:
    """Fetch a model; skip where there is no network."""
    try:
        return store.fetch(name)
    except ModelStoreError as error:
        if "could not be reached" in error.message:
            pytest.skip(error.message)
        raise


@pytest.mark.parametrize("name", [VOICE, TURN_MODEL])
def test_a_real_wheel_from_the_index(tmp_path: Path, name: str) -> None:
    store = ModelStore(tmp_path)
    path = fetch(store, name)
    assert path.name == CATALOG[name].entry
    assert {p.name for p in path.parent.iterdir()} == {
        *(file.name for file in CATALOG[name].files),
        "manifest.json",
    }
    assert store.verify(name) == path


def test_the_turn_model_tells_an_end_from_a_break(tmp_path: Path, voice: Voice) -> None:
    model = SmartTurnModel(fetch(ModelStore(tmp_path), TURN_MODEL))
    ends, breaks = [], []
    for text in (WEATHER, DOG_OR_CAT, "I would like a cup of tea.", "Where can I buy a ticket?"):
        samples, pause = voice.samples(text), silence(SPEECH_RATE // 5)
        ends.append(model.probability(np.concatenate((samples, pause))))
        breaks.append(model.probability(np.concatenate((samples[: samples.size // 2], pause))))
    assert min(ends) > max(breaks), (ends, breaks)


def test_the_models_of_the_settings_are_whole(
    llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path
) -> None:
    settings = load_settings()
    for name in configured_models(settings):
        ModelStore(settings.home).verify(name)


def test_each_path_is_what_its_loader_wants(
    llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path
) -> None:
    with llm_model_path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert (asr_model_dir / "model.bin").is_file()
    description = json.loads(Path(f"{tts_voice_path}.json").read_text(encoding="utf-8"))
    assert description["audio"]["sample_rate"] == 22050
