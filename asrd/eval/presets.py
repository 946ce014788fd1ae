"""The paper's result tables as evaluations: lengths, block size, decoders, thresholds, shots.

The paper does not give every setting. `NOTES` and each preset's `notes` list what is ours, and what a choice was
inferred from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrd.decoders import DECODERS
from asrd.eval.run import Cell
from asrd.lab.compare.plan import RunSpec

TASKS = {  # benchmark: task for instruct models, for base models
    "HumanEval": ("humaneval_instruct", "humaneval"),
    "MBPP": ("mbpp_instruct", "mbpp"),
    "GSM8K": ("gsm8k_cot_zeroshot", "gsm8k_cot"),
    "MATH500": ("minerva_math500", "minerva_math500"),
    "NQ-Open": ("nq_open", "nq_open"),
    "CNN/DailyMail": ("cnn_dailymail", "cnn_dailymail"),
}
FOUR = ("HumanEval", "MBPP", "GSM8K", "MATH500")
WINO = {"HumanEval": 0.7, "MBPP": 0.7, "GSM8K": 0.6, "MATH500": 0.8}
ASRD = {"HumanEval": 0.7, "MBPP": 0.8, "GSM8K": 0.7, "MATH500": 0.7}
NOTES = (
    "paper: block length 32, temperature 0 (0.2 with five seeds in paper-multiseed), window k = 2, WINO's verification"
    " threshold 0.9; base models 0-shot HumanEval, 3-shot MBPP, 4-shot MATH500, 8-shot GSM8K",
    "inferred: ASRD's threshold 0.7, on MBPP 0.8, and WINO's 0.8 on MATH500 and 0.7 on MBPP, for which the paper's"
    " sweep of LLaDA-Ins-8B has the figures of its main table; Saber n = 2 likewise",
    "WINO's own: threshold 0.6 on GSM8K, 0.7 on HumanEval (its repository's configurations)",
    "ours: alpha 0.1 (paper: 0.05 to 0.2), beta 0.3 (0.1 to 0.4), capacity 16 (12, 16 or 20 by length and task)",
    "ours, the paper leaves them open: tasks and shots of instruct models (lm-eval's humaneval_instruct, 3-shot"
    " mbpp_instruct, gsm8k_cot_zeroshot, 4-shot minerva_math500, with the chat template), which metric counts"
    " (flexible-extract, math_verify), batch size, dtype, device",
)
FIXED = "ours: no early stop, because the paper's steps of the standard decoder are the length itself (256.0, 512.0)"
EARLY = (
    "ours: early stop at the end of the text, because the paper's steps of the standard decoder are below the length"
)


@dataclass(frozen=True)
class Method:
    """A row of a table: its name in paper.csv, and how it is run."""

    name: str
    decoder: str
    by_benchmark: Mapping[str, float] = field(default_factory=dict)  # thresholds
    settings: Mapping[str, Any] = field(default_factory=dict)


STANDARD, SABER = Method("standard", "standard"), Method("saber", "saber", settings={"saber_n": 2})
PAPERS = (STANDARD, Method("wino", "wino", WINO, {"threshold_back": 0.9}), SABER, Method("asrd", "asrd", ASRD))


@dataclass(frozen=True)
class Preset:
    """One table."""

    table: str  # in paper.csv
    title: str
    methods: tuple[Method, ...] = PAPERS
    lengths: tuple[int, ...] = (256, 512)
    benchmarks: tuple[str, ...] = FOUR
    common: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A cell of a table with its place in the paper."""

    cell: Cell
    method: str
    benchmark: str
    length: int


PRESETS = {
    "paper-main": Preset(
        "main", "Instruct models: accuracy, steps, speed", common={"early_stop": False}, notes=(FIXED,)
    ),
    "paper-base-rl": Preset("base-rl", "Base and RL-tuned models", notes=(EARLY,)),
    "paper-multiseed": Preset(
        "multiseed", "Five seeds at temperature 0.2, 95 % Student-t intervals",
        common={"early_stop": False, "temperature": 0.2}, seeds=5, notes=(FIXED,),
    ),
    "paper-threshold-only": Preset(
        "threshold-only", "Threshold-only drafting as control",
        (STANDARD, Method("asrd", "asrd", ASRD),
         *(Method(f"threshold {t}", "threshold", settings={"threshold": t}) for t in (0.95, 0.9, 0.8, 0.7, 0.6))),
        lengths=(512,), common={"early_stop": False}, notes=(FIXED,),
    ),
    "paper-open-ended": Preset(
        "open-ended", "Open-ended generation: NQ-Open (EM), CNN/DailyMail (ROUGE-1)",
        (STANDARD, Method("wino", "wino", settings={"threshold": 0.7, "threshold_back": 0.9}), SABER,
         Method("asrd", "asrd", settings={"threshold": 0.7})),
        lengths=(512,), benchmarks=("NQ-Open", "CNN/DailyMail"),
        notes=("ours: 0-shot, threshold 0.7 for WINO and ASRD, lm-eval's stop strings, early stop",),
    ),
    "paper-block-models": Preset(
        "block-models", "Native block-diffusion models",
        (Method("native", "native"), Method("asrd", "asrd", settings={})), lengths=(512,),
        notes=("ours: the native decoder's own thresholds; speed is relative to the native decoder",),
    ),
}  # fmt: skip


def entries(
    preset: Preset,
    base: bool,
    chat: bool,
    lengths: Sequence[int] = (),
    benchmarks: Sequence[str] = (),
    common: Mapping[str, Any] | None = None,
) -> list[Entry]:
    """The cells of a table; lengths and benchmarks restrict it, `common` overrides its settings."""  # fmt: skip
    missing = [method.decoder for method in preset.methods if method.decoder not in DECODERS]
    if missing:
        raise ValueError(f"the preset {preset.table} needs the decoder {missing[0]!r}, which there is not yet")
    for name in benchmarks:
        if name not in preset.benchmarks:
            raise ValueError(f"--benchmarks {name}: the table has {', '.join(preset.benchmarks)}")
    for length in lengths:
        if length not in preset.lengths:
            raise ValueError(f"--lengths {length}: the table has {', '.join(map(str, preset.lengths))}")
    found = []
    for benchmark in benchmarks or preset.benchmarks:
        for length in lengths or preset.lengths:
            for method in preset.methods:
                for seed in range(preset.seeds):
                    run = _run(preset, method, benchmark, length, seed, common or {})
                    cell = Cell(TASKS[benchmark][base], run, None, chat)
                    found.append(Entry(cell, method.name, benchmark, length))
    return found


def _run(
    preset: Preset, method: Method, benchmark: str, length: int, seed: int, common: Mapping[str, Any]
) -> RunSpec:  # fmt: skip
    own = {"threshold": method.by_benchmark[benchmark]} if benchmark in method.by_benchmark else {}
    block = {} if preset.table == "block-models" else {"block_length": 32}
    settings = {"max_new_tokens": length, **block, **preset.common, **method.settings, **own, **common}
    reads = DECODERS[method.decoder].reads
    settings = {name: value for name, value in settings.items() if name in reads}
    swept = ("max_new_tokens", *(("threshold",) if method.decoder == "threshold" else ()))
    return RunSpec(method.decoder, settings, swept, seed)
