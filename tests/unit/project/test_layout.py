"""The import rules, the folder sizes and the top level, checked from the source.

A *package* is a folder directly below ``app``, ``audio``, ``llm_core`` or ``kernels``. Folders
inside a package are its own business. Modules that lie directly in a top-level folder
(``app.config``, ``llm_core.messages``...) are below all packages, unless ``ORDER`` names them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Packages import from their own and from those to the right of them, never from the left.
ORDER: dict[str, tuple[str, ...]] = {
    "app": (
        *("__main__", "cli", "server", "api", "access", "transports", "conversation"),
        *("routing", "observe", "clients", "models"),
    ),
    "audio": ("endpointing", "files", "asr", "tts", "text"),
    "llm_core": (
        *(
            "worker",
            "worker_io",
            "client",
            "offline",
            "engine",
            "speculative",
            "model",
            "structured",
        ),
        *("loading", "sampling", "scheduling", "tokenizer", "chat", "quant"),
    ),
    "kernels": ("gpu", "torch_cpu", "native"),
}

# Which top-level folder may import which other: by its root only ("root"), by the public faces of
# its packages ("faces"), or any module ("any": benchmarks measure what lies inside).
MAY_IMPORT: dict[str, dict[str, str]] = {
    "kernels": {},
    "audio": {},
    "llm_core": {"kernels": "any"},
    "app": {"llm_core": "root", "audio": "faces", "bench": "any"},
    "bench": {"app": "any", "audio": "any", "llm_core": "any", "kernels": "any"},
}
PACKAGES = tuple(MAY_IMPORT)

# Packages without one public face: their parts are imported one by one.
# app.transports: WebRTC needs an extra, the others do not. llm_core.structured: the client hashes
# guides without loading what compiles them.
FACELESS = {
    "llm_core.structured",
    "app.api",
    "app.cli",
    "app.server",
    "app.transports",
    "kernels.gpu",
    "kernels.native",
    "kernels.torch_cpu",
}

MAX_MODULES = 15  # in one folder, without __init__

# Third-party packages that only these files may import, and why.
ONLY_IN = {
    "piper": (
        "audio/tts/synthesizer.py",
    ),  # GPL-3.0: NOTICE promises that it stays behind one interface
    "opentelemetry": ("app/observe/spans.py",),  # an extra
    "transformers": (),  # a test dependency
    "triton": ("kernels/gpu/*",),  # an extra
    "xllamacpp": ("bench/llm/llama_cpp.py",),  # the peer we compare with
}

# Modules that load the code of a command only when it is chosen, so that `parley --help` does not
# wait for torch. Their imports obey the layers and the ban on cycles like all others.
LAZY = {
    *("app.cli.main", "app.cli.bench", "app.cli.gate", "app.cli.replay"),
    "llm_core.offline.jobs",
    "kernels.gpu",  # its Triton half needs an extra
}

# Parts of a declared dependency that are distributed, and versioned, by it.
COMES_WITH = {"starlette": "fastapi", "pydantic_core": "pydantic", "google": "onnx"}

TOP_LEVEL = {
    *("app", "llm_core", "audio", "kernels", "tests", "web_demo", "docs", "bench"),
    *("pyproject.toml", "constraints.txt", "Makefile", ".ci", ".gitignore"),
    *("README.md", "LICENSE", "NOTICE"),
}


@dataclass(frozen=True)
class Import:
    """One import of ours, resolved: ``target`` is a module that exists, or a package root."""

    source: str  # dotted name of the importing module
    target: str
    line: int
    in_function: bool
    of_module: bool  # `from package import module`, which names the package

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the four packages (``__init__`` is its package)."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_bytes())


def raw_imports(module: str) -> Iterator[tuple[str, str | None, ast.stmt, bool]]:
    """(module named, name taken from it or None, statement, inside a function) for each import."""
    is_package = modules()[module].name == "__init__.py"

    def visit(node: ast.AST, in_function: bool) -> Iterator[tuple[str, str | None, ast.stmt, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node, in_function
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield base, alias.name, node, in_function
        inside = in_function or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree_of(module), in_function=False)


@cache
def our_imports() -> tuple[Import, ...]:
    found = []
    for module in modules():
        for base, name, node, in_function in raw_imports(module):
            if base.split(".")[0] not in PACKAGES:
                continue
            # `from llm_core import ipc` takes a module when there is one of that name.
            target = f"{base}.{name}" if name and f"{base}.{name}" in modules() else base
            found.append(Import(module, target, node.lineno, in_function, target != base))
    return tuple(found)


def part_of(module: str) -> str:
    """The package of a module (``llm_core.engine``), or the module where it lies in no package."""
    return ".".join(module.split(".")[:2])


def rank_of(module: str) -> int:
    """Place in ``ORDER``: the larger, the lower. Modules in no package come last."""
    top, _, inner = module.partition(".")
    order = ORDER[top]
    name = inner.split(".")[0]
    return order.index(name) if name in order else len(order)


def package_of(module: str) -> str:
    return module.split(".")[0]


def expect_none(wrong: Iterable[object], rule: str) -> None:
    found = sorted({str(item) for item in wrong})
    if found:
        pytest.fail("\n  ".join([f"{rule}:", *found]), pytrace=False)


def test_top_level_folders_import_each_other_as_allowed() -> None:
    def wrong() -> Iterator[str]:
        for item in our_imports():
            source, target = package_of(item.source), package_of(item.target)
            if source == target:
                continue
            allowed = MAY_IMPORT[source].get(target)
            if allowed is None:
                yield f"{item}: {source} may not import {target}"
            elif allowed == "root" and item.target != target:
                yield f"{item}: only the root of {target} may be imported"
            elif target == "bench" and item.source not in LAZY:
                yield f"{item}: benchmarks are loaded when their command is chosen"

    expect_none(wrong(), "imports between top-level folders that MAY_IMPORT does not allow")


@pytest.mark.parametrize("top", ORDER)
def test_every_package_has_a_place_in_the_order(top: str) -> None:
    folders = {
        part_of(m).partition(".")[2]
        for m in modules()
        if m.count(".") > 1 and m.startswith(f"{top}.")
    }
    expect_none(folders - set(ORDER[top]), f"packages of {top} without a place in ORDER")


@pytest.mark.parametrize("top", ORDER)
def test_packages_import_downwards(top: str) -> None:
    def wrong() -> Iterator[Import]:
        for item in our_imports():
            if package_of(item.source) != top or package_of(item.target) != top:
                continue
            if top in (item.source, item.target):
                continue  # the root gathers from all packages and gives to other top-level folders
            if rank_of(item.target) < rank_of(item.source):
                yield item

    expect_none(wrong(), "imports from a package to the left in ORDER")


def test_packages_are_imported_by_their_public_face() -> None:
    """``from llm_core.engine import Engine``, not from the module inside that has it."""

    def wrong() -> Iterator[Import]:
        for item in our_imports():
            source, target = part_of(item.source), part_of(item.target)
            if source == target or target in FACELESS:
                continue
            if "bench" in (package_of(item.source), package_of(item.target)):
                continue
            if target not in modules() or modules()[target].name != "__init__.py":
                continue
            if item.target != target and not item.of_module:
                yield item

    expect_none(wrong(), "imports past a package's __init__")


def test_folders_are_small() -> None:
    counts: dict[str, int] = {}
    for path in modules().values():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            counts[folder] = counts.get(folder, 0) + 1
    large = (f"{folder}: {n} modules" for folder, n in counts.items() if n > MAX_MODULES)
    expect_none(large, f"folders of more than {MAX_MODULES} modules")


def test_inside_llm_core_nobody_imports_its_root() -> None:
    inside = (item for item in our_imports() if package_of(item.source) == "llm_core")
    expect_none((i for i in inside if i.target == "llm_core"), "imports of the own root")


def test_there_is_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for item in our_imports():
        if item.source != item.target:
            graph[item.source].add(item.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]), pytrace=False)


def test_nothing_of_ours_is_imported_inside_a_function() -> None:
    inside = (
        i
        for i in our_imports()
        if i.in_function and i.source not in LAZY and package_of(i.source) != "bench"
    )
    expect_none(inside, "imports of ours inside a function")


def test_third_party_imports_are_declared_and_kept_where_they_belong() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"]]
    for extra in ("speech", "webrtc", "otel", "bench", "gpu"):
        requirements += extras[extra]
    declared = {normalized(re.split(r"[\[<>=!~; ]", text)[0]) for text in requirements}
    distributions = packages_distributions()

    def wrong() -> Iterator[str]:
        for module, path in modules().items():
            if package_of(module) == "bench":
                continue  # benchmarks run from a checkout, with the extras for tests
            file_name = str(path.relative_to(ROOT))
            for base, _, node, _ in raw_imports(module):
                top = base.split(".")[0]
                if top in PACKAGES or top in sys.stdlib_module_names:
                    continue
                if not any(fnmatchcase(file_name, p) for p in ONLY_IN.get(top, ("*",))):
                    yield f"{module}:{node.lineno} imports {base}, kept to {ONLY_IN[top]}"
                provider = COMES_WITH.get(top, top)
                names = {normalized(d) for d in distributions.get(provider, [provider])}
                if not names & declared:
                    yield f"{module}:{node.lineno} imports {base}, not in pyproject.toml"

    expect_none(wrong(), "third-party imports that are not declared or not in their place")


def normalized(distribution: str) -> str:
    return distribution.replace("_", "-").lower()


def listed_by_git() -> list[Path]:
    """Every file that is committed or would be: what .gitignore names is left out."""
    listing = subprocess.run(
        # Whoever owns the files (in a container it may be somebody else), they are only listed.
        ["git", "-c", "safe.directory=*"]
        + ["ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def test_top_level_is_fixed() -> None:
    expect_none({path.parts[0] for path in listed_by_git()} - TOP_LEVEL, "not in TOP_LEVEL")


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_paths_in_documents_exist() -> None:
    """Files and folders of the project that a document names, and the targets of its links."""
    named = re.compile(r"`((?:app|audio|llm_core|kernels|bench|tests|docs|web_demo)/[\w./-]+)`")
    linked = re.compile(r"\]\((?!https?:|#)([^)#]+)")

    def wrong() -> Iterator[str]:
        for document in documents():
            text = document.read_text(encoding="utf-8")
            shown = document.relative_to(ROOT)
            if "adr" in shown.parts:
                continue  # records tell what was the case when they were written
            for path in named.findall(text):
                if not re.search("[A-Z]{3}", path) and not (ROOT / path).exists():
                    yield f"{shown}: {path}"
            for path in linked.findall(text):
                if not (document.parent / path).exists():
                    yield f"{shown}: link to {path}"

    expect_none(wrong(), "named in a document and not there")


def test_readme_is_short_and_the_glossary_too() -> None:
    assert (ROOT / "README.md").stat().st_size < 10_000
    glossary = (ROOT / "docs" / "architecture.md").read_text().split("## Glossary")[1]
    assert sum(line.startswith("| ") for line in glossary.splitlines()) <= 25


def test_documents_have_no_placeholders() -> None:
    expect_none(
        (str(d.relative_to(ROOT)) for d in documents() if "@@" in d.read_text(encoding="utf-8")),
        "with a placeholder (@@)",
    )
