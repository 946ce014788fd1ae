"""The model `asrd` of lm-eval: prompts as lm-eval makes them, decodes as the engine makes them, runs that resume."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.benchmark_items import published, write_items
from tests.support.table_models import make_llama

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

import asrd
from asrd.eval.code_metric import in_place_of_the_hub
from asrd.eval.likelihood import Estimate, Likelihood, hidden_places, published_estimate
from asrd.eval.model import AsrdLM
from asrd.eval.run import Cell, run_cell
from asrd.eval.stopping import answer
from asrd.eval.tasks import TASKS, load_task
from asrd.lab.compare.measure import decode_batch
from asrd.lab.compare.plan import RunSpec
from asrd.lab.tiny.task import held_out
from asrd.models import ModelAdapter


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return asrd.load("tiny")


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("run", [RunSpec("asrd", {"threshold": 0.6}), RunSpec("threshold", {"kv_cache": "dual"})])
def test_tiny_behind_lm_eval_is_as_right_in_as_many_passes_as_in_asrd_compare(
    run: RunSpec, tiny: tuple[Any, Any]
) -> None:
    make = functools.partial(AsrdLM, *tiny, batch_size=3)
    ours = run_cell(make, load_task("packaged", limit=6), Cell("packaged", run, chat=True), None).records
    theirs = decode_batch(tiny[0], run, held_out(6))
    assert [(bool(r["score"]), r["steps"], r["length"]) for r in ours] == [
        (r["right"], r["steps"], r["length"]) for r in theirs
    ]
    assert sum(r["score"] for r in ours) > 0


class Prompts(LM):
    """A stock model: keeps the prompts that lm-eval gives it."""

    tokenizer_name = "stock"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer, self.seen = tokenizer, []

    def generate_until(self, requests: Any) -> list[str]:
        self.seen = [request.args[0] for request in requests]
        return [""] * len(requests)

    def loglikelihood(self, requests: Any) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        from lm_eval.models.huggingface import HFLM

        self.chat_template_args: dict[str, Any] = {}
        return HFLM.apply_chat_template(self, chat_history, add_generation_prompt)  # type: ignore[arg-type]


def stock_prompts(name: str, data: Path, tokenizer: Any, chat: bool, number: int) -> list[str]:
    """Prompts of lm-eval's own task manager and evaluator; of ours are the rows of the data set only."""
    import lm_eval.tasks
    from datasets import Dataset, DatasetDict
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from asrd.eval.data import read_local

    folder = Path(lm_eval.tasks.__file__).parent / Path(TASKS[name].yaml).parent
    rows = DatasetDict({s: Dataset.from_list(r) for s, r in read_local(TASKS[name].source, data).splits.items()})
    rows.setdefault("train", rows[next(iter(rows))])  # stock tasks look for it, without examples too
    stock = {"cnn_dailymail": "cnn_dailymail_abisee"}.get(name, name)
    with in_place_of_the_hub():
        manager = TaskManager(include_defaults=False, include_path=folder)
        import datasets

        original, datasets.load_dataset = datasets.load_dataset, lambda **_: rows
        try:
            task = manager.load([stock])["tasks"][stock]
        finally:
            datasets.load_dataset = original
    model = Prompts(tokenizer)
    simple_evaluate(
        model=model, tasks=[task], limit=number, apply_chat_template=chat, fewshot_as_multiturn=True,
        predict_only=True, bootstrap_iters=0, task_manager=manager, confirm_run_unsafe_code=True,
        num_fewshot=0 if name == "gsm8k" else None,
    )  # fmt: skip
    return model.seen


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].source])
def test_prompts_are_those_that_lm_eval_gives_a_stock_model(
    name: str, chat: bool, tiny: tuple[Any, Any], items: Path
) -> None:
    """gsm8k without examples: the training set is not among the files."""
    real = published()
    data = real if real is not None and name != "cnn_dailymail" else items
    expected = stock_prompts(name, data, tiny[1], chat, 20)
    seen: list[str] = []

    class Ours(AsrdLM):
        def tok_encode(self, string: str, *rest: Any, **options: Any) -> list[int]:
            seen.append(string)
            return super().tok_encode(string, *rest, **options)

        def generate(self, jobs: Any) -> Any:
            for job in jobs:
                yield {"key": job.key, "text": "", "forwards": 1, "revoked": 0, "flip_flops": 0}

    task = load_task(name, data, shots=0 if name == "gsm8k" else None)
    from asrd.eval.code_metric import Executor

    class Nothing(Executor):
        def run(self, *_: Any) -> Any:
            from asrd.eval.sandbox import Outcome

            return Outcome(False, "not run")

    cell = Cell(name, RunSpec("asrd", {"max_new_tokens": 8}), chat=chat)
    run_cell(functools.partial(Ours, *tiny), task, cell, None, 20, Nothing())
    assert len(expected) == min(20, len(task.task.eval_docs))
    assert seen == expected


