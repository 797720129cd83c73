"""`shorten_text` with the embedded model: facts stay, what is said again goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_core import ShortenOptions, shorten_text

pytestmark = pytest.mark.integration

_POLITE = "Thank you very much for your patience and for your understanding."
_FACTS = ("The code of the back door is 4711.", "Lunch today is lentil soup.")
_TEXT = f"{_POLITE} {_FACTS[0]} {_POLITE} {_POLITE} {_FACTS[1]} {_POLITE}"


@pytest.mark.parametrize(
    ("question", "kept"), [("", _FACTS), ("What is the code of the back door?", _FACTS[:1])]
)
def test_facts_stay(llm_model_path: Path, question: str, kept: tuple[str, ...]) -> None:
    options = ShortenOptions(
        model_path=llm_model_path,
        text=_TEXT,
        max_tokens=11 * len(kept) + 2,
        question=question,
        num_threads=1,
    )
    report = shorten_text(options, lambda *_: None)
    assert all(fact in report.text for fact in kept)
    assert report.tokens_after <= options.max_tokens < report.tokens_before
