"""Algorithm 1 of the paper (asrd.tex l.145-177), transcribed line by line by somebody who had not seen the code.

"tex" = line of asrd.tex. It shares no code with the package and has none of its additions (docs/semantics.md).
The displayed formulas carry no numbers in the paper (equation*), so they are cited by tex line.

   Input: denoiser p_theta; length L; steps T; threshold tau; window k; cache capacity m; strengths alpha, beta.
   Output: decoded sequence x.
 1 Initialize x <- [MASK]^L; I, P <- {}; H^i <- (); Ebar_0^i <- 0.
 2 for decoding step s = 1..T do
 3   M <- {i : x^i = MASK} and E <- Embed(x).
 4   if I != {} then
 5     cbar <- |I|^-1 sum_{j in I} e^j.
 6     for each i in M, set gamma^i <- alpha Ebar_{s-1}^i and e^i <- (1-gamma^i) e_mask + gamma^i cbar.
 7     for each i in P, set d^i <- cbar - (<cbar,e^i> / ||e^i||_2^2) e^i and e^i <- e^i + beta d^i.
 8   end if
 9   p_s <- p_theta(E).                                                       > One model forward pass
10   R <- {i in P : argmax_v p_s^i(v) != xbreve^i}; set x^i <- MASK for every i in R.
11   T_s <- {i in M : max_v p_s^i(v) > tau}; set xbreve^i <- argmax_v p_s^i(v), x^i <- xbreve^i for i in T_s.
12   Append argmax_v p_s^i(v) to H^i for each i in M; A_s <- {i in T_s : Consistent_k(H^i)}.
13   if s < k and T_s != {} then A_s <- {argmin_{i in T_s} H(p_s^i)}.          > Seed cache
14   I <- FIFO_m(I u A_s) and P <- T_s \\ A_s.
15   Ebar_s <- MinMaxNormalize({H(p_s^i) : i in M}) for use at the next step.
16 end for
17 return x.

Positions i are 0..length-1, counted from the first generated token. `tokens` is x alone, without the prompt.
"""

# ruff: noqa: E741 - I is the paper's symbol
from dataclasses import dataclass, field

import torch


@dataclass
class Step:
    s: int
    embeds: torch.Tensor  # [length, D], what the model was fed at the generated positions
    top1: dict  # i -> argmax_v p_s^i(v), for i in M and P (lines 10-12)
    confidence: dict  # i -> max_v p_s^i(v),    for i in M (line 11)
    entropy: dict  # i -> H(p_s^i),          for i in M (lines 13, 15)
    drafted: list  # T_s
    revoked: list  # R
    promoted: list  # A_s
    pending: list  # P after line 14
    masked: list  # {i : x^i = MASK} after the step
    tokens: list  # x after the step
    anchors: list  # I after line 14, oldest first


@dataclass
class Result:
    tokens: list
    steps: int
    finished: bool
    history: list = field(default_factory=list)


def consistent(H, k):
    """Consistent_k, tex l.182: ahat_{t-k+1} = ... = ahat_t."""
    # paper silent: read on the list H^i as line 12 hands it over, i.e. its last k ENTRIES, gaps in steps ignored;
    # a list shorter than k is not consistent (tex l.682: "the consistency window is incomplete").
    return len(H) >= k and len(set(H[-k:])) == 1


def fifo(I, A, m):
    """FIFO_m, tex l.207: newcomers at the back, the oldest fall off the front."""
    # paper silent: newcomers of one step enter in ascending position; capacity holds within a step too.
    queue = I + [i for i in sorted(A) if i not in I]
    return queue[max(0, len(queue) - m) :]


def min_max_normalize(entropy):
    """tex l.231-236, over the positions given."""
    if not entropy:
        return {}  # paper silent: no mask left, nothing to normalise
    lo, hi = min(entropy.values()), max(entropy.values())
    return {i: (h - lo) / (hi - lo) if hi > lo else 0.0 for i, h in entropy.items()}  # max == min: 0, tex l.234


