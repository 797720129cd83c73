"""Plain text to token ids: normalising, cutting into words, merging. No control tokens here.

Three ways in: byte-level BPE by the name of its word rule (GGUF calls it ``gpt2``), SentencePiece
BPE from pieces and their ranks (GGUF: ``llama``), and the definition in a tokenizer.json. The
merging is done by the ``tokenizers`` library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from llm_core.errors import InvalidRequestError, LlmError, ModelLoadError, is_fault

SPACE = "\u2581"  # SentencePiece writes a space so

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(suffix: str, digits: str) -> str:
    """Words by case: capitals begin one. tiktoken's o200k_base, and Mistral's after it."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{_UPPER}*{_LOWER}+{suffix}|{before}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT4O_WORDS = _cased_words(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
_TEKKEN_WORDS = _cased_words("", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
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
    "llama-bpe": _by_pattern(_LLAMA3_WORDS),
    "qwen2": _by_pattern(_QWEN2_WORDS),
    "gpt-4o": _by_pattern(_GPT4O_WORDS),
    "tekken": _by_pattern(_TEKKEN_WORDS),
}


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """``first`` is for text at the beginning of a prompt, ``rest`` for text after a control token:
    some tokenizers put a space before the first word only. ``finds_added``: the pipeline itself
    finds user-defined tokens in text."""

    first: tokenizers.Tokenizer
    rest: tokenizers.Tokenizer
    is_byte_level: bool
    finds_added: bool = False

    def encode(self, text: str, *, is_first: bool = True) -> list[int]:
        """Token ids. Raises InvalidRequestError for text that is not Unicode (a lone surrogate)."""
        if not text:
            return []
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error.reason}") from error
        library = self.first if is_first else self.rest
        with _as_our_error(InvalidRequestError, "the tokenizer cannot encode the text"):
            return library.encode(text, add_special_tokens=False).ids


def byte_level_pipeline(vocab: Mapping[str, int], merges: Sequence[str], pre: str) -> TextPipeline:
    """Tokens in GPT-2's byte alphabet; ``pre`` names the rule for words. Raises ModelLoadError."""
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelLoadError(f"pre-tokenizer {pre!r} is not supported (supported: {known})")
    # The separator is the first space that is not the first character.
    pairs = [(m[:at], m[at + 1 :]) for m in merges if (at := m.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ModelLoadError("a merge of the tokenizer is not two words")
    # Llama 3 looks a whole word up before it merges; so do those made with tiktoken.
    looks_up = pre in ("llama-bpe", "gpt-4o", "tekken")
    # No unk token: see Tokenizer.encode.
    built = _bpe(vocab, pairs, ignore_merges=looks_up)
    built.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    return TextPipeline(built, built, is_byte_level=True)


def sentencepiece_pipeline(
    vocab: Mapping[str, int], ranks: Mapping[str, float], *, add_prefix_space: bool
) -> TextPipeline:
    """Pieces with ``SPACE`` for spaces; the pair whose piece has the lowest rank merges first.

    Characters without a piece become bytes (<0x00> to <0xFF>, which must be in ``vocab``). Kudo
    2018. Raises ModelLoadError.
    """
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise ModelLoadError(f"the tokenizer has no token for the byte {missing[0]}")
    built = _bpe(vocab, _merges_from_pieces(ranks), byte_fallback=True)
    replace = normalizers.Replace(" ", SPACE)
    prepend = [normalizers.Prepend(SPACE)] if add_prefix_space else []
    built.normalizer = normalizers.Sequence([*prepend, replace])
    return TextPipeline(built, built, is_byte_level=False)


def json_pipeline(
    definition: Mapping[str, Any], dropped: Iterable[str], kept: Mapping[str, int]
) -> TextPipeline:
    """The pipeline of a tokenizer.json: its normalizer, word rule and model as they are.

    ``dropped`` are control tokens, which leave the vocabulary; ``kept`` the added tokens that text
    may become. Raises ModelLoadError.
    """
    model = dict(definition["model"])
    merged = {"".join(pair) for pair in map(_pair, model.get("merges", ()))}
    vocab = model["vocab"] | kept
    for token in dropped:
        if token not in merged:
            vocab.pop(token, None)
    model |= {"vocab": vocab, "unk_token": None}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [t for t in definition["added_tokens"] if t["content"] in kept],
        "normalizer": definition.get("normalizer"),
        "pre_tokenizer": definition.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": definition.get("decoder"),
        "model": model,
    }
    first = _from_json(whole)
    later = whole | {"pre_tokenizer": _without_first_space(whole["pre_tokenizer"])}
    rest = first if later["pre_tokenizer"] == whole["pre_tokenizer"] else _from_json(later)
    is_byte_level = _has_byte_level(whole["pre_tokenizer"])
    return TextPipeline(first, rest, is_byte_level, finds_added=True)


def _bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: bool
) -> tokenizers.Tokenizer:
    with _as_our_error(ModelLoadError, "the tokenizer's merges do not fit its tokens"):
        return tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), **options))


def _from_json(whole: Mapping[str, Any]) -> tokenizers.Tokenizer:
    with _as_our_error(ModelLoadError, "tokenizer.json: not understood"):
        return tokenizers.Tokenizer.from_str(json.dumps(whole))


@contextmanager
def _as_our_error(kind: type[LlmError], message: str) -> Iterator[None]:
    """The library raises bare Exception; and where it panics, a class that is not even one."""
    try:
        yield
    except BaseException as error:
        if not is_fault(error):
            raise
        raise kind(f"{message}: {error!s:.300}") from error


def _merges_from_pieces(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best first; of one piece, best halves first."""
    found = []
    for piece, rank in ranks.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in ranks and right in ranks:
                found.append((rank, ranks[left], ranks[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _pair(merge: Any) -> tuple[str, str]:
    """Old files write a merge as one text with a space, new ones as two texts."""
    if isinstance(merge, str):
        left, _, right = merge.partition(" ")
        return left, right
    if isinstance(merge, list) and len(merge) == 2 and all(isinstance(m, str) for m in merge):
        return merge[0], merge[1]
    raise ModelLoadError(f"tokenizer.json: a merge is {merge!r:.60}, expected two texts")


def _without_first_space(step: Any) -> Any:
    """A pre_tokenizer definition whose Metaspace no longer prefixes the first word."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        steps = step.get("pretokenizers")
        if isinstance(steps, list):
            return step | {"pretokenizers": [_without_first_space(inner) for inner in steps]}
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return step | {"prepend_scheme": "never"}
    return step


def _has_byte_level(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "ByteLevel":
        return True
    inner = step.get("pretokenizers")
    return isinstance(inner, list) and any(map(_has_byte_level, inner))
