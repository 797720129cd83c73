"""Tiny models quantised, exported, read by our loader and by transformers; distillation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llm_core.errors import InvalidRequestError
from llm_core.loading.hf.model import open_hf_model
from llm_core.loading.model_files import open_model
from llm_core.loading.model_weights import open_weights
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.offline.distill import kept_layers
from llm_core.offline.jobs import distill_model, measure_perplexity, quantize_model
from llm_core.offline.options import (
    DistillOptions,
    PerplexityOptions,
    QuantizeMethod,
    QuantizeOptions,
)
from llm_core.offline.perplexity import likelihood, windows_of
from llm_core.offline.self_text import turn_separators, write_conversations
from llm_core.offline.texts import exact_runner, generation_runner
from llm_core.offline.trainable_decoder import TrainableDecoder
from llm_core.quant.formats import GroupedCodes, to_float
from tests.support.hf_models import our_runner, random_ids, save_model, their_logits
from tests.support.random_llama import run_chunk
from tests.support.tiny_model import write_tiny_gguf

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PROSE = "The user says hello, and the model says what the user hoped to hear. " * 40
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
}


def ignore(stage: str, done: int, total: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def quantized(source: Path, out_dir: Path, method: QuantizeMethod, **options: Any) -> Path:
    settings = {"group": 32, "text": PROSE, "window_len": 32, "num_windows": 16, "num_threads": 1}
    report = quantize_model(
        QuantizeOptions(model_path=source, out_dir=out_dir, method=method, **(settings | options)),
        ignore,
    )
    assert report.perplexity_after > 1 and report.num_eval_tokens >= 31
    return out_dir


def with_files(directory: Path, tiny: Path) -> Path:
    """Adds the tiny model's tokenizer files to a model saved by transformers."""
    donor = quantized(tiny, directory.with_name(f"{directory.name}-donor"), "int8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((donor / name).read_bytes())
    return directory


def nibbles(words: torch.Tensor, bits: int) -> list[list[list[int]]]:
    """The codes of each word, lowest bits first."""
    per, mask = 32 // bits, (1 << bits) - 1
    return [[[(w >> (bits * i)) & mask for i in range(per)] for w in row] for row in words.tolist()]


def read_gptq(tensors: dict[str, torch.Tensor], base: str, bits: int) -> torch.Tensor:
    """[N, K], value by value, as the format is published."""
    words, zero_words = (nibbles(tensors[f"{base}.{part}"], bits) for part in ("qweight", "qzeros"))
    scales, index = tensors[f"{base}.scales"].double(), tensors[f"{base}.g_idx"].tolist()
    per = 32 // bits
    values = torch.empty(scales.shape[1], len(index), dtype=torch.float64)
    for k, g in enumerate(index):
        for n in range(scales.shape[1]):
            zero = (zero_words[g][n // per][n % per] + 1) % (1 << bits)
            values[n, k] = (words[k // per][n][k % per] - zero) * scales[g, n]
    return values.float()


def read_awq(tensors: dict[str, torch.Tensor], base: str) -> torch.Tensor:
    words, zero_words = (nibbles(tensors[f"{base}.{part}"], 4) for part in ("qweight", "qzeros"))
    scales = tensors[f"{base}.scales"].double()
    num_in, group = len(words), len(words) // len(scales)
    place = {column: i for i, column in enumerate(AWQ_ORDER)}
    values = torch.empty(scales.shape[1], num_in, dtype=torch.float64)
    for k in range(num_in):
        for n in range(scales.shape[1]):
            code = words[k][n // 8][place[n % 8]]
            zero = zero_words[k // group][n // 8][place[n % 8]]
            values[n, k] = (code - zero) * scales[k // group, n]
    return values.float()


def read_int8(tensors: dict[str, torch.Tensor], base: str) -> torch.Tensor:
    words = nibbles(tensors[f"{base}.weight_packed"], 8)
    num_out, num_in = tensors[f"{base}.weight_shape"].tolist()
    codes = [[code - 128 for word in row for code in word][:num_in] for row in words]
    assert len(codes) == num_out
    scale = tensors[f"{base}.weight_scale"].float()
    return torch.tensor(codes).float() * scale.repeat_interleave(num_in // scale.shape[1], 1)


def their_model(directory: Path, container: str, bits: int = 4) -> Any:
    """transformers' model with the file's values, read independently of our loader."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = load_file(directory / "model.safetensors")
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    state = {}
    for name in model.state_dict():
        base = name.removesuffix(".weight")
        if f"{base}.qweight" in tensors:
            read = read_awq(tensors, base) if container == "awq" else read_gptq(tensors, base, bits)
            state[name] = read
        elif f"{base}.weight_packed" in tensors:
            state[name] = read_int8(tensors, base)
        elif f"{base}.weight_scale" in tensors:
            state[name] = tensors[name].float() * tensors[f"{base}.weight_scale"]
        elif name == "lm_head.weight" and name not in tensors:
            state[name] = tensors["model.embed_tokens.weight"].float()
        else:
            state[name] = tensors[name].float()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("method", "bits", "options"),
    [
        ("gptq", 4, {}),
        ("gptq", 8, {"act_order": False}),
        ("gptq", 4, {"group": 40}),  # 64 and 96 inputs: the last group is shorter
        ("rtn", 4, {"is_symmetric": True, "group": -1}),
        ("awq", 4, {"group": None}),  # the largest that divides all: 32
        ("int8", 8, {"group": None}),
        ("int8", 8, {"group": -1}),
        ("fp8", 8, {}),
    ],
)
def test_exported_formats_match_their_definition(
    tiny: Path, tmp_path: Path, method: QuantizeMethod, bits: int, options: dict[str, Any]
) -> None:
    directory = quantized(tiny, tmp_path / "out", method, bits=bits, **options)
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert method in ("int8", "fp8") or settings["group_size"] == (options.get("group") or 32)
    model = their_model(directory, "awq" if method == "awq" else "gptq", bits)
    ids = random_ids(270, 40)
    ours = run_chunk(our_runner(directory), ids)
    torch.testing.assert_close(ours, their_logits(model, ids), rtol=1e-3, atol=1e-3)
    with open_hf_model(directory) as opened:
        weight = opened.weights["layers.0.down"]
        assert isinstance(weight, GroupedCodes) == (method != "fp8")  # stays packed
        theirs = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
        torch.testing.assert_close(to_float(weight), theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("method", "group"), [("int8", 32), ("int8", -1), ("fp8", 32)])
@pytest.mark.parametrize("dtype", [torch.float32, "auto"])
def test_transformers_loads_8_bit_exports(
    tiny: Path, tmp_path: Path, method: QuantizeMethod, group: int, dtype: Any
) -> None:
    """With its own reader, the package compressed-tensors."""
    from transformers import AutoModelForCausalLM

    directory = quantized(tiny, tmp_path / "out", method, group=group)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    ids = random_ids(270, 40)
    ours = run_chunk(our_runner(directory), ids)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ours, their_logits(theirs, ids).float(), **close)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_all_families(tiny: Path, tmp_path: Path, family: str, method: QuantizeMethod) -> None:
    """AWQ's scales go into norms, values (shared by query heads), biases and up: with 8 bits in
    their place nothing of the function may change, so a wrong fold would show in the logits."""
    source = tmp_path / "source"
    changes = {"vocab_size": 270, "num_hidden_layers": 2} | FAMILIES[family]
    save_model(source, family, **changes)
    with_files(source, tiny)
    directory = quantized(source, tmp_path / "out", method, bits=4 if method == "awq" else 8)
    model = their_model(directory, method, 4 if method == "awq" else 8)
    ids = random_ids(270, 24)
    ours = run_chunk(our_runner(directory), ids)
    torch.testing.assert_close(ours, their_logits(model, ids), rtol=2e-3, atol=2e-3)
    exact = run_chunk(our_runner(source), ids)
    distance = (ours - exact).norm() / exact.norm()
    assert distance < (0.35 if method == "awq" else 0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainable_decoder_matches_the_engines(tmp_path: Path, family: str) -> None:
    changes = {"vocab_size": 101} | FAMILIES[family]
    save_model(tmp_path, family, **changes)
    ids = random_ids(101, 30)
    with open_hf_model(tmp_path) as opened, torch.inference_mode():
        model = TrainableDecoder(opened.config, opened.weights, 64)
        logits = model.logits(model.hidden(torch.stack((ids, ids.flip(0)))))
    ours = run_chunk(our_runner(tmp_path), ids)
    torch.testing.assert_close(logits[0], ours, rtol=1e-4, atol=1e-4)


def test_gguf_file_becomes_a_complete_directory(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = quantized(tiny, tmp_path / "out", "rtn")
    text = "Hello the user, 123  in\n\tümläut <|im_end|> 🙂"
    theirs = AutoTokenizer.from_pretrained(directory)
    with open_model(tiny) as before, open_model(directory) as after:
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
        assert after.tokenizer.eos_ids == before.tokenizer.eos_ids
        assert after.tokenizer.bos_id == before.tokenizer.bos_id
        separators = turn_separators(after.tokenizer, after.template)
        assert separators == turn_separators(before.tokenizer, before.template)
        plain = text.replace("<|im_end|>", "")
        assert theirs.encode(plain, add_special_tokens=False) == before.tokenizer.encode(plain)
        assert theirs.convert_tokens_to_ids("<|im_end|>") == 2
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert settings["bits"] == 4 and settings["group_size"] == 32 and not settings["desc_act"]


def test_perplexity_matches_its_definition(tiny: Path) -> None:
    with open_model(tiny) as opened:
        windows = windows_of(opened.tokenizer.encode(PROSE), 200)
        runner = exact_runner(opened.model, "tiny", 200, 1, "float32")
    seen: list[tuple[int, int]] = []
    result = likelihood(runner, windows, lambda done, total: seen.append((done, total)))
    nll = 0.0
    for ids in windows:
        logprobs = run_chunk(runner, ids).double().log_softmax(-1)
        nll -= float(logprobs[:-1].gather(1, ids[1:].unsqueeze(1)).sum())
    assert result.nll == pytest.approx(nll, rel=1e-5)
    assert result.num_tokens == len(windows) * 199
    assert seen[-1] == (len(windows), len(windows)) and len(windows) > 2
    report = measure_perplexity(
        PerplexityOptions(model_path=tiny, text=PROSE, window_len=200, num_threads=1), ignore
    )
    assert report.perplexity == pytest.approx(result.perplexity)


def test_conversations_follow_the_chat_template(tiny: Path) -> None:
    with open_model(tiny) as opened:
        runner = generation_runner(opened.model, str(tiny), 60, 1)
        separators = turn_separators(opened.tokenizer, opened.template)
        written = [
            write_conversations(
                runner,
                opened.tokenizer,
                opened.template,
                num_conversations=40,
                length=60,
                seed=seed,
                on_progress=lambda done, total: None,
            )
            for seed in (1, 1, 2)
        ]
        assert opened.tokenizer.decode(separators.opening) == "user\n"
        assert opened.tokenizer.decode(separators.to_assistant) == "\nassistant\n"
    assert written[0].shape == (40, 60)
    assert torch.equal(written[0], written[1]) and not torch.equal(written[0], written[2])
    assert written[0][:, : len(separators.opening)].tolist() == [separators.opening] * 40
    num_ends = 0
    for row in written[0].tolist():
        following = [separators.to_assistant, separators.to_user]
        for at in [i for i, token in enumerate(row) if token == separators.to_assistant[0]]:
            expected = following[0][: len(row) - at]
            assert row[at : at + len(expected)] == expected  # turns take turns
            following.reverse()
            num_ends += 1
    assert num_ends > 3


def test_student_is_trained_exported_and_loaded(tiny: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "student"
    options = DistillOptions(
        model_path=tiny,
        out_dir=out_dir,
        num_layers=1,
        num_steps=40,
        learning_rate=5e-3,
        num_windows=24,
        window_len=32,
        num_threads=1,
    )
    stages: set[str] = set()
    report = distill_model(options, lambda stage, done, total: stages.add(stage))
    assert stages == {"text", "training"}
    assert report.after.divergence < 0.8 * report.before.divergence
    assert report.after.same_best_token > report.before.same_best_token
    with open_weights(out_dir) as model:
        assert model.config.num_layers == 1
    from transformers import AutoModelForCausalLM

    ids = random_ids(270, 30)
    theirs = AutoModelForCausalLM.from_pretrained(out_dir, dtype=torch.float32).eval()
    ours = run_chunk(our_runner(out_dir), ids)
    torch.testing.assert_close(ours, their_logits(theirs, ids), rtol=1e-4, atol=1e-4)
    again = measure_perplexity(
        PerplexityOptions(model_path=out_dir, text=PROSE, window_len=32, num_threads=1), ignore
    )
    assert again.perplexity > 1


def test_kept_layers_are_evenly_spaced() -> None:
    assert kept_layers(30, 15) == (0, 2, 4, 6, 8, 10, 12, 15, 17, 19, 21, 23, 25, 27, 29)
    assert kept_layers(2, 1) == (0,)
    with pytest.raises(InvalidRequestError, match="expected 1 to 29"):
        kept_layers(30, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gguf"}, "expected one of gptq"),
        ({"bits": 3}, "bits is 3, expected 4 or 8"),
        ({"method": "awq", "bits": 8}, "bits is 8, expected 4"),
        ({"method": "awq", "is_symmetric": True}, "cannot be symmetric"),
        ({"group": 0}, "group is 0"),
        ({"group": 20}, "group is 20"),
        ({"window_len": 4}, "window_len is 4"),
        ({"num_windows": 1}, "num_windows is 1"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        QuantizeOptions(
            **({"model_path": tmp_path, "out_dir": tmp_path / "o", "method": "gptq"} | options)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "int8", "group": 128},
            "groups of 128 do not divide the matrices' inputs .64, 96",
        ),
        ({"method": "awq", "group": 128}, "groups of 128 do not divide, as AWQ files need; 32"),
        ({"text": "short"}, "the text has . tokens"),
        ({"text": PROSE[:60]}, "at least two are needed"),
        ({"eval_text": ""}, "the text has 0 tokens"),
        ({"window_len": 512, "text": None}, "longer than the model's context of 256"),
    ],
)
def test_failed_jobs_leave_no_files(
    tiny: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    method = options.pop("method", "gptq")
    with pytest.raises(InvalidRequestError, match=message):
        quantized(tiny, tmp_path / "out", method, **options)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(InvalidRequestError, match="exists already"):
        quantized(tiny, tmp_path, "rtn")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(InvalidRequestError, match="is not a directory"):
        quantized(tiny, tmp_path / "a" / "b", "rtn")


def test_safetensors_writer_matches_the_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(5, dtype=torch.int8),
        "a": torch.randn(3, 4),
        "half": torch.randn(2, 3).half(),
        "turned": torch.arange(6, dtype=torch.int32).view(2, 3).T,
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name].float(), value.float())
