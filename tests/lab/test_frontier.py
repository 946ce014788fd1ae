"""The frontier: figures worked out by hand, files read back as written, page and plot from them alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asrd.lab.compare import RunSpec
from asrd.lab.compare.frontier import (
    Setting,
    aup,
    difference,
    holm,
    join_problems,
    page,
    read_problems,
    save_problems,
    sign_test,
)
from asrd.lab.compare.presets import PRESETS
from asrd.lab.tiny.task import held_out


def setting(label: str, right: list[int], passes: int, tokens: int = 60) -> Setting:
    n = len(right)
    return Setting(label, right, [passes] * n, [tokens] * n, [10 * passes] * n, [0] * n)


def of_accuracy(percent: int, passes: int) -> Setting:
    return setting("x", [int(n < percent) for n in range(100)], passes)


def test_aup_is_the_weighted_area_of_d3llm() -> None:
    slow, fast, lost = of_accuracy(80, 60), of_accuracy(78, 20), of_accuracy(70, 10)  # 1, 3 and 6 tokens per pass
    assert aup([slow], 80) == pytest.approx(80)
    weight = math.exp(-3 * (1 - 78 / 80))
    assert aup([fast, slow], 80) == pytest.approx(80 + 2 * (80 + 78 * weight) / 2)
    assert aup([lost, fast, slow], 80) == aup([slow, fast], 80), "more than 5 points below the slowest does not count"
    assert aup([slow], 90) == pytest.approx(80), "the first point is not weighted"
    assert aup([slow, fast], 90) < aup([slow, fast], 80)


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (9, 2, 134 / 2048)])
def test_the_sign_test_is_the_two_sided_binomial(wins: int, losses: int, p: float) -> None:
    assert sign_test(wins, losses) == sign_test(losses, wins) == pytest.approx(p)


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.02, 0.005, 0.9, 0.5]) == pytest.approx([0.06, 0.02, 1.0, 1.0])
    assert holm([]) == []
    loo, peer = setting("loo a=1", [1] * 8, 10), setting("peer a=1", [0] * 8, 10)
    other = setting("other a=1", [1] * 8, 10)
    text = page({"a": [loo, peer, other]}, "command")
    assert "| 8 : 0 | 0.016 |" in text, "two comparisons: twice 2 / 256"
    assert "| 0 : 0 | 1 |" in text


def test_files_of_one_model_are_joined(tmp_path: Path) -> None:
    loo, factor = (RunSpec(name, {"factor": 2.0}, ("factor",)) for name in ("loo", "factor"))
    first, second, into = (tmp_path / name for name in ("a.csv", "b.csv", "all.csv"))
    save_problems([loo], [records(True, 10)[:2]], first)
    save_problems([factor, loo], [records(False, 12), records(True, 10)[1:]], second)
    join_problems([first, second], into)
    join_problems([into, second], into)
    ours, peer = read_problems(into)
    assert (ours.label, ours.problems, peer.problems) == ("loo factor=2.0", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert (ours.edited, peer.right, peer.passes) == ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 0], [12] * 6)
    save_problems([loo], [records(True, 11)[:1]], second)
    with pytest.raises(ValueError, match=r"loo factor=2.0\|passes is 11, 10 in a file before"):
        join_problems([first, second], into)


def test_a_peer_at_other_passes_is_mixed_from_its_neighbours() -> None:
    ours = setting("loo", [1, 1, 1, 1], 15)
    few, many = setting("peer a=1", [0, 0, 0, 0], 10), setting("peer a=2", [1, 1, 1, 0], 30)
    found = difference(ours, [many, few])
    assert found.forwards == pytest.approx(15)
    assert found.mean == pytest.approx(100 * (1 - 0.25 * 0.75))
    assert found.peer == "peer a=1 / a=2"
    assert found.wins + found.losses <= 4
    assert found.losses == 0
    for passes, label in ((5, "peer a=1"), (10, "peer a=1"), (40, "peer a=2")):
        nearest = difference(setting("loo", [1, 1, 1, 1], passes), [few, many])
        assert nearest.peer == label
    assert (nearest.wins, nearest.losses, nearest.mean) == (1, 0, 25.0)


def records(right: bool, steps: int) -> list[dict[str, Any]]:
    return [{"problem": n, "right": right or n == 3, "steps": steps, "length": 60, "rows": 9 * steps, "edited": n}
            for n in range(6)]  # fmt: skip


@pytest.mark.slow
def test_page_and_plot_are_made_from_the_files_alone(tmp_path: Path) -> None:
    runs = [RunSpec("loo", {"factor": 2.0}, ("factor",)), RunSpec("factor", {"factor": 2.0}, ("factor",))]
    for model in ("a", "b"):
        save_problems(runs, [records(True, 10), records(False, 10)], tmp_path / f"frontier-{model}.csv")
    ours, peer = read_problems(tmp_path / "frontier-a.csv")
    assert (ours.label, ours.decoder, ours.edited, ours.rows[0]) == ("loo factor=2.0", "loo", [0, 1, 2, 3, 4, 5], 90)
    assert (ours.accuracy, peer.accuracy, peer.tokens_per_forward) == (1.0, 1 / 6, 6.0)
    files = sorted(map(str, tmp_path.glob("*.csv")))
    subprocess.run(
        [sys.executable, "-m", "asrd.lab.compare.frontier", *files, "--out", str(tmp_path / "out")], check=True
    )
    text = (tmp_path / "out" / "frontier.md").read_text()
    assert text.count("| loo factor=2.0 | 10.0 | factor factor=2.0 | 10.0 | 6 | +83.3 ± 16.7 | 5 : 0 | 0.062 |") == 2
    assert "| decoder | a | b |" in text
    assert (tmp_path / "out" / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_the_preset_covers_every_decoder_and_caches_all_that_can() -> None:
    (table,) = PRESETS["frontier"]
    runs = table.runs({})
    assert {run.decoder for run in runs} == {"factor", "loo", "threshold", "asrd", "wino", "standard", "saber"}
    for decoder in ("factor", "loo"):
        assert [r.settings["factor"] for r in runs if r.decoder == decoder] == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert all((run.settings["kv_cache"] is None) == (run.decoder == "saber") for run in runs)


def test_problems_from_any_number_on_are_the_same_problems() -> None:
    assert [p.seed for p in held_out(3, first=2)] == [p.seed for p in held_out(5)][2:]


def test_settings_run_on_different_problems_are_compared_on_those_of_both(tmp_path: Path) -> None:
    runs = [RunSpec("loo", {"factor": 2.0}, ("factor",)), RunSpec("factor", {"factor": 2.0}, ("factor",))]
    save_problems(runs, [records(True, 10), records(False, 10)[2:5]], tmp_path / "frontier-a.csv")
    ours, peer = read_problems(tmp_path / "frontier-a.csv")
    assert (len(ours.right), peer.problems, peer.right) == (6, [2, 3, 4], [0, 1, 0])
    found = difference(ours, [peer])
    assert (found.wins, found.losses) == (2, 0)
    assert found.mean == pytest.approx(200 / 3)
    text = page({"a": [ours, peer], "b": [ours, peer]}, "command")
    assert "| loo factor=2.0 | 10.0 | factor factor=2.0 | 10.0 | 6 | +66.7 ± 21.1 | 4 : 0 | 0.12 |" in text
    assert "3 to 6 held-out problems" in text
