"""What this CPU computes fast."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16: with them a step of a training takes about a third
    of the time (measured on a Zen 5); in software they are slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
