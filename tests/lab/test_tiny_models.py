"""The models in the package: what the wheel carries, where the weights come from, and how good they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asrd
from asrd.lab.compare.measure import decode_batch
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.report import wilson
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.recipe import RECIPES
from asrd.lab.tiny.task import held_out

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "asrd" / "models" / "packaged"
MODELS = [recipe.folder for recipe in RECIPES.values()]


def content(model: str, name: str) -> dict[str, Any]:
    return json.loads((WEIGHTS / model / name).read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a wheel of this tree, unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("asrd-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_it_loads_and_decodes_from_an_installed_wheel_outside_the_source_tree(model: str, installed: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import asrd
from asrd.lab.tiny.task import generate, grade
print(asrd.__file__)
model, tokenizer = asrd.load({model!r})
problem = generate(1, "easy")
chat = [{{"role": "user", "content": problem.question}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ids = inputs["input_ids"]
out = asrd.fast_generate(model, ids, max_new_tokens=32, decoder={"threshold" if "block" in model else "asrd"!r})
print(problem.question, "->", tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=installed, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    where, text = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert "the answer is" in text


@pytest.mark.parametrize("model", MODELS)
def test_it_is_small(model: str) -> None:
    file = WEIGHTS / model / "model.safetensors"
    assert file.stat().st_size <= 8_000_000
    network, tokenizer = asrd.load(model)
    assert 1e6 <= sum(weight.numel() for weight in network.parameters()) <= 4e6
    assert len(tokenizer) == len(VOCABULARY)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_origin_of_the_weights_is_recorded(recipe: str) -> None:
    """The recipe's own command with its own schedule, from a clean commit, within 90 minutes."""
    training = content(RECIPES[recipe].folder, "training.json")
    assert training["command"].startswith(f"python -m asrd.lab.tiny.train --recipe {recipe}")
    assert training["updates"] == RECIPES[recipe].updates
    assert training["updates_done"] == RECIPES[recipe].stop
    assert training["processor_minutes"] <= 90
    assert len(training["commit"]) == 40
    assert training["dirty"] is False
    assert (WEIGHTS / RECIPES[recipe].folder / "curve.png").exists()


@pytest.mark.slow
def test_tiny_has_the_accuracy_of_its_scores_json() -> None:
    """The standard decoder on 200 problems, within the interval that 200 problems of the stated accuracy have."""
    stated = content("tiny", "scores.json")["standard"]
    assert stated["problems"] == 1000
    assert 0.80 <= stated["right"] <= 0.95
    model, _ = asrd.load("tiny")
    some = held_out(200)
    records = [
        record
        for start in range(0, len(some), 50)
        for record in decode_batch(model, RunSpec("standard"), some[start : start + 50])
    ]
    low, high = wilson(round(200 * stated["right"]), 200)
    assert low <= sum(record["right"] for record in records) / 200 <= high


def test_threshold_0_6_costs_tiny_accuracy() -> None:
    scores = content("tiny", "scores.json")
    assert scores["threshold 0.6"]["interval"][1] < scores["standard"]["interval"][0]
