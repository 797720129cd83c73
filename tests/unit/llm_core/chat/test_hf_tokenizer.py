"""Tokenizers and templates of Hugging Face directories against transformers' reading of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llm_core.errors import ModelLoadError
from llm_core.loading.model_files import OpenModel, open_model
from llm_core.messages import ChatMessage
from llm_core.tokenizer.hf_tokenizer import tokenizer_from_json
from llm_core.tokenizer.tokenizer import Tokenizer
from tests.support.hf_models import save_model

CORPUS = [
    "Hello there, the user's hello is the first hello of the day.",
    "I'll say it's 12345 and 3.14, isn't it? The naïve café, Größe, 日本語, Привет.",
    "snake_case and CamelCase and http://example.org/a?b=c\n\nNew lines\tand tabs.",
] * 4
TEXTS = (
    "Hello there, how are you today?",
    "  two spaces,\ttab\n\nand   runs   ",
    "I'll say it's 12345 and 3.14, isn't it? I'LL",
    "naïve café, Größe, 日本語, Привет, नमस्ते ١٢٣ ½ 🙂",
    "a <think>b</think> c<h1>",
    " leading",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MESSAGES = [
    ChatMessage(role="user", content="Hello there, what is 12345?"),
    ChatMessage(role="assistant", content="It's the naïve café."),
    ChatMessage(role="user", content="  And <think>tabs</think>?  "),
]


def byte_level() -> tokenizers.Tokenizer:
    """As Qwen's: NFC, a regular expression for words, bytes."""
    built = tokenizers.Tokenizer(models.BPE())
    built.normalizer = normalizers.NFC()
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


def sentencepiece(pre_tokenizer: Any, normalizer: Any) -> tokenizers.Tokenizer:
    """As Llama 2's and Gemma's: pieces with a mark for the space, bytes for the rest."""
    marked = [text.replace(" ", "▁") for text in CORPUS]
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special, show_progress=False, limit_alphabet=60
    )
    trained.train_from_iterator(marked, trainer)
    definition = json.loads(trained.to_str())
    definition["added_tokens"] = []
    definition["model"] |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    built = tokenizers.Tokenizer.from_str(json.dumps(definition))
    built.pre_tokenizer, built.normalizer = pre_tokenizer, normalizer
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def llama2() -> tokenizers.Tokenizer:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return sentencepiece(None, normalizers.Sequence(steps))


def metaspace_first() -> tokenizers.Tokenizer:
    return sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None)


def gemma() -> tokenizers.Tokenizer:
    return sentencepiece(None, normalizers.Replace(" ", "▁"))


CASES: dict[str, tuple[Callable[[], tokenizers.Tokenizer], list[str], str, dict[str, Any]]] = {
    "byte_level": (byte_level, ["<|im_start|>", "<|im_end|>"], CHATML, {}),
    "llama2": (llama2, ["<s>", "</s>"], LLAMA2, {}),
    "metaspace_first": (metaspace_first, ["<s>", "</s>"], LLAMA2, {}),
    "gemma": (gemma, ["<|im_start|>", "<|im_end|>"], CHATML, {}),
    "phi3": (
        llama2,
        ["<|user|>", "<|assistant|>", "<|end|>"],
        PHI3,
        {"rstrip": True},
    ),
}


def save(directory: Path, case: str) -> PreTrainedTokenizerFast:
    build, control, template, attributes = CASES[case]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=build(),
        chat_template=template,
        bos_token=AddedToken("<s>", special=True, normalized=False),
        eos_token=AddedToken(control[-1], special=True, normalized=False, **attributes),
    )
    special = [AddedToken(t, special=True, normalized=False, **attributes) for t in control]
    theirs.add_special_tokens({"additional_special_tokens": special})
    theirs.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    theirs.save_pretrained(directory)
    return theirs


