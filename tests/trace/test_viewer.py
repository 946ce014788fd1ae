"""The viewer in a real browser: it shows the states of the trace, can be controlled, and runs only its own code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli import main
from asrd.trace import Trace
from asrd.viewer import page
from asrd.viewer.palette import PARTS
from tests.support.browser import chromium
from tests.support.colours import VISION, distance
from tests.support.table_models import TableModel, TableSpec

pytestmark = pytest.mark.slow_after(1)  # each at one size of the screen, the others in the slow tier

ATTACK = " </script><img src=x onerror=window.hacked=1>"
WORDS = [" pad", " .", " ann", " has", " 12", "\nshells", ATTACK, " &lt;b&gt;", " so", "", " <!--", " mask"]
SEED = 2
ROLES = ("mask", "draft", "pending", "anchor", "revoked", "final")


CELL = "document.getElementById('tok-0-{}')"


class Tokenizer:
    """As much of a tokenizer as a trace asks for."""

    all_special_ids = (0, 1, 11)

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(WORDS)}

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[token] for token in ids)


def a_trace(decoder: str, rows: int = 1, **settings: Any) -> Trace:
    spec = TableSpec(seed=SEED, eos_bonus=0.5)
    prompt = torch.tensor([[2, 3, 6], [5, 4, 8]])[:rows]
    options = {"max_new_tokens": 22, "block_length": 8, "early_stop": True} | settings
    out = asrd.fast_generate(
        TableModel(spec), prompt, decoder=decoder, tokenizer=Tokenizer(), return_trace=True, **options
    )
    return out.trace


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    found = [a_trace("asrd", threshold=0.4), a_trace("standard")]
    seen = {role.value for canvases in found[0].replay() for role in canvases[0].roles}
    assert seen == set(ROLES), "a trace to test with must have every role"
    assert ATTACK in found[0].texts.values()
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


Opener = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Opens a page from disk; in the end, no test may have left an error on the console or asked the network."""
    faults: list[str] = []
    contexts = []

    def opened(traces: list[Trace], grades: tuple[str, ...] = (), **options: Any) -> Any:
        path = tmp_path / "trace.html"
        path.write_text(page(traces, grades), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda r: None if r.url == path.as_uri() else faults.append(f"asked for {r.url}"))
        tab.goto(path.as_uri())
        tab.locator(".panel").first.wait_for()
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def canvas(tab: Any, panel: int = 0) -> list[tuple[str, str]]:
    """(role, text) of each position on the page."""
    found = tab.evaluate(
        f"[...document.querySelectorAll('#text-{panel} .tok')].map(t => [t.dataset.role, t.textContent])"
    )
    return [(role, text) for role, text in found]


def expected(trace: Trace) -> list[list[tuple[str, str]]]:
    """The same from the replay in Python, before the first step and after each."""
    shown, before = [], [trace.header.mask] * trace.header.length
    fill = next((row.fill[0] for step in trace.steps for row in step.rows if row.fill), trace.header.length)
    for number, canvases in enumerate(trace.replay()):
        line = []
        for position, (token, role) in enumerate(zip(canvases[0].tokens, canvases[0].roles, strict=True)):
            if number == len(trace.steps) and position >= fill:
                line.append(("padding", ""))
            elif role == "mask":
                line.append(("mask", ""))
            else:
                text = trace.texts[before[position] if role == "revoked" else token].strip()
                line.append((role.value, text or "␣"))
        shown.append(line)
        before = list(canvases[0].tokens)
    return shown


def clock(tab: Any) -> str:
    return str(tab.locator("#clock").text_content())


def test_every_step_shows_what_the_replay_in_python_says(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces)
    wanted = [expected(trace) for trace in traces]
    ticks = max(len(trace.steps) for trace in traces)
    tab.keyboard.press("Home")
    for tick in range(ticks + 1):
        assert clock(tab) == f"{tick} / {ticks}"
        for panel, states in enumerate(wanted):
            assert canvas(tab, panel) == states[min(tick, len(states) - 1)], f"panel {panel}, forward pass {tick}"
        tab.keyboard.press("ArrowRight")
    counts = traces[0].steps[-1].rows[0].counts
    for name, value in (("anchors", counts[2]), ("revoked", counts[1])):
        assert tab.locator(f".panel >> nth=0 >> .counter-{name} dd").text_content() == str(value)


