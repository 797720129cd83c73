"""GPU sampling against its reference and against the CPU sampler."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from kernels.gpu import SamplingInputs, load_ops
from kernels.gpu.sampling.kernels import sample_cost
from kernels.gpu.sampling.oracle import sample_one
from kernels.philox import uniform
from llm_core.messages import SamplingParams
from llm_core.sampling import sampler
from tests.support.gpu_guard import NUM_CASES_FACTOR, Guards, fresh_rng, guarded

TRITON, ORACLE = load_ops("triton"), load_ops("oracle")

# temperature, top_k, top_p, min_p
Settings = tuple[float, int, float, float]
PLAIN: Settings = (1.0, 0, 1.0, 0.0)


def make_inputs(rng: random.Random, guards: Guards, settings: list[Settings]) -> SamplingInputs:
    columns = list(zip(*settings, strict=True))
    seeds = [rng.getrandbits(64) - (1 << 63) for _ in settings]
    positions = [rng.choice((0, 5, rng.getrandbits(40))) for _ in settings]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    values = (torch.tensor(c, dtype=d) for c, d in zip(columns, dtypes, strict=True))
    temperature, top_k, top_p, min_p = map(guards.wrap, values)
    return SamplingInputs(
        *(temperature, top_k, top_p, min_p),
        guards.wrap(torch.tensor(seeds)),
        guards.wrap(torch.tensor(positions)),
    )


def acceptable(
    row: torch.Tensor, allowed: torch.Tensor | None, inputs: SamplingInputs, index: int
) -> set[int]:
    """What the oracle draws with numbers a little less and more: float32 sums differ from float64
    ones where a number lies at an edge."""
    seed = int(inputs.seeds[index]) & (1 << 64) - 1
    fraction = uniform(seed, int(inputs.positions[index]))
    top_p = float(inputs.top_p[index])
    tokens = set()
    for nudge, cut in product((0.0, -1e-5, 1e-5), (0.0, -2e-6, 2e-6)):
        p = top_p if top_p >= 1.0 else min(max(top_p + cut, 1e-9), 0.9999999)
        settings = (
            *(float(inputs.temperature[index]), int(inputs.top_k[index])),
            *(p, float(inputs.min_p[index])),
        )
        moved = min(max(fraction + nudge, 0.0), 1.0 - 1e-9)
        tokens.add(sample_one(row.float(), allowed, *settings, moved))
    return tokens


def check(
    logits: torch.Tensor, inputs: SamplingInputs, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    found = TRITON.sample(logits, inputs, allowed=allowed)
    expected = ORACLE.sample(logits, inputs, allowed=allowed)
    for index, token in enumerate(found.tolist()):
        if token != int(expected[index]):
            mask = None if allowed is None else allowed[index]
            assert token in acceptable(logits[index], mask, inputs, index), f"row {index}"
    return found


@pytest.mark.parametrize("repeat", range(NUM_CASES_FACTOR))
def test_all_settings(repeat: int) -> None:
    """A vocabulary of more than one block; logits that may tie; a row for each kind of cut."""
    rng = fresh_rng()
    settings = [
        PLAIN,
        (0.0, 0, 1.0, 0.0),
        (rng.uniform(0.2, 2.0), 1, 0.5, 0.5),
        (rng.uniform(0.2, 2.0), 0, 1.0, rng.uniform(0.0, 0.2)),
        (rng.uniform(0.2, 1.2), rng.randint(2, 60), 1.0, 0.0),
        (rng.uniform(0.2, 1.0), 0, rng.uniform(0.05, 0.99), 0.0),
        (rng.uniform(0.2, 1.2), rng.randint(2, 60), rng.uniform(0.05, 0.99), 0.02),
        (1e-4, 0, 0.9, 0.0),
    ]
    with guarded() as guards:
        logits = 3 * torch.randn(len(settings), 5000)
        logits[-4:] = (logits[-4:] * rng.choice((1, 4))).round() / 4
        check(guards.wrap(logits), make_inputs(rng, guards, settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grammar_mask_and_16_bit_logits(dtype: torch.dtype) -> None:
    rng = fresh_rng()
    vocab_size = 333
    settings = [PLAIN, (0.0, 0, 1.0, 0.0), (0.8, 20, 0.9, 0.0), (1.0, 0, 0.7, 0.0)]
    with guarded() as guards:
        logits = guards.wrap((2 * torch.randn(4, vocab_size)).to(dtype))
        words = torch.randint(-(2**31), 2**31, (4, 11), dtype=torch.int64).int()
        found = check(logits, make_inputs(rng, guards, settings), guards.wrap(words))
    for index, token in enumerate(found.tolist()):
        assert int(words[index, token // 32]) >> (token % 32) & 1, "a token that is not allowed"


def test_ties_go_to_the_smaller_ids() -> None:
    rng = fresh_rng()
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (1.0, 0, 0.4, 0.0), (1.0, 9, 0.5, 0.1)]
    with guarded() as guards:
        logits = guards.wrap(torch.zeros(4, 200))
        found = check(logits, make_inputs(rng, guards, settings)).tolist()
    assert found[0] == 0 and found[1] < 7 and found[2] <= 80 and found[3] <= 5


def test_unusable_rows() -> None:
    rng = fresh_rng()
    with guarded() as guards:
        logits = torch.randn(6, 70)
        logits[0, 3], logits[1], logits[2, 69] = torch.nan, -torch.inf, torch.inf
        allowed = torch.full((6, 3), -1, dtype=torch.int32)
        allowed[3] = 0
        allowed[4, 0] = 0  # hides a NaN, which still makes the row unusable
        logits[4, 5] = torch.nan
        inputs = make_inputs(rng, guards, [PLAIN, (0.0, 0, 1.0, 0.0), *[PLAIN] * 4])
        found = check(guards.wrap(logits), inputs, guards.wrap(allowed)).tolist()
    assert found[:5] == [-1] * 5
    assert found[5] >= 0


def test_equals_the_cpu_sampler() -> None:
    rng = fresh_rng()
    settings = 3 * [
        *(PLAIN, (0.7, 40, 1.0, 0.0), (0.9, 0, 0.95, 0.0), (1.2, 50, 0.9, 0.05)),
        *((0.5, 3, 1.0, 0.0), (1.5, 0, 0.3, 0.0), (1.0, 0, 1.0, 0.1)),
    ]
    with guarded() as guards:
        logits = 2 * torch.randn(len(settings), 600)
        inputs = make_inputs(rng, guards, settings)
        found = TRITON.sample(guards.wrap(logits), inputs).tolist()
    for index, (temperature, top_k, top_p, min_p) in enumerate(settings):
        seed = int(inputs.seeds[index]) & (1 << 64) - 1
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        state = sampler.SamplerState(params, (), vocab_size=600)
        token = sampler.sample_row(logits[index].numpy(), state, int(inputs.positions[index]))
        if found[index] != token:  # at an edge the sums' rounding decides, and only there
            near = acceptable(logits[index], None, inputs, index)
            assert len(near) > 1 and {found[index], token} <= near


def test_random_numbers_equal_the_cpu_samplers() -> None:
    """Equal weights drawn in order of ids: the token tells the number's leading bits."""
    rng = fresh_rng()
    with guarded() as guards:
        inputs = make_inputs(rng, guards, [PLAIN] * 6)
        found = TRITON.sample(guards.wrap(torch.zeros(6, 1000)), inputs).tolist()
    for index, token in enumerate(found):
        seed = int(inputs.seeds[index]) & (1 << 64) - 1
        number = sampler.uniform(seed, int(inputs.positions[index]))
        assert number == uniform(seed, int(inputs.positions[index]))
        assert abs(token - 1000 * number) <= 1.001


def test_no_rows_and_cost() -> None:
    nothing = torch.zeros(0)
    inputs = SamplingInputs(
        nothing, nothing.int(), nothing, nothing, nothing.long(), nothing.long()
    )
    assert TRITON.sample(torch.zeros(0, 5), inputs).shape == (0,)
    assert sample_cost(torch.zeros(2, 5)).num_bytes == 3 * 2 * 5 * 4
