"""What may be asked of ``model_jobs``, and what comes back. Options raise InvalidRequestError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llm_core.config import HeadKind
from llm_core.errors import InvalidRequestError

QuantizeMethod = Literal["gptq", "awq", "rtn", "int8", "fp8"]
Progress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""

MAX_WINDOW_LEN = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityOptions:
    """``weight_format`` as in ``quant.linear``: "float32" measures the weights alone, "auto" what
    the engine would run. At most ``max_tokens`` tokens are read, in windows of ``window_len``."""

    model_path: Path
    text: str
    window_len: int = 512
    max_tokens: int = 1 << 16
    weight_format: str = "float32"
    num_threads: int = 2

    def __post_init__(self) -> None:
        _check_range("window_len", self.window_len, 2, MAX_WINDOW_LEN)
        _check_range("max_tokens", self.max_tokens, self.window_len, 1 << 30)
        _check_range("num_threads", self.num_threads, 1, 1024)


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """``num_tokens`` were predicted; ``weight_format`` is what ran."""

    perplexity: float
    num_tokens: int
    weight_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortenOptions:
    """``text`` is to have ``max_tokens`` tokens at most; with a ``question``, what bears on it is
    kept, otherwise what the model expects least."""

    model_path: Path
    text: str
    max_tokens: int
    question: str = ""
    num_threads: int = 2

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, 1 << 24)
        _check_range("num_threads", self.num_threads, 1, 1024)


@dataclass(frozen=True, slots=True)
class ShortenReport:
    """The shorter text, and the tokens of both."""

    text: str
    tokens_before: int
    tokens_after: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """``text`` is for calibration (None: the model writes its own), ``eval_text`` for measuring
    (None: an eighth of the calibration windows, which is then not calibrated with).

    ``bits`` and ``is_symmetric`` are of gptq, awq and rtn, ``group`` of all but fp8: -1 is a whole
    row, None the largest of 128, 64 and 32 (for int8, 32) that divides all matrices' inputs.
    """

    model_path: Path
    out_dir: Path
    method: QuantizeMethod
    bits: int = 4
    group: int | None = None
    act_order: bool = True
    is_symmetric: bool = False
    text: str | None = None
    eval_text: str | None = None
    num_windows: int = 64
    window_len: int = 256
    num_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in get_args(QuantizeMethod):
            known = ", ".join(get_args(QuantizeMethod))
            raise InvalidRequestError(f"method is {self.method!r}, expected one of {known}")
        if self.bits not in (4, 8) or (self.bits == 8 and self.method == "awq"):
            allowed = "4" if self.method == "awq" else "4 or 8"
            raise InvalidRequestError(f"bits is {self.bits}, expected {allowed}")
        if self.method == "awq" and self.is_symmetric:
            raise InvalidRequestError("AWQ files have zero points: they cannot be symmetric")
        if self.group not in (None, -1) and not (
            8 <= self.group <= 1 << 16 and self.group % 8 == 0
        ):
            raise InvalidRequestError(
                f"group is {self.group}, expected -1 (a whole row) or a multiple of 8"
            )
        _check_range("num_windows", self.num_windows, 2, 1 << 16)
        _check_range("window_len", self.window_len, 8, MAX_WINDOW_LEN)
        _check_range("num_threads", self.num_threads, 1, 1024)


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """Perplexities are of float32 arithmetic on the source's weights and on the written ones."""

    perplexity_before: float
    perplexity_after: float
    num_eval_tokens: int
    source_note: str
    size_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """A student of ``num_layers`` of the teacher's layers, trained for ``num_steps`` batches of
    ``batch_size`` windows; ``text`` None: the teacher writes the text."""

    model_path: Path
    out_dir: Path
    num_layers: int
    num_steps: int = 100
    batch_size: int = 4
    learning_rate: float = 5e-4
    text: str | None = None
    num_windows: int = 128
    window_len: int = 128
    num_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range("num_layers", self.num_layers, 1, 1 << 16)
        _check_range("num_steps", self.num_steps, 1, 1 << 24)
        _check_range("batch_size", self.batch_size, 1, 1 << 12)
        _check_range("num_windows", self.num_windows, 2, 1 << 20)
        _check_range("window_len", self.window_len, 8, MAX_WINDOW_LEN)
        _check_range("num_threads", self.num_threads, 1, 1024)
        if not 0 < self.learning_rate < 1:
            raise InvalidRequestError(
                f"learning_rate is {self.learning_rate}, expected between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHeadOptions:
    """A draft head of ``kind``, written to ``out_dir``. ``data_dir`` keeps what the model says and
    the state of the training, so that a later run goes on from there. The model talks for
    ``talk_s`` seconds more; training takes ``train_s`` in all, those of earlier runs included, and
    begins again when those are used up. ``text``: its sentences' beginnings also begin what users
    say. ``draft_vocab``: words that can be drafted (0: all). ``start_dir``: a head whose weights
    and words the training begins with; without one, a regression is the beginning."""

    model_path: Path
    out_dir: Path
    data_dir: Path
    kind: HeadKind = "eagle3"
    talk_s: float = 1500.0
    train_s: float = 2100.0
    draft_vocab: int = 3072
    text: str | None = None
    start_dir: Path | None = None
    num_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadKind):
            known = ", ".join(get_args(HeadKind))
            raise InvalidRequestError(f"kind is {self.kind!r}, expected one of {known}")
        for name in ("talk_s", "train_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}, expected 0 to 1e6")
        _check_range("draft_vocab", self.draft_vocab, 0, 1 << 20)
        _check_range("num_threads", self.num_threads, 1, 1024)
        _check_range("seed", self.seed, 0, (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class HeadProgress:
    """How a head's training goes. ``acceptance[j]``: how often step j's likeliest draft was what
    was said, lately; ``held_out``: accepted lengths, measured exactly on answers that are not
    trained on (near-greedy ones, others), or None where they were not measured just now. ``done``:
    the share of the time that is over."""

    step: int
    epoch: int
    elapsed_s: float
    num_anchors: int
    loss: float
    acceptance: tuple[float, ...]
    held_out: tuple[float, float] | None
    done: float

    @property
    def chain_len(self) -> float:
        """What a chain would bring a round by ``acceptance``, the target's own token included."""
        total, reach = 1.0, 1.0
        for rate in self.acceptance:
            reach *= rate
            total += reach
        return total


@dataclass(frozen=True, slots=True)
class TrainHeadReport:
    """``chain_lens``: accepted lengths of chains of 4 on held-out answers, (near-greedy, others);
    ``num_answer_tokens`` of all data, ``num_anchors`` trained on (more than once, if repeated)."""

    chain_lens: tuple[float, float]
    num_answer_tokens: int
    num_anchors: int
    num_steps: int
    size_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a student with its teacher on held-out text: the divergence KL(teacher || student) in nats
    a token, how often both find the same token likeliest, and the student's perplexity."""

    divergence: float
    same_best_token: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class DistillReport:
    """``before`` is the pruned student untrained; ``kept_layers`` are the teacher's."""

    before: Agreement
    after: Agreement
    teacher_perplexity: float
    kept_layers: tuple[int, ...]
    size_bytes: int
    wall_s: float


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}, expected {low} to {high}")
