"""How many tokens a step drafts would bring, by drafter, tree, prompts and temperature; exact.

    python -m bench.speculation.acceptance MODEL [--drafter auto|ngram|PATH ...] [--prompts DIR] \
        [--count 32]

The model answers prompts by plain decoding first. Then every drafter goes over these answers as it
would when decoding: it proposes, what was really said decides, and it sees the hidden states of
what was accepted. Speculation is lossless, so the engine's rounds are these and no others. Prompts
are of ../shared/data/prompts: what people ask assistants aloud (with Parley's own instructions),
and school mathematics (with none). Drafters are the engine's own (``EngineConfig.speculation``).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec import structs

from llm_core.batch import ForwardBatch, Segment
from llm_core.loading.model_files import OpenModel, open_model
from llm_core.messages import ChatMessage, EngineConfig, SamplingParams
from llm_core.model.runner import ModelRunner
from llm_core.offline.train_head.topics import PARLEY_INSTRUCTIONS
from llm_core.sampling.sampler import SamplerState, sample_row, uniform
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.accept import accepted_path
from llm_core.speculative.drafters.base import ComputedTokens, Drafter, DraftRequest, DraftShape
from llm_core.speculative.drafters.ngram import NgramDrafter
from llm_core.speculative.factory import make_drafter

BLOCK_SIZE = 16
MAX_LEN = 512
SHAPES = {
    "chain 1": DraftShape(1, 1),
    "chain 2": DraftShape(2, 2),
    "chain 3": DraftShape(3, 3),
    "chain 4": DraftShape(4, 4),
    "siblings 2": DraftShape(2, 1, 2),
    "chain 3 and 2": DraftShape(9, 3, siblings=2),
    "tree 4": DraftShape(4, 3, 4),
    "tree 8": DraftShape(8, 4, 4),
    "tree 16": DraftShape(16, 5, 6),
    "tree 32": DraftShape(32, 6, 8),
}
TEMPERATURES = (0.0, 0.7)


@dataclass
class Answer:
    """A prompt and what plain decoding said; ``features`` float32 of all tokens but the last."""

    prompt_ids: list[int]
    token_ids: list[int]  # the prompt's too
    seed: int
    is_over: bool = False
    features: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Count:
    rounds: int = 0
    tokens: int = 0
    drafts: int = 0

    @property
    def length(self) -> float:
        return self.tokens / max(1, self.rounds)


def spoken_prompts(directory: Path, count: int) -> list[str]:
    """Evenly from both sets."""
    texts = []
    for name in ("clinc150_sample.tsv", "slurp_spoken_sample.tsv"):
        with (directory / name).open(encoding="utf-8") as file:
            rows = [row["text"] for row in csv.DictReader(file, delimiter="\t")]
        take = count // 2
        texts += [rows[i * len(rows) // take] for i in range(take)]
    return texts


def general_prompts(directory: Path, count: int) -> list[str]:
    lines = (directory / "gsm8k.question.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines][:count]


def plain_answers(
    runner: ModelRunner,
    opened: OpenModel,
    prompts: list[list[ChatMessage]],
    options: argparse.Namespace,
    temperature: float,
) -> list[Answer]:
    """All answers, decoded together."""
    blocks_each = MAX_LEN // BLOCK_SIZE
    answers = []
    for seed, messages in enumerate(prompts):
        ids = opened.tokenizer.encode_pieces(opened.template.render(messages))
        answers.append(Answer(ids, list(ids), seed))
    params = SamplingParams(temperature=temperature)
    while going := [(i, a) for i, a in enumerate(answers) if not a.is_over]:
        segments, token_ids, last_rows = [], [], []
        for index, answer in going:
            start = sum(len(part) for part in answer.features)
            new = answer.token_ids[start:]
            table = tuple(range(index * blocks_each, (index + 1) * blocks_each))
            segments.append(Segment(table, start, len(new)))
            token_ids += new
            last_rows.append(len(token_ids) - 1)
        result = runner.forward(
            ForwardBatch(torch.tensor(token_ids), tuple(segments), torch.tensor(last_rows), True)
        )
        assert result.features is not None
        parts = torch.split(result.features, [segment.length for segment in segments])
        for (_, answer), part, row in zip(going, parts, result.logits, strict=True):
            answer.features.append(part.clone())
            state = SamplerState(params, (), vocab_size=len(row))
            state.seed = answer.seed
            token = sample_row(row.numpy(), state, len(answer.token_ids))
            answer.token_ids.append(token)
            num_said = len(answer.token_ids) - len(answer.prompt_ids)
            answer.is_over = token in opened.tokenizer.eos_ids or num_said >= options.tokens
    return answers


def replay(
    drafter: Drafter, answers: Sequence[Answer], shape: DraftShape, temperature: float
) -> Count:
    """All answers at once, each a sequence of its own."""
    count, params = Count(), SamplingParams(temperature=temperature)
    blocks_each = MAX_LEN // BLOCK_SIZE
    going: list[tuple[TokenSequence, Answer, torch.Tensor]] = []
    for index, answer in enumerate(answers):
        sequence = TokenSequence(index, answer.prompt_ids, max_len=MAX_LEN)
        sequence.block_ids = list(range(index * blocks_each, (index + 1) * blocks_each))
        features = torch.cat(answer.features)
        advance(drafter, sequence, answer, features, len(answer.prompt_ids))
        going.append((sequence, answer, features))
    while going := [item for item in going if len(item[0].token_ids) < len(item[1].token_ids)]:
        requests = []
        for sequence, answer, _ in going:
            first = len(sequence.token_ids)
            places = range(first, first + shape.max_depth) if temperature > 0 else ()
            uniforms = tuple(uniform(answer.seed, place) for place in places)
            requests.append(DraftRequest(sequence, shape, params, uniforms))
        for (sequence, answer, features), tree in zip(
            going, drafter.propose(requests), strict=True
        ):
            tree.check()
            first = len(sequence.token_ids)
            said = iter([*answer.token_ids[first:], None])
            rows = accepted_path(tree, lambda _, said=said: next(said))  # type: ignore[misc]
            num_new = min(len(rows), len(answer.token_ids) - first)
            count.rounds, count.tokens = count.rounds + 1, count.tokens + num_new
            count.drafts += len(tree)
            advance(drafter, sequence, answer, features, num_new)
    for index in range(len(answers)):
        drafter.close_sequence(TokenSequence(index, [0], max_len=1))
    return count


def advance(
    drafter: Drafter, sequence: TokenSequence, answer: Answer, features: torch.Tensor, num_rows: int
) -> None:
    """``num_rows`` more were computed, and the token that follows them is known."""
    start = sequence.computed_len
    end = start + num_rows
    sequence.computed_len = end
    sequence.token_ids = answer.token_ids[: end + 1]
    taken = features[start:end] if drafter.feature_layers else None
    drafter.observe_computed([ComputedTokens(sequence, start, range(num_rows), taken)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--drafter", action="append", help="auto (default), ngram, or a path")
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--prompts", type=Path, default=root.parent / "shared/data/prompts")
    parser.add_argument("--count", type=int, default=32, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=80, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sets", default="spoken,general", help="of prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sets = {
        "spoken": [
            [ChatMessage("system", PARLEY_INSTRUCTIONS), ChatMessage("user", text)]
            for text in spoken_prompts(options.prompts, options.count)
        ],
        "general": [
            [ChatMessage("user", text)] for text in general_prompts(options.prompts, options.count)
        ],
    }
    sets = {name: sets[name] for name in options.sets.split(",")}
    num_sequences = max(map(len, sets.values()))
    engine_config = EngineConfig(
        model_path=options.model,
        num_threads=options.threads,
        max_sequences=num_sequences,
        max_context=MAX_LEN,
        kv_cache_tokens=num_sequences * MAX_LEN,
    )
    started, rows = time.monotonic(), []
    with open_model(options.model) as opened:
        runner = ModelRunner.of(opened.model, engine_config)
        for wanted in options.drafter or ["auto"]:
            config = structs.replace(engine_config, speculation=wanted)
            drafter = make_drafter(config, runner, opened)
            if drafter is None:
                sys.exit("no head comes with this model")
            runner.set_feature_layers(drafter.feature_layers or (runner.config.num_layers,))
            for name, prompts in sets.items():
                for temperature in TEMPERATURES:
                    answers = plain_answers(runner, opened, prompts, options, temperature)
                    torch.set_num_threads(options.threads)
                    for shape in options.shapes.split(","):
                        if isinstance(drafter, NgramDrafter) and shape.startswith("tree"):
                            continue
                        count = replay(drafter, answers, SHAPES[shape], temperature)
                        row = (drafter.name, name, temperature, shape, count.length, count.tokens)
                        rows.append(row)
                        print(
                            f"{row[0]:8} {name:8} T={temperature} {shape:8} {count.length:.3f} "
                            f"tokens a step ({count.tokens} tokens, "
                            f"{count.drafts / max(1, count.rounds):.1f} drafts a step)",
                            flush=True,
                        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
