"""Files that are written whole or not at all, and checked before work begins whose result they are to take."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes its place when the context ends, and is removed if it fails.

    A link is followed. A device or pipe is refused: to take its place would be to remove it.
    """
    target = Path(path).resolve()
    _require_regular(target, str(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask)
        beside.replace(target)
    except OSError as error:
        raise OSError(f"{target} cannot be written: {error.strerror or error}; what was there is unchanged") from error
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Replace the content of a file, in UTF-8."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def read_text(path: str | Path) -> str:
    """A text file in UTF-8, with or without a byte order mark."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.object[error.start]:#x} at {error.start}") from None


def require_text(text: str, what: str) -> None:
    """Raise ValueError if a string holds bytes that were not UTF-8, as those of a command line or a pipe may."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not UTF-8 text: character {error.start + 1} is {text[error.start]!a}") from None


def check_file(path: Path, option: str) -> None:
    """Raise ValueError if a file cannot be written there."""
    if path.is_dir() or not path.name:
        raise ValueError(f"{option} {path} is a folder: expected the name of a file")
    _require_regular(path, f"{option} {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    _check_writable(path.parent, f"{option} {path}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: permission denied")


def check_folder(path: Path, option: str) -> None:
    """Raise ValueError if files cannot be written to that folder, which need not exist."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {path}: {existing} is a file, expected a folder")
    _check_writable(existing, f"{option} {path}")


def _require_regular(path: Path, what: str) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"{what} is a device, pipe or folder: expected the name of a file")


def _check_writable(folder: Path, what: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{what}: {folder} cannot be written to: {error.strerror or error}") from None
