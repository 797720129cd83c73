"""ctypes declarations of the C library: structures and functions of ``parley.h``.

Sizes of structures and values of constants are checked against the library when it is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from kernels.native.build import NEEDS_FOLDER, NativeUnavailableError, build

# Threads spin this long before they sleep: longer than a phase of a decode step takes, and far
# shorter than a time slice of the operating system.
SPIN_US = 60

# Constants of parley.h, there with the prefix PN_.
GROUP = 32  # inputs that share a scale
TILE = 8  # outputs of a tile
MAX_THREADS = 256  # of a pool
MAX_QUERIES = 48  # query heads of a KV head
MAX_TREE_ROWS = 256  # rows of one tree segment
MAX_SIBLINGS = 4  # alternatives to a draft token
MAXIMA_BLOCK = 64  # logits that share one block maximum
TAIL_DEPTH = 14  # see ``sampler``
HAS_ZERO = 1
F32, BF16, INT8, F16 = range(4)
STORE, ADD, GATED = range(3)
SILU, GELU_TANH = range(2)
_CONSTANTS = (
    *("GROUP", "TILE", "MAX_THREADS", "MAX_QUERIES", "MAX_TREE_ROWS", "MAX_SIBLINGS"),
    *("MAXIMA_BLOCK", "TAIL_DEPTH", "HAS_ZERO", "F32", "BF16", "INT8", "F16"),
    *("STORE", "ADD", "GATED", "SILU", "GELU_TANH"),
)

_PIECE_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20


class Result(IntEnum):
    """pn_result."""

    OK, NO_MEMORY, BAD_TOKEN, BAD_LOGIT_ROW, BAD_BLOCK, BAD_SEGMENT, BAD_AUX_LAYER, BAD_TREE = (
        range(8)
    )


class Matrix(Structure):
    """pn_matrix."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        *((name, c_int32) for name in ("num_out", "num_in", "num_tiles", "num_groups")),
        *((name, c_int32) for name in ("bits", "flags", "record_bytes")),
        ("offset", c_float),
        ("post_scale", c_float),
    )


class Layer(Structure):
    """pn_layer."""

    _fields_ = (
        *((n, Matrix) for n in ("query_key_value", "attention_output", "gate_up", "down")),
        *((n, c_void_p) for n in ("attention_norm", "ffn_norm")),
        *((n, c_void_p) for n in ("attention_post_norm", "ffn_post_norm")),
        *((n, c_void_p) for n in ("query_norm", "key_norm", "rotations")),
        ("window", c_int32),
        ("reserved", c_int32),
    )


class Model(Structure):
    """pn_model."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("embedding_matrix", Matrix),
        ("head", Matrix),
        *((n, c_int32) for n in ("num_layers", "hidden_size", "num_heads", "num_kv_heads")),
        *((n, c_int32) for n in ("head_dim", "inner_size", "vocab_size", "max_context")),
        *((n, c_int32) for n in ("embedding_type", "activation")),
        *((n, c_float) for n in ("rms_eps", "embedding_scale", "score_scale")),
        *((n, c_float) for n in ("attention_softcap", "logit_softcap")),
    )


class Cache(Structure):
    """pn_cache."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("num_positions", c_int64),
        ("type", c_int32),
        ("block_size", c_int32),
    )


class Segment(Structure):
    """pn_segment."""

    _fields_ = (*((n, c_int32) for n in ("start", "length", "first_block", "is_tree", "skipped")),)


class Batch(Structure):
    """pn_batch."""

    _fields_ = (
        *((n, c_void_p) for n in ("token_ids", "logit_rows", "segments", "parents", "block_ids")),
        *((n, c_void_p) for n in ("aux_layers", "logits", "features", "block_maxima")),
        *((n, c_int32) for n in ("num_rows", "num_logits", "num_segments", "num_aux_layers")),
    )


