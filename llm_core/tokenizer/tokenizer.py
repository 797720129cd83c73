"""Text to token ids and back, with control tokens kept apart.

Control tokens are not part of the text vocabulary at all, so no text whatsoever can become one:
``encode`` turns "<|im_end|>" into plain characters. Only ``encode_pieces`` writes control tokens,
and only where the chat template wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llm_core.chat import PromptPiece
from llm_core.errors import ModelLoadError
from llm_core.tokenizer.text_pipeline import (
    SPACE,
    TextPipeline,
    byte_level_pipeline,
    sentencepiece_pipeline,
)

# gguf.TokenType
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6

# Besides the file's own eos/eot: tokens that end a turn whatever the file says.
_END_TOKENS = frozenset(
    (
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
        *("<end_of_turn>", "<|endofprompt|>"),
    )
)
# Files exist that call these plain words. Whoever writes one in a message must not steer the model.
ALWAYS_CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<(start|end)_of_turn>|</?s>|<(bos|eos|pad|unk)>|\[/?INST\]"
)


class Tokenizer:
    """``eos_ids`` are all tokens that end a reply; ``token_bytes[id]`` is what a token adds to the
    text (nothing for control tokens); ``control_tokens`` maps their text to their id.
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str],
        token_types: Sequence[int],
        merges: Sequence[str] = (),
        pre: str = "",
        pipeline: TextPipeline | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        strip_before: Iterable[str] = (),
        strip_after: Iterable[str] = (),
    ) -> None:
        """Byte-level BPE from ``merges`` and the word rule ``pre``, or any other ``pipeline``.

        ``strip_before`` and ``strip_after`` are control tokens that swallow the white space on that
        side of them. Raises ModelLoadError when the parts do not fit together.
        """
        if len(tokens) != len(token_types):
            raise ModelLoadError(f"{len(tokens)} tokens, but {len(token_types)} token types")
        typed = [
            (text, CONTROL if kind != BYTE and ALWAYS_CONTROL.fullmatch(text) else kind)
            for text, kind in zip(tokens, token_types, strict=True)
        ]
        self.vocab_size = len(tokens)
        self.control_tokens = _ids(typed, CONTROL)
        self.pipeline = pipeline or byte_level_pipeline(_ids(typed, NORMAL), merges, pre)
        self._user_tokens = {} if self.pipeline.finds_added else _ids(typed, USER_DEFINED)
        self._user_pattern = _alternatives(self._user_tokens)
        is_byte_level = self.pipeline.is_byte_level
        self.token_bytes = [_bytes_of(text, kind, is_byte_level) for text, kind in typed]
        self.bos_id = _checked_id(bos_id, self.vocab_size, "bos")
        eos_ids = tuple(eos_ids)
        ends = {_checked_id(i, self.vocab_size, "eos") for i in eos_ids}
        ends |= {self.control_tokens.get(text) for text in _END_TOKENS}
        self.eos_ids = frozenset(i for i in ends if i is not None)
        self.bos_token = "" if self.bos_id is None else tokens[self.bos_id]
        self.eos_token = next((tokens[i] for i in eos_ids), "")
        self._add_bos = add_bos and self.bos_id is not None
        self.strip_before, self.strip_after = frozenset(strip_before), frozenset(strip_after)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the ``tokenizer.ggml.*`` values of a GGUF file. Raises ModelLoadError."""
        model = metadata.get("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise ModelLoadError(f"tokenizer {model!r} is not supported (supported: gpt2, llama)")
        needed = ("tokens", "token_type", *(("merges", "pre") if model == "gpt2" else ("scores",)))
        missing = [name for name in needed if f"tokenizer.ggml.{name}" not in metadata]
        if missing:
            raise ModelLoadError(f"the file lacks, of tokenizer.ggml: {', '.join(missing)}")
        tokens = _texts(metadata, "tokens")
        types = [int(kind) for kind in metadata["tokenizer.ggml.token_type"]]
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        add_bos = metadata.get("tokenizer.ggml.add_bos_token")
        common: dict[str, Any] = {
            "bos_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_ids": [i for i in eos if i is not None],
        }
        if model == "gpt2":
            pre = str(metadata["tokenizer.ggml.pre"])
            return cls(
                tokens=tokens,
                token_types=types,
                merges=_texts(metadata, "merges"),
                pre=pre,
                add_bos=pre == "llama-bpe" if add_bos is None else bool(add_bos),
                **common,
            )
        return cls(
            tokens=_with_real_spaces(tokens, types),
            token_types=types,
            pipeline=_gguf_sentencepiece(metadata, tokens, types),
            add_bos=True if add_bos is None else bool(add_bos),
            strip_after=_swallowing(metadata, tokens),
            **common,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; never a control token.

        A byte that the vocabulary has no token for is left out, as in the model's own tokenizer
        (SmolLM2 lacks a few ASCII control codes and planes 4 to 11 of Unicode). Raises
        InvalidRequestError for text that is not Unicode (a lone surrogate).
        """
        return self._encode(text, is_first=True)

    def encode_pieces(self, pieces: Iterable[PromptPiece], *, is_start: bool = True) -> list[int]:
        """Token ids of a rendered prompt, with one BOS in front if the model wants it.

        ``is_start`` False: of a part that follows others, which has no BOS.
        """
        ids: list[int] = []
        pieces = list(pieces)
        for index, piece in enumerate(pieces):
            if piece.is_control:
                ids.append(self.control_tokens[piece.text])
                continue
            text = piece.text
            if index > 0 and pieces[index - 1].text in self.strip_after:
                text = text.lstrip()
            if index + 1 < len(pieces) and pieces[index + 1].text in self.strip_before:
                text = text.rstrip()
            ids.extend(self._encode(text, is_first=is_start and index == 0))
        wants_bos = self._add_bos and is_start
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, all at once; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[i] for i in token_ids).decode("utf-8", errors="replace")

    def _encode(self, text: str, *, is_first: bool) -> list[int]:
        if self._user_pattern is None:
            return self.pipeline.encode(text, is_first=is_first)
        ids: list[int] = []
        for part in self._user_pattern.split(text):
            token_id = self._user_tokens.get(part)
            if token_id is not None:
                ids.append(token_id)
            else:
                ids.extend(self.pipeline.encode(part, is_first=is_first))
        return ids


