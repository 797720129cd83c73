"""A small but whole model file: byte-level vocabulary, chat template, random Llama weights.

Everything about it is real (the loader, tokenizer, template and decoder treat it as any other
model); it is only small, and what it says makes no sense.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np

from llm_core.tokenizer.tokenizer import Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's way of writing bytes as printable characters.
BYTE_CHARS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + n) for n, byte in enumerate(_OTHERS)
}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "i n", "Ġ Ġ", "u s", "us er", "e r"]
TOKENS = [*CONTROL, *(BYTE_CHARS[byte] for byte in range(256))]
TOKENS += [merge.replace(" ", "") for merge in MERGES]
TYPES = [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny model."""
    return Tokenizer(
        tokens=TOKENS, token_types=TYPES, merges=MERGES, pre="smollm", bos_id=1, eos_ids=[2]
    )


def write_tiny_gguf(
    path: Path, *, seed: int = 0, context_len: int = 256, template: str | None = TEMPLATE
) -> Path:
    """Writes a random float32 Llama (2 layers, hidden 64, 4 heads, 2 key/value heads) as GGUF."""
    hidden, inner, kv, layers = 64, 96, 32, 2
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(context_len)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)

    def weight(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(shape[-1]))
        writer.add_tensor(name, values)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    weight("token_embd.weight", len(TOKENS), hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}"
        norm(f"{prefix}.attn_norm.weight")
        weight(f"{prefix}.attn_q.weight", hidden, hidden)
        weight(f"{prefix}.attn_k.weight", kv, hidden)
        weight(f"{prefix}.attn_v.weight", kv, hidden)
        weight(f"{prefix}.attn_output.weight", hidden, hidden)
        norm(f"{prefix}.ffn_norm.weight")
        weight(f"{prefix}.ffn_gate.weight", inner, hidden)
        weight(f"{prefix}.ffn_up.weight", inner, hidden)
        weight(f"{prefix}.ffn_down.weight", hidden, inner)
    norm("output_norm.weight")
    weight("output.weight", len(TOKENS), hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
