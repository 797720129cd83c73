"""The decoder's weights by name: what a loader must provide, whatever the file's own names are."""

from __future__ import annotations

from llm_core.config import ModelConfig


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight the decoder needs; matrices are [out, in].

    ``head`` is there only when it is not the embedding. Rows of ``query`` and ``key`` are in
    interleaved RoPE order: values 2j and 2j + 1 of a head turn together.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, hidden),
        "final_norm": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        shapes[prefix + "attention_norm"] = (hidden,)
        shapes[prefix + "query"] = (config.query_size, hidden)
        shapes[prefix + "key"] = (config.kv_size, hidden)
        shapes[prefix + "value"] = (config.kv_size, hidden)
        shapes[prefix + "attention_output"] = (hidden, config.query_size)
        shapes[prefix + "ffn_norm"] = (hidden,)
        shapes[prefix + "gate"] = (inner, hidden)
        shapes[prefix + "up"] = (inner, hidden)
        shapes[prefix + "down"] = (hidden, inner)
    return shapes
