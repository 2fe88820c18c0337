"""What is measured: row widths of real models, batches, and slots as a page allocator hands them out. No CUDA here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ALL_CELLS",
    "CACHE_SLOTS",
    "INDEX_BYTES",
    "MODELS",
    "PAGE_SIZE",
    "SWEEP_CELLS",
    "Cell",
    "Model",
    "RowGroup",
    "draw_slots",
    "model_cells",
    "row_groups",
]

BF16_BYTES = 2
INDEX_BYTES = 8
PAGE_SIZE = 16
CACHE_SLOTS = 262_144

TENSOR_PARALLEL = (1, 4, 8)
DECODE_BATCHES = (1, 8, 32, 128, 512)
PREFILL_TOKENS = (2_048, 8_192, 16_384)


@dataclass(frozen=True)
class Model:
    """What a model appends per token and layer, in bf16: `kv_heads` heads of `k_dim` and `v_dim` elements.

    A `replicated` row, such as MLA's latent one, is the same on every tensor-parallel rank.
    """

    name: str
    kv_heads: int
    k_dim: int
    v_dim: int
    replicated: bool = False

    def row_bytes(self, ranks: int) -> tuple[int, int] | None:
        """Bytes of a row of K and of V on one of `ranks` ranks; None where the heads do not divide."""
        if self.replicated:
            ranks = 1
        if self.kv_heads % ranks:
            return None
        heads = self.kv_heads // ranks
        return heads * self.k_dim * BF16_BYTES, heads * self.v_dim * BF16_BYTES


MODELS = (
    Model("Llama-3.1-8B", 8, 128, 128),
    Model("Llama-3.1-70B", 8, 128, 128),
    Model("Qwen3-8B", 8, 128, 128),
    Model("Mistral-7B", 8, 128, 128),
    Model("gpt-oss-20b", 8, 64, 64),
    Model("gpt-oss-120b", 8, 64, 64),
    Model("Gemma-3-27B", 16, 128, 128),
    Model("DeepSeek-V3 (MLA)", 1, 576, 512, replicated=True),
)


@dataclass(frozen=True)
class RowGroup:
    """All (model, tensor-parallel ranks) that share one pair of row widths."""

    k_bytes: int
    v_bytes: int
    users: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """E.g. `TP1: Llama-3.1-8B, Qwen3-8B; TP4, 8: ...`."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for n in sorted({n for _, n in self.users}):
            ranks.setdefault(tuple(name for name, its in self.users if its == n), []).append(n)
        return "; ".join(f"TP{', '.join(map(str, its))}: {', '.join(names)}" for names, its in ranks.items())


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a batch of rows of one width, and how its slots lie.

    `phase` is "decode" (one slot in each sequence's last page), "prefill" (whole pages) or "random" (any slots).
    """

    k_bytes: int
    v_bytes: int
    batch: int
    phase: str

    @property
    def source_bytes(self) -> int:
        """Bytes of K and V in one batch."""
        return self.batch * (self.k_bytes + self.v_bytes)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a launch must move: K and V read and written, and the indices read."""
        return 2 * self.source_bytes + self.batch * INDEX_BYTES


def row_groups(models: Iterable[Model] = MODELS) -> tuple[RowGroup, ...]:
    """The distinct row widths of `models`, narrowest first, each with who uses it."""
    users: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for model in models:
        for ranks in TENSOR_PARALLEL:
            widths = model.row_bytes(ranks)
            if widths is not None:
                users.setdefault(widths, []).append((model.name, ranks))
    return tuple(RowGroup(*widths, tuple(users[widths])) for widths in sorted(users))


def model_cells(
    groups: Iterable[RowGroup], decode: Iterable[int] = DECODE_BATCHES, prefill: Iterable[int] = PREFILL_TOKENS
) -> tuple[Cell, ...]:
    """Every batch for every row group."""
    batches = [("decode", batch) for batch in decode] + [("prefill", tokens) for tokens in prefill]
    return tuple(Cell(group.k_bytes, group.v_bytes, batch, phase) for group in groups for phase, batch in batches)


def _random_cells(*widths: int) -> tuple[Cell, ...]:
    return tuple(Cell(width, width, batch, "random") for width in widths for batch in (1, 16, 128, 1024, 4096, 16_384))


SWEEP_CELLS = _random_cells(128, 256, 1024, 2048, 4096)
"""The 30 cells on which the design's prototype was measured: random slots of CACHE_SLOTS."""

# 3 heads of 256 B; MLA's 576 bf16; rows that no vector of 16 bytes divides, nor one of 8.
ALL_CELLS = tuple(sorted(SWEEP_CELLS + _random_cells(768, 1152, 200, 92), key=lambda cell: cell.k_bytes))
"""SWEEP_CELLS and four rows of other kinds, narrowest first."""


def draw_slots(cell: Cell, sets: int, cache_slots: int, rng: np.random.Generator) -> np.ndarray:
    """(sets, batch) slots, int64: distinct within a set, and between sets as far as the cache reaches.

    Raises
    ------
    ValueError
        The cache is too small for one set.
    """
    pages = cache_slots // PAGE_SIZE
    if cell.phase == "random":
        return _shuffled_chunks(cache_slots, cell.batch, sets, rng)
    if cell.phase == "prefill":
        chunks = _shuffled_chunks(pages, -(-cell.batch // PAGE_SIZE), sets, rng)
        return (chunks[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(sets, -1)[:, : cell.batch]
    # Once every page has been some sequence's last one, the same sequences decode their next token.
    distinct = min(sets, max(1, pages // cell.batch))
    last_pages = _shuffled_chunks(pages, cell.batch, distinct, rng)
    filled = rng.integers(PAGE_SIZE, size=last_pages.shape)
    turn, chunk = np.divmod(np.arange(sets), distinct)
    return last_pages[chunk] * PAGE_SIZE + (filled[chunk] + turn[:, None]) % PAGE_SIZE


def _shuffled_chunks(total: int, size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows of `size` distinct numbers below `total`, cut from as few shuffles of all of them as can be."""
    per_shuffle = total // size
    if per_shuffle == 0:
        raise ValueError(f"{size} distinct numbers were asked for of {total}")

    def shuffles() -> Iterator[np.ndarray]:
        for _ in range(-(-count // per_shuffle)):
            yield rng.permutation(total)[: per_shuffle * size].reshape(per_shuffle, size)

    return np.concatenate(list(shuffles()))[:count].astype(np.int64)
