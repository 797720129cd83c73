"""From a path to replies: an engine that is given a Hugging Face directory says what transformers
says, whatever form the weights have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm_core.engine.engine import Engine
from llm_core.errors import ModelLoadError
from llm_core.loading.model_files import open_model
from llm_core.messages import EngineConfig, GenerationDone, SamplingParams, TextDelta
from llm_core.model.runner import ModelRunner
from tests.support.hf_models import save_model
from tests.support.tiny_model import write_tiny_gguf
from tests.unit.llm_core.chat.test_hf_tokenizer import MESSAGES, save


def reply(engine: Engine) -> str:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.submit(1, MESSAGES, params, received_ns=0)
    text, done = "", False
    while engine.has_work:
        for _, event in engine.step():
            text += event.text if isinstance(event, TextDelta) else ""
            done |= isinstance(event, GenerationDone)
    assert done
    return text


@pytest.mark.parametrize("case", ["byte_level", "metaspace_first"])
def test_greedy_reply_equals_transformers(tmp_path: Path, case: str) -> None:
    theirs = save(tmp_path, case)
    model = save_model(tmp_path, "qwen3", vocab_size=len(theirs), head_dim=16)
    config = EngineConfig(model_path=str(tmp_path), max_context=120)
    with open_model(tmp_path) as files:
        runner = ModelRunner.of(files.model, config, weight_format="float32")
    engine = Engine(runner, files.tokenizer, files.template)
    prompt = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in MESSAGES],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert reply(engine) == files.tokenizer.decode(ids[len(prompt) :])
    loaded = Engine.load(config)
    assert loaded.info.name == tmp_path.name
    assert reply(loaded)


def test_tokenizer_must_fit_the_model(tmp_path: Path) -> None:
    theirs = save(tmp_path, "byte_level")
    save_model(tmp_path, "llama", vocab_size=len(theirs) - 1)
    with (
        pytest.raises(ModelLoadError, match="the tokenizer knows 381 tokens, the model only 380"),
        open_model(tmp_path),
    ):
        pass


def test_missing_files_are_named(tmp_path: Path) -> None:
    theirs = save(tmp_path, "byte_level")
    save_model(tmp_path, "llama", vocab_size=len(theirs))
    (tmp_path / "tokenizer_config.json").unlink()  # it is not needed
    with open_model(tmp_path) as files:
        assert files.model.config.vocab_size == len(theirs)
    (tmp_path / "tokenizer.json").unlink()
    with (
        pytest.raises(ModelLoadError, match="tokenizer.json: cannot be read"),
        open_model(tmp_path),
    ):
        pass


def test_directory_of_gguf_files_is_rejected(tmp_path: Path) -> None:
    for name in ("small.gguf", "large.gguf"):
        write_tiny_gguf(tmp_path / name)
    with (
        pytest.raises(ModelLoadError, match=r"no config.json.*: large.gguf, small.gguf"),
        open_model(tmp_path),
    ):
        pass


def test_gguf(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with open_model(path) as files:
        assert files.model.name == "tiny"
        assert files.tokenizer.control_tokens
    write_tiny_gguf(path, template=None)
    with pytest.raises(ModelLoadError, match="has no chat template"), open_model(path):
        pass
