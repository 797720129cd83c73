"""Text to token ids and back, built from the vocabulary inside a GGUF file.

Byte-level BPE only (GGUF calls it ``gpt2``). How text is cut into words before the merges is named
by ``tokenizer.ggml.pre``; the cuts here are those of the models' own Hugging Face definitions.

Control tokens are not part of the BPE vocabulary at all, so no text whatsoever can become one:
``encode`` turns "<|im_end|>" into plain characters. Only ``encode_pieces`` writes control tokens,
and only where the chat template wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from llm_core.chat_template import PromptPiece
from llm_core.errors import InvalidRequestError, ModelLoadError

# gguf.TokenType
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6

# Besides the file's own eos/eot: tokens that end a turn whatever the file says.
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
)

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _by_pattern(_LLAMA3_WORDS),
    "qwen2": lambda: _by_pattern(_QWEN2_WORDS),
}


class Tokenizer:
    """Byte-level BPE with control tokens kept apart.

    ``eos_ids`` are all tokens that end a reply; ``token_bytes[id]`` is what a token adds to the
    text (nothing for control tokens); ``control_tokens`` maps their text to their id.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str],
        token_types: Sequence[int],
        merges: Sequence[str],
        pre: str,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        """Raises ModelLoadError when the parts do not fit together."""
        if len(tokens) != len(token_types):
            raise ModelLoadError(f"{len(tokens)} tokens, but {len(token_types)} token types")
        if pre not in _PRE_TOKENIZERS:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            raise ModelLoadError(f"pre-tokenizer {pre!r} is not supported (supported: {known})")
        typed = list(enumerate(zip(tokens, token_types, strict=True)))
        self.vocab_size = len(tokens)
        self.control_tokens = {text: i for i, (text, kind) in typed if kind == _CONTROL and text}
        self._user_tokens = {text: i for i, (text, kind) in typed if kind == _USER_DEFINED and text}
        self._user_pattern = _alternatives(self._user_tokens)
        self.token_bytes = [_bytes_of(text, kind) for _, (text, kind) in typed]
        self.bos_id = _checked_id(bos_id, self.vocab_size, "bos")
        ends = {_checked_id(i, self.vocab_size, "eos") for i in eos_ids}
        ends |= {self.control_tokens.get(text) for text in _END_TOKENS}
        self.eos_ids = frozenset(i for i in ends if i is not None)
        self.bos_token = "" if self.bos_id is None else tokens[self.bos_id]
        self.eos_token = next((tokens[i] for i in sorted(eos_ids)), "")
        self._add_bos = add_bos and self.bos_id is not None
        vocab = {text: i for i, (text, kind) in typed if kind == _NORMAL}
        self._bpe = _build_bpe(vocab, merges, pre)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the ``tokenizer.ggml.*`` values of a GGUF file. Raises ModelLoadError."""
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelLoadError(f"tokenizer {model!r} is not supported (supported: gpt2)")
        missing = [
            name
            for name in ("tokens", "token_type", "merges", "pre")
            if f"tokenizer.ggml.{name}" not in metadata
        ]
        if missing:
            raise ModelLoadError(f"the file lacks, of tokenizer.ggml: {', '.join(missing)}")
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            tokens=list(metadata["tokenizer.ggml.tokens"]),
            token_types=[int(kind) for kind in metadata["tokenizer.ggml.token_type"]],
            merges=list(metadata["tokenizer.ggml.merges"]),
            pre=metadata["tokenizer.ggml.pre"],
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=[int(i) for i in eos if i is not None],
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; never a control token.

        A byte that the vocabulary has no token for is left out, as in the model's own tokenizer
        (SmolLM2 lacks a few ASCII control codes and planes 4 to 11 of Unicode). Raises
        InvalidRequestError for text that is not Unicode (a lone surrogate).
        """
        if self._user_pattern is None:
            return self._encode_words(text)
        ids: list[int] = []
        for part in self._user_pattern.split(text):
            token_id = self._user_tokens.get(part)
            ids.extend(self._encode_words(part) if token_id is None else (token_id,))
        return ids

    def encode_pieces(self, pieces: Iterable[PromptPiece]) -> list[int]:
        """Token ids of a rendered prompt, with one BOS in front if the model wants it."""
        ids: list[int] = []
        for piece in pieces:
            if piece.is_control:
                ids.append(self.control_tokens[piece.text])
            else:
                ids.extend(self.encode(piece.text))
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, all at once; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[i] for i in token_ids).decode("utf-8", errors="replace")

    def _encode_words(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error.reason}") from error
        return self._bpe.encode(text, add_special_tokens=False).ids


def _build_bpe(vocab: dict[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    # The separator is the first space that is not the first character.
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ModelLoadError("a merge of the tokenizer is not two words")
    try:
        # Llama 3 looks a whole word up before it merges; no unk token: see Tokenizer.encode.
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"the tokenizer's merges do not fit its tokens: {error}") from error
    built = tokenizers.Tokenizer(bpe)
    built.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    return built


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _checked_id(token_id: int | None, vocab_size: int, name: str) -> int | None:
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise ModelLoadError(f"{name} token {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes as printable characters: those that print stand for themselves, the other
    bytes take the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _bytes_of(text: str, kind: int) -> bytes:
    if kind == _NORMAL and all(char in _BYTE_OF_CHAR for char in text):
        return bytes(_BYTE_OF_CHAR[char] for char in text)
    if kind == _BYTE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return bytes((int(text[3:5], 16),))
    if kind in (_NORMAL, _USER_DEFINED):
        return text.encode("utf-8", errors="replace")
    return b""
