"""`commit`: lines 10 to 15 of Algorithm 1, everything that happens to the state after a forward pass.

Symbols as in the paper: x tokens, s step, M the masks that are drafted from, those of the active block (`guided` are
those that get guidance and a history, in scope "sequence" all of them), P pending, R revoked, T drafts above the
threshold, A new anchors. "line 10" is a line of Algorithm 1, "(3)" a step of docs/semantics.md, which says what the
paper leaves open: block, progress rule, budget, end of text. Rows never influence each other; a done row does not
change. The kernel is `commit_triton`.

`write` is the same for decoders without anchors: tokens are drafted, revoked or edited, then `finish_step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import NO_ENTROPY, DecodeState, VocabStats, text_ends


def commit_torch(state: DecodeState, stats: VocabStats, quota: Tensor | None = None) -> None:
    """Apply the statistics [B, G] of guided masks and pending tokens to the state, in place.

    quota [B] int64: how many masks are drafted at least, where there are that many; None: one.
    """
    rules, x, guided, P = state.rules, state.generated, state.guided, state.pending
    top1, confidence, entropy = stats.top1, stats.confidence, stats.entropy
    state.step.add_(~state.done)
    s, budget = state.step[:, None], state.budget[:, None]
    M = state.active_masks

    # line 10 (3) verify: a pending token whose prediction has changed has failed
    failed = P & (top1 != x)
    # line 11 (4) draft T and the most confident mask, which is in T unless T is empty; then it is neither anchor nor
    # pending
    T = M & (confidence > rules.threshold)
    drafted = T | most_confident(M, confidence, quota)
    # line 10 (5) revoke, after drafting: the budget counts the masks left, each of which needs one of the passes left
    masks_left = ((x == rules.mask_id) & ~drafted).sum(1, keepdim=True)
    R = failed & (failed.cumsum(1) <= budget - s - masks_left)
    x.copy_(torch.where(drafted, top1, x).masked_fill(R, rules.mask_id))
    # lines 12 and 13 (6, 7) histories, then anchors
    extend_histories(state, top1, guided)
    if rules.revoked_history == "reset":
        state.run.masked_fill_(R, 0)
        state.last.masked_fill_(R, -1)
    A = promote(state, T, entropy)
    # line 14 (8, 10) P <- T \ A; at the end of the budget what is pending becomes final
    P = T & ~A & (s < budget) if rules.verify else torch.zeros_like(T)
    # line 15 (9) entropies for the next step, which normalises them
    state.entropy.copy_(torch.where(guided, entropy, NO_ENTROPY))

    state.drafted.add_(drafted.sum(1))
    state.revoked.add_(R.sum(1))
    finish_step(state, P)
    state.entropy.masked_fill_(state.done[:, None], NO_ENTROPY)


def extend_histories(state: DecodeState, top1: Tensor, seen: Tensor) -> None:
    """Line 12: append the predictions at the seen positions [B, G] to their histories, kept as last value and run."""
    run = torch.where(top1 == state.last, state.run, 0) + 1
    state.run.copy_(torch.where(seen, run, state.run))
    state.last.copy_(torch.where(seen, top1, state.last))


def promote(state: DecodeState, T: Tensor, entropy: Tensor) -> Tensor:
    """[B, G] bool A, the members of T that become anchors, which enter the cache."""
    rules, m = state.rules, state.ring.shape[1] - 1
    candidates = T if rules.anchor_eos else T & ~text_ends(state.generated, rules.eos_ids)
    consistent = candidates & (state.run >= rules.window)  # line 12: the same top-1 for k steps
    lowest = torch.where(candidates, entropy, torch.inf).argmin(1, keepdim=True)
    seed = candidates & (state.positions == lowest)  # line 13: while s < k, the one of lowest entropy
    A = torch.where(state.step[:, None] < rules.window, seed, consistent)
    # line 14: I <- FIFO_m(I u A), in ascending position; promotion n is in column n mod m of the ring
    number = state.anchors[:, None] + A.cumsum(1) - 1
    state.anchors.add_(A.sum(1))
    state.trusted.logical_or_(A)
    if m > 0:
        kept = A & (number >= state.anchors[:, None] - m)
        column = torch.where(kept, number % m, m)  # column m: waste
        state.ring.scatter_(1, column, state.positions.expand_as(column))
    return A


def write(
    state: DecodeState,
    top1: Tensor,
    drafted: Tensor,
    revoked: Tensor | None = None,
    edited: Tensor | None = None,
    provisional: Tensor | None = None,
) -> None:
    """End a step: commit `top1` where `drafted`, replace a token by it where `edited`, mask again where `revoked`.

    A position that is both drafted and revoked is committed and revoked. provisional: tokens that may still be revoked
    or edited. They are streamed as drafts and no text ends with them; a row without masks is done nevertheless.
    Everything is [B, G]; done rows do not change.
    """
    x, live, nothing = state.generated, ~state.done[:, None], torch.zeros_like(drafted)
    drafted = drafted & live
    revoked = nothing if revoked is None else revoked & live & state.inside  # given tokens stay
    edited = nothing if edited is None else edited & live
    state.step.add_(live[:, 0])
    state.drafted.add_(drafted.sum(1))
    state.revoked.add_(revoked.sum(1))
    state.edited.add_(edited.sum(1))
    x.copy_(torch.where(drafted | edited, top1, x).masked_fill(revoked, state.rules.mask_id))
    pending = nothing
    if provisional is not None:
        masks = state.masks
        pending = provisional & state.inside & ~masks & masks.any(1, keepdim=True)
    finish_step(state, pending)


def finish_step(state: DecodeState, pending: Tensor) -> None:
    """The end of every decoder's step (10): end of text, done rows, next active block. pending [B, G]: from now on."""
    rules, x = state.rules, state.generated
    still_open = state.masks | pending
    done = ~still_open.any(1)
    if rules.early_stop and rules.eos_ids:
        ends = text_ends(x, rules.eos_ids, state.given) & (still_open.cumsum(1) == 0)  # nothing is open before it
        ends &= ~state.done[:, None]  # a row may have been ended with an EOS pending
        x.masked_fill_(ends.cumsum(1) > ends, rules.pad_id)  # what follows the first end
        done |= ends.any(1)
    state.done.logical_or_(done)
    live = ~state.done[:, None]
    state.pending.copy_(pending & live)
    # the leftmost block with a mask (in block diffusion, or a pending token) becomes active
    masks = state.masks & live
    keeps_open = masks | state.pending if rules.one_block else masks
    block = state.block_of.gather(1, keeps_open.long().argmax(1, keepdim=True))[:, 0]
    state.active.copy_(torch.where(keeps_open.any(1), block, state.active))
    state.guided.copy_(masks if rules.scope == "sequence" else masks & state.in_active_block)


