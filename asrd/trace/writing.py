"""`recording`: writes a decode's trace to memory, to a file line by line, or to both."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from asrd.engine.batch import Batch
from asrd.trace.read import Trace
from asrd.trace.record import Recorder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

as_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Recording:
    """A running recorder; `trace` is available when it has finished, if it is kept in memory."""

    def __init__(self, recorder: Recorder, records: list[dict[str, Any]] | None) -> None:
        self.recorder, self._records = recorder, records

    @property
    def trace(self) -> Trace | None:
        """The trace, or None if it is not kept in memory."""
        return None if self._records is None else Trace(self._records)


@contextmanager
def recording(batch: Batch, model: Any, tokenizer: Any, path: str | Path | None, keep: bool) -> Iterator[Recording]:
    """Record the decode in this context; the file is opened and its first line written on entry."""
    records: list[dict[str, Any]] = []
    with ExitStack() as open_things:
        file = None if path is None else open_things.enter_context(_written_alone(path))

        def write(record: dict[str, Any]) -> None:
            if keep:
                records.append(record)
            if file is not None:
                file.write(as_line(record) + "\n")

        recorder = open_things.enter_context(Recorder(batch, name_of(model), write, tokenizer))
        yield Recording(recorder, records if keep else None)


@contextmanager
def _written_alone(path: str | Path) -> Iterator[TextIO]:
    """The file, empty, for one decode at a time; an OSError names it."""
    try:
        with open(path, "a", encoding="utf-8", buffering=1) as file:
            _lock(file, path)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.truncate(0)
            yield file
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            raise OSError(error.errno, f"the trace cannot be written: {error.strerror}", str(path)) from error
        raise


def _lock(file: TextIO, path: str | Path) -> None:
    """Raise ValueError if another decode, here or in another process, writes to it."""
    if fcntl is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"trace={str(path)!r}: another decode is writing to it; give each its own file") from None
    except OSError:  # a file system without locks
        return


def name_of(model: Any) -> str:
    """The path or id that the model was loaded from, else its class; a packaged model's short name."""
    source = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return Path(source).name if source.startswith("/") else source or type(model).__name__
