"""Model objects that a user already has: each family's own mask and position conventions, and the LM head's rows."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import asrd
from asrd.models.adapter import ModelAdapter, evaluating
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM, randomise
from tests.support.table_models import TableModel, TableSpec, make_llama, make_qwen2

SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "block_length": 4, "threshold": 0.15, "return_dict_in_generate": True}


def remote(kind: str) -> nn.Module:
    if kind == "llada":
        return randomise(LLaDAModelLM(LLaDAConfig()), seed=1, dtype=torch.float64).eval()
    return randomise(DreamModel(DreamConfig()), seed=2, dtype=torch.float64).eval()


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_remote_code_classes_decode_padded_batches_as_single_rows(kind: str) -> None:
    model = remote(kind)
    ids = torch.tensor([[0, 0, 0, 2, 3], [7, 6, 5, 4, 3], [0, 9, 8, 7, 6]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    batch = asrd.fast_generate(model, ids, mask, **SETTINGS)
    for row in range(3):
        alone = asrd.fast_generate(model, ids[row : row + 1, mask[row].bool()], row_ids=[row], **SETTINGS)
        assert torch.equal(batch.sequences[row, mask[row].argmax() :], alone.sequences[0])
        assert batch.steps[row] == alone.steps[0]


def test_dreams_distribution_of_a_position_is_read_one_row_earlier() -> None:
    model = remote("dream")
    assert ModelAdapter(model).shift == 1
    ids = torch.tensor([[5, 6, 7]])
    out = asrd.fast_generate(model, ids, max_new_tokens=1)
    canvas = torch.cat([ids, torch.tensor([[model.config.mask_token_id]])], dim=1)
    with torch.no_grad():
        logits = model(input_ids=canvas, attention_mask="full").logits[0, 2]
    logits[model.config.mask_token_id] = -torch.inf
    assert out[0, 3] == logits.argmax()


def test_any_bidirectional_hugging_face_model_works() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForMaskedLM(config).double().eval()
    ids = torch.tensor([[0, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    batch = asrd.fast_generate(model, ids, mask, mask_token_id=19, **SETTINGS)
    alone = asrd.fast_generate(model, ids[:1, 1:], mask_token_id=19, **SETTINGS)
    assert torch.equal(batch.sequences[0, 1:], alone.sequences[0])


class RowCounter:
    """Counts the rows that pass through a module."""

    def __init__(self, module: nn.Module):
        self.rows = 0
        module.register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.rows += output.numel() // output.shape[-1]


@pytest.mark.parametrize("build", [make_llama, make_qwen2])
def test_the_lm_head_sees_only_the_wanted_rows(build: Any) -> None:
    model = build(seed=4)
    ids = torch.tensor([[2, 3, 4, 5, 6, 7]])
    asrd.fast_generate(model, ids, max_new_tokens=1)  # one-time probes
    head, body = RowCounter(model.lm_head), RowCounter(model.model.norm)
    out = asrd.fast_generate(model, ids, **SETTINGS | {"verify": False, "early_stop": False})
    steps = out.steps.item()
    assert body.rows == steps * 16
    assert 10 <= head.rows <= steps * 4  # of 16 rows at most the block of 4, and only its masks


def test_where_logits_are_more_than_the_head_they_are_taken_whole(caplog: pytest.LogCaptureFixture) -> None:
    class SoftCapped(type(make_llama(seed=4))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = 0.1 * (10 * out.logits).tanh()
            return out

    capped = make_llama(seed=4)
    capped.__class__ = SoftCapped
    ids = torch.tensor([[2, 3, 4, 5]])
    with caplog.at_level(logging.WARNING, logger="asrd"):
        flat = asrd.fast_generate(capped, ids, **SETTINGS)
    assert "more than head(body(x))" in caplog.text
    assert flat.steps.item() == 10  # so flat a distribution is never confident: one token per step


def test_probes_run_once_per_model() -> None:
    model = TableModel(TableSpec(seed=1))
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([[2, 3]])
    first = asrd.fast_generate(model, ids, max_new_tokens=3, return_dict_in_generate=True).steps.item()
    probes = len(calls) - first
    calls.clear()
    second = asrd.fast_generate(model, ids, max_new_tokens=3, return_dict_in_generate=True).steps.item()
    assert probes > 0
    assert len(calls) == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_models_decode(dtype: torch.dtype) -> None:
    model = make_llama(seed=4).to(dtype)
    out = asrd.fast_generate(model, torch.tensor([[2, 3, 4, 5]]), **SETTINGS)
    assert out.drafted.item() - out.revoked.item() == 10


def test_guidance_free_of_the_prompt_works_with_and_without_a_mask() -> None:
    model = make_llama(seed=4)
    ids, mask = torch.tensor([[2, 3, 4], [0, 3, 4]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    settings = SETTINGS | {"cfg_scale": 1.5}
    batch = asrd.fast_generate(model, ids, mask, **settings)
    first = asrd.fast_generate(model, ids[:1], **settings)
    second = asrd.fast_generate(model, ids[1:, 1:], **settings)
    assert torch.equal(batch.sequences[0], first.sequences[0])
    assert torch.equal(batch.sequences[1, 1:], second.sequences[0])
    assert not torch.equal(first.sequences, asrd.fast_generate(model, ids[:1], **SETTINGS).sequences)


class Mixer(nn.Module):
    """A bidirectional toy that subclasses bend: every position sees the mean of those it may see."""

    def __init__(self, vocab: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(vocab, 8), nn.Linear(8, vocab, bias=False)
        self.config = type("Config", (), {"mask_token_id": vocab - 1})()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def visible(self, length: int) -> Tensor:
        return torch.ones(length, length)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        seen = self.visible(inputs_embeds.shape[1]).to(inputs_embeds.dtype)
        return self.out(inputs_embeds + seen / seen.sum(1, keepdim=True) @ inputs_embeds) * 4


IDS = torch.tensor([[2, 3, 4]])


def test_a_bare_module_that_returns_logits_works() -> None:
    assert asrd.fast_generate(Mixer(), IDS, max_new_tokens=5).shape == (1, 8)


def test_a_block_causal_model_is_refused() -> None:
    class BlockCausal(Mixer):
        def visible(self, length: int) -> Tensor:
            block = torch.arange(length) // 4
            return (block[:, None] >= block).float()

    with pytest.raises(ValueError, match="is causal"):
        asrd.fast_generate(BlockCausal(), IDS, max_new_tokens=5)
    model = Mixer()
    model.config.model_type = "sdar"
    with pytest.raises(ValueError, match="block-diffusion models are decoded on transformers' own classes"):
        asrd.fast_generate(model, IDS, max_new_tokens=5)


def test_embeddings_that_are_changed_after_the_look_up_are_refused() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 16 * super().forward(ids)

    model = Mixer()
    model.table = Scaled(12, 8)
    with pytest.raises(ValueError, match="changes its embeddings"):
        asrd.fast_generate(model, IDS, max_new_tokens=5)


def test_broken_weights_are_said_to_be_broken(caplog: pytest.LogCaptureFixture) -> None:
    model = make_llama(seed=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 1] = torch.nan
    with pytest.raises(ValueError, match=r"the embedding of token 5 of LlamaForCausalLM is NaN or infinite"):
        asrd.fast_generate(model, torch.tensor([[2, 3]]), **SETTINGS)
    model = make_llama(seed=1)
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.raises(ValueError, match="every token the same logit, 0: its weights are zero or were not loaded"):
        asrd.fast_generate(model, torch.tensor([[2, 3]]), **SETTINGS)
    model = make_llama(seed=1)
    model.model.layers[0].mlp.up_proj.weight.data.fill_(torch.nan)
    with caplog.at_level(logging.INFO, logger="asrd"), pytest.raises(ValueError, match="are NaN"):
        asrd.fast_generate(model, torch.tensor([[2, 3]]), **SETTINGS)
    assert "LM head" not in caplog.text


def test_a_causal_model_in_training_mode_is_found_out_too_and_stays_in_it() -> None:
    class Dropping(Mixer):
        def visible(self, length: int) -> Tensor:
            return torch.ones(length, length).tril()

        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(inputs_embeds, 0.5, self.training))

    model = Dropping().train()
    with pytest.raises(ValueError, match="is causal"):
        asrd.fast_generate(model, IDS, max_new_tokens=5)
    assert model.training


def test_probes_that_gave_no_numbers_are_not_remembered() -> None:
    model = make_llama(seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(torch.inf)
    with pytest.raises(ValueError, match="NaN"):
        asrd.fast_generate(model, IDS, **SETTINGS)
    model.lm_head.weight = make_llama(seed=4).lm_head.weight
    assert ModelAdapter(model).split


def test_positions_counted_otherwise_are_refused_in_a_padded_batch() -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, mask_token_id=19,
    )  # fmt: skip
    model = RobertaForMaskedLM(config).eval()
    assert asrd.fast_generate(model, IDS, max_new_tokens=4, mask_token_id=19).shape == (1, 7)
    padded, mask = torch.tensor([[0, 2, 3], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="does not read a padded row"):
        asrd.fast_generate(model, padded, mask, max_new_tokens=4, mask_token_id=19)


def test_logits_in_another_precision_or_without_a_row_for_the_mask_work() -> None:
    class Narrow(Mixer):
        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return super().forward(inputs_embeds)[..., :11].to(self.kind)

    for kind in (torch.float64, torch.bfloat16):
        model = Narrow()
        model.kind = kind
        assert asrd.fast_generate(model, IDS, max_new_tokens=5).shape == (1, 8)


def test_a_compiled_model_is_called_as_it_is() -> None:
    model = make_llama(seed=4)
    compiled = torch.compile(model, backend="eager")
    assert not ModelAdapter(compiled).split
    out = asrd.fast_generate(compiled, IDS, max_new_tokens=4, block_length=2)
    assert torch.equal(out, asrd.fast_generate(model, IDS, max_new_tokens=4, block_length=2))


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_every_module_keeps_its_own_training_mode() -> None:
    """Frozen parts of a model in training, or the other way round, and a KV cache, which is tested as well."""
    for whole, part in ((True, False), (False, True)):
        model = make_llama(3)
        model.train(whole)
        model.model.layers[0].train(part)
        before = modes(model)
        asrd.fast_generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=2, kv_cache="dual")
        assert modes(model) == before


def test_a_second_thread_waits_until_the_first_has_restored_the_training_mode() -> None:
    model = make_llama(4).train()

    def second() -> None:
        with evaluating(model):
            pass

    thread = threading.Thread(target=second)
    with evaluating(model):
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
    thread.join()
    assert all(modes(model).values())


def test_four_threads_on_a_new_model_leave_its_training_mode_as_it_was() -> None:
    model = make_llama(4).train()
    together = threading.Barrier(4)

    def work(_: int) -> None:
        together.wait()
        asrd.fast_generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=2)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert all(modes(model).values())
