"""Tensor parallel by transformers: two processes that share each layer give the tokens of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import QUESTION, alone

PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
import asrd
torch.set_num_threads(1)
dist.init_process_group("gloo")
model, tokenizer = asrd.load("tiny", dtype=torch.float32, tp_plan="auto")
sharded = [name for name, p in model.named_parameters() if type(p).__name__ == "DTensor" or "q_proj" in name]
rows = model.model.layers[0].self_attn.q_proj.weight
local = rows.to_local() if hasattr(rows, "to_local") else rows
found = {"share": local.shape[0] / model.config.hidden_size}
for decoder in ("asrd", "loo"):
    out = []
    for number in (4, 7):
        ids = tokenizer(sys.argv[1].format(number), return_tensors="pt")["input_ids"]
        own = {"decoder": decoder} | ({"factor": 2.0} if decoder == "loo" else {})
        out.append(asrd.fast_generate(model, ids, max_new_tokens=32, **own)[0, ids.shape[1]:].tolist())
    found[decoder] = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out]
with open(os.path.join(sys.argv[2], f"rank{dist.get_rank()}.json"), "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, QUESTION, str(tmp_path)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["share"] == 0.5, "each process should hold half of a layer"
    assert ranks[0]["asrd"] == [alone(QUESTION.format(number))[0] for number in (4, 7)]
    assert ranks[0]["loo"] == [alone(QUESTION.format(number), decoder="loo", factor=2.0)[0] for number in (4, 7)]
