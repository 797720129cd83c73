"""Where greedy text of quantised copies first differs from the float32 model's.

    python -m bench.quantization.greedy_divergence REFERENCE MODEL... --prompts FILE [--tokens \
        64] [--json OUT]

FILE has a prompt a line. Models run in torch with float32 arithmetic, so that only the weights
differ; MODEL as native=PATH runs in compiled code, which rounds activations to 8 bits (and weights
that are stored as floats). For each: on how many prompts the whole text is the same, and quartiles
of the number of equal tokens before the first that differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.loading.model_files import open_model
from llm_core.messages import ChatMessage, EngineConfig
from llm_core.model.runner import ModelRunner


def greedy(model: str, prompts: list[str], num_tokens: int, num_threads: int) -> list[list[int]]:
    """Token ids of each reply, up to and including its end; all prompts decode together."""
    is_native = model.startswith("native=")
    path = model.removeprefix("native=")
    with open_model(path) as opened:
        ids = [
            opened.tokenizer.encode_pieces(
                opened.template.render([ChatMessage(role="user", content=prompt)])
            )
            for prompt in prompts
        ]
        longest = max(map(len, ids)) + num_tokens
        config = EngineConfig(
            model_path=path,
            num_threads=num_threads,
            max_sequences=len(ids),
            max_context=longest,
            kv_cache_tokens=len(ids) * (longest + 16),
            backend="native" if is_native else "torch",
        )
        runner = ModelRunner.of(
            opened.model, config, weight_format="auto" if is_native else "float32"
        )
        ends = opened.tokenizer.eos_ids
    blocks_each = -(-longest // runner.block_size)
    tables = [tuple(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(len(ids))]
    replies: list[list[int]] = [[] for _ in ids]
    starts = [0] * len(ids)
    waiting = list(range(len(ids)))
    while waiting:
        segments, rows, token_ids, at = [], [], [], 0
        for i in waiting:
            new = (ids[i] + replies[i])[starts[i] :]
            segments.append(Segment(tables[i], starts[i], len(new)))
            token_ids += new
            at += len(new)
            rows.append(at - 1)
            starts[i] += len(new)
        batch = ForwardBatch(torch.tensor(token_ids), tuple(segments), torch.tensor(rows))
        tokens = runner.forward(batch).logits.argmax(-1).tolist()
        for i, token in zip(waiting, tokens, strict=True):
            replies[i].append(token)
        waiting = [
            i for i in waiting if len(replies[i]) < num_tokens and replies[i][-1] not in ends
        ]
    return replies


def equal_tokens(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def compare(reference: list[list[int]], replies: list[list[int]]) -> dict[str, Any]:
    same = [one == other for one, other in zip(reference, replies, strict=True)]
    equal = [equal_tokens(one, other) for one, other in zip(reference, replies, strict=True)]
    return {
        "num_prompts": len(same),
        "same_text": sum(same),
        "equal_tokens_quartiles": statistics.quantiles(equal, n=4),
        "differs_at_once": sum(count == 0 for count in equal),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [line.strip() for line in lines if line.strip()]
    if len(prompts) < 2:
        parser.error(f"{arguments.prompts} has {len(prompts)} prompts, at least two are needed")
    reference = greedy(arguments.reference, prompts, arguments.tokens, arguments.threads)
    result = {}
    for path in arguments.models:
        replies = greedy(path, prompts, arguments.tokens, arguments.threads)
        result[path] = compare(reference, replies)
        print(path, json.dumps(result[path]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
