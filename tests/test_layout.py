"""The import rule, the file sizes, the top level and the README's tree, checked from the source.

The tables below are the rule. Each row is a layer: its modules may import from their own row and
from rows below, never from above. A name covers a module or a whole subpackage; ``*`` matches as
in file names. A new module must be put into a row, or `test_every_module_has_a_layer` fails.
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

ROOT = Path(__file__).resolve().parent.parent

LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "app": (
        ("__main__",),
        ("cli", "cli_*"),
        ("bench",),
        ("call_client",),
        ("phone_peers",),
        ("talk_client", "talk_log", "recording", "waterfall", "server_process", "trace_source"),
        ("server",),
        ("engine_start",),
        ("web",),
        ("http_protocol",),
        ("portions",),
        ("api", "transports", "auth", "client_secrets", "rate_limits", "connections", "pages"),
        ("conversation",),
        ("observe",),
        ("engine_options",),
        ("model_store", "model_hub", "model_wheel", "model_catalog", "logging_setup", "clock"),
        ("config", "errors", "extras"),
    ),
    "llm_core": (
        ("client", "worker", "process", "ipc", "model_jobs", "parallel.follower"),
        ("compress", "speculative.train"),
        ("engine",),
        ("request", "speculator", "speculative.choice", "step_pipeline", "pins", "row_budget"),
        ("downgrade",),
        ("generation", "prompt"),
        ("guided", "logprobs"),
        ("arguments_schema",),
        ("model_files", "step"),
        ("tokenizer_json",),
        ("scheduler", "speculative.draft_model", "speculative.calibration"),
        ("runner", "tokenizer"),
        ("chat_template", "detokenizer"),
        ("text_pipeline",),
        ("params_check", "tool_prompt", "tool_calls", "model_choice", "native_sampler"),
        ("parallel.steps", "parallel.launch"),
        ("speculative",),
        ("sampler",),
        ("tool_call_json",),
        ("decoder", "native_decoder", "gpu_decoder"),
        ("rope", "parallel", "cuda_*", "torch_parts"),
        ("quant", "loading", "batch", "kv_cache"),
        ("block_tables", "policy", "step_cost"),
        ("prefix_cache",),
        ("blocks", "attention_window"),
        ("sequence",),
        ("config",),
        ("model_hash",),
        ("errors", "messages", "job_options", "cpu_features", "process_log", "child_process"),
    ),
}

# What each package may import of the other three. "root" means: only what its __init__ exports.
MAY_IMPORT: dict[str, dict[str, str]] = {
    "kernels": {},
    "audio": {},
    "llm_core": {"kernels": "any"},
    "app": {"llm_core": "root", "audio": "any"},
}
PACKAGES = tuple(MAY_IMPORT)

# Third-party packages that only these files may import, and why.
ONLY_IN = {
    "piper": ("audio/tts.py",),  # GPL-3.0: NOTICE promises that it stays behind one interface
    "opentelemetry": ("app/observe/spans.py",),  # an extra
    "transformers": (),  # a test dependency
    "triton": ("kernels/gpu/*",),  # an extra
    "xllamacpp": ("app/bench/llama_cpp.py",),  # the peer we compare with
}

# Modules that load the code of a command only when it is chosen, so that `parley --help` does not
# wait for torch. Their imports obey the layers and the ban on cycles like all others.
LAZY = {
    *("app.cli", "app.cli_bench", "app.cli_gate", "app.cli_replay"),
    *("app.bench.llm", "app.bench.llama_cpp"),
    "llm_core.model_jobs",
    "kernels.gpu",  # its Triton half needs an extra
}

# Parts of a declared dependency that are distributed, and versioned, by it.
COMES_WITH = {"starlette": "fastapi", "pydantic_core": "pydantic", "google": "onnx"}

TOP_LEVEL = {
    *("app", "llm_core", "audio", "kernels", "tests", "web_demo", "docs", "bench"),
    *("pyproject.toml", "constraints.txt", "Makefile", ".ci", ".gitignore"),
    *("README.md", "LICENSE", "NOTICE"),
}

MAX_LINES = 500
SOURCE_SUFFIXES = {".py", ".c", ".h", ".js", ".mjs", ".css", ".html", ".sh"}


@dataclass(frozen=True)
class Import:
    """One import of ours, resolved: ``target`` is a module that exists, or a package root."""

    source: str  # dotted name of the importing module
    target: str
    line: int
    in_function: bool

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
            found.append(Import(module, target, node.lineno, in_function))
    return tuple(found)


def layer_of(module: str) -> int | None:
    """Row of a module in its package's table; None when it has no row."""
    package, _, inner = module.partition(".")
    for row, patterns in enumerate(LAYERS[package]):
        if any(fnmatchcase(inner, p) or inner.startswith(f"{p}.") for p in patterns):
            return row
    return None


