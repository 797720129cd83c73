"""Prompt shortening: sentence splitting, scores and selection."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_core.errors import InvalidRequestError
from llm_core.offline.shorten import (
    Sentence,
    choose,
    scored_by_question,
    scored_by_surprisal,
    sentences_of,
)
from tests.support.random_llama import tiny_config, tiny_runner
from tests.support.tiny_model import tiny_tokenizer

_TEXT = 'One came. "Is it two?" Three\n\n- four; five\n  six... 3.5 is no end! '


def test_sentences_cover_the_text() -> None:
    parts = [s.text for s in sentences_of(_TEXT, tiny_tokenizer())]
    assert "".join(parts) == _TEXT.rstrip()
    assert parts[:3] == ["One came.", ' "Is it two?"', " Three"]
    assert " 3.5 is no end!" in parts


def test_long_sentences_are_split() -> None:
    text = "word " * 2_000
    parts = sentences_of(text.strip(), tiny_tokenizer())
    assert "".join(s.text for s in parts) == text.strip()
    assert max(len(s.token_ids) for s in parts) < 1_000


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-5, 5)), max_size=12), st.integers(0, 40))
def test_selection_fits_and_is_greedy(sizes: list[tuple[int, float]], max_tokens: int) -> None:
    sentences = [Sentence(str(i), [0] * n, score) for i, (n, score) in enumerate(sizes)]
    kept = choose(sentences, max_tokens)
    assert [int(s.text) for s in kept] == sorted(int(s.text) for s in kept)
    used = sum(len(s.token_ids) for s in kept)
    assert used <= max_tokens
    for left_out in {s.text for s in sentences} - {s.text for s in kept}:
        sentence = sentences[int(left_out)]
        better = sum(len(s.token_ids) for s in kept if s.score >= sentence.score)
        assert better + len(sentence.token_ids) > max_tokens


def test_surprisal_in_pieces_counts_every_token() -> None:
    """The mean over sentences, weighted by length, is the text's own mean."""
    runner, rng = tiny_runner(), random.Random(4)
    sentences = [
        Sentence(
            str(i), [rng.randrange(tiny_config().vocab_size) for _ in range(rng.randint(1, 30))]
        )
        for i in range(20)
    ]
    seen: list[tuple[int, int]] = []
    scored = scored_by_surprisal(runner, sentences, lambda read, total: seen.append((read, total)))
    total = sum(len(s.token_ids) for s in sentences)
    assert seen[-1][1] == total and [s.text for s in scored] == [s.text for s in sentences]
    assert all(0 < s.score < 40 for s in scored)
    alone = scored_by_surprisal(runner, sentences[:1], lambda *_: None)
    assert alone[0].score == pytest.approx(scored[0].score, rel=1e-4)


def test_question_length_is_checked() -> None:
    runner = tiny_runner()
    for question in ([], [1], [1] * runner.max_context):
        with pytest.raises(InvalidRequestError, match="the question has"):
            scored_by_question(runner, [Sentence("a", [1])], question, lambda *_: None)
