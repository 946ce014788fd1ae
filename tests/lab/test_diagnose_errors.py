"""Error rate, long-span ratio and contamination from masks of known figures; annotators' files that do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asrd.lab.diagnose.annotations import INSTRUCTIONS, read_annotations, tasks
from asrd.lab.diagnose.errors import annotated_errors, count_errors, figures

LONG, SHORT = [True] * 15, [True] * 14


def test_a_run_of_fifteen_is_long_and_one_of_fourteen_is_not() -> None:
    mask = [*LONG, False, *SHORT, False, False]
    found = count_errors(mask)
    assert (found.length, found.errors, found.long_errors) == (32, 29, 15)
    broken = [*[True] * 10, False, *[True] * 10]
    assert count_errors(broken).long_errors == 0


def test_the_figures_are_ratios_of_sums_over_texts() -> None:
    texts = [
        count_errors([*LONG, *[False] * 5], anchors=[0, 1, 19], right=False),
        count_errors([False] * 80, anchors=[5], right=True),
    ]
    found = figures("asrd", 2, texts)
    assert found.error_rate.value == pytest.approx(15 / 100)
    assert found.long_span.value == 1.0
    assert found.contamination.value == pytest.approx(2 / 4)
    assert found.anchors.value == pytest.approx(2.0)
    assert found.accuracy.value == 0.5
    assert found.error_rate.low <= 0.15 <= found.error_rate.high
    assert found.error_rate.high == pytest.approx(15 / 20), "a set of the first text alone is drawn often enough"


def test_what_was_not_recorded_is_nan() -> None:
    found = figures("standard", None, [count_errors([False] * 8), count_errors([False] * 8)])
    assert found.error_rate.value == 0.0
    assert 0 < found.error_rate.high < 0.3, "the interval of 0 of 16 has a width"
    for estimate in (found.long_span, found.contamination, found.anchors, found.accuracy):
        assert math.isnan(estimate.value)


def content(**changes: Any) -> dict[str, Any]:
    sample = {
        "id": "gsm8k/38", "method": "asrd", "window": 2, "correct": False, "tokens": list("abcdef"), "anchors": [0, 3],
        "error_mask": [0, 0, 1, 1, 0, 0], "error_spans": [{"start": 2, "end": 4, "type": "sum", "rationale": "is 7"}],
    }  # fmt: skip
    return {"version": 1, "samples": [sample | changes]}


def write(tmp_path: Path, what: Any) -> Path:
    path = tmp_path / "annotated.json"
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return path


def test_an_annotators_file_gives_one_line_for_each_method_and_window(tmp_path: Path) -> None:
    file = content()
    file["samples"] += [file["samples"][0] | {"id": "other", "error_mask": [0] * 6, "error_spans": [], "correct": True}]
    file["samples"] += [{"id": "gsm8k/38", "method": "standard", "error_mask": [1, 1, 0]}]
    asrd, standard = annotated_errors(read_annotations(write(tmp_path, file)))
    assert (asrd.method, asrd.window, asrd.texts) == ("asrd", 2, 2)
    assert asrd.error_rate.value == pytest.approx(2 / 12)
    assert asrd.contamination.value == pytest.approx(1 / 4)
    assert asrd.accuracy.value == 0.5
    assert (standard.method, standard.window) == ("standard", None)
    assert math.isnan(standard.contamination.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("{", "is not JSON"),
        ([], "expected an object with \"version\": 1, found 'list'"),
        ({"version": 2}, "found 2"),
        ({"version": 1, "samples": []}, '"samples" must be a list of at least one'),
        ({"version": 1, "samples": ["x"]}, r"samples\[0\] must be an object"),
        (content(id=""), '"id" must be text'),
        (content(method=None), '"method" must be text, not None'),
        (content(correct="yes"), "\"correct\" must be true or false, not 'yes'"),
        (content(window=0), '"window" must be an integer of at least 1'),
        (content(error_mask=[0, 2]), '"error_mask" must be a list of 0 and 1'),
        (content(error_mask=[]), '"error_mask" must be a list of 0 and 1'),
        (content(error_mask=None), '"error_mask" must be a list of 0 and 1.*null'),
        (content(error_mask=[0, 1]), '"error_mask" has 2 entries, "tokens" 6'),
        (content(error_mask=[0, 0, 1, 0, 0, 0]), 'token 3 is inside "error_spans" but 0 in "error_mask"'),
        (content(error_mask=[1, 0, 1, 1, 0, 0]), 'token 0 is outside "error_spans" but 1 in "error_mask"'),
        (content(error_spans=[{"start": 2, "end": 9}]), '"start" < "end" <= 6'),
        (content(error_spans=[[2, 4]]), '"start" < "end" <= 6'),
        (content(anchors=[6]), '"anchors" must be token numbers from 0 to 5'),
        (content(anchors=[1, 1]), "names a token twice"),
        ({"version": 1, "samples": content()["samples"] * 2}, "occurs twice for method 'asrd', window 2"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path: Path, what: Any, message: str) -> None:
    path = write(tmp_path, what)
    with pytest.raises(ValueError, match=message) as caught:
        read_annotations(path)
    assert "annotated.json" in str(caught.value)


def test_the_instructions_say_what_to_mark_and_what_to_return() -> None:
    for kind in ("code", "math"):
        file = tasks(kind, {}, [{"id": "1"}])
        assert file["version"] == 1
        for word in ("error_spans", "error_mask", "correct", "start", "end", "rationale"):
            assert f'"{word}"' in file["instructions"]
    assert INSTRUCTIONS["code"] != INSTRUCTIONS["math"]
    with pytest.raises(ValueError, match="kind='poetry': expected one of code, math"):
        tasks("poetry", {}, [])