def package_of(module: str) -> str:
    return module.split(".")[0]


def expect_none(wrong: Iterable[object], rule: str) -> None:
    found = sorted({str(item) for item in wrong})
    if found:
        pytest.fail("\n  ".join([f"{rule}:", *found]), pytrace=False)


def test_packages_import_each_other_as_allowed() -> None:
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

    expect_none(wrong(), "imports between packages that MAY_IMPORT does not allow")


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_a_layer(package: str) -> None:
    inside = (name for name in modules() if name.startswith(f"{package}."))
    expect_none((m for m in inside if layer_of(m) is None), "modules without a row in LAYERS")


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_downwards(package: str) -> None:
    def wrong() -> Iterator[Import]:
        for item in our_imports():
            if package_of(item.source) != package or package_of(item.target) != package:
                continue
            source, target = layer_of(item.source), layer_of(item.target)
            # The root module itself has no row: it gathers from all rows and gives to the others.
            if source is not None and target is not None and target < source:
                yield item

    expect_none(wrong(), "imports from a row above in LAYERS")


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
    inside = (i for i in our_imports() if i.in_function and i.source not in LAZY)
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


def test_no_source_file_is_too_long() -> None:
    def wrong() -> Iterator[str]:
        for path in listed_by_git():
            if path.suffix in SOURCE_SUFFIXES:
                num_lines = len((ROOT / path).read_bytes().splitlines())
                if num_lines > MAX_LINES:
                    yield f"{path}: {num_lines}"

    expect_none(wrong(), f"files of more than {MAX_LINES} lines")


def readme_tree(text: str) -> list[str]:
    """Paths that the README's file map names.

    The map is the first fenced block with a line that begins with ``app/``. In each of its lines,
    ``#`` starts a remark; the words before it are names. A name that ends in ``/`` is a folder,
    and what follows it, in the same line or in deeper indented lines below, lies inside. All other
    names are files; ``*`` matches as in file names.
    """
    blocks = text.split("```")[1::2]
    block = next((b for b in blocks if any(x.startswith("app/") for x in b.splitlines())), "")
    paths: list[str] = []
    open_folders: list[tuple[int, str]] = []  # (indent, path with a slash at the end)
    for line in block.splitlines()[1:]:  # the first line is the rest of the fence
        words = line.split("#")[0].split()
        indent = len(line) - len(line.lstrip())
        if not words:
            continue
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        for word in words:
            path = (open_folders[-1][1] if open_folders else "") + word
            paths.append(path)
            if word.endswith("/"):
                open_folders.append((indent, path))
    return paths


def test_readme_tree_is_read_as_documented() -> None:
    text = (
        "x\n```sh\nmake run\n```\n```text\napp/   # app/no.py\n  cli.py cli_*.py\n"
        "  api/ chat.py  # remark\n  config.py\ntests/\n```\n"
    )
    assert readme_tree(text) == [
        *("app/", "app/cli.py", "app/cli_*.py", "app/api/", "app/api/chat.py", "app/config.py"),
        "tests/",
    ]


def test_readme_tree_agrees_with_the_disk() -> None:
    named = readme_tree((ROOT / "README.md").read_text(encoding="utf-8"))
    assert named, "README.md has no file map: a fenced block with a line that begins with app/"
    files = {str(path) for path in listed_by_git()}
    folders = {f"{parent}/" for path in files for parent in Path(path).parents}
    absent = (n for n in named if not any(fnmatchcase(x, n) for x in files | folders))
    expect_none(absent, "named in the README's tree and not on disk")

    ours = (f for f in files if f.split("/")[0] in PACKAGES and f.endswith(".py"))
    modules_on_disk = (f for f in ours if not f.endswith("__init__.py"))
    unnamed = (f for f in modules_on_disk if not any(fnmatchcase(f, n) for n in named))
    expect_none(unnamed, "on disk and not named in the README's tree")


def test_documents_have_no_placeholders() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    expect_none(
        (str(d.relative_to(ROOT)) for d in documents if "@@" in d.read_text(encoding="utf-8")),
        "with a placeholder (@@)",
    )
