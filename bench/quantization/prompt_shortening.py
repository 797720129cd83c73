"""What a shorter prompt costs in answers and saves in time: `parley shorten` against simpler cuts.

Notes of twelve sentences about a made-up office, four of them facts and the others polite words,
some said twice; four questions to each. The figure is the surprisal of the right answer, in bits a
token, after the notes and the question (teacher forced): "none" is without notes.

    python -m bench.quantization.prompt_shortening [--model PATH] [--cases 25] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from llm_core.loading.model_files import open_model
from llm_core.messages import EngineConfig
from llm_core.model.runner import ModelRunner
from llm_core.offline.shorten import (
    Sentence,
    choose,
    scored_by_question,
    scored_by_surprisal,
    sentences_of,
    surprisal_bits,
)

_NAMES = ("Anna", "Boris", "Clara", "David", "Emil", "Fatima", "Greta", "Hugo")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_MEALS = ("lentil soup", "fish and chips", "mushroom risotto", "tomato pasta")
_POLITE = (
    "As you may know, we are always happy to help our visitors and guests.",
    "Please do not hesitate to ask if there is anything that you need.",
    "It is important to remember that everyone is welcome here at any time.",
    "We hope that you have a very nice day and enjoy your stay with us.",
    "In general, things are the way they have always been, and that is fine.",
    "Thank you very much for your patience and for your understanding.",
)


def notes(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (question, answer) of each of its facts."""
    name, day, meal = rng.choice(_NAMES), rng.choice(_DAYS), rng.choice(_MEALS)
    code, price = rng.randint(1000, 9999), rng.randint(2, 9)
    facts = [
        f"The meeting with {name} was moved to {day}.",
        f"Lunch today is {meal}.",
        f"The code of the back door is {code}.",
        f"Parking costs {price} euros an hour.",
    ]
    questions = [
        (f"When is the meeting with {name}?", f" {day}"),
        ("What is for lunch today?", f" {meal}"),
        ("What is the code of the back door?", f" {code}"),
        ("How much does parking cost an hour?", f" {price} euros"),
    ]
    sentences = [*facts, *rng.sample(_POLITE, 5), *rng.choices(_POLITE, k=3)]
    rng.shuffle(sentences)
    return " ".join(sentences), questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = next(Path.home().glob(".parley/models/smollm2-135m-instruct/*.gguf"), None)
    parser.add_argument("--model", type=Path, default=default, required=default is None)
    parser.add_argument("--cases", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with open_model(arguments.model) as opened:
        config = EngineConfig(model_path=str(arguments.model), num_threads=2, max_context=2048)
        runner, tokenizer = ModelRunner.of(opened.model, config), opened.tokenizer
    rng = random.Random(arguments.seed)
    bits: dict[str, list[float]] = {}
    lengths: dict[str, list[int]] = {}
    scoring_ms: dict[str, list[float]] = {"surprisal": [], "question": []}

    def measure(name: str, kept: Sequence[Sentence], question: str, answer: str) -> None:
        text = "".join(s.text for s in kept).strip()
        before = tokenizer.encode(f"{text}\nQuestion: {question}\nAnswer:".lstrip())
        answer_ids = tokenizer.encode(answer)
        of_answer = surprisal_bits(runner, before + answer_ids)[-len(answer_ids) :]
        bits.setdefault(name, []).append(statistics.mean(of_answer))
        lengths.setdefault(name, []).append(sum(len(s.token_ids) for s in kept))

    for _ in range(arguments.cases):
        text, questions = notes(rng)
        sentences = sentences_of(text, tokenizer)
        half = sum(len(s.token_ids) for s in sentences) // 2
        start_s = time.perf_counter()
        by_surprisal = scored_by_surprisal(runner, sentences, lambda *_: None)
        scoring_ms["surprisal"].append((time.perf_counter() - start_s) * 1e3)
        at_random = [Sentence(s.text, s.token_ids, rng.random()) for s in sentences]
        newest = [Sentence(s.text, s.token_ids, i) for i, s in enumerate(sentences)]
        for question, answer in questions:
            start_s = time.perf_counter()
            ids = tokenizer.encode(question)
            by_question = scored_by_question(runner, sentences, ids, lambda *_: None)
            scoring_ms["question"].append((time.perf_counter() - start_s) * 1e3)
            measure("all of it", sentences, question, answer)
            measure("1/2, by surprisal", choose(by_surprisal, half), question, answer)
            measure("1/2, at random", choose(at_random, half), question, answer)
            measure("1/2, the newest", choose(newest, half), question, answer)
            measure("1/4, by the question", choose(by_question, half // 2), question, answer)
            measure("1/4, by surprisal", choose(by_surprisal, half // 2), question, answer)
            measure("none", [], question, answer)
    print(f"{arguments.cases} notes, {len(bits['none'])} answers, {runner.info_fields['name']}")
    print("| kept | tokens | bits a token of the answer |\n|---|---|---|")
    for name, values in bits.items():
        print(f"| {name} | {statistics.mean(lengths[name]):.0f} | {statistics.mean(values):.2f} |")
    for name, times in scoring_ms.items():
        print(f"scoring by {name}: median {statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()
