"""Hand-written problems in the shapes of the published benchmarks, and where the published ones are, if at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ITEMS = {
    "gsm8k_test.jsonl": [
        {"question": "Ann has 3 pens and buys 4 more. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
        {"question": "A hall has 40 rows of 25 seats. How many seats?", "answer": "40 * 25 = 1000 seats\n#### 1,000"},
        {"question": "Tom owes 5 coins and gets 2. What has he?", "answer": "2 - 5 = -3\n#### -3"},
        {"question": "A cup costs $2. What do 6 cost?", "answer": "6 * 2 = $12\n#### 12"},
    ],
    "math500.jsonl": [
        {"problem": "What is $1/4+1/4$?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": "\\frac{1}{2}"},
        {"problem": "Solve $x^2=9$, $x>0$.", "solution": "So $x=\\boxed{3}$.", "answer": "3"},
        {"problem": "Give the point.", "solution": "The point is $\\boxed{(1,2)}$.", "answer": "(1,2)"},
        {"problem": "What is $10^3$?", "solution": "It is $\\boxed{1000}$.", "answer": "1000"},
    ],
    "humaneval.jsonl": [
        {
            "task_id": f"Own/{number}",
            "prompt": f'def {name}(x):\n    """{about}"""\n',
            "canonical_solution": f"    return {body}\n",
            "test": f"def check(candidate):\n    assert candidate(3) == {value}\n",
            "entry_point": name,
        }
        for number, (name, about, body, value) in enumerate(
            [("twice", "Twice.", "2 * x", 6), ("square", "Squared.", "x * x", 9), ("text", "As text.", "str(x)", "'3'")]
        )
    ],
    "mbpp.jsonl": [
        {
            "task_id": number,
            "text": f"Write a function to add {add} to a number.",
            "code": f"def add(x):\r\n  return x + {add}",
            "test_list": [f"assert add(0) == {add}", f"assert add(1) == {add + 1}", f"assert add(-{add}) == 0"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for number, add in ((1, 1), (11, 2), (12, 3), (13, 4), (511, 5))
    ],
    "nq_open_dev.jsonl": [
        {"question": "who painted the mona lisa", "answer": ["Leonardo da Vinci", "Leonardo"]},
        {"question": "when did the war end", "answer": ["The 8th of May"]},
        {"question": "how many legs has an ant", "answer": ["six"]},
    ],
    "cnn_dailymail.jsonl": [
        {"article": "The mayor opened a bridge on Monday. It cost a lot.", "highlights": "Mayor opens costly bridge."},
        {"article": "Rain fell all week in the north. Roads closed.", "highlights": "Rain closes roads in the north."},
        {"article": "A club won its third cup. Fans sang.", "highlights": "Club wins third cup ."},
    ],
}  # fmt: skip


def write_items(folder: Path) -> Path:
    """The hand-written problems as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ITEMS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def published() -> Path | None:
    """The folder of the published files: $ASRD_EVAL_DATA, else ../shared/data beside the clone; None: not here."""
    given = os.environ.get("ASRD_EVAL_DATA")
    places = [Path(given)] if given else [Path(__file__).parents[3] / "shared" / "data"]
    return next((place for place in places if (place / "gsm8k_test.jsonl").is_file()), None)


def require_published() -> Path:
    """The folder of the published files, or the test is skipped."""
    folder = published()
    if folder is None:
        pytest.skip("the published benchmark files are not here: set ASRD_EVAL_DATA to their folder")
    return folder