def requests_of(texts: list[str], **given: Any) -> list[Instance]:
    options = {"until": [], "max_gen_toks": 32, "do_sample": False} | given
    return [Instance("generate_until", {}, (t, options), 0, ("own", n, 1)) for n, t in enumerate(texts)]


def test_a_run_resumes_from_its_file_and_a_half_written_line_is_generated_again(
    tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    requests = requests_of([problem.question for problem in held_out(4, "easy")])
    path = tmp_path / "generations.jsonl"
    whole = AsrdLM(*tiny, generations=path).generate_until(requests)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])

    class Counting(AsrdLM):
        made = 0

        def generate(self, jobs: Any) -> Any:
            Counting.made = len(jobs)
            yield from super().generate(jobs)

    assert Counting(*tiny, generations=path).generate_until(requests) == whole
    assert Counting.made == 2
    kept = {record["key"]: record["tokens"] for record in map(json.loads, path.read_text().splitlines())}
    assert kept == {record["key"]: record["tokens"] for record in map(json.loads, lines)}


def test_other_settings_do_not_take_the_answers_of_a_file(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    requests = requests_of([held_out(1, "easy")[0].question])
    path = tmp_path / "generations.jsonl"
    AsrdLM(*tiny, generations=path, threshold=0.9).generate_until(requests)
    AsrdLM(*tiny, generations=path, threshold=0.5).generate_until(requests)
    assert len(path.read_text().splitlines()) == 2


def test_a_batch_gives_what_single_requests_give_sampling_included(tiny: tuple[Any, Any]) -> None:
    requests = requests_of([p.question for p in held_out(5, "easy")], do_sample=True, temperature=0.7)
    together = AsrdLM(*tiny, batch_size=4).generate_until(requests)
    assert [AsrdLM(*tiny, batch_size=1).generate_until([request])[0] for request in requests] == together


def test_repeats_of_a_sampled_request_differ(tiny: tuple[Any, Any]) -> None:
    options = {"until": [], "max_gen_toks": 32, "do_sample": True, "temperature": 2.0}
    request = Instance("generate_until", {}, (held_out(1, "easy")[0].question, options), 0, ("own", 0, 4))
    assert len(set(AsrdLM(*tiny).generate_until([request] * 4))) > 1


def test_settings_of_the_model_win_over_the_task_and_both_are_checked(tiny: tuple[Any, Any]) -> None:
    model = AsrdLM(*tiny, max_new_tokens=16)
    assert model._asked({"max_gen_toks": 64, "do_sample": False})[0]["max_new_tokens"] == 16
    assert AsrdLM(*tiny)._asked({"max_gen_toks": 64, "threshold": 0.8})[0] == {"max_new_tokens": 64, "threshold": 0.8}
    with pytest.raises(ValueError, match="min_tokens=3 is no setting"):
        model._asked({"min_tokens": 3})
    with pytest.raises(ValueError, match=r"treshold=0\.8 is no argument .*threshold"):
        AsrdLM(*tiny, treshold=0.8)
    with pytest.raises(ValueError, match=r"threshold=2 is out of range"):
        AsrdLM(*tiny, threshold=2)


def test_a_long_prompt_loses_tokens_on_the_left_and_that_is_recorded(tiny: tuple[Any, Any]) -> None:
    model = AsrdLM(*tiny, max_length=40)
    (job,) = model._jobs(requests_of([" ".join(["7"] * 20 + ["8"] * 8)]))
    assert job.ids == tiny[1].encode(" ".join(["8"] * 8))
    assert job.truncated == 20


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("decoder", ["asrd", "standard", "threshold"])
def test_stop_strings_end_the_decode_and_change_nothing_before_them(decoder: str, tiny: tuple[Any, Any]) -> None:
    texts = [problem.question for problem in held_out(3)]
    settings = {"max_gen_toks": 64}

    def run(until: list[str], **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
        model = AsrdLM(*tiny, batch_size=3, decoder=decoder, **options)
        found = model.generate_until(requests_of(texts, until=until, **settings))
        return found, sorted(model.generations.done.values(), key=lambda record: record["document"])

    whole, full = run([])
    stop = whole[0].split()[8]
    stopped, short = run([stop, "nowhere"])
    assert [text.rstrip() for text in stopped] == [text.partition(stop)[0].rstrip() for text in whole]
    assert stopped[0]
    for record, other in zip(short, full, strict=True):
        assert record["tokens"] == other["tokens"][: record["length"]]
        ended = stop in whole[record["document"]]
        assert record["stopped_by"] == (stop if ended else None)
        assert record["steps"] <= other["steps"]
    assert short[0]["steps"] < full[0]["steps"]
    to_the_end, fixed = run([stop], early_stop=False)
    assert to_the_end == stopped
    assert [record["steps"] for record in fixed] >= [record["steps"] for record in full]
    assert {record["stopped_by"] for record in fixed} == {None}
    if decoder == "standard":
        assert [record["steps"] for record in fixed] == [64] * 3


def test_padding_behind_a_stop_string_is_no_flip_flop() -> None:
    from types import SimpleNamespace

    from asrd.eval.watch import Watch

    watch, mask, pad = Watch(mask_id=9, eos_ids=(1,)), 9, 0
    handle, shown = SimpleNamespace(index=0, kept=None), [[mask] * 4]

    def show(tokens: list[int]) -> None:
        off, step = torch.zeros(1, len(tokens), dtype=torch.bool), torch.tensor([len(shown)])
        state = SimpleNamespace(
            generated=torch.tensor([tokens]), pending=off, trusted=off, done=torch.tensor([False]), step=step
        )
        shown.append(tokens)
        watch(state, (handle,))  # type: ignore[arg-type]

    show([5, 6, pad, mask])
    show([5, mask, mask, mask])  # 6 and a predicted pad are revoked
    show([5, 6, mask, mask])  # 6 again: a flip-flop
    handle.kept = 2
    show([5, 6, pad, pad])  # the row has ended behind 6
    assert watch.seen[0].flip_flops.count == 1


def test_without_events_nothing_observes_the_engine_and_seconds_are_measured(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import asrd.eval.model as module

    observers = []

    class Spy(module.Engine):
        def __init__(self, *rest: Any, **options: Any) -> None:
            observers.append(len(options["observers"]))
            super().__init__(*rest, **options)

    monkeypatch.setattr(module, "Engine", Spy)
    requests = requests_of([problem.question for problem in held_out(3, "easy")])
    for events in (False, True):
        model = AsrdLM(*tiny, batch_size=2, events=events)
        model.generate_until(requests)
        assert all(record["seconds"] > 0 for record in model.generations.done.values())
        assert {record["flip_flops"] is None for record in model.generations.done.values()} == {not events}
    assert observers == [0, 1]


def test_a_stop_string_that_is_a_special_token_cuts_although_it_does_not_show(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    tokens = tokenizer.encode("3 + 4", add_special_tokens=False)
    tokens = [*tokens, tokenizer.eos_token_id, *tokens]
    assert answer(tokenizer, tokens, ["<|eos|>"]).split() == ["3", "+", "4"]
    assert answer(tokenizer, tokens, []).split() == ["3", "+", "4"] * 2


def exact(adapter: ModelAdapter, context: list[int], target: list[int], mask: int) -> float:
    """Mean over all numbers and places of masks, by enumeration."""
    total, length = 0.0, len(target)
    for count in range(1, length + 1):
        sums = []
        for code in range(2**length):
            hidden = [bool(code >> place & 1) for place in range(length)]
            if sum(hidden) != count:
                continue
            ids = torch.tensor([context + [mask if h else t for h, t in zip(hidden, target, strict=True)]])
            logits = adapter.full_logits(adapter.table[ids], adapter.inputs())[0].log_softmax(-1)
            sums.append(sum(float(logits[len(context) + p, target[p]]) for p in range(length) if hidden[p]))
        total += length / count * sum(sums) / len(sums)
    return total / length


@torch.no_grad()
def test_the_likelihood_estimate_converges_to_the_mean_over_all_masks() -> None:
    adapter = ModelAdapter(make_llama(seed=1))
    mask = int(adapter.config.mask_token_id) if hasattr(adapter.config, "mask_token_id") else adapter.vocab_size - 1
    context, target = [2, 3, 4], [5, 6, 2]
    wanted = exact(adapter, context, target, mask)
    draws = [Likelihood(adapter, mask, 48, 8, seed=seed).estimate(context, target) for seed in range(12)]
    mean, spread = float(torch.tensor(draws).mean()), float(torch.tensor(draws).std())
    assert abs(mean - wanted) < 4 * spread / math.sqrt(len(draws)) + 1e-9
    one = Likelihood(adapter, mask, 48, 8, seed=3)
    assert one.estimate(context, target) == one.estimate(context, target)


def test_numbers_of_masks_are_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.stack([hidden_places(6, 3, generator).sum(1) for _ in range(500)])
    assert counts.min() == 1
    assert counts.max() == 6
    assert torch.bincount(counts.flatten(), minlength=7)[1:].float().std() < 40
    places = torch.stack([hidden_places(6, 3, generator) for _ in range(500)]).float().mean((0, 1))
    assert places.std() < 0.05


def test_multiple_choice_prefers_what_the_model_would_write(tiny: tuple[Any, Any]) -> None:
    problem = held_out(1, "easy")[0]
    context = tiny[1].apply_chat_template([{"role": "user", "content": problem.question}], tokenize=False,
                                          add_generation_prompt=True)  # fmt: skip
    wrong = problem.solution.replace(f"the answer is {problem.answer}", f"the answer is {problem.answer + 1}")
    pairs = [(context, f" {problem.solution}"), (context, f" {wrong}")]
    found = AsrdLM(*tiny, mc_num=16).loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert found[0][0] > found[1][0]


@pytest.mark.parametrize(
    ("task", "wanted"),
    [("mmlu_abstract_algebra", Estimate(1, 1)), ("arc_challenge", Estimate(128, 8, 0.5)),
     ("truthfulqa_mc2", Estimate(128, 8, 2.0)), ("winogrande", Estimate(128, 8, 0.0))],
)  # fmt: skip
def test_likelihoods_have_the_published_settings_of_their_task(task: str, wanted: Estimate) -> None:
    assert published_estimate(task) == wanted


def test_a_block_diffusion_model_has_no_likelihoods() -> None:
    model = AsrdLM(*asrd.load("tiny-block"))
    with pytest.raises(ValueError, match="block-diffusion"):
        model.loglikelihood([Instance("loglikelihood", {}, ("tom has 3", " pens"), 0)])