class DraftModel(Structure):
    """pn_draft_model."""

    _fields_ = (
        *((n, Matrix) for n in ("features", "hidden_proj", "embedding_proj", "query_key_value")),
        *((n, Matrix) for n in ("attention_output", "gate_up", "down", "head")),
        *((n, c_void_p) for n in ("embedding_norm", "hidden_norm", "ffn_norm", "final_norm")),
        *((n, c_void_p) for n in ("rotations", "target_ids")),
        ("target", POINTER(Model)),
        *((n, c_int32) for n in ("num_features", "normalises_features", "hidden_size")),
        *((n, c_int32) for n in ("num_heads", "num_kv_heads", "head_dim", "inner_size")),
        *((n, c_int32) for n in ("draft_vocab_size", "max_context")),
        *((n, c_float) for n in ("rms_eps", "score_scale")),
        ("reserved", c_int32),
    )


class DraftChoice(Structure):
    """pn_draft_choice."""

    _fields_ = (
        *((n, c_float) for n in ("temperature", "top_p", "min_p")),
        *((n, c_float) for n in ("min_probability", "min_extend_probability")),
        *((n, c_int32) for n in ("top_k", "max_drafts")),
    )


class SampleParams(Structure):
    """pn_sample_params."""

    _fields_ = (
        *((n, c_void_p) for n in ("repeated_ids", "reply_ids", "bias_ids")),
        *((n, c_void_p) for n in ("reply_counts", "biases")),
        ("u", ctypes.c_double),
        *((n, c_float) for n in ("repetition_penalty", "frequency_penalty", "presence_penalty")),
        *((n, c_float) for n in ("temperature", "top_p", "min_p")),
        *((n, c_int32) for n in ("num_repeated", "num_reply_ids", "num_biases", "top_k")),
        *((n, c_int32) for n in ("is_greedy", "reserved")),
    )


class DraftBatch(Structure):
    """pn_draft_batch."""

    _fields_ = (
        *((n, c_void_p) for n in ("token_ids", "features", "states", "output_rows", "segments")),
        *((n, c_void_p) for n in ("parents", "block_ids")),
        ("choices", POINTER(DraftChoice)),
        *((n, c_void_p) for n in ("u_values", "logits", "out_states", "out_tokens")),
        *((n, c_void_p) for n in ("out_probabilities", "out_siblings")),
        *((n, c_void_p) for n in ("out_sibling_probabilities", "out_lengths")),
        *((n, c_int32) for n in ("num_rows", "num_outputs", "num_segments", "num_steps")),
        ("u_bandwidth", c_float),
        ("num_siblings", c_int32),
    )


class Epilogue(Structure):
    """pn_epilogue."""

    _fields_ = (
        ("out", c_void_p),
        ("stride", c_int64),
        ("mode", c_int32),
        ("activation", c_int32),
        ("softcap", c_float),
    )


def pointer(structure: Model) -> Any:
    """A pointer to ``structure`` for a field; it does not keep the structure alive."""
    return ctypes.pointer(structure)


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "pn_struct_size": (c_int64, (c_char_p,)),
    "pn_constant": (c_int64, (c_char_p,)),
    "pn_phase_name": (c_char_p, (c_int,)),
    "pn_instructions": (c_char_p, ()),
    "pn_memory_map": (c_void_p, (c_int64,)),
    "pn_memory_unmap": (None, (c_void_p, c_int64)),
    "pn_pack_rows": (
        None,
        (POINTER(Matrix), c_void_p, c_void_p, c_void_p, *(c_int,) * 3),
    ),
    "pn_pool_create": (c_void_p, (c_int, c_int)),
    "pn_pool_destroy": (None, (c_void_p,)),
    "pn_matmul": (c_int, (c_void_p, POINTER(Matrix), c_void_p, c_int, POINTER(Epilogue))),
    "pn_session_create": (c_void_p, (c_void_p, POINTER(Model))),
    "pn_session_destroy": (None, (c_void_p,)),
    "pn_forward": (c_int, (c_void_p, POINTER(Cache), POINTER(Batch))),
    "pn_matrix_row": (None, (POINTER(Matrix), c_int, c_void_p)),
    "pn_draft_session_create": (c_void_p, (c_void_p, POINTER(DraftModel))),
    "pn_draft_session_destroy": (None, (c_void_p,)),
    "pn_draft": (c_int, (c_void_p, POINTER(Cache), POINTER(DraftBatch))),
    "pn_sample_token": (c_int64, (c_void_p, c_void_p, c_int, POINTER(SampleParams), c_void_p)),
    "pn_session_profile": (POINTER(c_int64), (c_void_p, c_int)),
}
STRUCTURES: dict[str, type[Structure]] = {
    "pn_matrix": Matrix,
    "pn_layer": Layer,
    "pn_model": Model,
    "pn_cache": Cache,
    "pn_segment": Segment,
    "pn_batch": Batch,
    "pn_epilogue": Epilogue,
    "pn_draft_model": DraftModel,
    "pn_draft_choice": DraftChoice,
    "pn_draft_batch": DraftBatch,
    "pn_sample_params": SampleParams,
}


