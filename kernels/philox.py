"""Counter-based random numbers, shared by all samplers: a token's number depends on its request's
seed and its position alone."""

from __future__ import annotations

_WORD = 0xFFFF_FFFF


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits; ``seed`` is an unsigned 64-bit integer."""
    a, b, _, _ = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
