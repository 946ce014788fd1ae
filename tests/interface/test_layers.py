"""Layers import downwards only, tests no benchmarks, and every folder's `__init__` names what is in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (  # from the bottom to the top; parts of one layer may not import each other
    ("asrd_kernels",),
    ("asrd.settings", "asrd.files", "asrd.memory", "asrd.prompts"),
    ("asrd.config", "asrd.output"),
    ("asrd.models",),
    ("asrd.engine",),
    ("asrd.decoders",),
    ("asrd.trace",),
    ("asrd.arguments",),
    ("asrd.many", "asrd.viewer"),
    ("asrd.generate",),
    ("asrd.templates",),
    ("asrd",),  # the public names
    ("asrd.lab",),
    ("asrd.eval", "asrd.serve"),
    ("asrd.cli",),
    ("asrd.__main__",),
)
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}
FILES = sorted([*ROOT.glob("asrd/**/*.py"), *ROOT.glob("asrd_kernels/**/*.py")])
FOLDERS = sorted({file.parent for file in FILES if file.name != "__init__.py"} - {ROOT / "asrd"})


def part_of(module: str) -> str:
    """The part of `LAYERS` that a module belongs to."""
    return max((part for part in LEVELS if f"{module}.".startswith(f"{part}.")), key=len)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, packages: tuple[str, ...] = ("asrd", "asrd_kernels")) -> Iterator[str]:
    """Every module of these that is imported anywhere in a file, inside functions and for types included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in packages)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            for alias in node.names:
                below = ROOT / (node.module or "").replace(".", "/") / alias.name
                is_module = below.is_dir() or below.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def upward(module: str, source: str) -> list[str]:
    """The imports of a file that go up or sideways."""
    own = part_of(module)
    found = [(name, part_of(name)) for name in imports(ast.parse(source))]
    return [name for name, part in found if part != own and LEVELS[part] >= LEVELS[own]]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_module_imports_only_lower_layers(file: Path) -> None:
    assert upward(module_of(file), file.read_text(encoding="utf-8")) == []


def test_an_import_that_goes_up_is_found() -> None:
    assert upward("asrd.engine.step", "from asrd.decoders import AsrdDecoder") == ["asrd.decoders"]
    assert upward("asrd.models.adapter", "def f():\n    from asrd import cli") == ["asrd.cli"]
    assert upward("asrd_kernels.state", "import asrd.config") == ["asrd.config"]
    assert upward("asrd.cli.demo", "from asrd.engine import step") == []


def test_no_test_imports_a_benchmark() -> None:
    """What both need stands in tests/support."""
    read = {file: ast.parse(file.read_text(encoding="utf-8")) for file in ROOT.glob("tests/**/*.py")}
    assert len(read) > 100
    assert {file.name: found for file, tree in read.items() if (found := list(imports(tree, ("benchmarks",))))} == {}


def test_an_import_of_a_benchmark_is_found() -> None:
    tree = ast.parse("import benchmarks.step\ndef f():\n    from benchmarks.kernels import cost")
    assert list(imports(tree, ("benchmarks",))) == ["benchmarks.step", "benchmarks.kernels.cost"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_lists_its_modules(folder: Path) -> None:
    """`__init__` is the table of contents."""
    contents = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = [file.stem.removesuffix("_triton") for file in folder.glob("*.py") if file.name != "__init__.py"]
    names += [below.name for below in folder.iterdir() if (below / "__init__.py").is_file()]
    missing = sorted({name for name in names if name not in contents})
    assert not missing, f"{folder.name}/__init__.py does not mention {', '.join(missing)}"
