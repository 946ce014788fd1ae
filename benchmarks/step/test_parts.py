"""pytest-benchmark of the parts of a step: `pytest benchmarks --benchmark-enable` (8B shapes: add `-m long`)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.step.parts import DECODERS, DRAFTED, MASKS, PARTS, PENDING, SHAPES, Step

_steps: dict[str, Step] = {}


def a_step(shape: str) -> Step:
    """One step of each shape, built once: the large one takes half a minute and 5 GB."""
    if shape not in _steps:
        _steps[shape] = Step(SHAPES[shape])
    return _steps[shape]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", ["2M", "2M-deep", pytest.param("8B", marks=pytest.mark.long)])
def test_part(benchmark: Any, shape: str, part: str) -> None:
    step = a_step(shape)
    parts = step.parts()
    benchmark.group = shape
    benchmark.extra_info["layers_timed_of"] = [SHAPES[shape].layers_timed, SHAPES[shape].layers]

    def fresh() -> None:
        step.reset()
        for name in PARTS[: PARTS.index(part)]:
            parts[name]()

    benchmark.pedantic(parts[part], setup=fresh, rounds=3 if shape == "8B" else 30)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("shape", ["2M", "2M-deep"])
def test_every_step_that_is_timed_is_the_same_one_in_mid_course(shape: str, decoder: str) -> None:
    step = Step(SHAPES[shape], decoder)
    for _ in range(3):
        step.reset()
        before = int(step.batch.state.drafted)
        for run in step.parts().values():
            run()
        state = step.batch.state
        wanted = {"asrd": MASKS + PENDING, "threshold": MASKS, "standard": 16}[decoder]
        assert len(step.row) == wanted
        assert int(state.drafted) - before == (1 if decoder == "standard" else DRAFTED)
        assert not state.done.any()