def _gguf_sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> TextPipeline:
    """Ranks are scores turned round; Gemma's scores do not follow its merges, its ids do."""
    scores = metadata["tokenizer.ggml.scores"]
    if len(scores) != len(tokens) or len(types) != len(tokens):
        raise ModelLoadError(
            f"{len(tokens)} tokens, but {len(scores)} scores and {len(types)} types"
        )
    by_id = str(metadata.get("general.architecture", "")).startswith("gemma")
    vocab, ranks = {}, {}
    for token_id, (text, kind, score) in enumerate(zip(tokens, types, scores, strict=True)):
        is_word = kind in (NORMAL, USER_DEFINED) and not ALWAYS_CONTROL.fullmatch(text)
        if is_word or kind == BYTE:
            piece = text.replace(" ", SPACE)
            vocab[piece] = token_id
            if is_word:
                ranks[piece] = float(token_id if by_id else -score)
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_pipeline(vocab, ranks, add_prefix_space=bool(add_space))


def _swallowing(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[str]:
    """Phi-3's role tokens swallow the white space after them; its GGUF files do not say so."""
    if metadata.get("general.architecture") != "phi3":
        return []
    kept = ("<|endoftext|>",)
    return [t for t in tokens if t.startswith("<|") and t.endswith("|>") and t not in kept]


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata[f"tokenizer.ggml.{name}"]
    if not isinstance(values, list):
        raise ModelLoadError(f"tokenizer.ggml.{name} is not a list of texts")
    return values


def _with_real_spaces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    return [
        text.replace(SPACE, " ") if kind == USER_DEFINED else text
        for text, kind in zip(tokens, types, strict=False)
    ]


def _ids(typed: Sequence[tuple[str, int]], wanted: int) -> dict[str, int]:
    """Text -> id of the tokens of one type."""
    return {text: i for i, (text, kind) in enumerate(typed) if kind == wanted and text}


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _checked_id(token_id: Any, vocab_size: int, name: str) -> int | None:
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise ModelLoadError(f"{name} token {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes as printable characters: those that print stand for themselves, the other
    bytes take the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _bytes_of(text: str, kind: int, is_byte_level: bool) -> bytes:
    if kind == NORMAL and is_byte_level and all(char in _BYTE_OF_CHAR for char in text):
        return bytes(_BYTE_OF_CHAR[char] for char in text)
    if kind == BYTE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return bytes((int(text[3:5], 16),))
    if kind in (NORMAL, USER_DEFINED):
        plain = text if is_byte_level else text.replace(SPACE, " ")
        return plain.encode("utf-8", errors="replace")
    return b""
