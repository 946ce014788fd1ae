"""The live page in a real browser: ask, watch, stop, switch the decoder, reload; phone, dark; nothing foreign runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.browser import chromium
from tests.support.server import QUESTION, Running, alone, chat, running

ATTACK = "</script><img src=x onerror=window.hacked=1> ann"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(slots=2, settings={"threshold": 0.5}) as found:
        yield found


Opener = Callable[..., Any]


@pytest.fixture
def show(browser: Any, server: Running) -> Iterator[Opener]:
    """Opens the page; in the end, no test may have left an error on the console or asked anybody else."""
    faults: list[str] = []
    contexts = []

    def opened(running: Running = server, allowed: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        tab = context.new_page()
        note = lambda text: None if allowed and allowed in text else faults.append(text)  # noqa: E731
        tab.on("console", lambda m: note(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda r: None if r.url.startswith((running.url, "data:")) else faults.append(r.url))
        tab.goto(running.url)
        tab.locator("#model").filter(has_text=" ").or_(tab.locator("#model").filter(has_text="tiny")).wait_for()
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def put(tab: Any, question: str) -> None:
    tab.locator("#question").fill(question)
    tab.locator("#send").click()


def wait_for_end(tab: Any, turn: int = 0) -> Any:
    panel = tab.locator(".turn").nth(turn).locator(".panel")
    panel.locator(".badge").wait_for(state="visible", timeout=30_000)
    tab.locator("#send").wait_for(state="visible")
    return panel


def counter(panel: Any, name: str) -> float:
    return float(panel.locator(f".counter-{name} dd").inner_text())


def test_an_answer_is_watched_being_drafted_and_revoked(show: Opener) -> None:
    tab = show()
    tab.evaluate(
        """() => { window.seen = new Set(); new MutationObserver(() => {
          for (const t of document.querySelectorAll('.turn .tok')) window.seen.add(t.dataset.role);
        }).observe(document.getElementById('turns'), { subtree: true, childList: true, attributes: true }); }"""
    )
    put(tab, QUESTION.format(4))
    panel = wait_for_end(tab)
    text, length, steps = alone(chat(), threshold=0.5)
    assert panel.locator(".plain").inner_text() == text
    assert panel.locator(".badge").inner_text() == "✓ complete" or "complete" in panel.locator(".badge").inner_text()
    assert {"mask", "pending", "anchor", "revoked", "final"} <= set(tab.evaluate("[...window.seen]"))
    assert counter(panel, "passes") == steps
    assert counter(panel, "rate") == pytest.approx(length / steps, abs=0.01)
    assert counter(panel, "saved") == length - steps
    assert counter(panel, "revoked") > 0
    shown = tab.evaluate("[...document.querySelectorAll('.turn .tok')].filter(t => !t.hidden).map(t => t.textContent)")
    assert " ".join(shown).replace("<|eos|>", "").strip() == text


def test_the_decoder_is_switched_and_kept_over_a_reload(show: Opener) -> None:
    tab = show()
    tab.locator("#more summary").click()
    tab.locator("#pace").select_option("0")
    tab.locator("#decoder").select_option("loo")
    assert tab.locator("#threshold").is_hidden()
    tab.locator("#factor").fill("2")
    tab.locator("#factor").blur()
    put(tab, QUESTION.format(7))
    panel = wait_for_end(tab)
    assert panel.locator("h2").inner_text() == "loo"
    text, _, steps = alone(chat(7), decoder="loo", factor=2.0)
    assert (panel.locator(".plain").inner_text(), counter(panel, "passes")) == (text, steps)
    tab.reload()
    tab.locator(".turn .plain").first.wait_for()
    assert tab.locator(".turn .plain").first.inner_text() == text
    assert tab.locator("#decoder").input_value() == "loo"
    put(tab, QUESTION.format(4))
    assert wait_for_end(tab, 1).locator("h2").inner_text() == "loo"
    tab.locator("#fresh").click()
    assert tab.locator(".turn").count() == 0


def test_stop_ends_the_answer_on_the_server_too(show: Opener, server: Running) -> None:
    tab = show()
    tab.locator("#more summary").click()
    tab.locator("#decoder").select_option("standard")
    tab.locator("#max_tokens").fill("400")
    tab.locator("#pace").select_option("3")
    put(tab, QUESTION.format(4))
    tab.locator(".turn .tok[data-role='final']").first.wait_for()
    tab.locator("#stop").click()
    panel = wait_for_end(tab)
    assert "stopped" in panel.locator(".badge").inner_text()
    assert counter(panel, "passes") < 60
    assert server.idle(10)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_an_answer_is_in_sight_while_it_is_drafted_with_the_settings_open(show: Opener, device: str) -> None:
    tab = show(**(PHONE if device == "phone" else {}))
    tab.locator("#more summary").click()
    tab.locator("#max_tokens").fill("300")
    tab.locator("#decoder").select_option("standard")
    tab.locator("#pace").select_option("3")
    for turn in range(2):
        put(tab, QUESTION.format(4))
        panel = tab.locator(".turn").nth(turn).locator(".panel")
        panel.locator(".tok:not([data-role='mask'])").first.wait_for()
        covered = tab.locator("#ask").bounding_box()["y"]
        first = panel.locator(".tok").first.bounding_box()
        assert 0 <= first["y"] < first["y"] + first["height"] <= covered, "the first tokens cannot be seen"
        tab.locator("#stop").click()
        wait_for_end(tab, turn)
    tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    end = tab.locator(".panel").last.bounding_box()
    assert end["y"] + end["height"] <= covered, "the end of the page cannot be scrolled into sight"


def test_what_is_typed_is_text_and_never_code(show: Opener) -> None:
    tab = show()
    put(tab, ATTACK)
    wait_for_end(tab)
    assert tab.locator(".question").inner_text() == ATTACK
    assert tab.evaluate("window.hacked") is None
    assert tab.locator(".turn img").count() == 0
    tab.reload()
    tab.locator(".question").wait_for()
    assert tab.evaluate("window.hacked") is None


def test_a_refusal_is_shown_in_words(show: Opener) -> None:
    tab = show(allowed="the server responded with a status of 400")
    put(tab, "<|mask|>")
    fault = tab.locator(".fault")
    fault.filter(has_text="a prompt must not contain masks").wait_for()
    put(tab, QUESTION.format(4))
    wait_for_end(tab, 1)


def test_a_key_is_asked_for_and_used(show: Opener) -> None:
    with running(slots=1, api_key="a-long-enough-key") as guarded:
        tab = show(guarded, allowed="the server responded with a status of 401")
        tab.locator("#key").fill("a-long-enough-key")
        tab.locator("#key").blur()
        tab.locator("#model").filter(has_text="tiny").wait_for()
        put(tab, QUESTION.format(4))
        wait_for_end(tab)
        tab.context.close()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_it_fits_and_can_be_read_on_phone_and_desktop(
    show: Opener, device: str, scheme: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tab = show(color_scheme=scheme, **(PHONE if device == "phone" else {}))
    put(tab, QUESTION.format(4))
    panel = wait_for_end(tab)
    width = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page scrolls sideways"
    for button in ("#send", "#question"):
        assert tab.locator(button).bounding_box()["height"] >= 40
    assert panel.bounding_box()["x"] >= 0
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(16, 20, 27)") == (scheme == "dark")
    tab.locator("#theme").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    tab.locator("#theme").click()
    tab.screenshot(path=str(tmp_path_factory.getbasetemp() / f"live-{device}-{scheme}.png"))
