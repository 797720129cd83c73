"""Prompt shortening: keeps the most informative sentences of a text within a token budget.

A sentence's score is its surprisal, the mean of -log2 p(token | text so far) in bits per token,
under the model that will read it (Li et al. 2023, "Selective Context"): repetition and predictable
text score low. With a question the score is instead the gain in log-probability of the question's
tokens after the sentence (Jiang et al. 2023, "LongLLMLingua"). Sentences are kept or dropped whole,
in their order, so that the result can be read aloud.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from llm_core.errors import InvalidRequestError
from llm_core.loading import open_model
from llm_core.messages import EngineConfig
from llm_core.model import ModelRunner
from llm_core.offline.options import Progress, ShortenOptions, ShortenReport
from llm_core.offline.perplexity import surprisals
from llm_core.tokenizer import Tokenizer

# After sentence punctuation before whitespace, and before line ends.
_BOUNDARY = re.compile(r"(?<=[.!?;])(?=\s)|(?<=[.!?]['\")\]])(?=\s)|(?=\n)")
_MAX_SENTENCE_TOKENS = 256
_MAX_CONTEXT = 4096  # tokens computed in one sequence


@dataclass(frozen=True, slots=True)
class Sentence:
    """``text`` includes the whitespace before it; ``score`` in bits per token."""

    text: str
    token_ids: list[int]
    score: float = 0.0


def shorten(options: ShortenOptions, progress: Progress) -> ShortenReport:
    """Runs the job. Raises LlmError."""
    start_s = time.monotonic()
    with open_model(options.model_path) as opened:
        config = EngineConfig(
            model_path=str(options.model_path),
            num_threads=options.num_threads,
            max_sequences=1,
            max_context=min(_MAX_CONTEXT, opened.model.config.context_len),
        )
        runner = ModelRunner.of(opened.model, config)
    sentences = sentences_of(options.text, opened.tokenizer)
    tokens_before = sum(len(s.token_ids) for s in sentences)
    if tokens_before > options.max_tokens:
        on_tokens = partial(progress, "shorten")
        if options.question:
            question_ids = opened.tokenizer.encode(options.question)
            sentences = scored_by_question(runner, sentences, question_ids, on_tokens)
        else:
            sentences = scored_by_surprisal(runner, sentences, on_tokens)
        sentences = choose(sentences, options.max_tokens)
    if not sentences:
        raise InvalidRequestError(
            f"no sentence of the text fits into max_tokens, {options.max_tokens}"
            if tokens_before
            else "the text is empty"
        )
    return ShortenReport(
        text="".join(s.text for s in sentences).strip(),
        tokens_before=tokens_before,
        tokens_after=sum(len(s.token_ids) for s in sentences),
        wall_s=time.monotonic() - start_s,
    )


def sentences_of(text: str, tokenizer: Tokenizer) -> list[Sentence]:
    """``text`` split at the ends of sentences and lines; longer ones are split between words."""
    sentences: list[Sentence] = []
    gap = ""
    for piece in _BOUNDARY.split(text):
        if not piece.strip():
            gap += piece
            continue
        token_ids = tokenizer.encode(gap + piece)
        if len(token_ids) <= _MAX_SENTENCE_TOKENS:
            sentences.append(Sentence(gap + piece, token_ids))
        else:
            words = re.findall(r"\s*\S+", gap + piece)
            for start in range(0, len(words), _MAX_SENTENCE_TOKENS // 4):
                part = "".join(words[start : start + _MAX_SENTENCE_TOKENS // 4])
                sentences.append(Sentence(part, tokenizer.encode(part)))
        gap = ""
    return sentences


def choose(sentences: Sequence[Sentence], max_tokens: int) -> list[Sentence]:
    """The sentences with the highest scores that fit into ``max_tokens``, in their order."""
    order = sorted(range(len(sentences)), key=lambda i: (-sentences[i].score, i))
    kept: set[int] = set()
    left = max_tokens
    for index in order:
        length = len(sentences[index].token_ids)
        if length <= left:
            kept.add(index)
            left -= length
    return [sentences[i] for i in sorted(kept)]


def scored_by_surprisal(
    runner: ModelRunner, sentences: Sequence[Sentence], on_tokens: Callable[[int, int], None]
) -> list[Sentence]:
    """``sentences`` scored by surprisal given all before them. A text longer than the model's
    context is computed in pieces. ``on_tokens(done, total)`` reports progress."""
    total = sum(len(s.token_ids) for s in sentences)
    scored: list[Sentence] = []
    read = 0
    for piece in _pieces(sentences, runner.max_context):
        ids = [token for s in piece for token in s.token_ids]
        # Nothing predicts the first token: uniform over the vocabulary.
        bits = [math.log2(runner.config.vocab_size)]
        for part in _bits_in_parts(runner, ids):
            bits += part
            on_tokens(read + len(bits), total)
        read += len(ids)
        at = 0
        for sentence in piece:
            end = at + len(sentence.token_ids)
            mean = sum(bits[at:end]) / len(sentence.token_ids)
            scored.append(Sentence(sentence.text, sentence.token_ids, mean))
            at = end
    return scored


def scored_by_question(
    runner: ModelRunner,
    sentences: Sequence[Sentence],
    question_ids: list[int],
    on_tokens: Callable[[int, int], None],
) -> list[Sentence]:
    """``sentences`` scored by how much each reduces the question's surprisal, per token of the
    question.

    Raises InvalidRequestError for a question that is empty or longer than half of the context.
    """
    if not 2 <= len(question_ids) <= runner.max_context // 2:
        raise InvalidRequestError(
            f"the question has {len(question_ids)} tokens, expected 2 to {runner.max_context // 2}"
        )
    total = sum(len(s.token_ids) for s in sentences)
    alone = _question_bits(runner, [], question_ids)
    scored: list[Sentence] = []
    read = 0
    for sentence in sentences:
        gain = alone - _question_bits(runner, sentence.token_ids, question_ids)
        scored.append(Sentence(sentence.text, sentence.token_ids, gain / len(question_ids)))
        read += len(sentence.token_ids)
        on_tokens(read, total)
    return scored


def _question_bits(runner: ModelRunner, before: list[int], question_ids: list[int]) -> float:
    """Surprisal in bits of the question's tokens but the first, given ``before``."""
    ids = before[: runner.max_context - len(question_ids)] + question_ids
    return sum(surprisal_bits(runner, ids)[-(len(question_ids) - 1) :])


def surprisal_bits(runner: ModelRunner, ids: list[int]) -> list[float]:
    """-log2 p of each of ``ids`` but the first; at most ``runner.max_context`` of them."""
    return [bits for part in _bits_in_parts(runner, ids) for bits in part]


def _bits_in_parts(runner: ModelRunner, ids: list[int]) -> Iterator[list[float]]:
    """``surprisal_bits`` in chunks."""
    for nats in surprisals(runner, torch.tensor(ids, dtype=torch.int64)):
        yield (nats / math.log(2)).tolist()


def _pieces(sentences: Sequence[Sentence], max_len: int) -> list[list[Sentence]]:
    pieces: list[list[Sentence]] = []
    length = max_len + 1
    for sentence in sentences:
        if length + len(sentence.token_ids) > max_len:
            pieces.append([])
            length = 0
        pieces[-1].append(sentence)
        length += len(sentence.token_ids)
    return pieces
