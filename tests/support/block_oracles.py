"""The native decoders of block-diffusion models and ASRD on them, restated in sets and lists, one row at a time.

Written from the shared specification, not from the package: every step is one forward of the whole window up to the
open block with a block-causal mask and no cache. Positions are the row's own, prompt included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.block_models import EOS, PAD, block_logits


@dataclass(frozen=True)
class Rule:
    """Settings of one decode."""

    new: int
    block: int
    threshold: float
    strategy: str = "dynamic"
    steps: int | None = None
    faithful: bool = False
    native: str = "sdar"
    editing: float = 0.9
    post: int = 16
    transfer: int = 1
    early_stop: bool = True
    window: int = 2
    capacity: int = 16
    alpha: float = 0.1
    beta: float = 0.3
    verify: bool = True
    factor: float = 2.0
    back: float = 0.9
    ratio: float = 1.0
    max_edits: int = 3
    witnesses: int = 8


@dataclass
class Outcome:
    """What a decode came to."""

    text: list[int]
    steps: int  # forwards with something to decide
    counts: dict[str, int] = field(default_factory=dict)


class Row:
    """The canvas of one row and what the model says of it."""

    def __init__(self, model: Any, prompt: list[int], rule: Rule) -> None:
        self.model, self.rule, self.start = model, rule, len(prompt)
        self.mask = model.config.mask_token_id
        whole = -(-(len(prompt) + rule.new) // rule.block) * rule.block
        self.x = prompt + [self.mask] * (whole - len(prompt))
        self.steps = 0
        self.counts = {"drafted": 0, "revoked": 0, "anchors": 0, "edited": 0}

    def blocks(self) -> list[range]:
        size = self.rule.block
        return [range(b * size, b * size + size) for b in range(self.start // size, len(self.x) // size)]

    def masks(self, block: range) -> list[int]:
        return [i for i in block if self.x[i] == self.mask]

    def read(self, block: range, edits: dict[int, Tensor] | None = None) -> dict[int, tuple[int, float, float]]:
        """One forward: top-1, its probability and the entropy at each position of the block."""
        self.steps += 1
        ids = torch.tensor([self.x[: block.stop]])
        embeds = self.model.get_input_embeddings()(ids).detach().clone()
        for i, e in (edits or {}).items():
            embeds[0, i] = e
        with torch.no_grad():
            logits = block_logits(self.model, ids, self.rule.block, embeds)[0]
        said = {}
        for i in block:
            p = logits[i].softmax(0)
            token = int(p.argmax())
            some = p[p > 0]
            said[i] = (token, float(p[token]), float(-(some * some.log()).sum()))
        return said

    def witness(self, block: range, i: int) -> Tensor:
        """Probabilities at a mask behind the window, in the place of i, that sees the window but for i, and itself."""
        size, window = self.rule.block, block.stop
        ids = torch.tensor([[*self.x[:window], self.mask]])
        visible = [[key < window and key // size <= at // size for key in range(window + 1)] for at in range(window)]
        visible.append([key != i for key in range(window + 1)])
        places = torch.tensor([[*range(window), i]])
        mask = torch.tensor(visible)[None, None]
        with torch.no_grad():
            logits = self.model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[0, -1]
        logits[self.mask] = -torch.inf
        return logits.softmax(0)

    def ended(self, settled: int) -> bool:
        """Is there a generated end of text before this position?"""
        return self.rule.early_stop and EOS in self.x[self.start : settled]

    def outcome(self) -> Outcome:
        text = self.x[self.start :]
        if self.rule.early_stop and EOS in text:
            end = text.index(EOS) + 1
            text = text[:end] + [PAD] * (len(text) - end)
        return Outcome(text[: self.rule.new], self.steps, self.counts)


def pick(masks: list[int], said: dict[int, tuple[int, float, float]], threshold: float, quota: int) -> set[int]:
    """Those above the threshold; if they are fewer than the quota, the most confident so many instead."""
    sure = {i for i in masks if said[i][1] > threshold}
    if len(sure) >= quota:
        return sure
    return set(sorted(masks, key=lambda i: (-said[i][1], i))[:quota])


def evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if j < total % parts else 0) for j in range(parts)]


def native_quota(model: Any, prompt: list[int], rule: Rule) -> Outcome:
    """SDAR (static, dynamic, sequential) and LLaDA2.0."""
    row = Row(model, prompt, rule)
    steps = rule.steps or rule.block
    if rule.faithful and rule.native == "llada2":
        steps = min(steps, rule.new)
    for block in row.blocks():
        for quota in evenly(rule.block, steps):
            masks = row.masks(block)
            if not masks:
                break
            said = row.read(block)
            if rule.strategy == "static":
                chosen = set(sorted(masks, key=lambda i: (-said[i][1], i))[:quota])
            elif rule.strategy == "sequential":
                chosen = set(masks[:quota])
            else:
                chosen = pick(masks, said, rule.threshold, quota)
            for i in chosen:
                row.x[i] = said[i][0]
            row.counts["drafted"] += len(chosen)
            left = row.masks(block)
            if not rule.faithful and row.ended(left[0] if left else block.stop):
                return row.outcome()
        assert not row.masks(block)
        if row.ended(block.stop):
            break
    return row.outcome()


def native_joint(model: Any, prompt: list[int], rule: Rule) -> Outcome:
    """LLaDA2.1: fill masks and edit tokens until a block without masks stands still."""
    row = Row(model, prompt, rule)
    for block in row.blocks():
        post = 0
        while True:
            masks = row.masks(block)
            if not masks:
                post += 1
                if post > rule.post:
                    break
            said = row.read(block)
            fill = pick(masks, said, rule.threshold, rule.transfer)
            edit = {
                i for i in block
                if i >= row.start and i not in masks and said[i][1] > rule.editing and said[i][0] != row.x[i]
            }  # fmt: skip
            for i in fill | edit:
                row.x[i] = said[i][0]
            row.counts["drafted"] += len(fill)
            row.counts["edited"] += len(edit)
            if not masks and not edit:
                break
        if row.ended(block.stop):
            break
    return row.outcome()


class Anchors:
    """Cache, history and entropies of ASRD."""

    def __init__(self, row: Row) -> None:
        self.row, self.rule = row, row.rule
        self.cache: list[int] = []
        self.history: dict[int, list[int]] = {}
        self.entropy: dict[int, float] = {}

    def edits(self, masks: list[int], pending: set[int]) -> dict[int, Tensor]:
        """Embeddings that are not clean in the coming forward."""
        if not self.cache:
            return {}
        table, rule = self.row.model.get_input_embeddings().weight.detach(), self.rule
        c = torch.stack([table[self.row.x[i]] for i in self.cache]).mean(0)
        low, high = min(self.entropy.values(), default=0.0), max(self.entropy.values(), default=0.0)
        found = {}
        for i in masks:
            if i in self.entropy and high - low > 1e-6:
                g = rule.alpha * (self.entropy[i] - low) / (high - low)
                found[i] = (1 - g) * table[self.row.mask] + g * c
        for i in pending:
            e = table[self.row.x[i]]
            found[i] = e + rule.beta * (c - (c @ e) / (e @ e) * e)
        return found

    def promote(self, seen: set[int], bold: set[int], said: dict[int, tuple[int, float, float]]) -> set[int]:
        """Extend the history where predictions were seen; the anchors among the bold commits."""
        rule = self.rule
        for i in seen:
            self.history.setdefault(i, []).append(said[i][0])
        if self.row.steps < rule.window:
            anchors = set(sorted(bold, key=lambda i: (said[i][2], i))[:1])
        else:
            anchors = {i for i in bold if self.run(i) >= rule.window}
        self.row.counts["anchors"] += len(anchors)
        self.cache = (self.cache + sorted(anchors))[-rule.capacity :] if rule.capacity else []
        return anchors

    def run(self, i: int) -> int:
        past, length = self.history[i], 0
        while length < len(past) and past[-1 - length] == past[-1]:
            length += 1
        return length


def asrd_quota(model: Any, prompt: list[int], rule: Rule) -> Outcome:
    """ASRD on SDAR and LLaDA2.0."""
    row = Row(model, prompt, rule)
    anchors, budget = Anchors(row), len(row.x) - len(prompt)
    for block in row.blocks():
        drafts, pending = 0, set[int]()
        quotas = evenly(rule.block, rule.steps or rule.block)
        while row.masks(block) or pending:
            masks = row.masks(block)
            said = row.read(block, anchors.edits(masks, pending))
            failed = [i for i in sorted(pending) if said[i][0] != row.x[i]]
            bold = {i for i in masks if said[i][1] > rule.threshold}
            commit = set(bold)
            if masks:
                quota = quotas[min(drafts, len(quotas) - 1)]
                drafts += 1
                others = sorted((i for i in masks if i not in bold), key=lambda i: (-said[i][1], i))
                commit |= set(others[: max(quota - len(bold), 0)])
            for i in commit:
                row.x[i] = said[i][0]
            row.counts["drafted"] += len(commit)
            allowed = max(budget - row.steps - row.x.count(row.mask), 0)
            for i in failed[:allowed]:
                row.x[i] = row.mask
            row.counts["revoked"] += len(failed[:allowed])
            fixed = anchors.promote(set(masks), bold, said)
            pending = bold - fixed if rule.verify and row.steps < budget else set()
            anchors.entropy = {i: said[i][2] for i in masks}
            still_open = sorted({*row.masks(block), *pending})
            if row.ended(still_open[0] if still_open else block.stop):
                return row.outcome()
    assert row.steps <= budget + len(row.blocks())
    return row.outcome()


def asrd_joint(model: Any, prompt: list[int], rule: Rule) -> Outcome:
    """ASRD on LLaDA2.1."""
    row = Row(model, prompt, rule)
    anchors = Anchors(row)
    for block in row.blocks():
        post, pending, pool = 0, set[int](), set[int]()
        while True:
            masks = row.masks(block)
            post += not masks
            said = row.read(block, anchors.edits(masks, pending))
            failed = {i for i in pending if said[i][0] != row.x[i]}
            bold = {i for i in masks if said[i][1] > rule.threshold}
            fill = pick(masks, said, rule.threshold, rule.transfer)
            edit = {i for i in pool if said[i][1] > rule.editing and said[i][0] != row.x[i]}
            for i in fill | edit:
                row.x[i] = said[i][0]
            row.counts["drafted"] += len(fill)
            row.counts["edited"] += len(edit)
            seen = set(masks) | pool
            fixed = anchors.promote(seen, bold | edit, said)
            if rule.verify:
                pool = (pool - edit) | failed | (fill - bold)
                pending = (bold | edit) - fixed
            else:
                pool, pending = pool | fill, set()
            anchors.entropy = {i: said[i][2] for i in masks}
            still = not masks and not edit and not failed
            if not row.masks(block) and ((not pending and (not pool or still)) or post >= rule.post):
                break
            still_open = sorted({*row.masks(block), *pending, *pool})
            if row.ended(still_open[0]):
                return row.outcome()
        if row.ended(block.stop):
            break
    return row.outcome()


def loo_blocks(model: Any, prompt: list[int], rule: Rule) -> Outcome:
    """Leave-one-out editing: drafts by factor; the doubtful ones get a witness in the next pass over their block."""
    row = Row(model, prompt, rule)
    edits = dict.fromkeys(range(len(row.x)), 0)
    row.counts |= {"checks alone": 0, "waited": 0, "refused": 0}
    for block in row.blocks():
        pending: dict[int, float] = {}
        while row.masks(block) or pending:
            masks = row.masks(block)
            queue = sorted(pending, key=lambda i: (pending[i], i))
            heard, waiting = queue[: rule.witnesses], queue[rule.witnesses :]
            row.counts["checks alone"] += not masks
            row.counts["waited"] += len(waiting)
            verdicts = {i: row.witness(block, i) for i in heard}
            said = row.read(block)
            edited = {}
            for i, p in verdicts.items():
                token = int(p.argmax())
                if token == row.x[i]:
                    continue
                if edits[i] == rule.max_edits or (rule.ratio < 1 and p[row.x[i]] >= rule.ratio * p[token]):
                    row.counts["refused"] += 1
                    continue
                row.x[i], edited[i] = token, float(p[token])
                edits[i] += 1
            order = sorted(masks, key=lambda i: (-said[i][1], i))
            number = min(1, len(order))
            while number < len(order):
                if said[order[number]][1] < 1 - rule.factor / (number + 2) and number < len(order) - 1:
                    break
                number += 1
            for i in order[:number]:
                row.x[i] = said[i][0]
            row.counts["drafted"] += number
            row.counts["edited"] += len(edited)
            doubtful = {i: said[i][1] for i in order[:number] if said[i][1] < rule.back}
            pending = doubtful | edited | {i: pending[i] for i in waiting}
            if row.mask not in row.x:
                pending = {}
            still_open = sorted({*row.masks(block), *pending})
            if row.ended(still_open[0] if still_open else block.stop):
                return row.outcome()
    return row.outcome()
