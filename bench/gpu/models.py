"""Whole steps of a Llama-3-8B-shaped model with random weights, for ``bench.gpu.run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch

from kernels import select_backend
from kernels.gpu import GpuOps, SamplingInputs
from llm_core.batch import ForwardBatch, Segment, TokenChoices
from llm_core.config import ModelConfig
from llm_core.loading.weights import weight_shapes
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.graphs import Capture
from llm_core.model.gpu.kv_cache import GpuKvCache
from llm_core.model.gpu.weights import GpuFormat
from llm_core.model.kv_cache import KvCache
from llm_core.model.torch_decoder import TorchDecoder
from llm_core.quant.codes import GroupedCodes
from llm_core.quant.formats import Weight
from llm_core.quant.linear import FormatChoice

BLOCK_SIZE = 16
Form = Literal["bf16", "fp8", "int4"]
_FORMATS: dict[Form, GpuFormat] = {"bf16": "bfloat16", "fp8": "fp8", "int4": "auto"}

LLAMA_3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    context_len=8448,
    rope_theta=500000.0,
)
SMOKE_MODEL = ModelConfig(
    num_layers=1,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    vocab_size=40,
    context_len=80,
)


class RandomWeights(Mapping[str, Weight]):
    """Matrices made where they are needed: drawing eight billion numbers on a CPU takes minutes."""

    def __init__(self, config: ModelConfig, form: Form, device: torch.device) -> None:
        self._shapes = weight_shapes(config)
        self._form = form
        self._device = device

    def __getitem__(self, name: str) -> Weight:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        scale = shape[1] ** -0.5
        if self._form != "int4" or name == "embedding":
            values = torch.randn(shape, device=self._device, dtype=torch.bfloat16)
            return values.mul_(scale)
        group = 128 if shape[1] % 128 == 0 else 32
        codes = torch.randint(16, shape, dtype=torch.uint8, device=self._device)
        scales = torch.full((shape[0], shape[1] // group), scale / 4.6, device=self._device)
        return GroupedCodes(codes, scales, -7.5 * scales, 4, group)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class BenchModel:
    """A decoder, and a pool that holds ``num_sequences`` sequences of ``max_context`` positions or
    one prompt."""

    def __init__(
        self,
        config: ModelConfig,
        form: Form,
        ops: GpuOps,
        device: torch.device,
        capture: Capture | None,
        *,
        num_sequences: int,
        sequence_len: int,
        weights: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Weight]] | None = None,
    ) -> None:
        """``weights`` makes them of their shapes; None: random ones on ``device``."""
        self.config = config
        shapes = weight_shapes(config)
        self.decoder = TritonDecoder(
            config,
            RandomWeights(config, form, device) if weights is None else weights(shapes),
            ops,
            device=device,
            dtype=torch.bfloat16,
            max_context=config.context_len,
            weight_format=_FORMATS[form],
            capture=capture,
        )
        self._per_sequence = -(-sequence_len // BLOCK_SIZE)
        num_blocks = max(num_sequences * self._per_sequence, -(-config.context_len // BLOCK_SIZE))
        self.cache = GpuKvCache(config, num_blocks, BLOCK_SIZE, "bfloat16", device=device, ops=ops)
        # Attention over what was never written would be over whatever the memory holds, NaN too.
        self.cache.data.normal_()

    def batch(
        self, num_sequences: int, start: int, rows: int, *, tree: bool, chooses: bool = False
    ) -> ForwardBatch:
        """``rows`` rows of each sequence after ``start`` positions; logits of every row of a tree,
        else of the last. ``chooses``: the best tokens are given out instead, and single rows take
        theirs from the step before."""
        segments = []
        for number in range(num_sequences):
            first = number * self._per_sequence
            last = first + max(self._per_sequence, -(-(start + rows) // BLOCK_SIZE))
            parents = tuple((row - 1) // 2 if row else -1 for row in range(rows)) if tree else None
            segments.append(Segment(tuple(range(first, last)), start, rows, parents))
        num_rows = num_sequences * rows
        tokens = torch.randint(self.config.vocab_size, (num_rows,))
        wanted = torch.arange(num_rows) if tree else torch.arange(rows - 1, num_rows, rows)
        choices = None
        if chooses:
            count = wanted.shape[0]
            zeros = torch.zeros(count, dtype=torch.int32)
            inputs = SamplingInputs(
                *(zeros.float(), zeros, zeros.float() + 1, zeros.float(), zeros.long(), zeros)
            )
            sources = torch.arange(num_rows) if rows == 1 else torch.full((num_rows,), -1)
            choices = TokenChoices(inputs, (), sources.to(torch.int32))
        return ForwardBatch(tokens, tuple(segments), wanted, choices=choices)

    def kv_bytes(self, num_positions: int) -> int:
        """What attention reads of the cache for ``num_positions`` positions."""
        return (
            KvCache.num_bytes(self.config, 1, BLOCK_SIZE, "bfloat16") * num_positions // BLOCK_SIZE
        )

    def prefill_flops(self, num_tokens: int) -> int:
        """Of a prompt: products with layers' weights, scores and their sums, one row of logits."""
        c = self.config
        per_layer = c.hidden_size * (2 * c.query_size + 2 * c.kv_size + 3 * c.intermediate_size)
        attention = 4 * c.query_size * num_tokens * (num_tokens + 1) // 2
        layers = c.num_layers * (2 * per_layer * num_tokens + attention)
        return layers + 2 * c.hidden_size * c.vocab_size


