"""The few rules that matter, as tests: who may import whom, and that pages say what is true."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tandem.config import reference as config_reference
from tandem.config.flags import parse_run_flags
from tandem.config.stages import stage_names
from tandem.garbage import collected_seldom
from tandem.launch.flags import take_launch_flags
from tandem.metrics import reference as metrics_reference

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tandem"

LAYERS = (
    ("errors", "message", "compact", "version"),
    ("types", "text", "stopping", "yaml_text", "garbage"),
    ("config", "files", "imports", "process", "processor", "devices", "named_functions"),
    ("ops", "tensor_files"),
    ("data", "models", "parallel", "objectives", "metrics"),
    ("generation", "checkpoint", "rewards"),
    ("memory",),
    ("predict",),
    ("engine",),
    ("training", "serve", "plan", "launch"),
    ("cli", "__init__"),
    ("__main__", "api_reference"),
)
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
# Further than its layer: what a room may not know, whatever stands below it.
FORBIDDEN = {
    "objectives": {"types", "config"},
    "serve": {"engine", "objectives"},
    "generation": {"objectives"},
    "rewards": {"types", "ops", "models", "parallel", "objectives", "metrics"},
    "checkpoint": {"config", "data", "models", "objectives", "metrics", "types"},
}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
@collected_seldom()
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
@collected_seldom()
def nodes(path: Path) -> list[ast.AST]:
    """Of the whole tree, in ast.walk's order."""
    return list(ast.walk(parsed(path)))


def definitions(path: Path) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of a file that are inside no function."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return found


@cache
def imports(path: Path) -> set[str]:
    """Every tandem module that a file imports, those inside functions too; type-only ones not."""
    type_only = {
        id(node)
        for block in nodes(path)
        if isinstance(block, ast.If)
        and isinstance(block.test, ast.Name)
        and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in nodes(path):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            whole = node.module == "tandem"  # from tandem import files
            found |= {f"tandem.{a.name}" for a in node.names} if whole else {node.module}
    return {name for name in found if name.split(".")[0] == "tandem"}


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_lower_layers_and_itself(module: str) -> None:
    room = room_of(module)
    assert room in LAYER, f"{room} has no layer"
    for imported in imports(MODULES[module]):
        other = room_of(imported)
        if other == room:
            continue
        assert LAYER[other] < LAYER[room], f"{module} must not import {imported}"
        assert other not in FORBIDDEN.get(room, set()), f"{room} must not know {other}"


def test_no_file_imports_itself_in_a_circle() -> None:
    edges = {
        module: {name for name in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()
    while edges:
        free = {m for m, targets in edges.items() if targets <= done}
        assert free, f"a circle among {sorted(edges)}"
        done |= free
        edges = {m: targets for m, targets in edges.items() if m not in free}


def test_objectives_import_torch_and_errors_alone() -> None:
    for path in (PACKAGE / "objectives").glob("*.py"):
        for node in nodes(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                first = name.split(".")[0]
                assert first in {"torch", "tandem", "__future__", "collections", "dataclasses",
                                 "math", "typing"}, f"{path.name} imports {name}"  # fmt: skip


@pytest.mark.parametrize("room", ["engine", "parallel"])
def test_no_configuration_of_a_run_below_training(room: str) -> None:
    """They take what they read: `EngineSettings`, or less."""
    for path in (PACKAGE / room).glob("*.py"):
        assert "RunConfig" not in path.read_text(encoding="utf-8"), path.name


@cache
def documented_methods() -> set[str]:
    """Names of methods that some class of ours documents: an override need not say it again."""
    return {
        method.name
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


# They override methods of torch and argparse.
OVERRIDES = {"forward", "error", "parse_args"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_things_are_documented_and_files_can_be_held_in_the_head(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert ast.get_docstring(parsed(path)), f"{path.name} says nothing of itself"
    assert num_lines <= 400, f"{path.name}: one idea should move out"
    found = definitions(path)
    private_bodies = [
        c.body for c in found if isinstance(c, ast.ClassDef) and c.name.startswith("_")
    ]
    for node in found:
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 75, f"{node.name} is too long to see"
        is_private = node.name.startswith("_")
        in_private = any(node in body for body in private_bodies)
        if not (is_private or in_private or node.name in OVERRIDES | documented_methods()):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_generated_pages_are_what_the_code_says() -> None:
    assert (ROOT / "docs/config.md").read_text() == config_reference.markdown(), "run `make docs`"
    assert (ROOT / "docs/metrics.md").read_text() == metrics_reference.markdown(), "run `make docs`"


PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_commands_that_pages_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    commands = {"train", *stage_names()}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    shown = [block for language, block in blocks if language in ("", "sh", "bash")]
    for line in "\n".join(shown).replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("tandem "):
            continue  # curl's JSON goes over several lines
        words = shlex.split(line, comments=True)
        if words[:1] == ["tandem"] and len(words) > 1 and words[1] in commands:
            flags = [word for word in words[2:] if word not in ("...", "[flags]")]
            _, flags, wrong = take_launch_flags(flags)
            assert not wrong
            if "--config" not in flags:
                parse_run_flags(flags, words[1])


def test_the_layers_that_the_page_shows_are_those_that_are_enforced() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    diagram = next(b for b in page.split("```") if b.lstrip("\n").startswith("11 "))
    shown: dict[int, set[str]] = {}
    number = -1
    for line in diagram.strip("\n").splitlines():
        words = line.partition("#")[0].split()
        number = int(words.pop(0)) if words[0].isdigit() else number
        shown.setdefault(number, set()).update(words)
    enforced = {n: {*rooms} - {"__init__"} for n, rooms in enumerate(LAYERS)}
    assert shown == enforced