class Library:
    """The loaded library; ``functions`` has the C functions with their types declared."""

    def __init__(self, path: Path) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.restype, function.argtypes = result, list(arguments)
        except (OSError, AttributeError) as error:
            reason = f"{path} does not load: {error}"
            raise NativeUnavailableError(reason, NEEDS_FOLDER) from error
        self._check_declarations()
        self.instructions: str = self.functions.pn_instructions().decode()
        self.has_vector_products = self.instructions != "portable C"

    def _check_declarations(self) -> None:
        for name, structure in STRUCTURES.items():
            size = self.functions.pn_struct_size(name.encode())
            assert size == ctypes.sizeof(structure), f"{structure.__name__} differs from {name}"
        constants = {name: globals()[name] for name in _CONSTANTS}
        for name, value in {**constants, **Result.__members__}.items():
            assert self.functions.pn_constant(f"PN_{name}".encode()) == value, f"{name} differs"

    def phase_names(self) -> tuple[str, ...]:
        """Kinds of phases of a forward pass, in the order of ``pn_session_profile``'s times."""
        names: list[str] = []
        while (name := self.functions.pn_phase_name(len(names))) is not None:
            names.append(name.decode())
        return tuple(names)

    def memory(self) -> WeightMemory:
        """Memory for the matrices of one model."""
        return WeightMemory(self)

    def pool(self, num_threads: int, spin_us: int = SPIN_US) -> ThreadPool:
        """Threads for ``pn_matmul`` and sessions; one caller at a time."""
        return ThreadPool(self, num_threads, spin_us)


class ThreadPool:
    """Owns a pn_pool, whose threads end with this object."""

    def __init__(self, library: Library, num_threads: int, spin_us: int) -> None:
        self._library = library
        self.handle = library.functions.pn_pool_create(num_threads, spin_us)
        if not self.handle:
            raise NativeUnavailableError(
                f"cannot start {num_threads} threads: expected 1 to {MAX_THREADS}, and memory"
            )

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.functions.pn_pool_destroy(self.handle)


