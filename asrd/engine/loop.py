"""A step: embed, forward, read the statistics, commit. `batch` repeats it until every row has ended.

Knows the order of these parts. What a step changes is up to the decoder, how a model is called up to the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches import BlockBody, CachedBody, copy_lines
from asrd.engine.decoder import Decoder, Selection
from asrd.engine.device.gpu import Gpu, shapes_on
from asrd.engine.observers.inspector import Inspector
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState, VocabStats, dispatch, extra_stats_torch, write_report

Observer = Callable[[DecodeState], None]


def no_mark(part: str) -> None:
    """`Run.mark` where no inspector listens."""


@dataclass(frozen=True)
class Run:
    """What stays the same over the steps of a batch."""

    adapter: ModelAdapter
    request: Request
    inputs: dict[str, Any]  # of every forward, besides the embeddings
    fixed: bool  # all shapes of a step are fixed and the host reads nothing; else only wanted positions are read
    cache: CachedBody | BlockBody | None = (
        None  # with one, the host reads back how much of each row a forward recomputes
    )
    gpu: Gpu | None = None  # with one, steps are queued ahead of the device and perhaps captured as a graph
    mark: Callable[[str], None] = no_mark  # is told when a part of a step is over

    @property
    def copies(self) -> int:
        """Lines of a forward for each row: two with classifier-free guidance."""
        return 2 if self.request.cfg_scale > 0 else 1

    @classmethod
    def of(cls, adapter: ModelAdapter, request: Request, fixed: bool | None = None) -> Run:
        """A run of `request`; classifier-free guidance doubles its rows. fixed None: as the device has it."""
        copies = 2 if request.cfg_scale > 0 else 1
        attention = None if request.attention is None else request.attention.repeat(copies, 1)
        positions = None if request.positions is None else request.positions.repeat(copies, 1)
        inputs = adapter.inputs(attention, positions)
        cache: CachedBody | BlockBody | None = None
        if request.starts is not None:
            cache = BlockBody(adapter, request)
        elif request.kv_cache:
            cache = CachedBody(adapter, request, inputs, attention, positions)
        usual, gpu = shapes_on(request.prompt.device)
        return cls(adapter, request, inputs, usual if fixed is None else fixed, cache, gpu)

    def put(self, source: Run, rows: Tensor, slots: Tensor) -> None:
        """Take over what forwards are given besides embeddings, and the caches, of rows of a run with the same canvas
        and settings, in place. The requests themselves are the decoders' affair."""
        copies, counts = 2 if self.request.cfg_scale > 0 else 1, [len(run.request.prompt) for run in (source, self)]
        there, here = (
            torch.cat([index + copy * count for copy in range(copies)])
            for index, count in zip((rows, slots), counts, strict=True)
        )
        for name, value in self.inputs.items():
            if isinstance(value, Tensor) and isinstance(source.inputs.get(name), Tensor):
                copy_lines(source.inputs[name], there, value, here)
        if self.cache is not None and source.cache is not None:
            self.cache.put(source.cache, (rows, slots), (there, here), counts[1] * copies)  # type: ignore[arg-type]

    def forwards(self, decoder: Decoder) -> Tensor:
        """[B] int64: forward passes so far; with classifier-free guidance those of one half."""
        return self.cache.forwards if isinstance(self.cache, BlockBody) else decoder.state.step

    def computed(self, decoder: Decoder) -> Tensor:
        """[B] int64: positions computed in the forward passes so far; padding is not counted, and with classifier-free
        guidance one of the two halves."""
        if self.cache is not None:
            return self.cache.computed
        layout, tokens, attention = decoder.attention_layout(), decoder.state.tokens, self.request.attention
        width = torch.full_like(decoder.state.step, tokens.shape[1]) if attention is None else attention.sum(1)
        return decoder.state.step * (width if layout is None else width + (layout.positions.shape[1] - tokens.shape[1]))


def mark_all(inspectors: list[Inspector]) -> Callable[[str], None]:
    """A `Run.mark` to which all of them listen."""

    def mark(part: str) -> None:
        for inspector in inspectors:
            inspector.mark(part)

    return mark


def step(run: Run, decoder: Decoder, buffers: tuple[VocabStats, VocabStats]) -> None:
    """One forward pass and its commit. Where `run.fixed`, the host reads nothing."""
    if isinstance(run.cache, BlockBody):
        run.mark("embed")  # part of the forward, which embeds no more than it needs
        hidden = run.cache(decoder)
        run.mark("forward")
        finish(run, hidden, decoder, buffers)
        if (ahead := run.cache.ahead(decoder)) is not None:
            finish_ahead(run, hidden, decoder, buffers, ahead)
    else:
        embeds = decoder.embed()  # 1. guidance and probe
        run.mark("embed")
        layout = decoder.attention_layout()
        hidden = forward(run, embeds, decoder.state, layout, decoder.probes)  # 2. one forward pass ...
        run.mark("forward")
        finish(run, hidden, decoder, buffers)


def finish(run: Run, hidden: Tensor, decoder: Decoder, buffers: tuple[VocabStats, VocabStats]) -> None:
    """What follows the body's forward pass."""
    asked = read(run, hidden, decoder, buffers[0])  # ... then LM head and statistics of the wanted positions
    run.mark("statistics")
    decoder.commit(buffers[1], **asked)  # 3. - 10. verify, draft, revoke, promote
    decoder.report(buffers[1])
    if decoder.scores is not None:
        decoder.scores.settle(buffers[1], decoder.state, decoder.rules.mask_id)
    run.mark("commit")


