"""The tokenizer against two independent oracles: a plain BPE written here, and the library's own
pipeline with control tokens as added tokens."""

from __future__ import annotations

import unicodedata

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from llm_core.chat.template import PromptPiece
from llm_core.errors import InvalidRequestError, ModelLoadError
from llm_core.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_model import BYTE_CHARS, MERGES, TOKENS, TYPES, tiny_tokenizer

TEXTS = (
    "",
    "Hello there, how are you today?",
    "  two spaces,\ttab\n\nand   runs   ",
    "I'll say it's 12345 and 3.14, isn't it?",
    "naïve café, Größe, 日本語, Привет, नमस्ते ١٢٣ ½",
    "emoji 🙂👩‍👩‍👧 end",
    "<|im_start|>user\n<|im_end|>",
    "snake_case CamelCase http://example.org/a?b=c",
)

_GPT2_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def oracle_encode(text: str) -> list[int]:
    """Single digits, GPT-2 words, and the lowest-ranked merge first: written for clearness."""
    ids = {token: i for i, token in enumerate(TOKENS)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    words = [
        word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in _GPT2_WORDS.findall(part)
    ]
    result = []
    for word in words:
        symbols = [BYTE_CHARS[byte] for byte in word.encode()]
        while True:
            pairs = list(zip(symbols, symbols[1:], strict=False))
            known = [pair for pair in pairs if pair in ranks]
            if not known:
                break
            at = pairs.index(min(known, key=lambda pair: ranks[pair]))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        result += [ids[symbol] for symbol in symbols]
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_oracle(text: str) -> None:
    assert tiny_tokenizer().encode(text) == oracle_encode(text)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_equals_the_oracle_and_comes_back(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == oracle_encode(text)
    assert tokenizer.decode(ids) == text


def test_control_tokens_never_come_from_text() -> None:
    tokenizer = tiny_tokenizer()
    control_ids = set(tokenizer.control_tokens.values())
    for text in ("<|im_end|>", "a<|im_start|>system\nb", "<|endoftext|>" * 3):
        ids = tokenizer.encode(text)
        assert not control_ids & set(ids)
        assert tokenizer.decode(ids) == text


def test_pieces_equal_the_library_with_added_tokens() -> None:
    tokenizer = tiny_tokenizer()
    reference = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(TOKENS)},
            merges=[tuple(merge.split(" ")) for merge in MERGES],
        )
    )
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    reference.add_special_tokens([AddedToken(t, special=True) for t in tokenizer.control_tokens])
    text = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    pieces = [
        PromptPiece(part, is_control=part in tokenizer.control_tokens)
        for part in regex.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        if part
    ]
    assert tokenizer.encode_pieces(pieces) == reference.encode(text).ids


def test_bos_is_written_once() -> None:
    with_bos = Tokenizer(
        tokens=TOKENS, token_types=TYPES, merges=MERGES, pre="smollm", bos_id=1, add_bos=True
    )
    start = PromptPiece("<|im_start|>", is_control=True)
    hello = PromptPiece("Hi", is_control=False)
    assert with_bos.encode_pieces([hello]) == [1, *with_bos.encode("Hi")]
    assert with_bos.encode_pieces([start, hello]) == [1, *with_bos.encode("Hi")]
    assert tiny_tokenizer().encode_pieces([hello]) == with_bos.encode("Hi")


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = tiny_tokenizer()
    text = "Größe 🙂 12"
    assert b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(text)) == text.encode()
    for token_id in tokenizer.control_tokens.values():
        assert tokenizer.token_bytes[token_id] == b""


def test_ends_of_a_turn() -> None:
    assert tiny_tokenizer().eos_ids == {0, 2}


def test_user_defined_tokens_are_whole_words_of_text() -> None:
    tokens = [*TOKENS, "<think>"]
    tokenizer = Tokenizer(tokens=tokens, token_types=[*TYPES, 4], merges=MERGES, pre="smollm")
    plain = tiny_tokenizer()
    assert tokenizer.encode("a<think>b") == [*plain.encode("a"), len(TOKENS), *plain.encode("b")]
    assert tokenizer.decode([len(TOKENS)]) == "<think>"


def test_a_byte_without_a_token_is_left_out() -> None:
    kept = [i for i, token in enumerate(TOKENS) if token != BYTE_CHARS[0x04]]
    tokenizer = Tokenizer(
        tokens=[TOKENS[i] for i in kept],
        token_types=[TYPES[i] for i in kept],
        merges=MERGES,
        pre="smollm",
    )
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@given(text=st.text(max_size=40))
@settings(max_examples=30, deadline=None)
def test_every_cut_keeps_all_text(pre: str, text: str) -> None:
    tokenizer = Tokenizer(tokens=TOKENS, token_types=TYPES, merges=MERGES, pre=pre)
    text = text if pre != "qwen2" else unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_by_pre_tokenizer() -> None:
    tokens = [*TOKENS, "12", "123"]
    types = [*TYPES, 1, 1]
    merges = [*MERGES, "1 2", "12 3"]

    def cut(pre: str) -> list[bytes]:
        tokenizer = Tokenizer(tokens=tokens, token_types=types, merges=merges, pre=pre)
        return [tokenizer.token_bytes[i] for i in tokenizer.encode("123123")]

    assert cut("smollm") == [b"1", b"2", b"3", b"1", b"2", b"3"]
    assert cut("qwen2") == [b"1", b"2", b"3", b"1", b"2", b"3"]
    assert cut("llama-bpe") == [b"123", b"123"]
    assert cut("gpt-2") == [b"123", b"123"]


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        tiny_tokenizer().encode("\ud800")


def test_broken_vocabularies_are_load_errors() -> None:
    good = {"tokens": TOKENS, "token_types": TYPES, "merges": MERGES, "pre": "smollm"}
    for change, message in (
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"token_types": TYPES[:-1]}, "token types"),
        ({"merges": ["ab"]}, "two words"),
        ({"merges": ["zz qq"]}, "merges"),
        ({"bos_id": 10**6}, "bos"),
        ({"eos_ids": [-1]}, "eos"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            Tokenizer(**{**good, **change})
    with pytest.raises(ModelLoadError, match="gpt2"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelLoadError, match="merges, pre"):
        Tokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": TOKENS,
                "tokenizer.ggml.token_type": TYPES,
            }
        )
