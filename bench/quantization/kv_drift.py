"""What keeping keys and values in fewer bits costs: memory, perplexity, and drift against length.

    python -m bench.quantization.kv_drift MODEL TEXT [--tokens 2048] [--json OUT]

Reads TEXT through the model in chunks of 64 rows (so that later rows attend to stored keys and
values, as in a conversation), once for each dtype, and compares logits row by row with float32's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.config import KvDtype
from llm_core.loading.model_files import open_model
from llm_core.messages import EngineConfig
from llm_core.model.kv_cache import KvCache
from llm_core.model.runner import ModelRunner

CHUNK = 64
BUCKET = 256


def read_logprobs(runner: ModelRunner, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocab]: log-probabilities after each token."""
    blocks = tuple(range(runner.num_blocks))
    rows = []
    for start in range(0, len(token_ids), CHUNK):
        chunk = token_ids[start : start + CHUNK]
        batch = ForwardBatch(chunk, (Segment(blocks, start, len(chunk)),), torch.arange(len(chunk)))
        rows.append(torch.log_softmax(runner.forward(batch).logits, -1).half())
    return torch.cat(rows)


def measure(model_path: str, token_ids: torch.Tensor) -> dict[str, Any]:
    num_tokens = len(token_ids)
    exact: torch.Tensor | None = None
    result: dict[str, Any] = {"num_tokens": num_tokens, "bucket": BUCKET}
    dtypes: tuple[KvDtype, ...] = ("float32", "bfloat16", "int8")
    for dtype in dtypes:
        config = EngineConfig(
            model_path=model_path, max_sequences=1, max_context=num_tokens, kv_dtype=dtype
        )
        runner = ModelRunner.load(config)
        logprobs = read_logprobs(runner, token_ids)
        said = logprobs[:-1].float().gather(1, token_ids[1:].unsqueeze(1)).squeeze(1)
        if exact is None:
            exact = logprobs
        drift = [
            kl_divergence(exact[at : at + BUCKET], logprobs[at : at + BUCKET])
            for at in range(0, num_tokens, BUCKET)
        ]
        agree = (exact.argmax(-1) == logprobs.argmax(-1)).float().mean().item()
        result[dtype] = {
            "bytes_per_token": KvCache.num_bytes(runner.config, 1, 1, dtype),
            "perplexity": math.exp(-said.mean().item()),
            "same_best_token": agree,
            "kl_by_position": drift,
        }
    return result


def kl_divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over rows, in nats."""
    p = exact.float()
    return (p.exp() * (p - other.float())).sum(-1).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", nargs="+", help="files of plain text")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in arguments.text)
    with open_model(arguments.model) as opened:
        ids = opened.tokenizer.encode(text)[: arguments.tokens]
    if len(ids) < arguments.tokens:
        parser.error(f"the text has {len(ids)} tokens, {arguments.tokens} are needed")
    result = measure(arguments.model, torch.tensor(ids))
    output = json.dumps(result, indent=1)
    print(output)
    if arguments.json is not None:
        arguments.json.write_text(output + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