def finish_ahead(
    run: Run, hidden: Tensor, decoder: Decoder, buffers: tuple[VocabStats, VocabStats], rows: Tensor
) -> None:
    """A further step of these rows [B] bool, whose forward pass has been done together with the last one; the others
    stay as they are."""
    state = decoder.state
    held = [(values, values.clone()) for values in decoder.held()]
    for values, _ in held:  # what is done, and has nothing open, does not change but for what is held
        if values.dtype is torch.bool and values.dim() == 2:
            values.logical_and_(rows[:, None])
    state.done.logical_or_(~rows)
    finish(run, hidden, decoder, buffers)
    for values, before in held:
        values.copy_(torch.where(rows if values.dim() == 1 else rows[:, None], values, before))
    write_report(state, buffers[1])


def read(run: Run, hidden: Tensor, decoder: Decoder, out: VocabStats) -> dict[str, Tensor]:
    """Statistics of the wanted positions, to `out`; gives those that the decoder asks for besides."""
    request = run.request
    chosen = select(run, decoder)
    row, position, source, _ = chosen
    read_at = decoder.read_at() if source is None else None
    logits = head(run, hidden, chosen, read_at)
    run.mark("head")
    if request.shaping is not None:
        logits = request.shaping(logits, chosen, decoder)
    if (scores := decoder.scores) is not None:
        place = decoder.canvas_position(chosen)
        logprobs = scores.see(logits, row, place, request.readout, decoder.state)
    asked: dict[str, Tensor] = {}
    if decoder.extra_stats:
        scored = decoder.tokens_to_score()
        asked = extra_stats_torch(decoder.extra_stats, logits, row, position, request.readout, scored)
    dispatch.vocab_stats(logits, row, position, request.readout, out, request.impl)
    if scores is not None:
        scores.decide(logprobs, row, position, place, out, decoder.state)
    return asked


def select(run: Run, decoder: Decoder) -> Selection:
    """The wanted positions and no others; or with fixed shapes B * W slots, of which some may be unused."""
    if run.fixed:
        return decoder.slot_indices()
    row, position = decoder.wanted().nonzero(as_tuple=True)
    return Selection(row, position, unused=False)


def forward(
    run: Run, embeds: Tensor, state: DecodeState, layout: AttentionLayout | None = None, probed: bool = True
) -> Tensor:
    """Body of the model on the canvas and what the layout puts behind it; with classifier-free guidance a second half
    follows, its prompts masked. probed: the pending tokens' embeddings are not their own."""
    embeds = with_blind(run, embeds, layout)
    if isinstance(run.cache, CachedBody):
        return run.cache(embeds, state, layout, probed)
    if layout is None:
        return run.adapter.body(embeds, run.inputs)
    inputs = run.adapter.inputs_for_layout(layout.repeat(run.copies), run.inputs, run.request.impl)
    return run.adapter.body(embeds, inputs)


def with_blind(run: Run, embeds: Tensor, layout: AttentionLayout | None = None) -> Tensor:
    """With classifier-free guidance, the embeddings and then the same with a mask wherever a prompt token is shown."""
    if run.copies == 1:
        return embeds
    mask = run.adapter.table[run.request.rules.mask_id]
    if layout is not None and layout.of_prompt is not None:
        return torch.cat([embeds, torch.where(layout.of_prompt[:, :, None], mask, embeds)])
    blind = embeds.clone()
    blind[:, : run.request.prompt.shape[1]] = mask
    if (given := run.request.given) is not None:  # to LLaDA all known text is the prompt
        width = run.request.prompt.shape[1]
        known = (given != run.request.rules.mask_id)[..., None]
        blind[:, width : width + given.shape[1]] = torch.where(known, mask, blind[:, width : width + given.shape[1]])
    return torch.cat([embeds, blind])


def gather(run: Run, hidden: Tensor, chosen: Selection, read_at: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows [N, D] of the body's output for the chosen positions; with classifier-free guidance those of the second
    half, too. read_at: `Decoder.read_at`."""
    prompt, shift = run.request.prompt.shape[1], run.adapter.shift
    if not chosen.unused and read_at is None and hidden.shape[1] == prompt + run.request.length:
        text = hidden[:, prompt - shift :]
        rows = text[chosen.row, chosen.position]
        return rows, text[chosen.row + len(run.request.prompt), chosen.position] if run.copies == 2 else None
    source = source_rows(run, hidden.shape[1], chosen, read_at) if chosen.source is None else chosen.source
    rows = hidden.reshape(run.copies, -1, hidden.shape[2]).index_select(1, source.to(hidden.device))
    return rows[0], rows[1] if run.copies == 2 else None


def source_rows(run: Run, width: int, chosen: Selection, read_at: Tensor | None = None) -> Tensor:
    """[N] which rows of the body's output [B * width, D] have the logits of the chosen positions."""
    request = run.request
    if read_at is not None:
        column = read_at[chosen.row, chosen.position.clamp(max=request.length - 1)]
        return column.add_(chosen.row, alpha=width)
    column = chosen.position + request.prompt.shape[1]
    if run.adapter.shift:
        column = column - run.adapter.shift * (chosen.position < request.length)
    return column.clamp_(max=width - 1).add_(chosen.row, alpha=width)  # no unused slot beyond the last


def head(run: Run, hidden: Tensor, chosen: Selection, read_at: Tensor | None = None) -> Tensor:
    """Logits [N, V] of the chosen positions, classifier-free guidance applied."""
    rows, blind_rows = gather(run, hidden, chosen, read_at)
    logits = run.adapter.head(rows)
    if blind_rows is not None:
        blind = run.adapter.head(blind_rows)
        logits = blind + (run.request.cfg_scale + 1) * (logits - blind)
    return logits.to(chosen.row.device)