def test_an_edited_token_shows_before_and_after_and_the_witness_that_contradicted_it(show: Opener) -> None:
    trace = a_trace("loo", factor=3.0, early_stop=False)
    edits = [(step.number, *step.rows[0].edit[0]) for step in trace.steps if step.rows[0].edit]
    assert edits, "a trace to test with must have an edit"
    number, position, token = edits[0]
    before = [list(canvases[0].tokens) for canvases in trace.replay()][number - 1][position]
    shown = {token: WORDS[token].strip().replace("\n", "⏎") or "␣" for token in (before, token)}
    tab, wanted = show([trace]), expected(trace)
    tab.keyboard.press("Home")
    for tick in range(len(trace.steps) + 1):
        assert canvas(tab) == wanted[tick], f"forward pass {tick}"
        if tick == number:
            cell = tab.locator(f"#tok-0-{position}")
            assert cell.get_attribute("data-before") == shown[before]
            assert shown[before] in tab.evaluate(f"getComputedStyle({CELL.format(position)}, '::before').content")
            cell.click()
            history = tab.locator("#history").text_content()
            assert "contradicted by its witness" in history
            assert f"edited: {shown[before]} → {shown[token]}" in history
            tab.evaluate("document.activeElement.blur()")  # so that the arrow keys move the clock again
        tab.keyboard.press("ArrowRight")
    assert tab.locator(f"#tok-0-{position}").get_attribute("data-before") is None or edits[-1][0] == len(trace.steps)
    assert tab.locator(".counter-edited dd").text_content() == str(sum(len(s.rows[0].edit) for s in trace.steps))
    contradicted = sum(len(step.rows[0].contradict) for step in trace.steps)
    assert tab.locator(".counter-contradicted dd").text_content() == str(contradicted)
    assert tab.locator(".legend .tok[data-role=edited]").count() == 1
    pixel = f"viewer.panels[0].heatmap.picture.getContext('2d').getImageData({position}, {number - 1}, 1, 1).data"
    assert tab.evaluate(f"Array.from({pixel})") == tab.evaluate("rgb(colour('heat-edited'))")


def test_the_panel_of_wino_counts_what_it_revoked(show: Opener) -> None:
    """Its shadow is a witness, too, but leads to no edits."""
    trace = a_trace("wino", threshold=0.3, threshold_back=0.6, early_stop=False)
    assert any(row.witness for step in trace.steps for row in step.rows)
    assert trace.steps[-1].rows[0].counts[1] > 0, "a trace to test with must have a revocation"
    tab = show([trace])
    tab.keyboard.press("End")
    assert tab.locator(".counter-revoked dd").text_content() == str(trace.steps[-1].rows[0].counts[1])
    assert tab.locator(".counter-contradicted dd").count() == 0


def test_two_decoders_run_on_one_clock_and_the_faster_waits_at_its_end(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, ("right: 7", "wrong: it is 7"))
    short, long = sorted(len(trace.steps) for trace in traces)
    assert short < long
    tab.evaluate(f"viewer.seek({short})")
    passes = [tab.locator(".counter-passes dd").nth(i).text_content() for i in range(2)]
    assert passes == [str(short), str(short)]
    badges = tab.locator(".badge")
    fast = 0 if len(traces[0].steps) == short else 1
    assert badges.nth(fast).is_visible()
    assert not badges.nth(1 - fast).is_visible()
    tab.keyboard.press("End")
    assert badges.all_text_contents() == ["right: 7", "wrong: it is 7"]
    passes = [tab.locator(".counter-passes dd").nth(i).text_content() for i in range(2)]
    assert passes == [str(len(trace.steps)) for trace in traces]