@torch.no_grad()
def algorithm1(model, table, prompt, length, mask_id, *, tau, k, m, alpha, beta, max_steps) -> Result:
    N = len(prompt)  # paper silent: the box has no prompt; here it is fixed clean context in front of x
    # line 1: x <- [MASK]^L; I, P <- {}; H^i <- (); Ebar_0^i <- 0
    x = [mask_id] * length
    I, P = [], set()
    H = {i: [] for i in range(length)}
    Ebar = dict.fromkeys(range(length), 0.0)
    xbreve, history = {}, []

    def finished():
        return mask_id not in x and not P

    for s in range(1, max_steps + 1):  # line 2: for s = 1..T, T = max_steps
        # paper silent: the box has no early stop. With M = P = {} every further step changes nothing, so the
        # passes are saved; with M = {} but P != {} the loop goes on, as line 10 can still revoke.
        if finished():
            break
        # line 3: M <- {i : x^i = MASK}; E <- Embed(x)
        M = [i for i in range(length) if x[i] == mask_id]
        E = table[torch.tensor(list(prompt) + x, device=table.device)].clone()
        e_mask = table[mask_id]
        if I:  # line 4: if I != {}   (no anchor: no guidance and no probe, but line 10 still verifies)
            # line 5: cbar <- |I|^-1 sum_{j in I} e^j, tex l.215; anchors are in neither M nor P, so e^j is clean
            cbar = sum(E[N + j] for j in I) / len(I)
            for i in M:  # line 6: gamma^i <- alpha Ebar_{s-1}^i (tex l.227); blend (tex l.221)
                # paper silent: a position revoked at s-1 was not in M then, so line 15 gave it no Ebar_{s-1};
                # it takes the initial value 0 of line 1, i.e. the bare mask embedding.
                gamma = alpha * Ebar.get(i, 0.0)
                E[N + i] = (1 - gamma) * e_mask + gamma * cbar
            for i in sorted(P):  # line 7: d^i (tex l.262-264) and e^i <- e^i + beta d^i (tex l.270)
                e = E[N + i].clone()
                d = cbar - (cbar @ e) / (e @ e) * e  # paper silent: ||e^i|| = 0 is not guarded
                E[N + i] = e + beta * d
        # line 8: end if
        # line 9: p_s <- p_theta(E), the one forward pass
        logits = model(E)[N:].clone()
        logits[:, mask_id] = float("-inf")  # paper silent: the mask is never predicted
        p = torch.softmax(logits, dim=-1)  # paper silent: softmax at temperature 1, in the dtype of the logits
        # paper silent: argmax tie -> smallest id
        top1 = {i: int(p[i].argmax()) for i in sorted(set(M) | P)}
        confidence = {i: float(p[i].max()) for i in M}
        entropy = {i: float(torch.special.entr(p[i]).sum()) for i in M}  # -sum_v p log p, nats, 0 log 0 = 0
        # line 10: R <- {i in P : argmax_v p_s^i(v) != xbreve^i}; x^i <- MASK for i in R
        R = [i for i in sorted(P) if top1[i] != xbreve[i]]
        for i in R:
            x[i] = mask_id  # paper silent: H^i is kept; M stays that of line 3, so i is not redrafted in this step
        # line 11: T_s <- {i in M : max_v p_s^i(v) > tau}; xbreve^i <- argmax_v p_s^i(v); x^i <- xbreve^i
        T = [i for i in M if confidence[i] > tau]  # strict; may be empty, nothing is forced
        for i in T:
            xbreve[i] = top1[i]
            x[i] = xbreve[i]
        # line 12: append argmax_v p_s^i(v) to H^i for i in M (all of M, not only T_s); A_s <- {Consistent_k(H^i)}
        for i in M:
            H[i].append(top1[i])
        A = [i for i in T if consistent(H[i], k)]
        # line 13: if s < k and T_s != {} then A_s <- {argmin_{i in T_s} H(p_s^i)}
        if s < k and T:
            A = [min(T, key=lambda i: entropy[i])]  # paper silent: tie -> smallest position
        # line 14: I <- FIFO_m(I u A_s); P <- T_s \ A_s
        I = fifo(I, A, m)
        P = set(T) - set(A)  # P is replaced: a pending token that survived line 10 leaves P and is final
        # line 15: Ebar_s <- MinMaxNormalize({H(p_s^i) : i in M}), M of line 3 (T_s still inside, R outside)
        Ebar = min_max_normalize(entropy)
        history.append(
            Step(
                s,
                E[N:].clone(),
                top1,
                confidence,
                entropy,
                T,
                R,
                A,
                sorted(P),
                [i for i in range(length) if x[i] == mask_id],
                list(x),
                list(I),
            )
        )
    # line 16: end for
    return Result(x, len(history), finished(), history)  # line 17: return x