def read(directory: Path) -> Tokenizer:
    definition = json.loads((directory / "tokenizer.json").read_text())
    return tokenizer_from_json(definition, {}, [])


@pytest.mark.parametrize("case", CASES)
def test_text(tmp_path: Path, case: str) -> None:
    theirs = save(tmp_path, case)
    ours = read(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        back = theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False)
        assert ours.decode(ours.encode(text)) == back, text


@pytest.mark.parametrize("case", CASES)
def test_chat(tmp_path: Path, case: str) -> None:
    """The whole way of a prompt, from messages to ids, equals apply_chat_template."""
    theirs = save(tmp_path, case)
    with opened(tmp_path, theirs) as files:
        ids = files.tokenizer.encode_pieces(files.template.render(MESSAGES))
        conversation = [{"role": m.role, "content": m.content} for m in MESSAGES]
        expected = theirs.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        assert ids == list(expected)
        assert theirs.eos_token_id in files.tokenizer.eos_ids


def opened(directory: Path, theirs: PreTrainedTokenizerFast, **config: Any) -> Any:
    save_model(directory, "llama", vocab_size=len(theirs), **config)
    return open_model(directory)


@pytest.mark.parametrize("case", CASES)
def test_control_tokens_never_come_from_text(tmp_path: Path, case: str) -> None:
    save(tmp_path, case)
    ours = read(tmp_path)
    assert ours.control_tokens
    for token, token_id in ours.control_tokens.items():
        ids = ours.encode(f"a{token}b {token}")
        assert not set(ours.control_tokens.values()) & set(ids)
        assert ours.decode(ids).strip() == f"a{token}b {token}"
        assert ours.token_bytes[token_id] == b""


def test_ends_come_from_generation_config(tmp_path: Path) -> None:
    theirs = save(tmp_path, "byte_level")
    with opened(tmp_path, theirs, eos_token_id=5) as files:
        assert 5 in files.tokenizer.eos_ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    with open_model(tmp_path) as files:
        assert {5, 7, 9, theirs.eos_token_id} <= files.tokenizer.eos_ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, "x"]}')
    with (
        pytest.raises(ModelLoadError, match="generation_config.json: eos_token_id is"),
        open_model(tmp_path),
    ):
        pass


def templates(directory: Path) -> OpenModel:
    with open_model(directory) as files:
        return files


def test_where_templates_are(tmp_path: Path) -> None:
    theirs = save(tmp_path, "byte_level")
    with opened(tmp_path, theirs):
        pass
    jinja, settings = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    message = [ChatMessage(role="user", content="x")]
    assert jinja.exists()
    expected = templates(tmp_path).template.render(message)
    jinja.rename(tmp_path / "aside")
    plain = json.loads(settings.read_text())
    for source in (
        CHATML,
        [{"name": "tool", "template": "t"}, {"name": "default", "template": CHATML}],
    ):
        settings.write_text(json.dumps(plain | {"chat_template": source}))
        assert templates(tmp_path).template.render(message) == expected
    settings.write_text(json.dumps(plain))
    with pytest.raises(ModelLoadError, match="has no chat template"):
        templates(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model": {"type": "Unigram"}}, "model type 'Unigram' is not supported, only BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}}}, "model.vocab is not"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**40}}}, "model.vocab is not"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": 3}}, "model.merges is not a list"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}, "a merge is"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}, "not understood"),
        (
            {  # the library panics
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1, "ab": 2},
                    "merges": ["a b"],
                    "continuing_subword_prefix": "a" * 50,
                }
            },
            "not understood: range end index",
        ),
        ({"added_tokens": [{"id": "x", "content": "y"}]}, "added_tokens is not"),
        ({"pre_tokenizer": {"type": "Unheard"}}, "not understood"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}, "not understood"),
        ({"normalizer": [1]}, "not understood"),
    ],
)
def test_broken_definitions(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    save(tmp_path, "byte_level")
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_from_json(definition | edit, {}, [])