def test_play_runs_to_the_end_and_pause_stops_it(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces)
    play = tab.locator("#play")
    assert play.get_attribute("aria-label") == "play"
    tab.select_option("#speed", "1")
    play.click()
    assert play.get_attribute("aria-label") == "pause"
    assert int(clock(tab).split()[0]) < len(traces[1].steps)  # from the beginning
    tab.keyboard.press("ArrowRight")  # a step by hand pauses
    assert play.get_attribute("aria-label") == "play"
    now = clock(tab)
    tab.wait_for_timeout(1200)
    assert clock(tab) == now
    tab.select_option("#speed", "128")
    tab.locator("h1").click()
    tab.keyboard.press("Space")
    ticks = max(len(trace.steps) for trace in traces)
    tab.locator("#clock", has_text=f"{ticks} / {ticks}").wait_for()
    tab.locator("#play[aria-label=play]").wait_for()
    assert canvas(tab) == expected(traces[0])[-1]


def test_slider_buttons_and_keys_move_the_clock(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces)
    ticks = max(len(trace.steps) for trace in traces)
    slider = tab.locator("#slider")
    slider.fill("3")
    assert clock(tab) == f"3 / {ticks}"
    assert slider.get_attribute("aria-valuetext") == f"forward pass 3 of {ticks}"
    for button, tick in (("on", 4), ("back", 3), ("first", 0), ("back", 0), ("last", ticks), ("on", ticks)):
        tab.locator(f"#{button}").click()
        assert clock(tab) == f"{tick} / {ticks}"
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert clock(tab) == f"{ticks - 1} / {ticks}"
    before = tab.input_value("#speed")
    tab.keyboard.press("-")
    assert int(tab.input_value("#speed")) < int(before)
    tab.keyboard.press("?")
    assert tab.locator("#keys").is_visible()
    assert "masks" in tab.locator("#status").text_content()


def revoked_position(trace: Trace) -> int:
    return next(row.revoke[0] for step in trace.steps for row in step.rows if row.revoke)


def history_lines(trace: Trace, position: int) -> list[tuple[str, str, str]]:
    """(pass, prediction, confidence) of every step that read the position."""
    lines = []
    for step in trace.steps:
        (row,) = step.rows
        if position in row.at:
            index = row.at.index(position)
            text = re.sub(r"\n", "⏎", trace.texts[row.top1[index]]).strip() or "␣"
            lines.append((str(step.number), text, f"{row.confidence[index]:.2f}"))
    return lines


def shown_lines(tab: Any, where: str) -> list[tuple[str, str, str]]:
    script = f"""[...document.querySelectorAll('{where} tbody tr')].filter(r => r.children[1].textContent)
        .map(r => [r.children[0].textContent, r.children[1].textContent, r.children[2].textContent])"""
    return [tuple(line) for line in tab.evaluate(script)]


def test_hovering_a_token_shows_its_history_and_a_click_pins_all_of_it(show: Opener, traces: list[Trace]) -> None:
    tab, position = show(traces), revoked_position(traces[0])
    tab.keyboard.press("End")
    token = tab.locator(f"#tok-0-{position}")
    token.hover()
    tip = tab.locator("#tip")
    assert tip.is_visible()
    assert shown_lines(tab, "#tip") == history_lines(traces[0], position)[-8:]
    assert tip.locator(".event-draft").count() >= 1
    tab.locator("h1").hover()
    assert not tip.is_visible()
    token.click()
    pinned = tab.locator("#history")
    assert shown_lines(tab, "#history") == history_lines(traces[0], position)
    assert "revoked" in pinned.text_content()
    assert f"position {position}" in pinned.text_content()
    first = pinned.locator(".seek").first
    number = first.text_content()
    first.click()
    assert clock(tab).startswith(f"{number} /")
    assert token.get_attribute("aria-selected") == "true"
    tab.keyboard.press("Escape")
    assert not pinned.is_visible()


def test_the_heat_map_has_the_colour_of_each_role_and_leads_to_its_cell(show: Opener, traces: list[Trace]) -> None:
    tab, trace = show(traces), traces[0]
    length, count = trace.header.length, len(trace.steps)
    drawn = "viewer.panels[0].heatmap.picture.getContext('2d')"
    pixels = tab.evaluate(f"Array.from({drawn}.getImageData(0, 0, {length}, {count}).data)")
    colours = {role: tab.evaluate(f"rgb(colour('heat-{role}'))") for role in ROLES}
    assert len({tuple(c) for c in colours.values()}) == len(ROLES)
    _, *after = ([role.value for role in canvases[0].roles] for canvases in trace.replay())
    for step, roles in enumerate(after):
        for position, role in enumerate(roles):
            offset = 4 * (step * length + position)
            assert pixels[offset : offset + 4] == colours[role]
    picture = tab.locator(".panel >> nth=0 >> canvas")
    box = picture.bounding_box()
    ticks = max(len(trace.steps) for trace in traces)
    picture.click(position={"x": (7 + 0.5) * box["width"] / length, "y": (2 + 0.5) * box["height"] / ticks})
    assert clock(tab).startswith("3 /")
    assert "position 7" in tab.locator("#history").text_content()


