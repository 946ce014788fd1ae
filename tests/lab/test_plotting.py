"""Plots and tables can be read: colours differ for every kind of colour vision, axes have plain numbers, labels do not
overlap, both backgrounds are written, and no table is cut off."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from asrd.cli import main, parser
from asrd.decoders import DECODERS
from asrd.engine.observers.inspector import PARTS
from asrd.lab.compare.plots import draw, draw_frontier, varied
from asrd.lab.compare.report import Summary, read_csv, save
from asrd.lab.plotting import MARKERS, THEMES, Label, figure, log_axis, place_labels, plain
from asrd.lab.tables import counted, print_table, split
from asrd.viewer import palette

ROOT = Path(__file__).parents[2]
# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen without one kind of cone.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# Ottosson's OKLab: linear RGB to cone responses, and their cube roots to lightness and two opponent colours.
CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
         [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
OPPONENTS = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
             [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip
GROUPS = {"decoders": palette.DECODERS, "parts": palette.PARTS, "series": dict(enumerate(palette.SERIES))}


def linear(colour: str) -> torch.Tensor:
    levels = torch.tensor([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)], dtype=torch.float64)
    return torch.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def seen(colour: str, vision: str) -> torch.Tensor:
    """OKLab of a colour as it is seen."""
    light = (torch.tensor(VISION[vision], dtype=torch.float64) @ linear(colour)).clamp(0, 1)
    cones = torch.tensor(CONES, dtype=torch.float64) @ light
    return torch.tensor(OPPONENTS, dtype=torch.float64) @ cones ** (1 / 3)


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of luminances."""
    weights = torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    high, low = sorted((float(weights @ linear(colour)) + 0.05 for colour in (one, other)), reverse=True)
    return high / low


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("group", GROUPS)
def test_colours_differ_for_every_kind_of_colour_vision(group: str, vision: str, theme: Any) -> None:
    colours: Mapping[Any, palette.Colour] = GROUPS[group]
    for one, other in itertools.combinations(colours, 2):
        apart = (seen(theme.pick(colours[one]), vision) - seen(theme.pick(colours[other]), vision)).norm()
        assert apart > 0.08, f"{one} and {other} are {apart:.3f} apart"


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_colours_stand_out_from_the_background_and_text_can_be_read(theme: Any) -> None:
    for name in (*palette.DECODERS, "a decoder of the user's own"):
        assert contrast(theme.decoder(name), theme.paper) > 2
        assert contrast(theme.as_text(theme.decoder(name)), theme.paper) > 4.5
    assert contrast(theme.ink, theme.paper) > 12
    assert contrast(theme.soft, theme.paper) > 4.5


def test_every_decoder_and_part_has_a_colour_and_every_decoder_a_marker() -> None:
    assert set(DECODERS) <= set(palette.DECODERS) == set(MARKERS)
    assert set(PARTS) < set(palette.PARTS)
    assert len(set(MARKERS.values())) == len(MARKERS)


@pytest.mark.parametrize(("low", "high"), [(21.4, 96.0), (10.5, 96.0), (128, 1024), (1, 16), (0.04, 55), (7, 7)])
def test_log_axes_have_plain_numbers_and_both_ends(low: float, high: float) -> None:
    made, panels = figure(3)
    log_axis(panels[0, 0].xaxis, [low, high])
    ticks = panels[0, 0].get_xticks().tolist()
    assert {low, high} <= set(ticks)
    assert len(ticks) <= 9
    texts = [plain(tick) for tick in ticks]
    assert not any("e" in text or "^" in text for text in texts)
    assert len(set(texts)) == len(texts)
    made.draw_without_rendering()
    assert [label.get_text() for label in panels[0, 0].get_xticklabels()] == texts
    assert not panels[0, 0].get_xticks(minor=True).size


def test_labels_avoid_each_other_and_the_lines() -> None:
    made, panels = figure(4, width=5)
    panel = panels[0, 0]
    lines = [[(x / 10, 0.1 * number + 0.3 * math.sin(x / 3)) for x in range(30)] for number in range(4)]
    for line in lines:
        panel.plot(*zip(*line, strict=True))
    made.draw_without_rendering()
    place_labels(panel, [Label(f"line {number}", line, "black") for number, line in enumerate(lines)], lines)
    boxes = [text.get_window_extent(made.canvas.get_renderer()) for text in panel.texts]  # type: ignore[attr-defined]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    spots = [panel.transData.transform(spot) for line in lines for spot in line]
    assert not any(box.contains(*spot) for box in boxes for spot in spots)


def test_an_optional_label_is_left_out_where_there_is_no_place() -> None:
    made, panels = figure(2, width=2)
    made.draw_without_rendering()
    crowd = [Label("a long label", [(0.5, 0.5)], "black", optional=True) for _ in range(60)]
    place_labels(panels[0, 0], crowd, [])
    assert 1 <= len(panels[0, 0].texts) < 60


# --- comparisons -----------------------------------------------------------------------------------------------------


