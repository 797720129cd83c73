"""GGUF files as llama.cpp, which defines them, reads them: logits of all architectures, tokens.

The models are tiny and random; llama.cpp runs in this process. It rounds some intermediate results
to float16 even so (flash attention off, float32 cache), hence the tolerance.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from llm_core.loading.gguf.container import read_metadata
from llm_core.tokenizer.tokenizer import Tokenizer
from tests.support.hf_models import random_ids, save_model
from tests.support.tiny_model import MERGES, TOKENS, TYPES
from tests.unit.llm_core.loading.test_gguf_families import CASES, convert, our_logits

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is the witness of these tests")
pytestmark = pytest.mark.integration

VOCAB_SIZE = 101
TEXTS = (
    "Hello there, how are you today?",
    "  two spaces,\ttab\n\nand   runs   ",
    "I'll say it's 12345 and 3.14, isn't it? I'LL",
    "naïve café, Größe, 日本語, Привет, नमस्ते ١٢٣ ½",
    "emoji 🙂👩‍👩‍👧 end",
    "snake_case CamelCase HTTPServer http://example.org/a?b=c",
    "a\r\nb\r\n\r\n  c\u00a0d\u3000e",
    " the\n the ...!!!\n\n/x//",
)
PIECES = (
    *("▁", "t", "h", "e", "▁t", "▁th", "▁the", "a", "n", "d", "an", "and", "▁and", "l", "o"),
    *("ll", "H", "He", "Hell", "Hello", "▁Hello", "s", "'", "'s", "u", "r", "er", "us", "user"),
    *("▁user", "▁▁", "▁▁▁", "1", "2", "12", "é", "日", "本", "日本"),
)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """llama.cpp loads no model without one."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"▁x{i}" for i in range(VOCAB_SIZE - 3))])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([2, 3, 3] + [1] * (VOCAB_SIZE - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def serve(path: Path) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 128, 1, 1
    params.warmup, params.fit_params, params.verbosity = False, False, -1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def next_log_probs(server: Any, ids: list[int]) -> torch.Tensor:
    """float32 [vocab]: of the token after ``ids``."""
    answer = server.handle_completions(
        {"prompt": ids, "n_predict": 1, "n_probs": VOCAB_SIZE, "temperature": 1.0}
        | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    )
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    result = torch.full((VOCAB_SIZE,), float("nan"))
    for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        result[token["id"]] = token["logprob"]
    return result


def tokens_of(server: Any, text: str) -> list[int]:
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        json.dumps({"content": text, "add_special": False, "parse_special": False}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        ids: list[int] = json.loads(response.read())["tokens"]
    return ids


# llama.cpp ignores Phi-3's window, transformers does not: there the window is left out.
@pytest.mark.parametrize("case", [case for case in CASES if case != "phi3"] + ["phi3_full"])
def test_logits(tmp_path: Path, case: str) -> None:
    arch, model_type, changes, edit = CASES.get(case, ("phi3", "phi3", {}, lambda writer: None))
    model = save_model(tmp_path, model_type, **changes)

    def edit_all(writer: gguf.GGUFWriter) -> None:
        edit(writer)
        add_vocabulary(writer)

    path = convert(model, tmp_path / "m.gguf", arch, edit=edit_all)
    ids = random_ids(VOCAB_SIZE, 40)
    ours = our_logits(path, ids)[-1].log_softmax(-1)
    theirs = next_log_probs(serve(path), ids.tolist())
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)


def agree_on_texts(tmp_path: Path, edit: Callable[[Any], None], size: int) -> None:
    model = save_model(tmp_path, "llama", vocab_size=size)
    path = convert(model, tmp_path / "t.gguf", "llama", edit=edit)
    tokenizer, server = Tokenizer.from_gguf(read_metadata(path)), serve(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == tokens_of(server, text), text


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken", "starcoder"]
)
def test_word_rules(tmp_path: Path, pre: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    agree_on_texts(tmp_path, edit, len(TOKENS))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_sentencepiece(tmp_path: Path, prefix: bool, seed: int | None) -> None:
    """Scores in order of the pieces, and in none: which pair merges first is all in them."""
    scores = [-float(i) for i in range(len(PIECES))]
    if seed is not None:
        random.Random(seed).shuffle(scores)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*tokens, "<think>"])
        writer.add_token_scores([0.0] * 259 + scores + [0.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    agree_on_texts(tmp_path, edit, len(tokens) + 1)
