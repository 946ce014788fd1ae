"""The paper's result tables as evaluations: lengths, block size, decoders, thresholds, shots.

The paper does not give every setting. `Preset.remarks` lists what it says, what was inferred from its other tables, and
what is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrd.decoders import DECODERS
from asrd.eval.run import Cell
from asrd.lab.compare.plan import RunSpec, is_random

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
PAPER = "paper: temperature 0 (0.2 in paper-multiseed), window k = 2"
BLOCKS = "paper: blocks of 32 tokens"
BASE = (
    "paper: base models decode the whole sequence as one block; 0-shot HumanEval, 3-shot MBPP, 4-shot MATH500, 8-shot"
    " GSM8K",
    "inferred: thresholds of ASRD 0.1 below those of instruct models (the paper: slightly lower, of 0.6, 0.7 and 0.8)",
    "ours: WINO's thresholds and Saber's n are those of instruct models (the paper: tuned, without saying to what)",
)
FOUR_NOTES = (
    "inferred: ASRD's threshold 0.7, on MBPP 0.8, and WINO's 0.8 on MATH500 and 0.7 on MBPP, for which the paper's"
    " sweep of LLaDA-Ins-8B has the figures of its main table; Saber n = 2 likewise",
    "WINO's own: threshold 0.6 on GSM8K, 0.7 on HumanEval (its repository's configurations); paper: verification"
    " threshold 0.9",
)
OURS = (
    "ours: alpha 0.1 (paper: 0.05 to 0.2), beta 0.3 (0.1 to 0.4), capacity 16 (12, 16 or 20 by length and task)",
    "ours, the paper leaves them open: batch size, dtype, device, attention kernel, lm-eval's version",
)
INSTRUCT = (
    "ours, the paper leaves them open: tasks and shots of instruct models (lm-eval's humaneval_instruct, 3-shot"
    " mbpp_instruct, gsm8k_cot_zeroshot, 4-shot minerva_math500, with the chat template)"
)
METRICS = "ours, the paper leaves it open: which metric counts (flexible-extract, math_verify)"
FIXED = (
    "ours: no early stop, because the paper's steps of the standard decoder are the length itself (256.0, 512.0); stop"
    " strings cut the finished text"
)
EARLY = (
    "ours: EOS and the task's stop strings end the decode, because the paper's steps of the standard decoder are below"
    " the length (by 16 to 20 at both lengths, which the paper does not explain)"
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

    def remarks(self, base: bool) -> list[str]:
        """Where the settings come from, for a base model or another."""
        found = [PAPER]
        if self.benchmarks == FOUR and self.table != "block-models":
            competitors = any(method.decoder == "wino" for method in self.methods)
            found += [*(BASE if base else (BLOCKS,)), *FOUR_NOTES[: 2 if competitors else 1]]
        if self.benchmarks == FOUR:
            found += [METRICS, *(() if base else (INSTRUCT,))]
        return [*found, *self.notes, *OURS]


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
        "open-ended", "Open-ended generation: NQ-Open (exact match), CNN/DailyMail (ROUGE, BERTScore)",
        (STANDARD, Method("wino", "wino", settings={"threshold": 0.7, "threshold_back": 0.9}), SABER,
         Method("asrd", "asrd", settings={"threshold": 0.7})),
        lengths=(512,), benchmarks=("NQ-Open", "CNN/DailyMail"),
        notes=(
            BLOCKS, "ours, the paper leaves them open: 0-shot prompts, threshold 0.7 for WINO and ASRD (WINO's"
            " verification threshold 0.9, Saber n = 2), EOS and lm-eval's stop strings end the decode (NQ-Open: line"
            " break, full stop, comma; CNN/DailyMail: empty line), BERTScore's model (lm-eval's; --bertscore)",
        ),
    ),
    "paper-block-models": Preset(
        "block-models", "Native block-diffusion models",
        (Method("native", "native"), Method("asrd", "asrd", settings={})), lengths=(512,),
        notes=(
            "paper: blocks of 32 tokens; here those of the checkpoint, which are listed below",
            "ours, the paper leaves them open: the native decoder's own thresholds, for ASRD too; EOS and the task's"
            " stop strings end the decode",
        ),
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
        raise ValueError(f"the preset paper-{preset.table} needs the decoder {missing[0]!r}, which is not registered")
    for name in benchmarks:
        if name not in preset.benchmarks:
            raise ValueError(f"--benchmarks {name}: the table has {', '.join(preset.benchmarks)}")
    for length in lengths:
        if length not in preset.lengths:
            raise ValueError(f"--lengths {length}: the table has {', '.join(map(str, preset.lengths))}")
    found = []
    if preset.seeds > 1 and not is_random("standard", {**preset.common, **(common or {})}):
        raise ValueError(f"--set temperature=0: the {preset.seeds} seeds of {preset.title!r} would be the same decode")
    for benchmark in benchmarks or preset.benchmarks:
        for length in lengths or preset.lengths:
            for method in preset.methods:
                for seed in range(preset.seeds):
                    run = _run(preset, method, benchmark, length, seed, base, common or {})
                    cell = Cell(TASKS[benchmark][base], run, None, chat)
                    found.append(Entry(cell, method.name, benchmark, length))
    return found


def _run(
    preset: Preset, method: Method, benchmark: str, length: int, seed: int, base: bool, common: Mapping[str, Any]
) -> RunSpec:  # fmt: skip
    own = {"threshold": method.by_benchmark[benchmark]} if benchmark in method.by_benchmark else {}
    if base and own and method.decoder == "asrd":
        own["threshold"] = round(own["threshold"] - 0.1, 1)
    block = {} if preset.table == "block-models" else {"block_length": length if base else 32}
    settings = {"max_new_tokens": length, **block, **preset.common, **method.settings, **own, **common}
    reads = DECODERS[method.decoder].reads
    settings = {name: value for name, value in settings.items() if name in reads}
    swept = ("max_new_tokens", *(("threshold",) if method.decoder == "threshold" else ()))
    return RunSpec(method.decoder, settings, swept, seed)
