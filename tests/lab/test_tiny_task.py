"""What must hold of the generated problems: the split, the graders, the lengths and the tokenizer."""

from __future__ import annotations

import itertools
import re

import pytest

from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.language import EOS_ID, ID, MASK_ID, PAD_ID, UNK_ID, VOCABULARY
from asrd.lab.tiny.task import BLOCK, LEVELS, Problem, generate, grade, problems, split, token_errors
from asrd.lab.tiny.tokenizer import build_tokenizer, save_tokenizer


def answer_from_text(question: str) -> int:
    """An evaluator that knows only the question's text: sentence by sentence, by pattern."""
    first, *events, _ = [sentence.strip() for sentence in re.split(r" [.?]", question) if sentence.strip()]
    found = re.search(r"\d+", first)
    assert found
    have = int(found.group())
    for event in events:
        numbers = [int(digits) for digits in re.findall(r"\d+", event)]
        if "double" in event:
            have *= 2
        elif "half" in event:
            have -= have // 2
        elif "if even" in event:
            have -= numbers[0] if have % 2 == 0 else 0
        elif re.search(r"\b(finds|gets|wins|buys)\b", event):
            have += numbers[0]
        elif re.search(r"\b(loses|sells|drops|spends)\b", event):
            have -= numbers[0]
        else:
            raise AssertionError(f"unknown event {event!r}")
    return have


def sample(level: str, count: int) -> list[Problem]:
    return [generate(seed, level) for seed in range(count)]


@pytest.mark.parametrize("level", LEVELS)
def test_grader_agrees_with_an_independent_reading_of_the_text(level: str) -> None:
    for problem in sample(level, 500):
        answer = answer_from_text(problem.question)
        assert grade(problem, problem.solution)
        assert f"the answer is {answer} ." in problem.solution
        assert problem.answer == answer
        assert grade(problem, problem.response_ids)
        assert not grade(problem, problem.solution.replace(f"is {answer} .", f"is {answer + 1} ."))


def test_grader_wants_an_answer() -> None:
    problem = generate(0)
    assert not grade(problem, "")
    assert not grade(problem, "the answer is")
    assert not grade(problem, [EOS_ID, *problem.response_ids])
    assert grade(problem, f"the answer is {problem.answer}")


@pytest.mark.parametrize("level", LEVELS)
def test_every_equation_of_a_solution_is_true(level: str) -> None:
    for problem in sample(level, 300):
        equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", problem.solution)
        assert len(equations) == LEVELS[level].steps
        for left, sign, right, result in equations:
            assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert all(a[3] == b[0] for a, b in itertools.pairwise(equations)), "a step starts from the last one's result"


@pytest.mark.parametrize("level", LEVELS)
def test_train_and_test_share_no_question(level: str) -> None:
    train = {problem.question for problem in itertools.islice(problems("train", level), 1500)}
    test = {problem.question for problem in itertools.islice(problems("test", level), 150)}
    assert not train & test
    assert all(split(generate(seed, level)) in ("train", "test") for seed in range(100))


def test_generator_is_deterministic() -> None:
    assert generate(7, "hard") == generate(7, "hard") != generate(8, "hard")
    assert generate(0, "hard").question.startswith(generate(0, "hard").question[:10])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="level='harder'"):
        generate(0, "harder")
    with pytest.raises(ValueError, match="which='dev'"):
        next(problems("dev"))


def test_hard_responses_fill_three_blocks_with_one_end_of_text() -> None:
    for problem in sample("hard", 200):
        assert len(problem.response) == problem.response_length == 3 * BLOCK
        assert problem.response_ids.count(EOS_ID) == 1
        assert problem.response_ids[-1] == EOS_ID
    for level in LEVELS:
        assert all(problem.response_length % BLOCK == 0 for problem in sample(level, 50))


@pytest.mark.parametrize("level", LEVELS)
def test_solutions_have_no_token_error(level: str) -> None:
    for problem in sample(level, 200):
        assert not any(token_errors(problem, problem.response_ids))


def test_a_wrong_number_is_an_error_at_its_position_only() -> None:
    problem = generate(1)
    for at, word in enumerate(problem.response):
        if word.isdigit():
            ids = problem.response_ids
            ids[at] = ID[str((int(word) + 1) % 30)]
            assert [place for place, wrong in enumerate(token_errors(problem, ids)) if wrong] == [at]


def test_free_wording_is_no_error_but_must_agree_with_itself() -> None:
    checked = 0
    for problem in sample("hard", 30):
        for at, slot in enumerate(problem.slots):
            leader = slot.follows
            if leader is None or problem.slots[leader].follows is not None:
                continue
            ids = problem.response_ids
            other = (slot.options.index(problem.response[at]) + 1) % len(slot.options)
            ids[at] = ID[slot.options[other]]
            assert token_errors(problem, ids)[at], "disagrees with the earlier word"
            followers = [place for place, s in enumerate(problem.slots) if s.follows == leader]
            for place in (leader, *followers):
                ids[place] = ID[problem.slots[place].options[other]]
            assert not any(token_errors(problem, ids)), "all changed together"
            ids[leader] = MASK_ID
            assert [place for place, wrong in enumerate(token_errors(problem, ids)) if wrong] == [leader]
            checked += 1
    assert checked > 20


def test_nothing_after_the_end_of_text_is_an_error() -> None:
    problem = generate(0, "easy")
    ids = problem.response_ids
    end = ids.index(EOS_ID)
    assert not any(token_errors(problem, ids[: end + 1] + [ID["7"]] * 5))
    early = token_errors(problem, [*ids[:4], EOS_ID, *ids[5:]])
    assert early[4]
    assert not any(early[5:])
    assert token_errors(problem, [*ids[:end], ID["7"], ID["8"]])[-2:] == [True, True]


def test_tokenizer_round_trip_and_prompt(tmp_path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "tokenizer_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(VOCABULARY)
    for problem in sample("hard", 50):
        chat = [{"role": "user", "content": problem.question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == prompt_ids(problem)
        ids = tokenizer(problem.solution)["input_ids"]
        assert ids == [ID[word] for word in problem.response]
        assert tokenizer.decode(ids) == problem.solution
        assert tokenizer.decode(ids, skip_special_tokens=True) == problem.solution.removesuffix(" <|eos|>")
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (MASK_ID, EOS_ID, PAD_ID)
    assert len({MASK_ID, EOS_ID, PAD_ID, UNK_ID}) == 4
    assert tokenizer.padding_side == "left"


def test_any_text_tokenizes() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("Ann has 12 zebras, doesn't she?")["input_ids"]
    assert ids[:3] == [ID["ann"], ID["has"], ID["12"]]
    assert UNK_ID in ids
    assert all(0 <= index < len(VOCABULARY) for index in ids)
