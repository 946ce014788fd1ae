"""Finds, in source code, the calls by which a host reads from a device or sends to it.

A dispatch mode sees neither `.tolist()` nor `.cpu()`, so the source itself is searched: methods and functions of
PyTorch by name, and Python's bool, int and float of anything but a constant.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

READS = {
    "item", "tolist", "to_list", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    "bincount", "is_nonzero", "equal", "allclose", "synchronize", "print",
}  # fmt: skip
SENDS = {"tensor", "as_tensor", "from_numpy", "pin_memory"}
CONVERSIONS = {"bool", "int", "float"}


class Found(NamedTuple):
    """A call, and the function or class in which it stands."""

    where: str  # path::Class.function
    call: str


def host_calls(path: str, source: str) -> list[Found]:
    """All such calls in a file."""
    found: list[Found] = []

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.Call) and (call := _suspicious(node)):
            found.append(Found(f"{path}::{'.'.join(scope)}", call))
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(ast.parse(source), ())
    return found


def in_files(root: Path, paths: list[Path]) -> list[Found]:
    """All such calls in some files, named from the root."""
    return [call for path in paths for call in host_calls(path.relative_to(root).as_posix(), path.read_text("utf-8"))]


def _suspicious(call: ast.Call) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if isinstance(call.func, ast.Attribute) and name in READS | SENDS:
        return name
    plain = all(isinstance(argument, ast.Constant) for argument in call.args)
    return name if isinstance(call.func, ast.Name) and name in CONVERSIONS | {"print"} and not plain else ""
