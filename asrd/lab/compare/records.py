"""Results on disk, one line per problem, and what they are results of.

A file is named after everything that may change a decode: the decoder's code and that of the engine, versions, weights,
device, attention, settings, seed and level. Its lines are used again only then. Seconds also depend on the number of
problems that decode at a time and on the number of threads; `timed` says these, and seconds of different ones are not
compared.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import asrd
import asrd_kernels
from asrd.decoders import find_decoder
from asrd.engine.decoder import Decoder
from asrd.lab.compare.plan import RunSpec
from asrd.models.extra_rows import implementation_of

Record = dict[str, Any]
"""A result: problem (its number), steps (forward passes), seconds, length and further counts; `timed` and `date` say
how and when."""

SHARED_CODE = ("engine", "models", "decoders", "generate.py", "many.py", "arguments.py", "settings.py", "config.py",
               "lab/tiny/task.py", "lab/tiny/language.py", "lab/tiny/batch.py", "lab/tasks.py",
               "lab/sudoku/puzzle.py", "lab/compare/grading.py",
               "lab/compare/measure.py", "lab/compare/prompts.py")  # fmt: skip


class Store:
    """The folder of records for one model. `fresh`: what is there is not used; each file is begun anew, once."""

    def __init__(self, folder: Path, model: nn.Module, context: dict[str, Any], fresh: bool = False) -> None:
        self.folder, self.fresh = folder, fresh
        self.context = {**context, **environment(model), "weights": fingerprint(model)}
        self._begun: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, run: RunSpec) -> RecordFile:
        """The records of a run."""
        decoder = find_decoder(run.decoder)
        file = RecordFile(self.folder / f"{run.key(**self.context, code=code_of(decoder))}.jsonl")
        if self.fresh and file.path not in self._begun:
            file.path.unlink(missing_ok=True)
        self._begun.add(file.path)
        return file


class RecordFile:
    """The records of one run, as JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, names: Iterable[str] = ()) -> dict[int, Record]:
        """By problem; each has the fields `names`. A last line cut short by an interruption is removed."""
        if not self.path.exists():
            return {}
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        expected = ("problem", "steps", "seconds", "length", *names)
        records = (self._checked(line, number, expected) for number, line in enumerate(whole.splitlines(), start=1))
        return {record["problem"]: record for record in records}

    def append(self, record: Record) -> None:
        """One more, on disk before the next begins."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _checked(self, line: bytes, number: int, names: Iterable[str]) -> Record:
        where, advice = f"{self.path}, line {number}", "remove the line, or decode anew with --fresh"
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON ({error}): {advice}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no record of a problem: {advice}")
        for name in names:
            value, low = record.get(name), int(name == "steps")
            if not isinstance(value, int | float) or not low <= value < math.inf:
                raise ValueError(f"{where} has {name}={value!r}, expected a number of at least {low}: {advice}")
        return record


def environment(model: nn.Module) -> dict[str, str]:
    """Versions, device, precision and attention, as far as they may change a decode."""
    weight = next(model.parameters())
    return {
        "asrd": asrd.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(weight.device) if weight.is_cuda else weight.device.type,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "attention": str(implementation_of(getattr(model, "config", None))),
    }


def timing_conditions(batch_size: int, model: nn.Module) -> str:
    """What seconds depend on besides the decode itself, in words."""
    found = environment(model)
    threads = torch.get_num_threads()
    return f"{batch_size} at a time, {threads} thread{'s' * (threads > 1)}, {found['device']}, {found['attention']}"


def now() -> str:
    """The date of a record."""
    return time.strftime("%Y-%m-%d %H:%M")


def reused_sentence(reused: Sequence[Record], total: int, runs: int) -> str:
    """How many of the results were on disk already, and since when; "" if none."""
    if not reused:
        return ""
    dates = sorted(str(record.get("date", "an unknown date")) for record in reused)
    since = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    which = f" in {runs} runs" if runs > 1 else ""
    return f"{len(reused)} of {total} problems{which} from records of {since}; --fresh decodes anew"


def code_of(decoder: type[Decoder]) -> str:
    """Identifies the code of a decoder: the files of its classes, and what all decoders run on."""
    digest = hashlib.sha256(_shared_code().encode())
    for one in decoder.__mro__[:-1]:
        source = _source(one)
        digest.update(source if source is not None else _bytecode(one))
    return digest.hexdigest()[:12]


def _source(one: type) -> bytes | None:
    try:
        return Path(inspect.getfile(one)).read_bytes()
    except (TypeError, OSError):  # defined in an interactive session
        return None


def _bytecode(one: type) -> bytes:
    found = []
    for name, value in sorted(vars(one).items()):
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        constant = sorted(value) if isinstance(value, frozenset) else value
        if code is not None or isinstance(constant, str | int | float | tuple | list | None):
            found.append(f"{name}: {repr(constant) if code is None else _code_text(code)}")
    return "\n".join(found).encode()


def _code_text(code: Any) -> str:
    constants = [_code_text(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


@cache
def _shared_code() -> str:
    root = Path(asrd.__file__).parent
    files = [file for name in SHARED_CODE for file in ([root / name] if name.endswith(".py") else _python(root / name))]
    digest = hashlib.sha256()
    for file in (*files, *_python(Path(asrd_kernels.__file__).parent)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _python(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def fingerprint(model: nn.Module) -> str:
    """Identifies the weights, so that records of another model of the same name are not used."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        if not weight.is_meta:
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
