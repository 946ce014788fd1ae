"""The official client against the server: every answer is that of `fast_generate` alone, streamed or not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, OpenAI

from asrd.engine.stopping import text_before
from asrd.serve.service import Service
from asrd.serve.worker import Ended, Event, Stepped, Ticket
from tests.support.server import QUESTION, Running, alone, chat, running, tiny


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(slots=4) as found:
        yield found
        assert found.service.metrics.unfaithful._value.get() == 0


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def test_a_chat_is_answered_with_text_reason_and_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=chat(), max_tokens=32)
    text, length, _ = alone(chat())
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    _, tokenizer = tiny()
    prompt = tokenizer.apply_chat_template(chat(), add_generation_prompt=True, tokenize=False)
    assert answer.usage.prompt_tokens == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert answer.usage.completion_tokens == length
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + length
    assert (answer.object, answer.model) == ("chat.completion", "tiny")


def test_an_answer_that_is_cut_off_says_so(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=chat(), max_completion_tokens=8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].message.content == alone(chat(), 8)[0]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_the_same_text_in_settled_parts(client: OpenAI, usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(client.chat.completions.create(model="tiny", messages=chat(), stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text, length, _ = alone(chat())
    assert "".join(choice.delta.content or "" for choice in told) == text
    assert [choice.finish_reason for choice in told if choice.finish_reason] == ["stop"]
    assert len([choice for choice in told if choice.delta.content]) > 1
    assert len({chunk.id for chunk in chunks}) == 1
    if usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == length
        assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_clients_own_stream_helper_and_the_async_client_work(server: Running, client: OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=chat(), max_tokens=32) as stream:
        told = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(told) == whole.choices[0].message.content == alone(chat())[0]
    assert whole.choices[0].finish_reason == "stop"

    async def ask() -> list[str]:
        asking = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        both = [asking.chat.completions.create(model="tiny", messages=chat(n), max_tokens=16) for n in (4, 7)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*both)]

    assert asyncio.run(ask()) == [alone(chat(number), 16)[0] for number in (4, 7)]


def test_a_block_diffusion_model_is_served_with_the_decoders_it_has() -> None:
    import asrd

    model, tokenizer = asrd.load("tiny-block")
    ids = tokenizer(QUESTION.format(4))["input_ids"]
    with running(slots=2, model=model, tokenizer=tokenizer) as server:
        client = server.client()
        facts = client.models.retrieve("tiny").model_extra["asrd"]
        assert facts["decoders"] == ["asrd", "threshold", "factor", "loo", "native"]
        assert facts["settings"]["block_length"] == model.config.asrd_block_length
        for decoder in ("asrd", "native"):
            out = asrd.fast_generate(model, torch.tensor([ids]), max_new_tokens=30, decoder=decoder)
            text = tokenizer.decode(out[0, len(ids) :].tolist(), skip_special_tokens=True)
            ask: Any = {"model": "tiny", "prompt": QUESTION.format(4), "max_tokens": 30}
            ask |= {"extra_body": {"asrd": {"decoder": decoder}}}
            assert client.completions.create(**ask).choices[0].text == text
            chunks = list(client.completions.create(stream=True, **ask))
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
            word = text.split()[4]
            assert client.completions.create(stop=word, **ask).choices[0].text == text_before(text, word)
        with pytest.raises(BadRequestError, match="needs full attention"):
            client.completions.create(model="tiny", prompt="ann", extra_body={"asrd": {"decoder": "wino"}})


@pytest.mark.parametrize(
    ("own", "compared"),  # with the steps: loo takes two in one pass here, asrd does not
    [({"decoder": "loo"}, -1), ({"decoder": "asrd"}, 0), ({"decoder": "native", "boundary": "apart"}, 1)],
)
def test_forward_passes_of_a_block_diffusion_model_are_those_that_were_made(
    own: dict[str, Any], compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asrd
    from asrd.models import ModelAdapter

    made, body = [0], ModelAdapter.body

    def counted(self: Any, *arguments: Any) -> Any:
        made[0] += 1
        return body(self, *arguments)

    model, tokenizer = asrd.load("tiny-block")
    monkeypatch.setattr(ModelAdapter, "body", counted)
    long = [{"role": "user", "content": "ben has 4 stones . " * 6 + QUESTION.format(4)}]  # its first block is stored
    ask: Any = {"model": "tiny", "messages": long if "boundary" in own else chat(), "max_tokens": 60}
    with running(slots=2, model=model, tokenizer=tokenizer) as server:
        create = server.client().chat.completions.create
        made[0] = 0
        whole = create(extra_body={"asrd": own}, **ask).choices[0]
        assert whole.model_extra["asrd"]["forward_passes"] == made[0]
        made[0] = 0
        chunks = list(create(stream=True, extra_body={"asrd": own | {"drafts": True}}, **ask))
        told = [chunk.choices[0].model_extra["asrd"] for chunk in chunks if "asrd" in chunk.choices[0].model_extra]
    assert told[-1]["forward_passes"] == whole.model_extra["asrd"]["forward_passes"] == made[0]
    steps = [news["step"] for news in told if "step" in news]
    assert steps == list(range(1, len(steps) + 1))
    assert (made[0] > len(steps)) - (made[0] < len(steps)) == compared
    shown = {place: text for news in told[1:-1] for place, text in news["drafted"] + news["edited"]}
    last = told[-2]["filled"] or 60
    assert "".join(shown[place] for place in range(last)).replace("<|eos|>", "").strip() == whole.message.content


def test_the_steps_of_a_row_are_told_alike_beside_one_whose_steps_go_two_in_one_pass() -> None:
    """No commit is told that the row took no part in."""
    import asrd

    model, tokenizer = asrd.load("tiny-block")
    long = [{"role": "user", "content": "ben has 4 stones . " * 2 + QUESTION.format(7)}]  # its blocks end elsewhere
    prompts = [tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in (chat(), long)]
    settings = {"max_new_tokens": 96, "decoder": "loo", "early_stop": False}

    async def steps(which: list[int]) -> list[list[Stepped]]:
        """All that is told of these prompts, which are there before the engine begins."""
        worker, told, over = Service(model, tokenizer, "tiny", 2, None, settings).worker, {}, asyncio.Event()

        def notify(number: int, event: Event) -> None:
            told.setdefault(number, []).append(event)
            if sum(events[-1].last for events in told.values()) == len(which):
                over.set()

        for number in which:
            ids = list(prompts[number]["input_ids"])
            worker.submit(Ticket(ids, dict(settings), partial(notify, number), steps=True))
        worker.start()
        await asyncio.wait_for(over.wait(), 60)
        worker.stop()
        assert all(isinstance(events[-1], Ended) for events in told.values())
        return [[event for event in told[number] if isinstance(event, Stepped)] for number in which]

    alone = [asyncio.run(steps([number]))[0] for number in (0, 1)]
    assert [[int(event.moment.step) for event in told] for told in alone] == [[*range(1, 8)], [*range(1, 13)]]
    for found, wanted in zip(asyncio.run(steps([0, 1])), alone, strict=True):
        assert [event.settled for event in found] == [event.settled for event in wanted]
        for mine, other in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.moment, other.moment, strict=True))


def test_completions_take_text_ids_and_several_prompts(client: OpenAI) -> None:
    _, tokenizer = tiny()
    prompts = [QUESTION.format(n) for n in (4, 7)]
    both = client.completions.create(model="tiny", prompt=prompts, max_tokens=16, n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [alone(p, 16)[0] for p in prompts for _ in range(2)]
    ids = client.completions.create(model="tiny", prompt=tokenizer(prompts[0])["input_ids"], max_tokens=16)
    assert ids.choices[0].text == both.choices[0].text
    assert ids.object == "text_completion"
    streamed = client.completions.create(model="tiny", prompt=prompts, max_tokens=16, stream=True)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [both.choices[0].text, both.choices[2].text]


def test_choices_are_samples_of_their_own_and_a_seed_repeats_them(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": chat(), "temperature": 1.5, "n": 3, "max_tokens": 24}
    first, again = (client.chat.completions.create(seed=11, **ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert texts == [alone(chat(), 24, row, temperature=1.5, seed=11)[0] for row in range(3)]
    free = [client.chat.completions.create(**ask | {"n": 1}).choices[0].message.content for _ in range(4)]
    assert len(set(free)) > 1, "without a seed, samples should differ"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text_exactly(client: OpenAI, stream: bool) -> None:
    whole = alone(chat())[0]
    words = whole.split()
    rng = random.Random(3)
    middle = whole.index(" so ") + 1
    stops: list[Any] = [words[3], [words[-1], words[5]], whole[middle - 3 : middle + 4], "never there", whole[0]]
    stops += [whole[at : at + rng.randint(1, 6)] for at in rng.sample(range(len(whole) - 6), 4)]
    for stop in stops:
        expected = text_before(whole, stop).strip()
        ask: Any = {"model": "tiny", "messages": chat(), "stop": stop, "max_tokens": 32}
        if stream:
            chunks = [c.choices[0] for c in client.chat.completions.create(stream=True, **ask)]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            assert chunks[-1].finish_reason == "stop"
        else:
            answer = client.chat.completions.create(**ask)
            text = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
            assert 1 <= answer.usage.completion_tokens <= alone(chat())[1]
        assert text == expected, stop


def test_drafts_replayed_give_the_answer(client: OpenAI) -> None:
    extra = {"asrd": {"drafts": True, "threshold": 0.5}}
    chunks = list(client.chat.completions.create(model="tiny", messages=chat(), stream=True, extra_body=extra))
    told = [chunk.choices[0].model_extra.get("asrd") for chunk in chunks]
    head, *steps, end = [news for news in told if news]
    canvas: list[str | None] = [None] * head["length"]
    final: list[str | None] = []
    revoked = 0
    for step in steps:
        assert step["step"] == steps.index(step) + 1
        for place in step["revoked"]:
            assert canvas[place] is not None
            canvas[place] = None
        revoked += len(step["revoked"])
        for place, text in step["drafted"]:
            assert canvas[place] is None
            canvas[place] = text
        assert all(canvas[place] is not None for place in [*step["pending"], *range(step["settled"])])
        assert canvas[: len(final)] == final, "settled text has changed"
        final = canvas[: step["settled"]]

    last = steps[-1]["filled"] or head["length"]
    text, length, passes = alone(chat(), threshold=0.5)
    assert "".join(word or "" for word in canvas[:last]).replace("<|eos|>", "").strip() == text
    assert (end["forward_passes"], end["revoked"]) == (passes, revoked) == (len(steps), revoked)
    assert end["tokens_per_forward"] == pytest.approx(length / passes, abs=1e-4)
    assert revoked > 0, "the case should have a revocation"


@pytest.mark.parametrize("decoder", ["standard", "threshold", "loo", "wino", "saber", "factor"])
def test_every_decoder_can_be_asked_for_and_watched(client: OpenAI, decoder: str) -> None:
    settings = {"decoder": decoder} | ({"factor": 2.0} if decoder in ("loo", "factor") else {})
    chunks = client.chat.completions.create(
        model="tiny", messages=chat(7), stream=True, extra_body={"asrd": settings | {"drafts": True}}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == alone(chat(7), **settings)[0]


def test_log_probabilities_are_those_of_the_decode(client: OpenAI) -> None:
    import asrd

    model, tokenizer = tiny()
    answer = client.chat.completions.create(model="tiny", messages=chat(), max_tokens=32, logprobs=True)
    parts = answer.choices[0].logprobs.content
    assert "".join(part.token for part in parts).strip() == answer.choices[0].message.content
    engine = asrd.Engine(model, tokenizer, max_new_tokens=32, logprobs=True)
    engine.submit(chat()[0]["content"])
    (result,) = engine.run()
    assert [part.logprob for part in parts] == pytest.approx(result.logprobs["logprob"][: len(parts)])
    text = client.completions.create(model="tiny", prompt=QUESTION.format(4), max_tokens=8, logprobs=0).choices[0]
    assert "".join(text.logprobs.tokens).strip() == text.text.strip()
    assert len(text.logprobs.token_logprobs) == len(text.logprobs.text_offset) == 8
    for token, offset in zip(text.logprobs.tokens, text.logprobs.text_offset, strict=True):
        assert text.text[offset:].startswith(token if offset else token.lstrip())


def test_nucleus_sampling_is_that_of_the_decode(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": chat(), "temperature": 1.5, "seed": 4, "max_tokens": 24}
    text = client.chat.completions.create(top_p=0.3, **ask).choices[0].message.content
    assert text == alone(chat(), 24, temperature=1.5, seed=4, top_p=0.3)[0]
    assert text != client.chat.completions.create(**ask).choices[0].message.content


def test_what_vllm_and_sglang_add_is_sampled_by_and_their_defaults_change_nothing(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": chat(), "temperature": 2.0, "seed": 6, "max_tokens": 24}
    usual = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True}
    free = client.chat.completions.create(**ask).choices[0].message.content
    assert client.chat.completions.create(extra_body=usual, **ask).choices[0].message.content == free
    for own in ({"top_k": 2}, {"min_p": 0.2}, {"repetition_penalty": 3.0}):
        text = client.chat.completions.create(extra_body=own, **ask).choices[0].message.content
        assert text == alone(chat(), 24, temperature=2.0, seed=6, **own)[0]
        assert text != free


def test_many_clients_at_once_get_their_own_answers(server: Running) -> None:
    expected = {number: alone(chat(number), 24)[0] for number in range(4, 10)}
    wrong: list[Any] = []

    def ask(number: int, stream: bool) -> None:
        own = server.client(max_retries=5)
        if stream:
            chunks = own.chat.completions.create(model="tiny", messages=chat(number), max_tokens=24, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            answer = own.chat.completions.create(model="tiny", messages=chat(number), max_tokens=24)
            text = answer.choices[0].message.content
        if text != expected[number]:
            wrong.append((number, stream, text))

    threads = [threading.Thread(target=ask, args=(4 + i % 6, i % 2 == 0)) for i in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert server.idle()


def test_models_health_and_metrics_are_there(server: Running, client: OpenAI) -> None:
    import urllib.request

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["asrd"]["slots"] == 4
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    for name in ("asrd_requests_total", "asrd_completion_tokens_total", "asrd_forward_passes_total", "asrd_waiting"):
        assert f"\n{name}" in text
    assert 'asrd_requests_total{endpoint="chat",status="200"}' in text
