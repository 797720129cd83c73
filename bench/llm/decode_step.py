"""Where each microsecond of one decode step goes.

    python -m bench.llm.decode_step MODEL [--tokens 200] [--drafts 1] [--temperature 0] [--json OUT]

One stream in the worker's own loop: a client in another process reads what it sends. Functions
between the layers are wrapped by a clock, and a row is what a function takes without those that
have rows of their own (medians over the steps, so they need not add up). The wrappers cost time
themselves: columns "no probes" are the same without them.

``--tree`` runs another source tree in turn with this one (functions it lacks have no row).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("PARLEY_TREE", Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(ROOT))

PROMPTS = (
    "Why do cats purr?",
    "Please tell me a short story about a lighthouse.",
    "How does a bicycle stay upright?",
    "What is a good way to start running?",
)
ALL = "all"
# A row of the table, and the functions whose time it is.
PROBES: dict[str, tuple[str, ...]] = {
    "schedule, expire, stamp": (
        "llm_core.scheduling.scheduler:Scheduler.schedule",
        "llm_core.engine.engine:Engine._expire",
        "llm_core.engine.engine:Engine._stamp_scheduled",
        "llm_core.engine.engine:Engine._generations",
    ),
    "make the batch": ("llm_core.engine.engine:make_batch",),
    "check the batch": ("llm_core.model.runner:ModelRunner._check",),
    "call the forward pass": ("llm_core.model.runner:ModelRunner.forward",),
    "forward pass (C)": ("functions:pn_forward",),
    "learn costs": (
        "llm_core.engine.engine:Engine._learn",
        "llm_core.engine.speculation:Speculator.ran",
        "llm_core.engine.speculation:Speculator.verified",
    ),
    "commit": ("llm_core.scheduling.scheduler:Scheduler.commit",),
    "choose a token": (
        "llm_core.engine.generation:Generation.choose",
        "llm_core.engine.generation:sample_row",
    ),
    "append, detokenise, events": ("llm_core.engine.generation:Generation.accept",),
    "settle drafts, move rows": (
        "llm_core.model.runner:ModelRunner.move_rows",
        "llm_core.scheduling.scheduler:Scheduler.settle_drafts",
    ),
    "drafter observes": ("llm_core.engine.speculation:Speculator.observe",),
    "decide and plan drafts": ("llm_core.engine.speculation:Speculator.add_drafts",),
    "propose, in Python": ("llm_core.speculative.drafters.eagle:EagleDrafter.propose",),
    "draft (C)": ("functions:pn_draft",),
    "send": ("llm_core.worker_io:Outbox.send",),
    "take commands": ("llm_core.worker_io:Inbox.take",),
    "rest of a step": ("llm_core.engine.engine:Engine.step",),
}


class Clock:
    """Time by row, without what inner functions took."""

    def __init__(self) -> None:
        self.ns: defaultdict[str, int] = defaultdict(int)
        self.is_on = False
        self._inner = [0]

    def wrap(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        now, inner, sums = time.perf_counter_ns, self._inner, self.ns

        def timed(*args: Any, **options: Any) -> Any:
            inner.append(0)
            start = now()
            try:
                return function(*args, **options)
            finally:
                spent = now() - start
                sums[row] += spent - inner.pop()
                inner[-1] += spent

        return timed

    def install(self, functions: Any) -> None:
        """Wraps all functions of the probes that this source tree has."""
        for row, places in PROBES.items():
            for place in places:
                module_name, _, path = place.partition(":")
                owner: Any = functions
                if module_name != "functions":
                    owner = importlib.import_module(module_name)
                    *outer, path = path.split(".")
                    for name in outer:
                        owner = getattr(owner, name)
                if hasattr(owner, path):
                    setattr(owner, path, self.wrap(row, getattr(owner, path)))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One process' figures: microseconds a step by row, plain and with drafts."""
    from app.config import DEFAULT_INSTRUCTIONS
    from llm_core.engine.engine import Engine
    from llm_core.messages import ChatMessage, EngineConfig, RequestOptions, SamplingParams
    from llm_core.speculative.control.base import FixedController
    from llm_core.speculative.drafters.base import DraftShape
    from llm_core.structured.preparation import GuideDesk
    from llm_core.worker import Worker
    from llm_core.worker_io import Inbox, Outbox

    def config(speculation: str) -> EngineConfig:
        return EngineConfig(
            model_path=arguments.model,
            num_threads=arguments.threads,
            max_sequences=4,
            max_context=1024,
            speculation=speculation,
        )

    engine = Engine.load(config("auto" if arguments.drafts else "off"))
    speculator = engine._speculator
    if speculator is not None:
        shape = DraftShape(arguments.drafts, arguments.drafts)
        speculator._controller = FixedController(shape)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
    )
    commands_in, commands_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    inbox = Inbox(commands_in)
    desk = GuideDesk(engine.guides, None, inbox.put)
    worker = Worker(engine, inbox, Outbox(ours), desk, max_held=1)
    result: dict[str, Any] = {}
    number = 0
    clock = Clock()
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)
    params = SamplingParams(
        max_tokens=arguments.tokens, temperature=arguments.temperature, seed=7, ignore_eos=True
    )

    def run(name: str) -> None:
        nonlocal number
        steps = tokens = 0
        for prompt in PROMPTS:
            number += 1
            messages = [ChatMessage("system", DEFAULT_INSTRUCTIONS), ChatMessage("user", prompt)]
            options = RequestOptions(cache_salt=str(number))
            engine.submit(number, messages, params, received_ns=0, options=options)
            sequence = engine._requests[number].sequence
            while sequence.num_generated < 4:
                _turn(worker)
            first, first_steps = sequence.num_generated, sequence.num_steps
            while engine.has_work:
                clock.ns.clear()
                start = time.perf_counter_ns()
                _turn(worker)
                spent = time.perf_counter_ns() - start
                samples[name].append({ALL: spent, **clock.ns})
            steps += sequence.num_steps - first_steps
            tokens += sequence.num_generated - first
        found = result.setdefault(name, {"steps": 0, "tokens": 0})
        found["steps"] += steps
        found["tokens"] += tokens

    modes = [("plain", None)] + ([("drafted", speculator)] if speculator is not None else [])
    for _, chosen in modes:
        engine._speculator = chosen
        run("warm-up")
    result.clear()
    samples.clear()
    for _ in range(arguments.repeats):
        for name, chosen in modes:
            engine._speculator = chosen
            run(name + ", no probes")
    functions = engine._runner.model._functions
    clock.install(functions)
    for _ in range(arguments.repeats):
        for name, chosen in modes:
            engine._speculator = chosen
            run(name)
    for name, found in result.items():
        found["tokens_a_step"] = found["tokens"] / found["steps"]
        found["us"] = {
            row: statistics.median(sample.get(row, 0.0) for sample in samples[name]) / 1e3
            for row in (*PROBES, ALL)
        }
    ours.close()
    theirs.close()
    reader.wait(10)
    commands_out.close()
    inbox.finish()
    desk.close()
    return result


