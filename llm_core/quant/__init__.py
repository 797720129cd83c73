"""Stored weight formats, and the linear layer over them."""

from llm_core.quant.codes import Bits, GroupedCodes
from llm_core.quant.formats import (
    Weight,
    float_rows,
    quantize_float8,
    quantize_int8,
    row_range,
    stack_rows,
    take_rows,
    to_float,
)
from llm_core.quant.gguf_blocks import BLOCK_BYTES, BlockKind, BlockTensor, block_len
from llm_core.quant.grouped import quantize_grouped, to_grouped
from llm_core.quant.linear import FormatChoice, Linear, WeightFormat, choose_formats
from llm_core.quant.native_pack import pack_gated, pack_stacked

__all__ = [
    "BLOCK_BYTES",
    "Bits",
    "BlockKind",
    "BlockTensor",
    "FormatChoice",
    "GroupedCodes",
    "Linear",
    "Weight",
    "WeightFormat",
    "block_len",
    "choose_formats",
    "float_rows",
    "pack_gated",
    "pack_stacked",
    "quantize_float8",
    "quantize_grouped",
    "quantize_int8",
    "row_range",
    "stack_rows",
    "take_rows",
    "to_float",
    "to_grouped",
]