class WeightMemory:
    """An arena for packed matrices: a few large mappings, filled in the order of allocation.

    Pages become resident when they are written. Every matrix keeps a reference to its arena, which
    unmaps the memory when it is deleted.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.num_bytes = 0  # allocated
        self._pieces: list[tuple[int, int]] = []  # address, bytes
        self._next, self._end = 0, 0

    def matrix(
        self, num_out: int, num_in: int, *, bits: int, has_zero: bool, offset: int, log2_scale: int
    ) -> PackedMatrix:
        """An empty matrix, to be filled by ``PackedMatrix.pack``. Raises MemoryError."""
        return PackedMatrix(self, num_out, num_in, bits, has_zero, offset, log2_scale)

    def allocate(self, num_bytes: int) -> int:
        """The address of ``num_bytes`` zeroed bytes, aligned to 64. Raises MemoryError."""
        if self._next + num_bytes > self._end:
            size = -(-max(num_bytes, _PIECE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
            address = self.library.functions.pn_memory_map(size)
            if not address:
                raise MemoryError(f"no memory for {num_bytes} bytes of packed weights")
            self._pieces.append((address, size))
            self._next, self._end = address, address + size
        address = self._next
        self._next += -(-num_bytes // 64) * 64
        self.num_bytes += num_bytes
        return address

    def __del__(self) -> None:
        for address, size in self._pieces:
            self.library.functions.pn_memory_unmap(address, size)


class PackedMatrix:
    """A matrix [num_out, num_in] in the library's packed form.

    A weight is ((code - offset) * scale + zero) * 2 ** -log2_scale, scale and zero in float16.
    """

    def __init__(
        self,
        memory: WeightMemory,
        num_out: int,
        num_in: int,
        bits: int,
        has_zero: bool,
        offset: int,
        log2_scale: int,
    ) -> None:
        assert bits in (4, 8)
        self._memory = memory
        self._functions = memory.library.functions
        num_tiles, num_groups = -(-num_out // TILE), -(-num_in // GROUP)
        record_bytes = (128 if bits == 4 else 256) + (32 if has_zero else 16)
        self.struct = Matrix(
            # Prefetches of the last tiles read beyond the matrix; prefetches never fault.
            data=memory.allocate(num_tiles * num_groups * record_bytes),
            num_out=num_out,
            num_in=num_in,
            num_tiles=num_tiles,
            num_groups=num_groups,
            bits=bits,
            flags=HAS_ZERO if has_zero else 0,
            record_bytes=record_bytes,
            offset=float(offset),
            post_scale=2.0**-log2_scale,
        )
        self._bias: torch.Tensor | None = None

    def pack(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        *,
        first_row: int = 0,
        tile_step: int = 1,
    ) -> None:
        """Packs rows from ``first_row`` on; each row may be packed once.

        codes uint8 [R, num_in]; scale and zero float32 [R, num_groups], already multiplied by
        2 ** log2_scale. ``tile_step`` 2 fills every other tile (gate and up are interleaved).
        """
        struct = self.struct
        assert codes.dtype == torch.uint8 and codes.shape[1] == struct.num_in
        assert scale.shape == (codes.shape[0], struct.num_groups)
        assert (zero is not None) == bool(struct.flags & HAS_ZERO)
        tensors = [codes.contiguous(), scale.float().contiguous()]
        if zero is not None:
            assert zero.shape == scale.shape
            tensors.append(zero.float().contiguous())
        last = codes.shape[0] - 1
        end = first_row + last // TILE * tile_step * TILE + last % TILE + 1
        assert end <= struct.num_tiles * TILE, "rows beyond the matrix"
        self._functions.pn_pack_rows(
            struct,
            tensors[0].data_ptr(),
            tensors[1].data_ptr(),
            tensors[2].data_ptr() if zero is not None else None,
            codes.shape[0],
            first_row,
            tile_step,
        )

    def set_bias(self, bias: torch.Tensor) -> None:
        """Sets bias [num_out], added to every row of a product."""
        padded = torch.zeros(self.struct.num_tiles * TILE)
        padded[: bias.shape[0]] = bias
        self._bias = padded
        self.struct.bias = padded.data_ptr()

    def matmul(
        self, pool: ThreadPool, x: torch.Tensor, *, mode: int = STORE, activation: int = SILU
    ) -> torch.Tensor:
        """float32 x [T, num_in] -> [T, num_out]; activations are quantised to 8 bits.

        With ``mode`` GATED (interleaved gate and up) the result is activation(gate) * up. Raises
        MemoryError.
        """
        x = x.float().contiguous()
        out = torch.empty(x.shape[0], self.struct.num_out)
        if x.shape[0] == 0:
            return out
        epilogue = Epilogue(out.data_ptr(), out.shape[1], mode, activation, 0.0)
        result = self._functions.pn_matmul(
            pool.handle, self.struct, x.data_ptr(), x.shape[0], epilogue
        )
        if result != 0:
            raise MemoryError("no memory for quantised activations")
        return out


def load(cache_dir: Path, *, is_scalar: bool = False) -> Library:
    """Builds the library if necessary and loads it. Raises NativeUnavailableError."""
    return Library(build(cache_dir, is_scalar=is_scalar))
