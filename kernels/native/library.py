"""The C library's structures and functions, as ctypes sees them; layouts are those of parley.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from kernels.native.build import NEEDS_FOLDER, NativeUnavailableError, build

GROUP = 32  # inputs that share a scale
TILE = 8  # outputs that lie side by side
# Threads wait this long for each other before they sleep: longer than a phase of a decode step
# lasts, far shorter than the slice of time that another process may take.
SPIN_US = 60

MAX_THREADS = 256  # of a pool
MAX_TREE_ROWS = 256  # rows of one tree segment
MAX_SIBLINGS = 4  # of a draft of a chain
MAXIMUM_LEN = 64  # logits of which the largest is noted

F32, BF16, INT8, F16 = range(4)
STORE, ADD, GATED = range(3)
SILU, GELU_TANH = range(2)
PHASE_KINDS = (
    *("embed", "attention norm", "query/key/value", "rotate + store", "attention", "gather"),
    *("attention quantise", "attention output", "attention post norm", "ffn norm", "gate/up"),
    *("inner quantise", "down", "ffn post norm", "tap features", "final norm", "head"),
)
_HAS_ZERO = 1
_PIECE_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20


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


class Batch(Structure):
    """pn_batch."""

    _fields_ = (
        *((n, c_void_p) for n in ("token_ids", "logit_rows", "segments", "parents", "block_ids")),
        *((n, c_void_p) for n in ("taps", "logits", "features", "maxima")),
        *((n, c_int32) for n in ("num_rows", "num_logits", "num_segments", "num_taps")),
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
        *((n, c_int32) for n in ("num_words", "max_context")),
        *((n, c_float) for n in ("rms_eps", "score_scale")),
        ("reserved", c_int32),
    )


class DraftChoice(Structure):
    """pn_draft_choice."""

    _fields_ = (
        *((n, c_float) for n in ("temperature", "top_p", "min_p")),
        *((n, c_float) for n in ("least_probability", "least_followed")),
        *((n, c_int32) for n in ("top_k", "most_drafts")),
    )


class Draw(Structure):
    """pn_draw."""

    _fields_ = (
        *((n, c_void_p) for n in ("seen", "counted", "biased", "counts", "biases")),
        ("fraction", ctypes.c_double),
        *((n, c_float) for n in ("repetition", "frequency", "presence")),
        *((n, c_float) for n in ("temperature", "top_p", "min_p")),
        *((n, c_int32) for n in ("num_seen", "num_counted", "num_biased", "top_k")),
        *((n, c_int32) for n in ("is_greedy", "reserved")),
    )


class DraftBatch(Structure):
    """pn_draft_batch."""

    _fields_ = (
        *((n, c_void_p) for n in ("token_ids", "features", "states", "output_rows", "segments")),
        *((n, c_void_p) for n in ("parents", "block_ids")),
        ("choices", POINTER(DraftChoice)),
        *((n, c_void_p) for n in ("fractions", "logits", "out_states", "out_tokens")),
        *((n, c_void_p) for n in ("out_probabilities", "out_siblings")),
        *((n, c_void_p) for n in ("out_sibling_probabilities", "out_lengths")),
        *((n, c_int32) for n in ("num_rows", "num_outputs", "num_segments", "num_steps")),
        ("guess_reach", c_float),
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
    """For a field that points at a structure; it does not keep it alive."""
    return ctypes.pointer(structure)


_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "pn_layout": (c_int64, (c_int,)),
    "pn_instructions": (ctypes.c_char_p, ()),
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
    "pn_draw_token": (c_int64, (c_void_p, c_void_p, c_int, POINTER(Draw), c_void_p)),
    "pn_session_profile": (POINTER(c_int64), (c_void_p, c_int)),
}
_STRUCTURES = (
    *(Matrix, Layer, Model, Cache, Batch, Epilogue, DraftModel, DraftBatch, DraftChoice),
    Draw,
)


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
        for index, structure in enumerate(_STRUCTURES):
            theirs = self.functions.pn_layout(index)
            assert theirs == ctypes.sizeof(structure), f"{structure.__name__} differs from parley.h"
        self.instructions: str = self.functions.pn_instructions().decode()
        self.has_vector_products = self.instructions != "portable C"

    def memory(self) -> WeightMemory:
        """Where the matrices of one model go."""
        return WeightMemory(self)

    def pool(self, num_threads: int, spin_us: int = SPIN_US) -> ThreadPool:
        """Threads for ``pn_matmul`` and sessions; one caller at a time."""
        return ThreadPool(self, num_threads, spin_us)


class ThreadPool:
    """A pn_pool; ends its threads with the object."""

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
    """Matrices one after another, in the order they are made, in a few large pieces.

    Pieces become resident only where they are written. They are freed with this object, which
    every matrix keeps.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.num_bytes = 0  # of matrices
        self._pieces: list[tuple[int, int]] = []  # address, bytes
        self._next, self._end = 0, 0

    def matrix(
        self, num_out: int, num_in: int, *, bits: int, has_zero: bool, offset: int, log2_scale: int
    ) -> PackedMatrix:
        """Room for a matrix; see ``PackedMatrix.pack``. Raises MemoryError."""
        return PackedMatrix(self, num_out, num_in, bits, has_zero, offset, log2_scale)

    def take(self, num_bytes: int) -> int:
        """The address of so many zeroed bytes, aligned to 64. Raises MemoryError."""
        if self._next + num_bytes > self._end:
            size = -(-max(num_bytes, _PIECE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
            address = self.library.functions.pn_memory_map(size)
            if not address:
                raise MemoryError(f"no memory for {num_bytes} bytes of packed weights")
            self._pieces.append((address, size))
            self._next, self._end = address, address + size
        taken = self._next
        self._next += -(-num_bytes // 64) * 64
        self.num_bytes += num_bytes
        return taken

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
            # The last tiles' prefetches reach beyond a matrix, which is allowed everywhere.
            data=memory.take(num_tiles * num_groups * record_bytes),
            num_out=num_out,
            num_in=num_in,
            num_tiles=num_tiles,
            num_groups=num_groups,
            bits=bits,
            flags=_HAS_ZERO if has_zero else 0,
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
        """Rows from ``first_row`` on; each row is packed once.

        codes uint8 [R, num_in]; scale and zero float32 [R, num_groups], already times
        2 ** log2_scale. ``tile_step`` 2 leaves every other tile to another matrix (gate and up).
        """
        struct = self.struct
        assert codes.dtype == torch.uint8 and codes.shape[1] == struct.num_in
        assert scale.shape == (codes.shape[0], struct.num_groups)
        assert (zero is not None) == bool(struct.flags & _HAS_ZERO)
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
        """bias [num_out], added to every row of products."""
        padded = torch.zeros(self.struct.num_tiles * TILE)
        padded[: bias.shape[0]] = bias
        self._bias = padded
        self.struct.bias = padded.data_ptr()

    def matmul(
        self, pool: ThreadPool, x: torch.Tensor, *, mode: int = STORE, activation: int = SILU
    ) -> torch.Tensor:
        """float32 x [T, num_in] -> [T, num_out]; activations are rounded to 8 bits.

        ``mode`` GATED is for gate and up: activation(gate) * up, num_out columns of it.
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
    """Builds if needed and loads. Raises NativeUnavailableError with the reason."""
    return Library(build(cache_dir, is_scalar=is_scalar))
