"""`asrd doctor`: sound checkpoints of every kind pass, broken ones fail by the check that names the fault."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asrd.cli import main
from asrd.lab.doctor import Finding, examine
from asrd.lab.doctor.memory import needs
from asrd.lab.tiny.tokenizer import save_tokenizer
from asrd.models import load
from tests.support.block_originals import BlockModel, LLaDA2Config, SDARConfig
from tests.support.checkpoints import write
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM, randomise

KINDS: dict[str, Callable[[], nn.Module]] = {
    "llada": lambda: LLaDAModelLM(LLaDAConfig()),
    "dream": lambda: DreamModel(DreamConfig()),
    "sdar": lambda: BlockModel(SDARConfig()),
    "llada2": lambda: BlockModel(LLaDA2Config()),
}
OWN_CODE = """
from transformers import PretrainedConfig, PreTrainedModel
from types import SimpleNamespace
from tests.support.block_originals import BlockModel, LLaDA2Config, SDARConfig
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM

class OwnConfig(PretrainedConfig):
    model_type = "KIND"

class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        known = {name: getattr(config, name) for name in CONFIG.__dataclass_fields__ if hasattr(config, name)}
        known.pop("inner_dtype", None)
        inner = MODEL(CONFIG(**known))
        self.model = inner.model
        if hasattr(inner, "lm_head"):
            self.lm_head = inner.lm_head
        self.inner = [inner]
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        if attention_mask is None or isinstance(attention_mask, str):
            return self.inner[0](input_ids, attention_mask=attention_mask)
        allowed = attention_mask.bool() if attention_mask.dim() == 3 else attention_mask[:, 0] == 0
        return SimpleNamespace(logits=SCALE * self.inner[0](input_ids, allowed, position_ids))
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def checkpoint(folder: Path, kind: str, **changes: Any) -> Path:
    return write(folder, randomise(KINDS[kind](), seed=1), **changes)


def with_own_code(folder: Path, kind: str, scale: float = 1.0) -> Path:
    """A checkpoint whose own code is the restated original, its logits multiplied by `scale`."""
    config, model = {
        "llada": ("LLaDAConfig", "LLaDAModelLM"),
        "dream": ("DreamConfig", "DreamModel"),
        "sdar": ("SDARConfig", "BlockModel"),
        "llada2": ("LLaDA2Config", "BlockModel"),
    }[kind]
    model_type = {"llada2": "llada2_moe", "dream": "Dream"}.get(kind, kind)
    code = OWN_CODE.replace("KIND", model_type).replace("CONFIG", config).replace("MODEL", model)
    mapping = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    checkpoint(folder, kind, auto_map=mapping)
    (folder / "modeling_own.py").write_text(code.replace("SCALE", str(scale)))
    return folder


def failures(found: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.text for finding in found if finding.status == "failed"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_checkpoint_passes(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(checkpoint(tmp_path, kind))]) == 0
    out = capsys.readouterr().out
    assert "can be decoded." in out
    assert "FAILED" not in out
    assert ("block-causal, blocks of" in out) == (kind in ("sdar", "llada2"))
    assert "threshold" in out.split("run on this model:")[1].splitlines()[0]


def test_a_packaged_model_passes_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["status"] for row in found} == {"ok", "not checked"}
    assert {"loading", "special ids", "tokenizer", "padding", "KV cache", "memory"} <= {row["check"] for row in found}


BROKEN: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a weight is missing": ("sdar", {"edit": lambda w: w.pop("lm_head.weight")}, "loading", "missing: lm_head.weight"),
    "not a number": (
        "llada",
        {"edit": lambda w: w["model.transformer.ln_f.weight"].fill_(float("nan"))},
        "logits",
        "NaN",
    ),
    "no mask row": ("dream", {"edit": lambda w: w["model.embed_tokens.weight"][60].zero_()}, "special ids", "id 60"),
    "no block size": ("sdar", {"block_size": None}, "loading", "block_length="),
    "pad is mask": ("llada", {"pad_token_id": 60}, "special ids", "pad_token_id=60"),
    "an unknown kind": ("sdar", {"model_type": "sdar_moe"}, "loading", "SDAR-MoE"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_fails_by_name(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, changes, check, text = BROKEN[fault]
    folder = str(checkpoint(tmp_path, kind, **changes))
    found = failures(list(examine(folder)))
    assert check in found, found
    assert text in found[check]
    assert main(["doctor", folder]) == 1
    assert "cannot be used as it is" in capsys.readouterr().out


def test_a_tokenizer_of_another_model_fails(tmp_path: Path) -> None:
    save_tokenizer(checkpoint(tmp_path, "sdar"))  # 151 words, mask 2; the model has 64 rows and mask 60
    assert "only 64 rows" in failures(list(examine(str(tmp_path))))["tokenizer"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoints_own_code_gives_the_same_logits(tmp_path: Path, kind: str) -> None:
    found = list(examine(str(with_own_code(tmp_path, kind)), own_code=True))[-1]
    assert (found.check, found.status) == ("own code", "ok"), found
    assert "top-1 is the same at 100.0%" in found.text


def test_other_logits_than_those_of_its_own_code_are_found(tmp_path: Path) -> None:
    found = list(examine(str(with_own_code(tmp_path, "sdar", scale=1.1)), own_code=True))[-1]
    assert found.status == "failed"
    assert "more than rounding explains" in found.text


def test_own_code_is_not_run_unasked(tmp_path: Path) -> None:
    folder = with_own_code(tmp_path, "sdar")
    (folder / "modeling_own.py").write_text("raise SystemExit('own code was run')")
    assert list(examine(str(folder)))[-1].status == "not checked"


def test_flash_attention_is_looked_up_by_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.0" if name == "flash-attn" else real(name))
    found = [one for one in examine(str(checkpoint(tmp_path, "llada"))) if one.check == "FlashAttention"]
    assert [one.status for one in found] == ["warning"]
    assert "flash-attn 2.8.0 is installed but cannot run this model (float32 on cpu)" in found[0].text


def test_memory_is_what_the_tensors_hold() -> None:
    model, _ = load("tiny")
    need = needs(model, length=512, logit_rows=32)
    assert need.cache == 2 * 4 * 4 * 32 * 512 * 4  # keys and values, layers, heads, head size, length, float32
    assert need.logits == 32 * 151 * (4 + 4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * parameters <= need.weights < 4.1 * parameters


def test_a_model_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/no/such/folder"]) == 1
    assert "does not exist" in capsys.readouterr().out
