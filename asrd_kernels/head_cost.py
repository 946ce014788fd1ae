"""LM head as one GEMM with `vocab_stats` behind it, or fused with it: bytes and FLOPs of both, and which is worth it.

With N rows, V tokens, hidden size D and s bytes a number the GEMM path moves s (V D + N D + 2 N V): the weight, the
hidden states, and the logits, written and read again. Fused, the logits stay in registers, but a program holds at most
64 rows (32 of float32), so the weight is read once for each such tile: s V D ceil(N / 64) + s N D + partials.
The FLOPs are 2 N V D in both, N rounded up to a tile in the fused one.

So fusing saves at most 2 N / (D + 2 N) of the bytes, and only while one tile holds all rows: 3 % for the 64 rows of
one LLaDA-8B step, 0.8 % for 16. A hand-written GEMM loses more than that against the vendor's library (FlashSampling's
published figures on an RTX 3090: fused wins up to 16 rows and loses from 64), hence `WORTH`, and hence the default
lm_head="gemm". What fusing does save is memory: N V s bytes of logits, 0.5 GB at batch 32.

These are counts, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_TILES = {2: 64, 4: 32}  # bytes a number -> rows whose logits a fused program holds in registers, at most
COLUMN_TILE = 128  # columns of the vocabulary a fused program has
WORTH = 0.05  # share of the bytes that fusing must save to be worth it
PARTIAL_BYTES = 24  # six numbers of four bytes a row and column tile
MODELS = {"LLaDA-8B": (126464, 4096), "Dream-7B": (152064, 3584), "hidden 2048": (157184, 2048), "tiny": (512, 192)}


@dataclass(frozen=True)
class HeadCost:
    """Bytes and FLOPs of the two ways from hidden states to statistics."""

    gemm_bytes: int
    fused_bytes: int
    gemm_flops: int
    fused_flops: int
    weight_passes: int  # of the fused way
    logits_bytes: int  # memory that the GEMM way needs for logits

    @property
    def saving(self) -> float:
        """Share of the GEMM way's bytes that fusing saves; negative where it costs more."""
        return 1 - self.fused_bytes / self.gemm_bytes

    @property
    def go(self) -> bool:
        """Is fusing worth it by these counts?"""
        return self.weight_passes == 1 and self.saving >= WORTH


def head_cost(rows: int, vocab: int, hidden: int, itemsize: int = 2) -> HeadCost:
    """Costs for N = rows hidden states and a weight [vocab, hidden] of `itemsize` bytes a number."""
    tile = row_tile(rows, itemsize)
    passes, chunks = -(-rows // tile), -(-vocab // COLUMN_TILE)
    weight, states, logits = vocab * hidden * itemsize, rows * hidden * itemsize, rows * vocab * itemsize
    partials = rows * chunks * PARTIAL_BYTES
    return HeadCost(
        gemm_bytes=weight + states + 2 * logits,
        fused_bytes=passes * weight + states + 2 * partials,
        gemm_flops=2 * rows * vocab * hidden,
        fused_flops=2 * passes * tile * vocab * hidden,
        weight_passes=passes,
        logits_bytes=logits,
    )


def row_tile(rows: int, itemsize: int) -> int:
    """Rows of a fused program: 16, the least that tensor cores take, to what its registers hold."""
    return min(ROW_TILES[itemsize], max(16, 1 << (rows - 1).bit_length()))


def go_no_go(rows: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 2048)) -> list[dict[str, str | int | float]]:
    """The table by rows and vocabulary, for bf16 weights."""
    table: list[dict[str, str | int | float]] = []
    for model, (vocab, hidden) in MODELS.items():
        for count in rows:
            cost = head_cost(count, vocab, hidden)
            table.append(
                {
                    "model": model,
                    "V": vocab,
                    "D": hidden,
                    "rows": count,
                    "GFLOP": cost.gemm_flops / 1e9,
                    "gemm MB": cost.gemm_bytes / 1e6,
                    "fused MB": cost.fused_bytes / 1e6,
                    "saved": f"{cost.saving:.1%}",
                    "weight passes": cost.weight_passes,
                    "logits MB": cost.logits_bytes / 1e6,
                    "fused": "go" if cost.go else "no-go",
                }
            )
    return table
