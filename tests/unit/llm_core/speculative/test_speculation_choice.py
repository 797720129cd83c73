"""Drafters and controllers from a configuration, and errors for those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_core.engine.engine import Engine
from llm_core.errors import ModelLoadError
from llm_core.loading.model_files import open_model
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.messages import EngineConfig, ModelBackend
from llm_core.speculative.heads.files import HeadFile, fingerprint, write_head
from tests.support import tiny_model
from tests.support.native_library import native_cache_dir
from tests.support.random_heads import head_config, head_tensors
from tests.support.tiny_model import write_tiny_gguf
from tests.unit.llm_core.engine.test_engine import assert_nothing_left, reply_to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def engine_config(
    model: Path, speculation: str | Path, backend: ModelBackend = "torch", **options: Any
) -> EngineConfig:
    return EngineConfig(
        model_path=str(model),
        backend=backend,
        native_cache_dir=str(native_cache_dir()),
        max_sequences=2,
        speculation=str(speculation),
        draft_control="fixed",
        **options,
    )


def write(directory: Path, model: Path, kind: str = "eagle3", **changes: Any) -> Path:
    with open_model(model) as opened:
        config = opened.model.config
        changes.setdefault("target_fingerprint", fingerprint(config, opened.model.weights))
    head = head_config(config, kind, **changes)
    write_head(directory, HeadFile(head, head_tensors(head)), is_int8=False)
    return directory


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "medusa", "ngram", "draft model", "grammar"])
def test_each_drafter_leaves_the_text_unchanged(name: str, model: Path, tmp_path: Path) -> None:
    speculation: str | Path = {"grammar": "auto", "draft model": model}.get(name, name)
    if name in ("eagle3", "eagle1", "medusa"):
        changes: dict[str, Any] = {"num_medusa_heads": 2} if name == "medusa" else {}
        if name == "eagle1":
            with open_model(model) as opened:
                vocab_size = opened.model.config.vocab_size
            changes = {"draft_vocab_size": vocab_size, "has_draft_vocab": False}
        speculation = write(tmp_path / "head", model, name, **changes)
    backend: ModelBackend = "native" if name == "grammar" else "torch"
    engine = Engine.load(engine_config(model, speculation, backend))
    assert engine._speculator is not None and engine._speculator.name == name
    plain = Engine.load(engine_config(model, "off", backend))
    assert plain._speculator is None
    params = {"max_tokens": 12, "ignore_eos": True}
    assert reply_to(engine, "Hi", **params)[0] == reply_to(plain, "Hi", **params)[0]
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden_size 48, this one has 64"),
        ({"vocab_size": 300}, "vocab_size 300, this one has"),
        ({"feature_layers": (0, 1, 9)}, "layer 9, the model has 2"),
        ({"target_fingerprint": "0123456789abcdef"}, "fingerprint 0123456789abcdef"),
    ],
)
def test_head_of_another_model_is_refused(
    changes: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    head = write(tmp_path / "head", model, **changes)
    with pytest.raises(ModelLoadError, match=message):
        Engine.load(engine_config(model, head))
    # With speculation_optional the engine starts without it.
    engine = Engine.load(engine_config(model, head, speculation_optional=True))
    assert engine._speculator is not None and engine._speculator.name == "grammar"


def test_missing_tensors_are_named(model: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", model)
    with open_model(model) as opened:
        config = head_config(opened.model.config, "eagle3")
    tensors = head_tensors(config)
    del tensors["midlayer.self_attn.k_proj.weight"]
    write_safetensors(head / "head.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=r"lacks.*midlayer\.self_attn\.k_proj\.weight"):
        Engine.load(engine_config(model, head))


def test_paths_without_a_head_or_model_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        Engine.load(engine_config(model, tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError):
        Engine.load(engine_config(model, tmp_path / "empty"))


def test_draft_model_must_share_the_vocabulary(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model, "TOKENS", [*tiny_model.TOKENS, "zzz"])
    monkeypatch.setattr(tiny_model, "TYPES", [*tiny_model.TYPES, 1])
    other = write_tiny_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="shares the vocabulary"):
        Engine.load(engine_config(model, other))


@pytest.mark.parametrize("name", ["eagle3", "ngram", "draft model"])
def test_automatic_control_is_the_default(name: str, model: Path, tmp_path: Path) -> None:
    """Its start-up measurement with the real drafter leaves no state behind."""
    speculation: str | Path = {"draft model": model}.get(name, name)
    if name == "eagle3":
        speculation = write(tmp_path / "head", model)
    config = msgspec.structs.replace(engine_config(model, speculation), draft_control="auto")
    engine = Engine.load(config)
    plain = Engine.load(engine_config(model, "off"))
    text = "hello hello hello hello"
    for _ in range(2):
        reply = reply_to(engine, text, max_tokens=20, ignore_eos=True)[0]
        assert reply == reply_to(plain, text, max_tokens=20, ignore_eos=True)[0]
    assert_nothing_left(engine)
    assert engine._speculator is not None
    assert not getattr(engine._speculator._drafter, "_progress", {})


@pytest.mark.parametrize(
    ("backend", "window", "speculates"),
    [("native", None, True), ("native", 64, False), ("torch", None, False)],
)
def test_auto_speculates_only_on_the_native_backend_without_a_window(
    model: Path, backend: ModelBackend, window: int | None, speculates: bool
) -> None:
    engine = Engine.load(engine_config(model, "auto", backend, attention_window=window))
    assert (engine._speculator is not None) == speculates
    assert reply_to(engine, "Hi", max_tokens=4, ignore_eos=True)[0]
    assert_nothing_left(engine)


def test_draft_limits_below_one_are_refused() -> None:
    for name in ("draft_tokens", "draft_depth", "draft_width"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            EngineConfig(model_path="x", **{name: 0})  # type: ignore[arg-type]
