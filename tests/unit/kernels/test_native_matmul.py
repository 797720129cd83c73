"""Compiled matrix products against the reference, for all row counts, edges and formats."""

from __future__ import annotations

import random

import pytest
import torch
from annotated_types import Le

from app.config import Settings
from kernels import reference
from kernels.native import Library, NativeUnavailableError, PackedMatrix
from kernels.native.library import GATED, GELU_TANH, GROUP, MAX_THREADS, SILU
from tests.support.native_library import FORMS, native_library

ROW_COUNTS = [*range(1, 10), 15, 16, 17, 33]
SHAPES = [(8, 32), (40, 96), (3, 32), (17, 70), (1, 5), (24, 33), (50, 576)]


@pytest.fixture(params=FORMS)
def library(request: pytest.FixtureRequest) -> Library:
    return native_library(request.param)


class Packed:
    """A random matrix, its packed form, and its product by the oracle in float64."""

    def __init__(
        self, library: Library, num_out: int, num_in: int, bits: int, has_zero: bool, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_groups = -(-num_in // GROUP)
        top = 1 << bits
        self.offset = 0 if has_zero else top // 2
        self.codes = torch.randint(top, (num_out, num_in), generator=generator, dtype=torch.uint8)
        self.codes[0] = top - 1  # the largest sums
        scale = torch.rand(num_out, num_groups, generator=generator) + 0.1
        zero = torch.randn(num_out, num_groups, generator=generator) if has_zero else None
        self.scale = scale.half().float()
        self.zero = None if zero is None else zero.half().float()
        self.matrix: PackedMatrix = library.memory().matrix(
            num_out, num_in, bits=bits, has_zero=has_zero, offset=self.offset, log2_scale=3
        )
        self.matrix.pack(self.codes, self.scale, self.zero)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.codes.double() - self.offset
        return reference.grouped_matmul(x.double(), codes, self.scale, self.zero, GROUP) / 8


def exact_rows(num_rows: int, num_in: int, generator: torch.Generator) -> torch.Tensor:
    """Rows that 8 bits with a scale a group hold exactly: codes with a 127, times a power of two.

    Products of other rows differ from the oracle's by a whole step where a value lies between two
    codes and the last bit decides.
    """
    codes = torch.randint(-127, 128, (num_rows, num_in), generator=generator).float()
    codes[:, ::GROUP] = 127
    powers = torch.randint(-12, 3, (num_rows, -(-num_in // GROUP)), generator=generator)
    return codes * (2.0**powers).repeat_interleave(GROUP, 1)[:, :num_in]


def close(result: torch.Tensor, exact: torch.Tensor, x: torch.Tensor) -> None:
    """Sums in float32 of terms as large as the largest weight (40) times the row's magnitudes."""
    bound = 1e-6 * 40 * x.double().abs().sum(1, keepdim=True) + 1e-6
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("has_zero", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_the_oracle(
    library: Library, shape: tuple[int, int], bits: int, has_zero: bool
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    packed = Packed(library, *shape, bits, has_zero, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for num_threads in (1, 2):
        pool = library.pool(num_threads)
        for num_rows in ROW_COUNTS:
            x = exact_rows(num_rows, shape[1], generator)
            x[num_rows // 2] = 0
            x[-1] = x[-1].abs()  # no sign cancels: sums reach their bounds
            close(packed.matrix.matmul(pool, x), packed.product(x), x)


@pytest.mark.parametrize("has_zero", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_out", [8, 24, 48])  # a tile alone, a pair and one alone, pairs
def test_a_row_does_not_depend_on_the_batch(
    library: Library, num_out: int, bits: int, has_zero: bool
) -> None:
    """To the last bit: one row, up to eight and more of them, and a last tile alone take different
    forms of the product, and verified drafts must be what plain decoding says."""
    packed = Packed(library, num_out, 160, bits, has_zero, seed=9)
    x = torch.randn(33, 160, generator=torch.Generator().manual_seed(10))
    pool = library.pool(1)
    alone = torch.cat([packed.matrix.matmul(pool, row.unsqueeze(0)) for row in x])
    for num_rows in ROW_COUNTS:
        assert torch.equal(packed.matrix.matmul(pool, x[:num_rows]), alone[:num_rows]), num_rows


def test_largest_sums_do_not_overflow(library: Library) -> None:
    """All codes and all activations at their ends."""
    for bits in (4, 8):
        packed = Packed(library, 16, 64, bits, True, seed=1)
        packed.codes[:] = (1 << bits) - 1
        matrix = library.memory().matrix(16, 64, bits=bits, has_zero=True, offset=0, log2_scale=3)
        matrix.pack(packed.codes, packed.scale, packed.zero)
        for sign in (1.0, -1.0):
            x = torch.full((5, 64), 127 * sign)
            close(matrix.matmul(library.pool(1), x), packed.product(x), x)


@pytest.mark.parametrize("num_in", [32, 70, 576])
def test_activations_are_rounded_to_nearest(library: Library, num_in: int) -> None:
    """Through an identity matrix: what comes out is what the product sees of each value."""
    codes = torch.full((num_in, num_in), 128, dtype=torch.uint8)
    codes += torch.eye(num_in, dtype=torch.uint8)
    scale = torch.ones(num_in, -(-num_in // GROUP))
    matrix = library.memory().matrix(
        num_in, num_in, bits=8, has_zero=False, offset=128, log2_scale=0
    )
    matrix.pack(codes, scale, None)
    x = torch.randn(19, num_in) * torch.logspace(-20, 20, 19).unsqueeze(1)
    result = matrix.matmul(library.pool(1), x)
    expected = reference.fake_quantize_rows(x, GROUP)
    steps = torch.cat([p.abs().amax(1, keepdim=True).expand_as(p) / 127 for p in x.split(32, 1)], 1)
    assert bool(((result - x).abs() <= 0.501 * steps).all())
    assert float(((result - expected).abs() > 0.01 * steps).float().mean()) < 1e-3  # ties


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("num_out", [8, 20])
def test_gated_product(library: Library, num_out: int, activation: int) -> None:
    gate = Packed(library, num_out, 64, 4, True, seed=2)
    up = Packed(library, num_out, 64, 4, True, seed=3)
    padded = -(-num_out // 8) * 8
    matrix = library.memory().matrix(2 * padded, 64, bits=4, has_zero=True, offset=0, log2_scale=3)
    for index, part in enumerate((gate, up)):
        matrix.pack(part.codes, part.scale, part.zero, first_row=8 * index, tile_step=2)
    matrix.struct.num_out = num_out
    x = exact_rows(9, 64, torch.Generator().manual_seed(7)) / 2**10
    result = matrix.matmul(library.pool(2), x, mode=GATED, activation=activation)
    pre = gate.product(x)
    if activation == SILU:
        gated = torch.nn.functional.silu(pre)
    else:
        gated = torch.nn.functional.gelu(pre, approximate="tanh")
    exact = gated * up.product(x)
    torch.testing.assert_close(result.double(), exact, atol=2e-4, rtol=2e-4)


def test_bias_is_added(library: Library) -> None:
    packed = Packed(library, 11, 40, 8, False, seed=4)
    bias = torch.arange(11.0)
    packed.matrix.set_bias(bias)
    x = exact_rows(3, 40, torch.Generator().manual_seed(8))
    close(packed.matrix.matmul(library.pool(1), x), packed.product(x) + bias, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_propagate(library: Library, value: float) -> None:
    """In its own row, and in no other."""
    packed = Packed(library, 16, 64, 4, True, seed=5)
    x = torch.randn(3, 64)
    x[1, 40] = value
    result = packed.matrix.matmul(library.pool(1), x)
    assert not bool(result[1].isfinite().any())
    assert bool(result[[0, 2]].isfinite().all())


@pytest.mark.parametrize("num_threads", [7, MAX_THREADS])
def test_many_threads_and_no_rows(library: Library, num_threads: int) -> None:
    """More threads than tiles; an empty product."""
    packed = Packed(library, 16, 64, 4, True, seed=6)
    x = torch.randn(2, 64)
    expected = packed.matrix.matmul(library.pool(1), x)
    pool = library.pool(num_threads, spin_us=0)  # waiting threads sleep at once
    for _ in range(50):
        assert torch.equal(packed.matrix.matmul(pool, x), expected)
    assert packed.matrix.matmul(pool, x[:0]).shape == (0, 16)


def test_too_many_threads(library: Library) -> None:
    """As many as PARLEY_LLM_THREADS may ask for can be had."""
    threads = Settings.model_fields["llm_threads"]
    assert Le(MAX_THREADS) in threads.metadata
    with pytest.raises(NativeUnavailableError, match="start 257 threads: expected 1 to 256"):
        library.pool(MAX_THREADS + 1)
