"""The Sudoku task: reasoning-gym's puzzles and grades, tokens, symmetries, masks, training that resumes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator

import asrd
from asrd.cli import main
from asrd.lab.compare import RunSpec
from asrd.lab.compare.measure import decode_batch
from asrd.lab.sudoku import initialisation
from asrd.lab.sudoku import train as training
from asrd.lab.sudoku.data import as_batch, dataset, draw_batch, draw_masks, generated, load_or_generate
from asrd.lab.sudoku.evaluate import score
from asrd.lab.sudoku.puzzle import COUNT, ID, SCORING_FROM, VOCABULARY, Puzzle, as_text, held_out
from asrd.lab.sudoku.tokenizer import build_tokenizer, save_tokenizer
from asrd.lab.tasks import TASKS, find_task
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import EOS_ID, MASK_ID
from asrd.lab.tiny.language import ID as WORD_IDS
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.tokenizer import build_tokenizer as words_tokenizer
from asrd.models.source import packaged


def is_solved(cells: str) -> bool:
    """Every row, column and box has all digits."""
    grid = [cells[start : start + 9] for start in range(0, 81, 9)]
    lines = [*grid, *("".join(column) for column in zip(*grid, strict=True))]
    lines += ["".join(grid[3 * (b // 3) + n // 3][3 * (b % 3) + n % 3] for n in range(9)) for b in range(9)]
    return all(sorted(line) == list("123456789") for line in lines)


def fits(puzzle: Puzzle) -> bool:
    return all(clue in ("0", cell) for clue, cell in zip(puzzle.clues, puzzle.solved, strict=True))


def test_the_held_out_puzzles_are_reasoning_gyms() -> None:
    every = held_out(COUNT)
    assert len({puzzle.clues for puzzle in every}) == COUNT
    assert all(is_solved(puzzle.solved) and fits(puzzle) for puzzle in every)
    assert all(30 <= puzzle.clues.count("0") <= 50 for puzzle in every)
    assert [(p.clues, p.solved) for p in every[:3]] == list(generated(SCORING_FROM, 3))
    for puzzle, entry in zip(every, dataset(SCORING_FROM, 3), strict=False):
        assert puzzle.question in entry["question"]
        assert puzzle.solution == entry["answer"]


def test_grades_are_those_of_reasoning_gym() -> None:
    rng = random.Random(0)
    theirs = dataset(SCORING_FROM, 4)
    for number, puzzle in enumerate(held_out(4)):
        entry = theirs[number]
        for _ in range(10):
            ids = list(puzzle.response_ids)
            for place in rng.sample(range(90), rng.choice([0, 0, 1, 3])):
                ids[place] = rng.randrange(1, len(VOCABULARY))
            text = as_text(ids)
            assert puzzle.is_right(ids) == (theirs.score_answer(text, entry) == 1.0), text
            assert puzzle.is_right(ids) == puzzle.is_right(text)
            if not any(puzzle.wrong_tokens(ids)):
                assert puzzle.is_right(ids)
        assert not puzzle.is_right("")
        assert puzzle.is_right(puzzle.solution + "  ")


def test_wrong_tokens_are_those_that_differ_from_the_one_solution() -> None:
    (puzzle,) = held_out(1)
    ids = list(puzzle.response_ids)
    assert not any(puzzle.wrong_tokens(ids))
    ids[7], ids[89] = ID["\n"], MASK_ID
    assert [at for at, wrong in enumerate(puzzle.wrong_tokens(ids)) if wrong] == [7, 89]


def test_text_and_tokens_are_the_same_both_ways() -> None:
    tokenizer = build_tokenizer()
    for puzzle in held_out(3):
        messages = [{"role": "user", "content": puzzle.question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer(prompt)["input_ids"] == prompt_ids(puzzle)
        assert tokenizer.decode(puzzle.response_ids, skip_special_tokens=True) == puzzle.solution
        assert tokenizer(puzzle.solution)["input_ids"] == puzzle.response_ids[:-1]
    assert tokenizer("10 x")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_the_tokenizer_tells_the_task() -> None:
    assert find_task(build_tokenizer()) is TASKS[1]
    assert find_task(words_tokenizer()) is TASKS[0]
    assert find_task(None) is None
    assert [ID[word] for word in VOCABULARY[:6]] == [WORD_IDS[word] for word in VOCABULARY[:6]]


def test_a_symmetry_keeps_the_puzzle_a_puzzle() -> None:
    cells = [[list(map(int, puzzle.clues)), list(map(int, puzzle.solved))] for puzzle in held_out(2)]
    batch = draw_batch(torch.tensor(cells), 16, Generator().manual_seed(0))
    texts = [
        (as_text(prompt[1:-1].tolist()), as_text(answer.tolist()))
        for prompt, answer in zip(batch.prompt, batch.response, strict=True)
    ]
    assert len(set(texts)) == 16
    for clues, solved in texts:
        digits = ["".join(text.split()).replace("_", "0") for text in (clues, solved)]
        assert is_solved(digits[1])
        assert fits(Puzzle(0, *digits))


def test_masks_are_of_blanks_and_sometimes_of_everything() -> None:
    cells = [[list(map(int, puzzle.clues)), list(map(int, puzzle.solved))] for puzzle in held_out(64)]
    batch = as_batch(torch.tensor(cells))
    noisy = draw_masks(batch, Generator().manual_seed(0))
    masked = noisy == MASK_ID
    assert torch.equal(noisy[~masked], batch.response[~masked])
    assert (masked & batch.blank).any(1).all()
    everything = (masked & ~batch.blank).any(1).float().mean()
    assert 0.15 < everything < 0.45
    assert batch.response[:, -1].eq(EOS_ID).all()
    assert not batch.blank[:, 9::10].any()


def test_a_resumed_run_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WARM_UP", 1)
    lines = "".join(f"{puzzle.clues} {puzzle.solved}\n" for puzzle in held_out(8))
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "puzzles.txt").write_text(lines)
    settings = training.Settings(updates=4, decay=1, batch=2, puzzles=8, every=100)
    whole, _ = training.train(settings, tmp_path / "whole")
    training.train(replace(settings, updates=3), tmp_path / "parts")  # its rate has not begun to fall
    parts, _ = training.train(settings, tmp_path / "parts", resume=True)
    assert parts.update == whole.update == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, parts.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="learning rate"):
        training.train(replace(settings, updates=9, decay=8), tmp_path / "parts", resume=True)
    with pytest.raises(ValueError, match="seed=0, not 1"):
        training.train(replace(settings, seed=1), tmp_path / "parts", resume=True)


def test_puzzles_are_added_to_a_file_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "puzzles.txt"
    whole = load_or_generate(file, 3)
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n" + lines[1][:100])
    assert torch.equal(load_or_generate(file, 3), whole)
    assert file.read_text().splitlines() == lines
    assert torch.equal(load_or_generate(file, 2), whole[:2])


def test_the_initial_weights_know_row_column_and_box_and_what_they_exclude() -> None:
    torch.manual_seed(0)
    model = TinyModel(Shape(len(VOCABULARY), rope_theta=initialisation.THETA))
    initialisation.prepare(model)
    cells = [[list(map(int, puzzle.clues)), list(map(int, puzzle.solved))] for puzzle in held_out(4)]
    batch = as_batch(torch.tensor(cells))
    seen: list[torch.Tensor] = []
    model.model.transformer.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        logits = model(torch.cat([batch.prompt, draw_masks(batch, Generator().manual_seed(0))], dim=1))[:, -90:]
    for row, column in ((0, 0), (2, 8), (3, 0), (4, 5), (8, 8)):
        for place in (1, 91):
            found = seen[0][:, place + 10 * row + column, initialisation.CODES :][:, :27].unflatten(1, (3, 9)).argmax(2)
            assert found.tolist() == [[row, column, row // 3 * 3 + column // 3]] * 4
    digits = logits[:, :, ID["1"] : ID["1"] + 9].log_softmax(dim=2)
    truth = (batch.response - ID["1"]).clamp(0, 8)[..., None]
    assert digits.gather(2, truth)[batch.blank].mean() > -2.0, "better than guessing, which has -2.2"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sudoku") / "model"
    export(TinyModel(Shape(len(VOCABULARY), d_model=16, n_layers=1, n_heads=2, mlp_hidden_size=16)), folder, {})
    save_tokenizer(folder)
    return folder


def test_every_command_takes_a_model_of_the_task(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(untrained)]
    assert main(["compare", "--n", "2", "--decoders", "loo,factor", "--set", "factor=4", *model]) == 0
    assert "loo" in capsys.readouterr().out
    assert main(["demo", "--watch", "1", "--n", "1", *model]) == 0
    assert "side by side" in capsys.readouterr().out
    assert main(["trace", "--decoder", "loo", "--problem", "3", *model]) == 0
    assert held_out(1, first=3)[0].clues[0].replace("0", "_") in Path("trace.html").read_text()
    assert main(["generate", held_out(1)[0].question, "--max-new-tokens", "90", "--block-length", "90", *model]) == 0
    assert main(["compare", "--n", "2", "--level", "hard", *model]) != 0
    assert "9x9" in capsys.readouterr().err


def test_a_score_counts_solved_puzzles_and_passes(untrained: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel(Shape(len(VOCABULARY), d_model=16, n_layers=1, n_heads=2, mlp_hidden_size=16))
    found = score(model, held_out(2), 0.0)
    assert (found.right, found.forwards, found.problems) == (0.0, 1.0, 2)
    assert score(model, held_out(2)).forwards == 90


def test_the_packaged_model_is_small_solves_puzzles_and_says_where_it_comes_from() -> None:
    folder = packaged("tiny-sudoku")
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size < 2_100_000
    training = json.loads((folder / "training.json").read_text())
    assert training["command"].startswith("python -m asrd.lab.sudoku.train")
    assert (training["dirty"], len(training["commit"])) == (False, 40)
    model, tokenizer = asrd.load("tiny-sudoku")
    assert find_task(tokenizer) is TASKS[1]
    records = decode_batch(model, RunSpec("loo", {"factor": 1.0}), held_out(12))
    assert sum(record["right"] for record in records) >= 3