def summary(decoder: str, accuracy: float, forwards: float, **settings: Any) -> Summary:
    rest = dict.fromkeys(("tokens_per_forward", "revoked", "anchors", "error_rate"), 1.0)
    label = " ".join([decoder, *(f"{name}={value}" for name, value in settings.items())])
    return Summary(
        label=label, decoder=decoder, settings=settings, n=64, accuracy=accuracy, low=accuracy - 0.1,
        high=accuracy + 0.1, forwards=forwards, seconds=0.1, speed=None, precision=None, recall=0.25,
        contamination=None, long_span=None, **rest,
    )  # fmt: skip


TINY = [
    summary("standard", 0.85, 96.0),
    *(summary("threshold", a, f, threshold=t) for t, a, f in ((0.5, 0.5, 21.0), (0.7, 0.74, 32.0), (0.9, 0.84, 38.0))),
    *(summary("loo", a, f, factor=t) for t, a, f in ((2.0, 0.86, 17.0), (3.0, 0.84, 12.4))),
    *(summary("of my own", a, f, bound=t) for t, a, f in ((2.0, 0.7, 18.0), (3.0, 0.6, 13.0))),
]


def test_the_frontier_is_written_for_both_backgrounds_from_csv_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("tiny", "tiny-plain"):
        save(TINY, tmp_path / model, {"command": "", "model": model})
        assert read_csv(tmp_path / model / "results.csv") == {model: TINY}
    command = ["compare", "--from", str(tmp_path / "tiny" / "results.csv")]
    command += ["--from", str(tmp_path / "tiny-plain" / "results.csv"), "--out", str(tmp_path / "curves.png")]
    assert main(command) == 0
    assert "threshold threshold=0.7" in capsys.readouterr().out
    light, dark = (imread(tmp_path / name) for name in ("curves.png", "curves-dark.png"))
    assert light.shape == dark.shape
    assert light[0, 0, :3].min() > 0.95
    assert dark[0, 0, :3].max() < 0.15


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["--out", "x.jpg"], "", "expected a file that ends in .png"),
        ([], "a,b\n1,2\n", "line 2: expected the columns of results.csv"),
        ([], "label\n", "has no rows"),
    ],
)
def test_files_that_cannot_be_plotted_are_refused_in_one_line(
    arguments: list[str], content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.csv").write_text(content)
    out = [] if arguments else ["--out", str(tmp_path / "x.png")]
    assert main(["compare", "--from", str(tmp_path / "results.csv"), *arguments, *out]) == 2
    assert message in capsys.readouterr().err


def test_points_are_labelled_with_the_one_setting_that_a_curve_varies() -> None:
    assert varied([s for s in TINY if s.decoder == "threshold"]) == "threshold"
    assert varied(TINY[:1]) is None
    assert varied([summary("asrd", 0.5, 9.0, alpha=1, beta=1), summary("asrd", 0.5, 9.0, alpha=2, beta=2)]) is None


def test_decoders_that_coincide_can_be_drawn(tmp_path: Path) -> None:
    same = [summary(name, 1.0, 20.0, threshold=0.5) for name in ("threshold", "asrd", "wino")]
    assert [file.name for file in draw(same, tmp_path / "same.png", "one point")] == ["same.png", "same-dark.png"]
    assert draw_frontier({"a": same, "b": TINY}, tmp_path / "two.png", "two models")


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, *range(76, 90), 138, 200])
def test_no_table_is_cut_off(width: int) -> None:
    headings = ["decoder", *(f"heading {number}" for number in range(12))]
    rows = [["threshold=0.7", *(f"{number}.{row} (0.1 - 0.9)" for number in range(12))] for row in range(3)]
    out = Console(width=width, file=StringIO())
    print_table(out, headings, rows, "a title")
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for text in (*headings, *itertools.chain(*rows), "a title"):
        assert text in shown


def test_one_is_no_plural() -> None:
    assert [counted(number, "hard problem") for number in (0, 1, 2)] == [
        "0 hard problems",
        "1 hard problem",
        "2 hard problems",
    ]


def test_every_part_of_a_table_begins_with_the_columns_that_name_its_rows() -> None:
    assert split([10, 5, 20, 20, 20], 200, 2) == [[0, 1, 2, 3, 4]]
    assert split([10, 5, 20, 20, 20], 70, 2) == [[0, 1, 2, 3], [0, 1, 4]]
    assert split([10, 5, 20, 20, 20], 1, 2) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


# --- the pictures of the documentation -------------------------------------------------------------------------------


def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_every_picture_of_the_docs_has_a_command() -> None:
    known = set(pictures().PICTURES)
    found = {file.stem for file in (ROOT / "docs").glob("*.png")}
    assert known <= found <= known | {f"{name}-dark" for name in known}


@pytest.mark.parametrize("name", pictures().PICTURES)
def test_a_pictures_command_exists(name: str) -> None:
    words = pictures().command_of(name)
    if words[0] == "asrd":
        parser().parse_args(words[1:])
    else:
        assert words[:2] == ["python", "-m"]
        assert importlib.util.find_spec(words[2]) is not None
