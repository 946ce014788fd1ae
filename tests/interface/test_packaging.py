"""What a user gets from an install: types, no need of Triton or flash-attn, nothing probed, imports one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
from importlib import metadata, resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_both_packages_are_typed() -> None:
    for package in ("asrd", "asrd_kernels"):
        assert resources.files(package).joinpath("py.typed").is_file()


def test_the_console_script_is_registered() -> None:
    scripts = {entry.name: entry.value for entry in metadata.entry_points(group="console_scripts")}
    assert scripts["asrd"] == "asrd.cli:main"


@pytest.mark.slow
def test_import_and_decode_work_without_triton_flash_attention_and_what_the_command_line_draws_with() -> None:
    program = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
absent = ("triton", "flash_attn", "matplotlib", "rich", "pandas")
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name.split(".")[0] in absent else find(name, *rest))
sys.path.insert(0, sys.argv[1])
import torch, asrd
try:
    import triton
    sys.exit("triton can still be imported")
except ImportError:
    pass
from tests.support.table_models import make_llama
print(asrd.fast_generate(make_llama(seed=0), torch.tensor([[2, 3]]), max_new_tokens=4).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "tests")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[1, 6]" in done.stdout


def imports_of(path: Path) -> set[str]:
    """The modules that a file names in its imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "asrd_kernels").rglob("*.py")), ids=lambda p: p.name)
def test_the_operations_know_tensors_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"asrd", "transformers", "tokenizers"}


@pytest.mark.parametrize("path", sorted((ROOT / "asrd").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_flash_attention_is_detected_and_never_imported(path: Path) -> None:
    assert not {name for name in imports_of(path) if name.split(".")[0] == "flash_attn"}


def test_every_dependency_is_pinned() -> None:
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    needed = [r for r in metadata.requires("asrd") or [] if "extra" not in r or "test" in r]
    names = {re.split(r"[;<>=\[]", r)[0].strip().lower().replace("_", "-") for r in needed}
    assert names - pinned == set()


@pytest.mark.slow
def test_the_source_distribution_has_what_its_tests_need(tmp_path: Path) -> None:
    command = ["setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = [file for folder in ("tests", "benchmarks", "docs") for file in (ROOT / folder).rglob("*.*")]
    files += [file for folder in ("asrd", "asrd_kernels") for file in (ROOT / folder).rglob("*.*")]
    files += [ROOT / name for name in ("README.md", "LICENSE", "CONTRIBUTING.md", "constraints.txt", ".pytest.ini")]
    wanted = {f.relative_to(ROOT).as_posix() for f in files if f.is_file() and f.parent.name != "__pycache__"}
    assert wanted - packed == set()
    assert not {name for name in packed if name.endswith(".pyc")}