# Of each sequence: its first new position, its rows, and their parents if they are a tree.
_Parts = list[tuple[int, int, tuple[int, ...] | None]]
_TABLES = ((3, 1, 7, 9, 11, 12), (2, 8, 0, 5, 4, 6))


def comparison_model(*, is_smoke: bool) -> ModelConfig:
    """A small one that has everything."""
    return ModelConfig(
        num_layers=1 if is_smoke else 2,
        hidden_size=64,
        num_heads=2 if is_smoke else 4,
        num_kv_heads=1 if is_smoke else 2,
        head_dim=16 if is_smoke else 64,
        intermediate_size=96,
        vocab_size=97,
        context_len=128,
        attention_softcap=5.0,
        logit_softcap=3.0,
        sliding_window=9,
        layer_is_sliding=(True, False)[: 1 if is_smoke else 2],
        qk_norm=True,
        post_norms=True,
    )


def comparison_steps(
    generator: torch.Generator, *, is_smoke: bool
) -> Iterator[tuple[str, ForwardBatch]]:
    """What is run, by name: eager steps, then steps that are replayed from graphs."""
    tree = (-1, 0, 0, 1, 1, 2)
    steps: list[tuple[str, _Parts]] = [
        ("prompts", [(0, 70, None), (0, 20, None)]),
        # Graphs are recorded at the third time.
        *[("one row each", [(70 + n, 1, None), (20 + n, 1, None)]) for n in range(5)],
        *[("trees", [(75, 6, tree), (25, 3, tree[:3])]) for _ in range(5)],
        ("mixed", [(75, 1, None), (25, 12, None)]),
    ]
    if is_smoke:
        prompt = "prompts", [(0, 65, None), (0, 2, None)]
        steps = [prompt, ("one row each", [(65, 1, None), (2, 1, None)])]
        steps += [("trees", [(66, 3, tree[:3]), (3, 1, None)])]
    vocab_size = comparison_model(is_smoke=is_smoke).vocab_size
    for name, parts in steps:
        segments = tuple(
            Segment(table, start, length, parents)
            for table, (start, length, parents) in zip(_TABLES, parts, strict=True)
        )
        num_rows = sum(segment.length for segment in segments)
        tokens = torch.randint(vocab_size, (num_rows,), generator=generator)
        yield name, ForwardBatch(tokens, segments, torch.arange(num_rows))


def comparison_decoder(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    ops: GpuOps,
    device: torch.device,
    capture: Capture | None,
) -> tuple[TritonDecoder, GpuKvCache]:
    """In float32, and a pool for two sequences."""
    decoder = TritonDecoder(
        config,
        weights,
        ops,
        device=device,
        dtype=torch.float32,
        max_context=128,
        weight_format="float32",
        capture=capture,
    )
    return decoder, GpuKvCache(config, 16, BLOCK_SIZE, "float32", device=device, ops=ops)


def compare_with_cpu(
    ops: GpuOps, device: torch.device, capture: Capture | None, *, is_smoke: bool
) -> dict[str, float]:
    """Largest difference of float32 logits from the CPU's decoder, by name of the step."""
    config = comparison_model(is_smoke=is_smoke)
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, (1,)).item())
    weights: dict[str, Weight] = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = values * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.2 * values
    cpu = TorchDecoder(
        config, weights, FormatChoice("float32", "float32"), select_backend("cpu"), 128
    )
    cpu_cache = KvCache(config, 16, BLOCK_SIZE)
    gpu, gpu_cache = comparison_decoder(config, weights, ops, device, capture)
    found: dict[str, float] = {}
    for name, batch in comparison_steps(generator, is_smoke=is_smoke):
        expected = cpu.forward(batch, cpu_cache).logits
        result = gpu.forward(batch, gpu_cache).logits
        error = float((result - expected).abs().max())
        found[name] = max(found.get(name, 0.0), error if error == error else float("inf"))
    return found