READER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as s:
    while s.recv(65536): pass
"""


def _turn(worker: Any) -> None:
    """What ``Worker.run`` does again and again."""
    worker.turn(worker._inbox.take(wait=not worker._engine.has_work))


def child(arguments: argparse.Namespace, tree: Path) -> dict[str, Any]:
    """The figures of one source tree, measured in a process with the engine's environment."""
    from llm_core.client.engine_process import _environment
    from llm_core.messages import EngineConfig

    config = EngineConfig(model_path=arguments.model, num_threads=arguments.threads)
    environment = _environment(config) | {"PARLEY_TREE": str(tree), "PYTHONPATH": str(tree)}
    options = [
        f"--{name}={getattr(arguments, name)}"
        for name in ("tokens", "drafts", "temperature", "threads", "repeats")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.llm.decode_step", arguments.model, "--child", *options],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        cwd=tree,
    )
    return json.loads(done.stdout)


def show(trees: dict[str, list[dict[str, Any]]]) -> None:
    """One table: a column for each tree and mode."""
    columns = [(tree, mode) for tree, runs in trees.items() for mode in runs[0]]

    def line(title: str, of_run: Callable[[dict[str, Any]], float], digits: int) -> None:
        values = [statistics.median(of_run(run[mode]) for run in trees[t]) for t, mode in columns]
        if any(values):
            print(title.ljust(30), *(f"{value:26.{digits}f}" for value in values))

    print("us a step, medians".ljust(30), *(f"{tree + ' ' + mode:>26}" for tree, mode in columns))
    for row in (*PROBES, ALL):
        line(row, partial(_median_us, row), 1)
    line("tokens a step", itemgetter("tokens_a_step"), 2)


def _median_us(row: str, run: dict[str, Any]) -> float:
    return float(run["us"][row])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="model file or directory")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tree", action="append", default=[], help="another source tree")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        json.dump(measure(arguments), sys.stdout)
        return 0
    trees = [Path(tree).resolve() for tree in arguments.tree] + [ROOT]
    found: dict[str, list[dict[str, Any]]] = {tree.name: [] for tree in trees}
    for _ in range(arguments.rounds):
        for tree in trees:
            found[tree.name].append(child(arguments, tree))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