def test_text_of_the_model_is_shown_and_never_run(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, ("right: <img src=x onerror=window.hacked=1>",))
    tab.keyboard.press("End")
    everything = " ".join(text for panel in range(2) for _, text in canvas(tab, panel))
    assert "</script><img src=x onerror=window.hacked=1>" in everything + tab.locator("#prompt").text_content()
    tab.locator(f"#tok-0-{revoked_position(traces[0])}").click()
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    # Even code that did get into the page would not run: its policy knows only the page's own.
    assert "script-src 'sha256-" in tab.locator("meta[http-equiv]").get_attribute("content")


def test_code_put_into_the_page_is_stopped_by_its_policy(browser: Any, traces: list[Trace], tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    html = page(traces).replace("<main>", "<main><img src=x onerror=window.hacked=1><script>window.hacked=2</script>")
    path.write_text(html, encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert tab.evaluate("window.hacked") is None
    tab.close()


def test_a_phone_shows_everything_without_scrolling_sideways_and_a_tap_opens_the_history(
    show: Opener, traces: list[Trace]
) -> None:
    tab = show(traces, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    for control in ("#play", "#slider", "#clock", "#speed"):
        box = tab.locator(control).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 740
    tab.locator(f"#tok-0-{revoked_position(traces[0])}").tap()
    sheet = tab.locator("#history")
    assert sheet.is_visible()
    assert sheet.bounding_box()["width"] == pytest.approx(360, abs=1)
    assert not tab.locator("#tip").is_visible()
    tab.locator("#history .close").tap()
    assert not sheet.is_visible()


def test_a_text_can_be_read_token_by_token_with_the_keyboard(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces)
    text = tab.locator("#text-0")
    text.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    assert text.get_attribute("aria-activedescendant") == "tok-0-1"
    label = tab.locator("#tok-0-1").get_attribute("aria-label")
    assert label.startswith("position 1: ")
    before = clock(tab)
    tab.keyboard.press("Enter")
    assert clock(tab) == before  # arrows in a text do not move the clock
    assert "position 1 " in tab.locator("#history").text_content()
    every = "[...document.querySelectorAll('button, select, input, canvas')]"
    names = tab.evaluate(f"{every}.map(e => e.getAttribute('aria-label') || e.textContent)")
    assert all(name.strip() for name in names)


CONTRAST = """() => {
  const linear = (x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (e) => {
    const found = parse(getComputedStyle(e).backgroundColor);
    return found.length < 4 || found[3] > 0 ? found : behind(e.parentElement);
  };
  const texts = '.tok, small, h2, .settings, dt, dd, figcaption span, .axis span, .model, .badge, #prompt, #clock';
  const found = {};
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent || e.closest('[hidden]')) continue;
    const [more, less] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const name = `${e.tagName} ${e.className} ${e.parentElement.className} ${e.dataset.role || ''}`;
    found[name] = (more + 0.05) / (less + 0.05);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read_and_be_switched(scheme: str, show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, color_scheme=scheme, reduced_motion="reduce")

    def paper() -> str:
        return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))

    own = paper()
    assert min(tab.evaluate(CONTRAST).values()) >= 4.5, tab.evaluate(CONTRAST)
    tab.locator("#theme").click()
    other = paper()
    assert other != own
    assert min(tab.evaluate(CONTRAST).values()) >= 4.5, tab.evaluate(CONTRAST)
    tab.locator("h1").click()
    tab.keyboard.press("t")
    assert paper() == own


def test_rows_of_a_batch_can_be_chosen(show: Opener) -> None:
    trace = a_trace("wino", rows=2, threshold=0.4)
    tab = show([trace])
    assert len(canvas(tab)) == trace.header.length
    tab.select_option("#row", "1")
    tab.evaluate("viewer.seek(viewer.ticks)")
    tokens = [text for role, text in canvas(tab) if role != "padding"]
    assert tokens == [trace.texts[token].strip() or "␣" for token in trace.tokens[1]][: len(tokens)]
    assert tab.locator("#prompt").text_content() == "".join(trace.texts[t] for t in (5, 4, 8)).strip()


def test_classifier_free_guidance_counts_two_forward_passes_per_step(show: Opener) -> None:
    trace = a_trace("asrd", cfg_scale=1.0)
    tab = show([trace, a_trace("standard")])
    tab.keyboard.press("End")
    assert tab.locator(".counter-passes dd").first.text_content() == str(2 * len(trace.steps))
    tab.evaluate("viewer.seek(5)")
    assert tab.locator(".counter-passes dd").first.text_content() == "4"


def test_traces_of_different_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 1 rows"):
        page([a_trace("asrd", rows=2), a_trace("standard")])
    with pytest.raises(ValueError, match="traces is empty"):
        page([])


def test_the_command_writes_a_page_from_a_prompt_and_from_saved_traces(
    show: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "a.html", tmp_path / "b.html"
    options = ["--max-new-tokens", "32", "--against", "standard", "--set", "steps=8", "--threshold", "0.5"]
    command = ["trace", "ann has 3 stamps . how many stamps does ann have now ?", "--out", str(out), *options]
    assert main([*command, "--save", str(tmp_path)]) == 0
    saved = [tmp_path / "asrd.jsonl", tmp_path / "standard.jsonl"]
    traces = [asrd.trace.read(path) for path in saved]
    assert len(traces[1].steps) == 8  # each decoder gets the settings that it looks at
    assert traces[0].header.settings["threshold"] == 0.5
    assert "standard 8" in capsys.readouterr().err
    assert main(["trace", "--from", str(saved[0]), "--from", str(saved[1]), "--out", str(again)]) == 0
    assert again.read_text() == out.read_text()
    tab = show(traces)
    tab.keyboard.press("End")
    assert canvas(tab) == expected(traces[0])[-1]


def test_on_a_block_diffusion_model_steps_are_counted_not_forward_passes(
    show: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", "--model", "tiny-block4", "--problem", "3", "--decoder", "loo", "--save", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "a.html")]) == 0
    (trace,) = [asrd.trace.read(tmp_path / "loo.jsonl")]
    assert f"steps: loo {len(trace.steps)}" in capsys.readouterr().err
    tab = show([trace])
    assert tab.locator(".counter-passes dt").first.text_content() == "steps"
    assert "forward passes" not in tab.locator("article.panel").first.inner_text()


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"asrd_trace": 9}\n')
    for words, message in (
        (["--from", str(broken)], "line 1: asrd_trace=9"),
        (["--from", str(broken), "--against", "standard"], "leave --against out"),
        (["--against", "standrad"], "decoder='standrad' is unknown"),
        (["--problem", "-1"], "--problem -1"),
    ):
        assert main(["trace", *words, "--out", str(tmp_path / "x.html")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


SIZES = {"desktop": (1440, 900), "laptop": (1280, 720), "tablet": (820, 1180), "phone": (390, 844)}


def device(name: str) -> dict[str, Any]:
    """Options of a browser of this size; the small ones have a touch screen."""
    width, height = SIZES[name]
    touch = name in ("tablet", "phone")
    return {"viewport": {"width": width, "height": height}, "has_touch": touch, "is_mobile": touch}


def settled(tab: Any) -> None:
    """Wait until what is done with the next frame is done."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture(scope="module")
def long_traces() -> list[Trace]:
    settings: dict[str, Any] = {"max_new_tokens": 256, "block_length": 32, "early_stop": False}
    return [a_trace("asrd", threshold=0.4, **settings), a_trace("standard", **settings)]


WINDOW = """(places) => {
  const list = document.getElementById('text-0'), box = list.getBoundingClientRect();
  const seen = (place) => {
    const token = list.querySelector(`[data-place="${place}"]`).getClientRects()[0];
    return token.top >= box.top - 1 && token.bottom <= box.bottom + 1;
  };
  const { scrollTop, clientHeight, scrollHeight } = list, { lineHeight, overflowY } = getComputedStyle(list);
  return {
    seen: places.map(seen), cut: [scrollTop % parseFloat(lineHeight), clientHeight % parseFloat(lineHeight)],
    above: scrollTop, below: scrollHeight - scrollTop - clientHeight, overflow: overflowY,
    fades: ['more-above', 'more-below'].map((name) => list.parentElement.classList.contains(name)),
  };
}"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES)
def test_a_long_text_follows_the_decode_in_whole_lines_and_fades_where_there_is_more(
    size: str, show: Opener, long_traces: list[Trace]
) -> None:
    tab = show(long_traces, **device(size))
    trace, moved = long_traces[0], set()
    for step in trace.steps:
        (row,) = step.rows
        changed = row.revoke or [place for place, _ in row.draft][:1] or [row.block * trace.header.block_length]
        tab.evaluate(f"viewer.seek({step.number})")
        settled(tab)
        found = tab.evaluate(WINDOW, list(changed))
        assert found["seen"][0], f"forward pass {step.number}: position {changed[0]} is out of sight"
        assert found["cut"] == [0, 0], f"forward pass {step.number}: a line is cut"
        assert found["fades"] == [found["above"] > 1, found["below"] > 1]
        assert found["overflow"] == "auto"
        moved.add(found["above"])
    assert len(moved) > 2, "a text to test with must be longer than its box"


TOP_AT = """(id) => { const b = document.getElementById(id).getBoundingClientRect();
  const found = document.elementFromPoint(b.left + b.width / 2, b.top + b.height / 2);
  return b.width > 0 && document.getElementById(id).contains(found); }"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES)
def test_the_pinned_history_covers_no_control_and_is_not_wider_than_the_screen(
    size: str, show: Opener, traces: list[Trace]
) -> None:
    tab = show(traces, **device(size))
    tab.keyboard.press("End")
    width, _ = SIZES[size]
    place = next(p for step in traces[0].steps for p, token in step.rows[0].draft if WORDS[token] == ATTACK)
    tab.locator(f"#tok-0-{place}").click()
    settled(tab)
    for control in ("first", "back", "play", "on", "last", "slider", "clock", "speed"):
        assert tab.evaluate(TOP_AT, control), control
    chosen = tab.locator(f"#tok-0-{place}").bounding_box()
    box = tab.locator("#history").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= tab.locator("#controls").bounding_box()["y"]
    assert tab.evaluate(
        "(() => { const h = document.getElementById('history'); return h.scrollWidth <= h.clientWidth; })()"
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    apart = chosen["y"] + chosen["height"] <= box["y"] or chosen["x"] + chosen["width"] <= box["x"]
    assert apart, "the chosen token is covered"
    if width >= 1000:  # beside the panels
        assert all(
            panel.bounding_box()["x"] + panel.bounding_box()["width"] <= box["x"]
            for panel in tab.locator(".panel").all()
        )
    tab.evaluate("scrollTo(0, 0)")
    for control in ("help", "theme"):
        assert tab.evaluate(TOP_AT, control), control


PAINTED = """(panel) => {
  const { canvas } = viewer.panels[panel].heatmap, { width, height } = canvas;
  const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
  let last = 0;
  for (let y = 0; y < height - 4; y++) if (data[4 * (y * width + Math.floor(width / 2)) + 3]) last = y + 1;
  return [last, height];
}"""


def test_heat_maps_share_the_clock_so_that_fewer_passes_fill_less(show: Opener, traces: list[Trace]) -> None:
    tab = show(traces)
    tab.keyboard.press("End")
    ticks = max(len(trace.steps) for trace in traces)
    heights = set()
    for panel, trace in enumerate(traces):
        painted, height = tab.evaluate(PAINTED, panel)
        heights.add(height)
        share = len(trace.steps) / ticks
        assert painted / height == pytest.approx(share, abs=0.03)
        tops = {tab.locator("canvas").nth(i).bounding_box()["y"] for i in range(2)}
        assert len(tops) == 1
    assert len(heights) == 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", SIZES)
def test_the_legend_has_a_sample_of_every_colour_and_explains_it(size: str, show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, **device(size))
    for role in ROLES:
        sample = tab.locator(f".legend .role-{role}")
        assert sample.is_visible()
        shown = sample.evaluate("(e) => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)")
        assert shown == tab.evaluate(f"rgb(colour('heat-{role}'))")[:3]
        line = tab.locator(f".legend li:has(.role-{role})")
        assert role in line.text_content()
        assert line.locator("small").is_visible()
        assert line.locator("small").text_content()


def test_the_page_opens_paused_at_the_first_revocation_and_invites_to_play_from_the_start(
    show: Opener, traces: list[Trace]
) -> None:
    first = next(step.number for step in traces[0].steps if step.rows[0].revoke)
    tab = show(traces)
    assert clock(tab).startswith(f"{first} /")
    invitation = tab.locator("#invitation")
    assert invitation.is_visible()
    assert f"pass {first}: the first revocation" in invitation.text_content()
    assert "first revocation" in tab.locator("#status").text_content()
    assert tab.locator(".tok[data-role=revoked]").first.is_visible()
    tab.wait_for_timeout(400)
    assert clock(tab).startswith(f"{first} /")
    assert tab.evaluate("(() => { document.getElementById('play').click(); return viewer.tick; })()") == 0
    assert not invitation.is_visible()


def test_without_a_revocation_the_page_opens_at_the_first_edit_or_the_first_pass(show: Opener) -> None:
    trace = a_trace("loo", factor=3.0, early_stop=False)
    edit = next(step.number for step in trace.steps if step.rows[0].edit)
    tab = show([trace])
    assert clock(tab).startswith(f"{edit} /")
    assert "first edit" in tab.locator("#invitation").text_content()
    tab = show([a_trace("standard")])
    assert clock(tab).startswith("1 /")
    assert tab.locator("#invitation").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_colour_has_one_meaning(scheme: str, show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, color_scheme=scheme)
    roles = {name: str(tab.evaluate(f"colour('heat-{name}')")) for name in (*ROLES, "edited")}
    parts = {name: str(tab.evaluate(f"colour('part-{name}')")) for name in traces[0].header.parts}
    assert parts == {name: getattr(PARTS[name], scheme) for name in parts}
    for (one, colour), (other, another) in itertools.combinations(roles.items(), 2):
        for vision in VISION:
            assert distance(colour, another, vision) > 0.08, f"{one} and {other} with {vision}"
    for (role, colour), (part, another) in itertools.product(roles.items(), parts.items()):
        assert distance(colour, another) > 0.1, f"role {role} and part {part}"
    bar = (
        "[...document.querySelectorAll('.panel:first-child .times i')].map((e) => getComputedStyle(e).backgroundColor)"
    )
    rgb = [f"rgb({int(c[1:3], 16)}, {int(c[3:5], 16)}, {int(c[5:7], 16)})" for c in parts.values()]
    assert tab.evaluate(bar) == rgb
    # What is neither has no hue: curves, the play button, the grades.
    for selector, style in ((".curve", "stroke"), ("#play", "backgroundColor"), (".bar", "backgroundColor")):
        tab.locator("#tok-0-0").click()
        for text in tab.evaluate(
            f"[...document.querySelectorAll('{selector}')].map((e) => getComputedStyle(e).{style})"
        ):
            levels = [int(level) for level in re.findall(r"\d+", text)][:3]
            assert max(levels) - min(levels) < 40, f"{selector}: {text}"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_axes_have_numbers_and_units(size: str, show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, **device(size))
    tab.locator("#tok-0-0").click()
    ticks = max(len(trace.steps) for trace in traces)
    pictures = tab.locator(".panel canvas, .panel svg, #history svg, .times").all()
    assert len(pictures) == 2 * 5 + 1
    for picture in pictures:
        axes = picture.locator("xpath=..").locator(".axis")
        sides = [axis.get_attribute("class") for axis in axes.all()]
        assert "axis bottom" in sides
        assert "axis left" in sides or picture.get_attribute("class") == "times"
        for axis in axes.all():
            assert axis.locator(".unit").text_content()
            numbers = axis.locator(".numbers span").all_text_contents()
            assert len(numbers) >= 2
            assert all(re.fullmatch("\u2212?[0-9.]+", number) for number in numbers), numbers
            boxes = sorted(
                (n.bounding_box() for n in axis.locator(".numbers span").all()), key=lambda b: (b["x"], b["y"])
            )
            for one, other in itertools.pairwise(boxes):
                across, down = other["x"] - one["x"] - one["width"], abs(other["y"] - one["y"]) - one["height"]
                assert max(across, down) >= 0, f"numbers overlap: {numbers}"
    passes = tab.locator(".panel .heatmap .left .numbers").all()
    assert [axis.locator("span").last.text_content() for axis in passes] == [str(ticks)] * 2
    assert "≤" not in tab.locator("main").text_content()


ROWS = """() => {
  const rows = new Map();
  for (const token of document.querySelectorAll('#text-0 .tok')) {
    const box = token.getClientRects()[0], key = Math.round(box.top / 8);
    if (!rows.has(key)) rows.set(key, []);
    const { left, right } = box, lines = token.getClientRects().length;
    rows.get(key).push({ left, right, lines, text: token.textContent });
  }
  return [...rows.values()];
}"""


def test_lines_begin_at_one_edge_and_tokens_have_no_spaces_of_their_own(show: Opener, long_traces: list[Trace]) -> None:
    tab = show([long_traces[1]])
    tab.keyboard.press("End")
    settled(tab)
    rows = tab.evaluate(ROWS)
    assert len(rows) > 8
    after_whole = [row for last, row in itertools.pairwise(rows) if last[-1]["lines"] == 1]  # not continuing a token
    lefts = [row[0]["left"] for row in (rows[0], *after_whole)]
    assert max(lefts) - min(lefts) <= 2.5  # a token that continues a word stands 2 pixels to the left
    for row in rows:
        for one, other in itertools.pairwise(row):
            assert one["text"] == one["text"].strip()
            if one["lines"] == 1:
                assert other["left"] - one["right"] <= 3, f"a wide gap between {one['text']} and {other['text']}"


def test_on_a_phone_whatever_can_be_tapped_is_44_pixels_high_and_the_title_is_complete(
    show: Opener, traces: list[Trace]
) -> None:
    tab = show(traces, **device("phone"))
    tab.keyboard.press("End")
    tab.locator("#tok-0-0").tap()
    targets = (
        "[...document.querySelectorAll('button, select, summary, input, .text .tok')].filter((e) => e.offsetParent)"
    )
    small = tab.evaluate(f"{targets}.filter((e) => e.getBoundingClientRect().height < 44).map((e) => e.outerHTML)")
    assert small == []
    assert tab.evaluate(f"{targets}.length") > 2 * traces[0].header.length + 8
    title = tab.locator("#model")
    assert title.text_content().endswith("asrd beside standard")
    whole = "(e) => e.scrollWidth <= e.clientWidth + 1 && getComputedStyle(e).textOverflow === 'clip'"
    assert title.evaluate(f"(e) => {{ e.textContent += ' and a long name'; return ({whole})(e); }}")
    box = title.bounding_box()
    assert box["x"] + box["width"] <= 390
    maps = [tab.locator("canvas").nth(i).bounding_box() for i in range(2)]  # side by side
    assert maps[0]["y"] == pytest.approx(maps[1]["y"], abs=1)
    assert maps[0]["x"] + maps[0]["width"] < maps[1]["x"]


@pytest.mark.parametrize("width", [390, 641, 768, 861, 1024])
def test_every_control_is_on_the_screen(width: int, show: Opener, traces: list[Trace]) -> None:
    tab = show(traces, viewport={"width": width, "height": 900})
    edges = tab.evaluate(
        "[...document.querySelectorAll('.controls *')].filter((e) => e.offsetParent)"
        ".map((e) => e.getBoundingClientRect()).map((b) => [b.left, b.right, b.top, b.bottom])"
    )
    assert min(left for left, *_ in edges) >= 0
    assert max(right for _, right, *_ in edges) <= width
    assert max(bottom for *_, bottom in edges) <= 900
