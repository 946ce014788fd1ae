"""`AsrdLM`: a diffusion LLM as a model of lm-eval, under the name `asrd`.

lm-eval has no entry points for plug-ins: importing this module registers the name, and `asrd eval` runs it.

    import asrd.eval.model, lm_eval
    lm_eval.simple_evaluate(model="asrd", model_args="pretrained=tiny,decoder=loo,factor=2", tasks=[...])
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn
from tqdm import tqdm

from asrd.config import ALIASES, FIELDS, AsrdConfig, check, resolve_aliases
from asrd.decoders import find_decoder
from asrd.eval.generations import Generations, Record, key_of
from asrd.eval.likelihood import Likelihood
from asrd.eval.stopping import answer
from asrd.eval.watch import Watch
from asrd.many import Engine, Result
from asrd.models import ModelAdapter, load, special_ids
from asrd.settings import did_you_mean

OWN = ("decoder", "max_new_tokens", "seed", "temperature")
LM_EVALS = ("do_sample", "until", "max_gen_toks")  # of a task's generation_kwargs, besides settings of ours


@dataclass(frozen=True)
class Job:
    """One text to be generated."""

    key: str
    task: str | None
    document: int
    repeat: int
    row_id: int  # of the sampling noise: it does not depend on what else is in the run
    ids: list[int]
    truncated: int  # tokens that the context has lost on the left
    until: tuple[str, ...]
    settings: dict[str, Any]


@register_model("asrd")
class AsrdLM(TemplateLM):
    """Generation through `asrd.Engine`, likelihoods by LLaDA's Monte-Carlo estimate.

    pretrained     folder, Hub id or packaged name; or a loaded model, then with its `tokenizer`
    batch_size     texts that decode at a time
    max_length     longest canvas, prompt and text; longer prompts lose tokens on the left. None: the model's own
    generations    file to which each answer is written as it comes, and from which a run resumes
    events         record what happened to every token (anchors, flip-flops); for wall-clock figures on a GPU: False
    mc_num, mc_batch, check_greedy   of `loglikelihood`: draws, draws per batch, and whether is_greedy is computed
    **settings     any field of AsrdConfig. They win over what a task asks for (max_gen_toks, temperature).

    The task's stop strings (`until`) end the decode; with early_stop=False every text is decoded to its whole length
    and cut afterwards.
    """

    model: Any
    tokenizer: Any

    def __init__(
        self,
        pretrained: str | nn.Module = "tiny",
        tokenizer: Any = None,
        batch_size: int | str = 16,
        device: str | None = None,
        dtype: str = "auto",
        attn: str = "auto",
        trust_remote_code: bool = False,
        max_length: int | None = None,
        generations: str | Path | None = None,
        events: bool = True,
        mc_num: int = 128,
        mc_batch: int = 8,
        check_greedy: bool = False,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, str):
            self.model, self.tokenizer = load(
                pretrained,
                dtype=dtype,
                device_map=device,
                attn_implementation=attn,
                trust_remote_code=trust_remote_code,
            )
        else:
            self.model, self.tokenizer = pretrained, tokenizer
        if self.tokenizer is None:
            raise ValueError(f"pretrained={pretrained!r} has no tokenizer: give tokenizer=")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size!r} is out of range: expected an integer of at least 1")
        self.batch_size, self.events, self.check_greedy = int(batch_size), events, check_greedy
        self.settings = checked_settings(settings)
        self.adapter = ModelAdapter(self.model)
        self.special = special_ids(self.adapter, AsrdConfig(**self.settings), self.tokenizer)
        self.max_length = max_length or self.adapter.context_length or 4096
        self.generations = Generations(Path(generations) if generations else None)
        self.likelihood = Likelihood(
            self.adapter, self.special.mask, mc_num, mc_batch, self.settings.get("cfg_scale", 0.0),
            self.settings.get("seed", 0),
        )  # fmt: skip
        self._device = self.adapter.table.device
        self._chat = False
        self.keys: dict[int, list[str]] = {}  # of the last task's generations, by document

    # Text and ids

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.special.eos[0] if self.special.eos else self.special.pad

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Part of lm-eval's key for cached requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, with the tokenizer's own special tokens unless they stand in the text already."""
        if add_special_tokens is None:
            bos = getattr(self.tokenizer, "bos_token", None)
            add_special_tokens = not (self._chat or (bos and string.startswith(bos)))
        return self.tokenizer.encode(
            string, add_special_tokens=add_special_tokens, verbose=False
        )  # too long: we say so

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one prompt; without a generation prompt its last message is to be continued."""
        if self.tokenizer.chat_template is None:
            raise ValueError("the model's tokenizer has no chat template: leave --chat out, or use an instruct model")
        self._chat = True
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # Generation

    @property
    def early_stop(self) -> bool:
        """Does the end of a text, by EOS or a stop string, end its decode?"""
        return bool(self.settings.get("early_stop", FIELDS["early_stop"].default))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text per request; those on disk are not generated again."""
        jobs = self._jobs(requests)
        self.keys = {}
        for job in jobs:
            self.keys.setdefault(job.document, []).append(job.key)
        missing = [job for job in jobs if job.key not in self.generations]
        with tqdm(total=len(jobs), initial=len(jobs) - len(missing), unit="text", disable=disable_tqdm or None) as bar:
            for record in self.generate(missing):
                self.generations.add(record)
                bar.update()
        return [self.generations[job.key]["text"] for job in jobs]

    def generate(self, jobs: Sequence[Job]) -> Iterator[Record]:
        """Decode jobs; their records in the order in which they end.

        A step's seconds, without those of watching, are shared equally by the texts in it.
        """
        watch = Watch(self.special.mask, self.special.eos if self.early_stop else ()) if self.events else None
        engine = Engine(self.model, self.tokenizer, self.batch_size, observers=[watch] if watch else [],
                        **self.settings)  # fmt: skip
        coming, seconds = iter(jobs), dict[int, float]()
        while True:
            began, watched = time.perf_counter(), watch.seconds if watch else 0.0
            for job in itertools.islice(coming, engine.free):
                seconds[engine.submit(job.ids, row_id=job.row_id, **job.settings).index] = 0.0
            if not engine.pending:
                return
            results = engine.step()
            taken = time.perf_counter() - began - (watch.seconds - watched if watch else 0.0)
            for index in seconds:
                seconds[index] += taken / len(seconds)
            for result in results:
                job = jobs[result.index]
                if result.error is not None:
                    raise ValueError(f"{job.task}, document {job.document}: {result.error}")
                yield self._record(job, result, seconds.pop(result.index), watch)

    def _jobs(self, requests: Iterable[Instance]) -> list[Job]:
        jobs, times = [], Counter[str]()
        for request in requests:
            context, given = request.args
            first = key_of(request.task_name, request.doc_id, 0, (context, given, self.settings))
            repeat, times[first] = times[first], times[first] + 1
            settings, until = self._asked(given)
            room = self.max_length - settings["max_new_tokens"]
            if room < 1:
                raise ValueError(
                    f"max_new_tokens={settings['max_new_tokens']} leaves no room in {self.max_length} tokens"
                )
            ids = self.tok_encode(context)
            document = request.doc_id or 0
            jobs.append(
                Job(
                    key=key_of(request.task_name, request.doc_id, repeat, (context, given, self.settings)),
                    task=request.task_name,
                    document=document,
                    repeat=repeat,
                    row_id=document * (request.repeats or 1) + repeat,
                    ids=ids[-room:],
                    truncated=max(0, len(ids) - room),
                    until=until,
                    settings=settings,
                )
            )
        return jobs

    def _asked(self, given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Settings of one request and its stop strings, from a task's generation_kwargs and the settings of the run."""
        default = FIELDS["max_new_tokens"].default
        asked = dict(normalize_gen_kwargs(given, default_max_gen_toks=default))
        own = self.settings.get("stop_strings") or ()
        until = tuple(filter(None, (*asked["until"], *([own] if isinstance(own, str) else own))))
        settings = {"max_new_tokens": asked["max_gen_toks"]}
        if asked["do_sample"]:
            settings["temperature"] = asked["temperature"]
        for name, value in resolve_aliases({n: v for n, v in asked.items() if n not in LM_EVALS}).items():
            if name not in FIELDS:
                raise ValueError(f"generation_kwargs: {name}={value!r} is no setting of AsrdConfig{did_you_mean(name)}")
            if name != "temperature":
                settings[name] = value
        settings |= {name: self.settings[name] for name in settings if name in self.settings}
        return settings | ({"stop_strings": list(until)} if until and self.early_stop else {}), until

    def _record(self, job: Job, result: Result, seconds: float, watch: Watch | None) -> Record:
        tokens = result.tokens[: result.length]
        seen = watch.seen.pop(result.index) if watch else None
        return {
            "key": job.key, "task": job.task, "document": job.document, "repeat": job.repeat,
            "text": answer(self.tokenizer, tokens, job.until), "tokens": tokens,
            "pieces": [self.tokenizer.decode([token]) for token in tokens], "length": result.length,
            "prompt_tokens": len(job.ids), "truncated": job.truncated, "finish_reason": result.finish_reason,
            "stopped_by": result.stopped_by, "forwards": result.forwards, "steps": result.steps, "seconds": seconds,
            "drafted": result.drafted, "revoked": result.revoked, "edited": result.edited,
            "computed": result.computed, "anchors": result.anchors,
            "anchor_positions": seen.anchors if seen else None, "flip_flops": seen.flip_flops.count if seen else None,
        }  # fmt: skip

    # Likelihood

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found = []
        about = (self.settings, self.likelihood.draws, self.likelihood.batch, self.check_greedy)
        for _, context, continuation in tqdm(requests, unit="continuation", disable=disable_tqdm or None):
            key = key_of("loglikelihood", None, 0, (context, continuation, about))
            if key not in self.generations:
                room = self.max_length - len(continuation)
                if room < 1:
                    raise ValueError(f"a continuation of {len(continuation)} tokens: at most {self.max_length - 1}")
                value = self.likelihood.estimate(context[-room:], continuation)
                greedy = self.check_greedy and self.likelihood.is_greedy(context[-room:], continuation)
                self.generations.add({"key": key, "loglikelihood": value, "is_greedy": greedy})
            record = self.generations[key]
            found.append((record["loglikelihood"], record["is_greedy"]))
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of max_length tokens."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, self.max_length - 1, 1
            )
            parts = [(("", ""), list(context), list(rest)) for context, rest in map(make_disjoint_window, windows)]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm)))
        return found

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results file."""
        return {"model_dtype": str(self.adapter.table.dtype), "asrd_settings": self.settings}


def checked_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings of AsrdConfig, as model arguments give them."""
    settings = resolve_aliases({n: None if v in ("None", "none") else v for n, v in given.items()})
    for name, value in settings.items():
        if name not in FIELDS and name not in ALIASES:
            raise ValueError(f"{name}={value!r} is no argument of the model asrd and no setting{did_you_mean(name)}")
        check(name, value)
    find_decoder(settings.get("decoder", FIELDS["decoder"].default))
    return settings
