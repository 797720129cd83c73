"""Everything that needs a GPU to be known, on one card, in at most eight minutes.

    python -m bench.gpu.run [--json gpu.json] [--minutes 8] [--only PART ...]
    python -m bench.gpu.run --smoke # all of it in Triton's interpreter, tiny: for finding mistakes

Parts, in order of what is lost if time runs out: the card (its ceilings; the decoder against the
CPU's); a Llama-3-8B-shaped model with random weights in bf16 and INT4 (decode steps, verification
of drafts, prompts); each kernel against its oracle on fresh random inputs, and its time against its
floor; the model in FP8. Each part is a process of its own with a share of the time: one that
crashes, hangs or loses the device takes nothing with it, and what it had found is kept. Meanwhile
the other processors compile ahead what the parts will launch. At the end a table compares what was
found with the goals. Needs torch with CUDA, triton, numpy, and 40 GB of GPU memory. The exit status
is 0 only where all was measured and right. Early launches of kernels are tried first, and done
without for the rest of the run where the small decoder is wrong with them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:  # read by Triton when kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"
import torch

from bench.gpu.bare_machine import without_client
from kernels.gpu import load_ops, unavailable_reason
from kernels.gpu.device import SWITCH

without_client()

from bench.gpu.parts import (  # noqa: E402
    DECODER_LIMIT,
    Bench,
    DeviceLostError,
    Row,
    card,
    kernels,
    model,
)

ROOT = Path(__file__).resolve().parents[2]
# Seconds that a part may take at most, and the least with which it is worth beginning.
_PARTS = {
    "card": (100.0, 10.0),
    "bf16": (130.0, 40.0),
    "int4": (110.0, 40.0),
    "kernels": (130.0, 25.0),
    "fp8": (90.0, 40.0),
}
_MODELS = ("bf16", "int4", "fp8")
_GRACE_S = 6.0  # for what a part has begun in time
_COMPILE_S = 75.0  # models wait this long for what is compiled ahead
_MAX_RESTARTS = 6  # of the kernels' part, each behind the case that ended it
_LOST = 4  # a part's exit status when the device is gone
_MEMORY_GOAL = 0.8
_LAUNCH_BOUND_MB = 32.0  # moved in less time than a launch and its tail take


def run_part(options: argparse.Namespace) -> int:
    """In a process of its own: the parts ``options.part``."""
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    device = torch.device("cpu")
    if not options.smoke:
        device = torch.device("cuda", torch.cuda.current_device())
    copy_bytes, flops = map(float, options.ceilings.split(","))
    deadline = time.monotonic() + options.seconds
    bench = Bench(options.smoke, deadline, options.json, load_ops("triton"), device)
    bench.copy_bytes_per_s, bench.flops_per_s = copy_bytes, flops
    bench.skip_cases, bench.is_tuned = options.skip_cases, not options.untuned
    try:
        with torch.inference_mode():
            for part in options.part:
                if part == "card":
                    card(bench)
                elif part == "kernels":
                    kernels(bench)
                else:
                    bench.attempt(part, lambda part=part: model(bench, part))  # type: ignore[misc]
    except DeviceLostError as error:
        bench.fail("device", f"it is lost: {error}")
        return _LOST
    finally:
        bench.write()
    return 1 if bench.errors else 0


class Parts:
    """Runs parts, each in its process, and keeps what they find."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.found: Row = {}
        self.errors: list[Row] = []
        self.program: tuple[str, ...] = ("-m", "bench.gpu.run")  # tests have others
        self.limits = dict(_PARTS)
        self.grace_s = _GRACE_S
        self._options = options
        self._folder = folder
        self._deadline = time.monotonic() + 60 * options.minutes - 2 * _GRACE_S

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def is_decoder_wrong(self) -> bool:
        """On the card: it differs from the CPU's, or never came to an end."""
        errors = self.found.get("decoder", {"": 1.0}).values()
        return not all(error < DECODER_LIMIT for error in errors)

    def run(self, *names: str) -> None:
        """Parts of one process. The kernels' goes on behind a case that ends it; a model's that did
        not come to one decode step is tried once more, with the first launch configurations only.
        """
        longest, least = (sum(self.limits[name][n] for name in names) for n in range(2))
        skip_cases, is_tuned = 0, True
        for number in range(_MAX_RESTARTS):
            seconds = min(longest, self.left_s - self.grace_s)
            if seconds < least and not self._options.smoke:
                self._fail("+".join(names), f"left out, {self.left_s:.0f} s are left")
                return
            status = self._run(names, seconds, number, skip_cases, is_tuned=is_tuned)
            if names[0] in _MODELS and len(names) == 1:
                if status == 0 or not is_tuned or self.found.get(names[0], {}).get("decode"):
                    return
                is_tuned = False
                continue
            rows = self.found.get("kernels", [])
            if names != ("kernels",) or status in (0, 1) or not rows:
                return
            last_case = rows[-1]["case"]
            if last_case < skip_cases:
                return  # it ended before its first case, and would again
            skip_cases = last_case + 1

    def _run(
        self,
        names: tuple[str, ...],
        seconds: float,
        number: int,
        skip_cases: int,
        *,
        is_tuned: bool,
    ) -> int:
        path = self._folder / f"{'-'.join(names)}-{number}.json"
        ceilings = self.found.get("ceilings", {})
        # Without them shares mean nothing, but times do.
        copy_bytes = ceilings.get("copy_gb_per_s", 1.0) * 1e9
        flops = ceilings.get("bf16_tflop_per_s", 1.0) * 1e12
        command = [sys.executable, *_warnings(), *self.program, "--part", *names]
        command += ["--json", str(path), "--seconds", f"{seconds:.0f}"]
        command += ["--ceilings", f"{copy_bytes},{flops}", "--skip-cases", str(skip_cases)]
        command += ["--smoke"] if self._options.smoke else []
        command += [] if is_tuned else ["--untuned"]
        start = time.monotonic()
        limit_s = 600.0 if self._options.smoke else seconds + self.grace_s
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = -9
            self._fail("+".join(names), f"ended after {limit_s:.0f} s: it hung, or was slow")
        self._take(path)
        if status not in (0, 1, -9):
            self._fail("+".join(names), f"its process ended with status {status}")
        took_s = time.monotonic() - start
        print(f"-- {'+'.join(names)}: {took_s:.0f} s, {self.left_s:.0f} s left", flush=True)
        return status

    def _take(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._fail(path.stem, f"it left nothing: {error}")
            return
        self.errors += found.pop("errors")
        rows = self.found.get("kernels", [])
        self.found.update(found)
        if "kernels" in found:
            self.found["kernels"] = rows + found["kernels"]
        self.write()

    def _fail(self, where: str, text: str) -> None:
        self.errors.append({"where": where, "error": text, "traceback": ""})
        print(f"FAILED {where}: {text}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """All that is known so far."""
        if self._options.json is not None:
            contents = {**self.found, "goals": goals(self.found), "errors": self.errors}
            temporary = self._options.json.with_suffix(".part")
            temporary.write_text(json.dumps(contents, indent=1), encoding="utf-8")
            temporary.replace(self._options.json)


def _warnings() -> list[str]:
    return [f"-W{option}" for option in sys.warnoptions]


class Compilers:
    """Processes that compile ahead; they take nothing but idle processors."""

    def __init__(
        self, capability: int, multiprocessors: int, count: int, *more: str, wait_s: float
    ) -> None:
        self._until = time.monotonic() + wait_s
        command = [sys.executable, "-m", "bench.gpu.compile", "--capability", str(capability)]
        command += ["--multiprocessors", str(multiprocessors), *more]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen([*command, "--share", f"{n}/{count}"], cwd=ROOT, env=environment)
            for n in range(count)
        ]

    def wait(self) -> list[int | None]:
        """Until all are done, or their time is over; their statuses."""
        for process in self._processes:
            try:
                process.wait(max(0.1, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                print("-- not all is compiled ahead; going on", flush=True)
                break
        return [process.poll() for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def goals(found: Row) -> list[Row]:
    """What was asked of a card like an H200, and what it gave; None: not measured."""

    def decode(form: str) -> float | None:
        rows = [row for row in found.get(form, {}).get("decode", ()) if row["batch"] == 1]
        return (
            max(rows[0]["share_of_floor"], rows[0]["overlapped_share_of_floor"]) if rows else None
        )

    def verify(form: str) -> float | None:
        rows = [row for row in found.get(form, {}).get("verify", ()) if row["rows"] == 8]
        return rows[0]["times_one_row"] if rows else None

    rows = [
        _goal("bf16, batch 1: share of the memory floor", decode("bf16"), least=0.75),
        _goal("INT4, batch 1: share of the memory floor", decode("int4"), least=0.65),
        _goal("bf16: verification of 8 rows, times one", verify("bf16"), most=1.15),
        _goal("INT4: verification of 8 rows, times one", verify("int4"), most=1.15),
    ]
    for row in found.get("kernels", ()):
        if row.get("bound") != "memory":
            continue
        name = f"{row['kernel']}: share of the copy bandwidth"
        if row["mb"] < _LAUNCH_BOUND_MB:
            name += " (too small to count)"
        rows.append(_goal(name, row["share_of_floor"], least=_MEMORY_GOAL))
    return rows


def _goal(
    name: str, value: float | None, *, least: float | None = None, most: float | None = None
) -> Row:
    if value is None:
        met = None
    else:
        met = value >= least if least is not None else most is not None and value <= most
    wanted = f">= {least}" if least is not None else f"<= {most}"
    return {"goal": name, "wanted": wanted, "measured": value, "met": met}


def table(rows: list[Row]) -> Iterator[str]:
    """Lines for people."""
    yield f"{'goal':72s} {'wanted':>8s} {'measured':>9s}"
    for row in rows:
        measured = "-" if row["measured"] is None else f"{row['measured']:.3f}"
        verdict = {None: "not measured", True: "met", False: "MISSED"}[row["met"]]
        yield f"{row['goal']:72s} {row['wanted']:>8s} {measured:>9s} {verdict}"


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    """Where parts write: beside the whole's file, so that what a part found is there even if this
    process is ended before it."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="parley-gpu-") as folder:
            yield Path(folder)
        return
    beside = path.with_suffix(".parts")
    beside.mkdir(parents=True, exist_ok=True)
    yield beside
    shutil.rmtree(beside)  # the whole's file has it all


def run_all(options: argparse.Namespace) -> int:
    """Starts the parts' processes one after another, and says what came out."""
    reason = unavailable_reason()
    if reason is not None:
        print(f"nothing can be measured: {reason} (--smoke needs none)", file=sys.stderr)
        return 2
    with _folder(options.json) as folder:
        parts = Parts(options, folder)
        names = [name for name in _PARTS if options.only is None or name in options.only]
        compilers = _compilers(options, names)

        def again() -> None:
            nonlocal compilers
            compilers.close()
            compilers = _compilers(options, names)

        try:
            # Tiny ones share a process: to start it takes as long as they do.
            groups = [names] if options.smoke else [[name] for name in names]
            for number, group in enumerate(groups):
                if number == 1:
                    compilers.wait()
                if group == ["card"]:
                    run_card(parts, again)
                else:
                    parts.run(*group)
            parts.found["compiled_ahead"] = compilers.wait()
        finally:
            compilers.close()
        parts.write()
    print(json.dumps({name: parts.found.get(name) for name in ("machine", "ceilings")}))
    print("\n".join(table(goals(parts.found))))
    for error in parts.errors:
        print(f"FAILED {error['where']}: {error['error'][:300]}", file=sys.stderr)
    return 1 if parts.errors else 0


def run_card(parts: Parts, again: Callable[[], None]) -> None:
    """The first part; if the decoder is wrong, once more, and then all that follows, without what
    is the likeliest to be the reason: kernels that are launched before others end. ``again``
    compiles ahead for that."""
    parts.run("card")
    if parts.is_decoder_wrong and os.environ.get(SWITCH, "1") != "0":
        print("-- again, with kernels that wait for each other's end", flush=True)
        os.environ[SWITCH] = "0"
        again()
        parts.run("card")


def _compilers(options: argparse.Namespace, names: list[str]) -> Compilers:
    if options.smoke:  # a step of one part, which takes long enough
        return Compilers(
            90, 132, 1, "--parts", "card", "int4", "--smoke", "--front-end", wait_s=600
        )
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    num_processes = max(1, min(14, (os.cpu_count() or 2) - 2))
    capability = 10 * major + minor
    return Compilers(*(capability, count, num_processes, "--parts", *names), wait_s=_COMPILE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most this long")
    parser.add_argument("--smoke", action="store_true", help="tiny, in Triton's interpreter")
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), help="these parts")
    own = parser.add_argument_group("of the processes that this one starts")
    own.add_argument("--part", nargs="+", choices=list(_PARTS), help=argparse.SUPPRESS)
    own.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    own.add_argument("--ceilings", default="1e9,1e12", help=argparse.SUPPRESS)
    own.add_argument("--untuned", action="store_true", help=argparse.SUPPRESS)
    own.add_argument("--skip-cases", type=int, default=0, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    return run_part(options) if options.part else run_all(options)


if __name__ == "__main__":
    sys.exit(main())
