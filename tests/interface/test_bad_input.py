"""Bad input gets a ValueError that says what is wrong and what would be right, and nothing is half written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import asrd
from tests.support.table_models import TableModel, TableSpec, make_llama

IDS = torch.tensor([[2, 3, 4, 5]])


def model() -> TableModel:
    return TableModel(TableSpec(seed=5)).eval()


def refused(match: str, ids: Any = IDS, mask: Any = None, with_model: Any = None, **settings: Any) -> None:
    before = ids.clone() if isinstance(ids, Tensor) else None
    with pytest.raises(ValueError, match=match):
        asrd.fast_generate(with_model or model(), ids, mask, **{"max_new_tokens": 4} | settings)
    if before is not None:
        assert torch.equal(ids, before)


def test_an_empty_prompt() -> None:
    refused(r"prompt is empty", torch.zeros(1, 0, dtype=torch.int64))
    refused(r"prompt is empty", torch.zeros(0, 3, dtype=torch.int64))
    refused(r"attention_mask of row 1 is all 0", IDS.repeat(2, 1), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))


def test_a_prompt_of_the_wrong_kind() -> None:
    refused(r"shape \[batch, prompt length\], not shape \(4,\)", IDS[0])
    refused(r"integer tensor", IDS.float())
    refused(r"integer tensor of shape .* not list", [[1, 2]])


@pytest.mark.parametrize("convert", [lambda ids: ids.to("meta"), lambda ids: ids.to_sparse()], ids=["meta", "sparse"])
def test_ids_and_masks_that_are_not_dense(convert: Any) -> None:
    ids = torch.tensor([[2, 3, 4]])
    with pytest.raises(ValueError, match=r"input_ids is (on the meta device|sparse).*give a dense tensor"):
        asrd.fast_generate(TableModel(TableSpec(seed=3)), convert(ids), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"attention_mask is (on the meta device|sparse).*give a dense tensor"):
        asrd.fast_generate(TableModel(TableSpec(seed=3)), ids, convert(torch.ones_like(ids)), max_new_tokens=2)


def test_ids_outside_the_vocabulary() -> None:
    refused(r"id 12, outside the model's vocabulary of 12", torch.tensor([[1, 12]]))
    refused(r"id -1, outside", torch.tensor([[1, -1]]))
    refused(r"eos_token_id=40 is outside", eos_token_id=40)
    refused(r"pad_token_id=12 is outside", pad_token_id=12)
    refused(r"suppress_tokens=99 is outside", suppress_tokens=[99])
    refused(r"leaves none of the 12 ids", suppress_tokens=list(range(12)))


def test_what_is_not_what_its_name_says() -> None:
    refused(r"streamer=1: expected an object with put and end", streamer=1)
    refused(r"tokenizer='x': expected a tokenizer", tokenizer="x")
    for observers in (None, 5, [5]):
        refused(r"observers=.*: expected a list of callables", observers=observers)
    refused(r"max_length='60': expected an integer", max_length="60")
    refused(r"logits_processor=5: expected a list", logits_processor=5)
    refused(r"past_key_values=<object", past_key_values=object())
    refused(r"position_ids='x': expected a tensor", position_ids="x")
    refused(r"eot_token_id=99999 is outside", eot_token_id=99999, confidence_eos_eot_inf=True)


def test_a_prompt_that_is_too_long_alone_is_said_to_be() -> None:
    short = model()
    short.config.max_position_embeddings = 4
    refused(r"over the model's context of 4: shorten the prompt$", with_model=short)


def test_a_missing_or_wrong_mask_id() -> None:
    bare = model()
    bare.config.mask_token_id = None
    refused(r"give mask_token_id=", with_model=bare)
    refused(r"mask_token_id=12 is outside the model's vocabulary of 12", mask_token_id=12)
    refused(r"pad_token_id=11 is also the mask id", pad_token_id=11)
    refused(r"eos_token_id=11 is also the mask id", eos_token_id=11, pad_token_id=0)


def test_a_mask_id_is_found_in_config_generation_config_or_tokenizer() -> None:
    wanted = asrd.fast_generate(model(), IDS, max_new_tokens=4)
    bare = model()
    bare.config.mask_token_id = None
    tokenizer = SimpleNamespace(mask_token_id=11, eos_token_id=1, pad_token_id=0, get_vocab=dict)
    assert torch.equal(asrd.fast_generate(bare, IDS, max_new_tokens=4, tokenizer=tokenizer), wanted)
    bare.generation_config = SimpleNamespace(mask_token_id=11)
    assert torch.equal(asrd.fast_generate(bare, IDS, max_new_tokens=4), wanted)
    del bare.generation_config
    assert torch.equal(asrd.fast_generate(bare, IDS, max_new_tokens=4, mask_id=11), wanted)


def test_a_mask_in_the_padding_is_not_to_be_filled_in() -> None:
    out = asrd.fast_generate(model(), torch.tensor([[11, 2]]), torch.tensor([[0, 1]]), max_new_tokens=4)
    assert torch.equal(out[:, 1:], asrd.fast_generate(model(), torch.tensor([[2]]), max_new_tokens=4))


def test_masks_that_do_not_fit() -> None:
    two = IDS.repeat(2, 1)
    refused(r"right-padded", two, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    refused(r"holes", two, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]))
    refused(r"attention_mask \(\(2, 3\)\) must have the shape of input_ids, \(2, 4\)", two, torch.ones(2, 3))
    refused(r"0 \(padding\) and 1", two, torch.tensor([[1, 1, 1, 1], [2, 2, 1, 1]]))
    refused(r"begin with the pad id 0, but there is no attention_mask", torch.tensor([[0, 2], [3, 4]]))
    assert asrd.fast_generate(model(), torch.tensor([[0, 2]]), max_new_tokens=4).shape == (1, 6)  # one row may


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_unreadable_logits_name_row_and_step(value: float) -> None:
    class Broken(TableModel):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            if out.logits.shape[0] > 1:
                out.logits[1, 5] = value
            return out

    refused(r"row 1 of the batch .* forward pass 1", IDS.repeat(2, 1), with_model=Broken(TableSpec(seed=5)))


def test_unreadable_logits_of_unwanted_positions_do_not_matter() -> None:
    class Broken(TableModel):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            if out.logits.shape[1] == 8:
                out.logits[:, :4] = float("nan")
            return out

    spec = TableSpec(seed=5)
    wanted = asrd.fast_generate(TableModel(spec), IDS, max_new_tokens=4)
    assert torch.equal(asrd.fast_generate(Broken(spec), IDS, max_new_tokens=4), wanted)


def test_settings_out_of_range() -> None:
    refused(r"threshold=1.5 .* from 0 to 1", threshold=1.5)
    refused(r"alpha=-0.1", alpha=-0.1)
    refused(r"beta=-1", beta=-1)
    refused(r"block_length=0 .* an integer from 1 to 2", block_length=0)
    refused(r"max_new_tokens=0", max_new_tokens=0)
    refused(r"decoder='magic' is unknown: expected one of 'asrd', 'standard', 'threshold'", decoder="magic")
    refused(r"impl='triton' on device 'cpu': .*TRITON_INTERPRET=1", impl="triton")
    refused(r"row_ids must be 1 integers", row_ids=[1, 2])
    refused(r"row_ids", row_ids=[-1])


def test_a_causal_model_is_found_out() -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mask_token_id=15,
    )
    refused(r"LlamaForCausalLM is causal", with_model=LlamaForCausalLM(config).eval())


def test_more_than_the_context() -> None:
    llama = make_llama(seed=0)
    limit = llama.config.max_position_embeddings
    refused(rf"over the model's context of {limit}: .* at most {limit - 4}", with_model=llama, max_new_tokens=limit - 3)
    assert asrd.fast_generate(llama, IDS, max_new_tokens=limit - 4, block_length=8).shape == (1, limit)


def test_models_that_cannot_be_driven() -> None:
    class NoTable(nn.Module):
        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return inputs_embeds

    refused(r"no get_input_embeddings", with_model=NoTable())

    class NoEmbeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 4)

        def get_input_embeddings(self) -> nn.Module:
            return self.table

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.table(input_ids)

    refused(r"does not take inputs_embeds", with_model=NoEmbeds())


def test_a_model_that_ignores_its_attention_mask_is_refused_for_padded_batches_only() -> None:
    class Deaf(TableModel):
        def forward(self, inputs_embeds: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
            return super().forward(inputs_embeds=inputs_embeds)

    deaf = Deaf(TableSpec(seed=5))
    assert asrd.fast_generate(deaf, IDS.repeat(2, 1), max_new_tokens=4).shape == (2, 8)
    refused(
        r"does not read a padded row as it reads the row alone",
        IDS.repeat(2, 1),
        torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
        with_model=deaf,
    )


def test_what_is_not_a_model_or_not_a_config() -> None:
    for wrong, match in (((model(), None), "asrd.load returns"), ("tiny", "not str"), (None, "not NoneType")):
        with pytest.raises(ValueError, match=match):
            asrd.fast_generate(wrong, IDS)
    refused(r"generation_config must be .* not dict", generation_config={})
    refused(r"num_beams=4", generation_config=GenerationConfig(num_beams=4))
    refused(r"max_length=4 leaves no room behind a prompt of 4", max_new_tokens=None, max_length=4)
    refused(r"suppress_tokens=", suppress_tokens=(i for i in range(3)))


def test_max_length_counts_the_prompt() -> None:
    assert asrd.fast_generate(model(), IDS, max_length=10).shape == (1, 10)
    assert asrd.fast_generate(model(), IDS, generation_config=GenerationConfig(max_length=9)).shape == (1, 9)


def test_boundless_settings_do_no_harm() -> None:
    wanted = asrd.fast_generate(model(), IDS, max_new_tokens=8, capacity=8, window=9)
    assert torch.equal(asrd.fast_generate(model(), IDS, max_new_tokens=8, capacity=2**31 - 1, window=2**31 - 1), wanted)
    refused(r"beta=1e\+39", beta=1e39)
    refused(r"window=2147483648 .* to 2\*\*31 - 1", window=2**31)


def test_a_streamer_sees_nothing_of_logits_that_cannot_be_read_and_is_told_the_end() -> None:
    class Broken(TableModel):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            if out.logits.shape[1] == 8:
                out.logits[:] = float("nan")
            return out

    class Recorder:
        def __init__(self) -> None:
            self.put_count = self.end_count = 0

        def put(self, value: Tensor) -> None:
            self.put_count += 1

        def end(self) -> None:
            self.end_count += 1

    streamer = Recorder()
    refused(r"NaN", with_model=Broken(TableSpec(seed=5)), streamer=streamer)
    assert (streamer.put_count, streamer.end_count) == (1, 1)  # the prompt, and the end
