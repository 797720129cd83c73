"""Messages from rank 0, by which all ranks run the same steps. The first word is the kind:

STEP   layout (4), shape (3; zeros: none), rows, rows of logits, wants features, samples | words
COPY   source block, target block, rows
MOVE   start, blocks, rows | block ids | rows
LAYERS feature layers
VOCAB  vocabulary size
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from llm_core.batch import ForwardBatch, ForwardResult, Launched
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.graphs import StepShape
from llm_core.model.gpu.kv_cache import GpuKvCache
from llm_core.model.gpu.packed_batch import StepLayout
from llm_core.model.gpu.step import PackedStep
from llm_core.model.kv_cache import KvCache
from llm_core.model.parallel.group import RankGroup

_STEP_HEADER_LEN = 12


class _Kind(IntEnum):
    STEP, COPY, MOVE, LAYERS, VOCAB = range(5)


class LeadModel:
    """Rank 0's model, which broadcasts all calls. Same interface as ``TritonDecoder``."""

    def __init__(self, decoder: TritonDecoder, group: RankGroup) -> None:
        self.decoder = decoder
        self._group = group

    def attach(self, cache: GpuKvCache) -> None:
        """Broadcasts changes of rank 0's cache."""
        cache.on_copy = lambda *numbers: self._broadcast(_Kind.COPY, numbers)
        cache.on_move = lambda block_ids, start, rows: self._broadcast(
            _Kind.MOVE, (start, len(block_ids), len(rows), *block_ids, *rows)
        )

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``backend.Model``."""
        self._broadcast(_Kind.LAYERS, layers)
        self.decoder.set_feature_layers(layers)

    def set_vocab_size(self, vocab_size: int) -> None:
        """See ``backend.DeviceSampler``."""
        self._broadcast(_Kind.VOCAB, (vocab_size,))
        self.decoder.set_vocab_size(vocab_size)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """See ``TritonDecoder``. Raises RuntimeError if a rank has exited."""
        return self.launch(batch, cache).result()

    def launch(self, batch: ForwardBatch, cache: KvCache) -> Launched:
        """See ``TritonDecoder``. Raises as ``forward``."""
        step = self.decoder.pack(batch, cache)
        self._group.broadcast(encode_step(step))
        return self.decoder.fetch(step, batch.choices, self.decoder.run(step, cache))

    def _broadcast(self, kind: _Kind, numbers: Sequence[int]) -> None:
        self._group.broadcast(torch.tensor([kind, *numbers], dtype=torch.int32))


def encode_step(step: PackedStep) -> torch.Tensor:
    """Serialises a step."""
    layout, shape = step.layout, step.shape
    header = [
        _Kind.STEP,
        *(layout.num_rows, layout.num_segments, layout.num_logit_rows, layout.table_width),
        *((shape.num_sequences, shape.rows_each, shape.max_length) if shape else (0, 0, 0)),
        *(step.num_rows, step.num_logit_rows, step.wants_features, step.samples),
    ]
    return torch.cat((torch.tensor(header, dtype=torch.int32), step.words))


def decode_step(words: torch.Tensor) -> PackedStep:
    """Inverse of ``encode_step``."""
    header = words[:_STEP_HEADER_LEN].tolist()
    layout, shape = StepLayout(*header[1:5]), StepShape(*header[5:8])
    return PackedStep(
        words[_STEP_HEADER_LEN:].clone(),  # copied to an aligned buffer
        layout,
        shape if shape.num_sequences else None,
        header[8],
        header[9],
        wants_features=bool(header[10]),
        samples=bool(header[11]),
    )


def follow(decoder: TritonDecoder, cache: GpuKvCache, group: RankGroup) -> None:
    """Repeats all calls of rank 0, until it exits: raises RuntimeError then."""
    with torch.inference_mode():
        while True:
            words = group.receive()
            kind, numbers = _Kind(int(words[0])), words[1:]
            if kind is _Kind.STEP:
                decoder.run(decode_step(words), cache)
            elif kind is _Kind.COPY:
                cache.copy_rows(*numbers.tolist())
            elif kind is _Kind.LAYERS:
                decoder.set_feature_layers(tuple(numbers.tolist()))
            elif kind is _Kind.VOCAB:
                decoder.set_vocab_size(int(numbers[0]))
            else:
                start, num_blocks, _, *rest = numbers.tolist()
                cache.move_rows(rest[:num_blocks], start, rest[num_blocks:])
