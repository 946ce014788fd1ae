"""`Finding`: what one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "not checked"]


@dataclass(frozen=True)
class Finding:
    """`failed`: decoding will not work, or be wrong. `warning`: it works, but not everything, or not as well."""

    check: str
    status: Status
    text: str

    def as_row(self) -> dict[str, Any]:
        return {"check": self.check, "status": self.status, "text": self.text}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