def close(state: DecodeState, rows: Tensor) -> None:
    """End these rows [B] bool as they are, with nothing open any more."""
    state.done.logical_or_(rows)
    state.entropy.masked_fill_(rows[:, None], NO_ENTROPY)
    for flags in (state.pending, state.guided):
        flags.masked_fill_(rows[:, None], False)


# --- what decoders choose by ---


def most_confident(among: Tensor, confidence: Tensor, number: Tensor | None = None) -> Tensor:
    """[B, N] bool: the most confident position among [B, N] of each row, or the `number` [B] most confident; ties go to
    the lowest position, and a row with none among them has none."""
    if number is not None:
        return among & (ranks(confidence, among, largest=True) < number[:, None])
    best = torch.where(among, confidence, -torch.inf).argmax(1, keepdim=True)
    return among & (torch.arange(among.shape[1], device=among.device) == best)


def ranks(score: Tensor, among: Tensor, largest: bool = False) -> Tensor:
    """[B, N] int64: 0 for the smallest (or largest) score among [B, N], 1 for the next; of equals the lower position
    first. What is not among them has rank N."""
    order = torch.where(among, -score if largest else score, torch.inf).argsort(dim=1, stable=True)
    inside = among.gather(1, order)
    rank = torch.where(inside, inside.cumsum(1) - 1, score.shape[1])
    return torch.empty_like(order).scatter_(1, order, rank)
