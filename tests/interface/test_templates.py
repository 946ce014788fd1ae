"""`asrd.fill` and `asrd.choose`: blanks in, parts by name out; and reading instead of writing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asrd
from asrd.lab.tiny.task import held_out, token_errors
from tests.support.letters import Letters
from tests.support.table_models import TableModel, TableSpec

LETTERS = Letters()


@pytest.fixture(scope="module")
def tiny() -> Any:
    return asrd.load("tiny")


@pytest.fixture
def table() -> TableModel:
    return TableModel(TableSpec(seed=2, eos_token_id=None))


def test_parts_come_by_name_and_the_rest_stays(table: TableModel) -> None:
    out = asrd.fill(table, LETTERS, "ab{x:2}ca{y:3}dd___b", lengths={"3": 1})
    assert set(out.parts) == {"x", "y", "3"}
    tokens = out.output.sequences[0].tolist()
    assert tokens[0] == 4
    assert (tokens[3], tokens[7], tokens[9]) == (6, 10, 3)
    assert out.slots == {"x": range(1, 3), "y": range(4, 7), "3": range(8, 9)}
    assert out["x"] == LETTERS.decode(tokens[1:3], skip_special_tokens=True).strip()
    assert out.text == LETTERS.decode(tokens, skip_special_tokens=True).strip()
    assert 11 not in tokens


def test_a_mask_token_in_the_text_is_a_blank_too(table: TableModel) -> None:
    by_token = asrd.fill(table, LETTERS, "ab<mask><mask>ca<mask>")
    by_name = asrd.fill(table, LETTERS, "ab{a:2}ca{b:1}")
    assert torch.equal(by_token.output.sequences, by_name.output.sequences)
    assert list(by_token.parts) == ["1", "2"]


def test_a_blank_may_be_filled_with_less(table: TableModel) -> None:
    class Short(TableModel):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits[:, 2:, 1] += 50  # an EOS from the third column on
            return out

    out = asrd.fill(Short(TableSpec(seed=2)), LETTERS, "ab{x:4}ca")
    tokens = out.output.sequences[0].tolist()
    assert tokens[2:5] == [1, 1, 1]
    assert tokens[5] == 6
    assert out["x"] == LETTERS.decode(tokens[1:2])
    assert out.text == LETTERS.decode([4, tokens[1], 6])


def test_blanks_with_allowed_tokens_hold_nothing_else(table: TableModel) -> None:
    out = asrd.fill(table, LETTERS, "ab{x:3}ca{y:2}", allowed={"x": ["d", "dd"], "y": [2, 3]})
    assert set(out["x"]) == {"d"}
    assert set(out["y"]) <= {"a", "b"}


def removed_step(response_ids: list[int], tokens: Any) -> tuple[list[int], range]:
    """A solved problem without its second step: the ids, and where the gap is."""
    stops = [place for place, token in enumerate(response_ids) if token == tokens["."]]
    return response_ids, range(stops[0] + 1, stops[1] + 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("decoder", ["standard", "asrd", "threshold"])
def test_a_missing_step_of_a_solved_problem_is_filled_in(tiny: Any, decoder: str) -> None:
    """Graded by the packaged grader, token by token: the equation must be the solution's."""
    model, tokenizer = tiny
    vocabulary, rows, gaps, problems = tokenizer.get_vocab(), [], [], held_out(12, "hard")
    for problem in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=True
        )
        prompt = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
        response, gap = removed_step(list(problem.response_ids), vocabulary)
        filled = [tokenizer.mask_token_id if place in gap else token for place, token in enumerate(response)]
        rows.append(list(prompt) + filled)
        gaps.append(range(len(prompt) + gap.start, len(prompt) + gap.stop))
    right = 0
    for row, gap, problem in zip(rows, gaps, problems, strict=True):
        settings = {} if decoder == "standard" else {"threshold": 0.7}
        out = asrd.fast_generate(model, torch.tensor([row]), decoder=decoder, **settings)[0].tolist()
        assert [t for p, t in enumerate(out) if p not in gap] == [t for p, t in enumerate(row) if p not in gap]
        begin = len(row) - len(problem.response_ids)
        wrong = token_errors(problem, out[begin:])
        right += not any(wrong[place - begin] for place in gap[-6:])  # "8 - 2 = 6 .", whatever the wording before it
    assert right >= 10, f"{right} of 12"


def test_choices_are_read_in_one_forward_pass(table: TableModel) -> None:
    calls = []
    handle = table.register_forward_pre_hook(lambda *_: calls.append(1))
    asrd.choose(table, LETTERS, "ab{x}ca", ["a", "b"])
    calls.clear()
    found = asrd.choose(table, LETTERS, "ab{x}ca", ["a", "b", "dd"])
    handle.remove()
    assert len(calls) == 1
    logits = table(inputs_embeds=table.get_input_embeddings()(torch.tensor([[4, 11, 6]]))).logits[0, 1]
    wanted = logits[[2, 3, 10]].float().softmax(0).tolist()
    assert list(found.values()) == pytest.approx(wanted, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1)
    several = asrd.choose(table, LETTERS, "ab{x}ca", ["da", "db", "c"])
    assert set(several) == {"da", "db", "c"}


def test_tiny_knows_the_next_number(tiny: Any) -> None:
    model, tokenizer = tiny
    problem = held_out(1, "hard")[0]
    words = list(problem.response)
    place = words.index("=") + 1
    template = " ".join([*words[:place], "{sum}", *words[place + 1 :]])
    others = [str((int(words[place]) + step) % 30) for step in (0, 1, 2, 5)]
    found = asrd.choose(model, tokenizer, template, others, prompt=problem.question)
    assert max(found, key=lambda choice: found[choice]) == words[place]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"template": "abc"}, "has no blank"),
        ({"template": 5}, "template must be text"),
        ({"template": "{x}{x}"}, "two blanks called 'x'"),
        ({"template": "a{x:0}"}, "has 0 tokens"),
        ({"template": "a{x}", "lengths": {"y": 2}}, "lengths has 'y'"),
        ({"template": "a{x}", "lengths": {"x": 1.5}}, "has 1.5 tokens"),
        ({"template": "a{x}", "allowed": {"y": ["a"]}}, "allowed has 'y'"),
        ({"template": "a{x}", "allowed": {"x": ["zz"]}}, "not one token|zz"),
    ],
)
def test_bad_templates_are_refused(table: TableModel, arguments: dict[str, Any], match: str) -> None:
    class Strict(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [] if "z" in text else super().encode(text)

    with pytest.raises(ValueError, match=match):
        asrd.fill(table, Strict(), **arguments)


def test_bad_choices_are_refused(table: TableModel) -> None:
    for template, choices, match in (
        ("a{x}", ["a"], "at least two"),
        ("a{x}", ["a", "a"], "at least two"),
        ("a{x}", ["a", ""], "at least two"),
        ("a{x}{y}", ["a", "b"], "2 blanks"),
        ("a", ["a", "b"], "0 blanks"),
    ):
        with pytest.raises(ValueError, match=match):
            asrd.choose(table, LETTERS, template, choices)
