"""Sizes of the parts in which a CPU does a tile, and the memory that these parts take at most."""

from __future__ import annotations

from math import isqrt

import torch

from burst_rt.kernels.bands import scratch_of_band
from burst_rt.kernels.base import sum_dtype
from burst_rt.kernels.cpu_calls import MOST_STRIP_COLUMNS, STRIP, STRIP_COLUMNS, PartSize
from burst_rt.kernels.naive import UntiledKernel
from burst_rt.planning.problem import TileShape

__all__ = [
    "DISTANCES_PART", "MOST_MASKED", "PART", "SMALL_PART", "matrix_part", "scratch_bytes",
]  # fmt: skip

# Size of the parts of a tile, large enough that adding them up costs about one percent.
PART = PartSize(4096, 4096, 1, edge=128, largest=1024, strips=False)
# Size of the parts of a tile of small pieces, or under a mask, which is made as a matrix: fewer
# rows and columns, more heads.
SMALL_PART = PartSize(1024, 1024, 4, edge=128, largest=1024, strips=False)
# Maximum number of mask cells that are made at once, over all batch rows and heads that the mask
# tells apart.
MOST_MASKED = 1 << 24
# Size of the parts if each head has a matrix of distances of its own.
DISTANCES_PART = PartSize(512, 512, 1)
# Approximate number of cells of all heads' matrices of scores. They fit into the cache, and the C
# library does not give their memory back to the system after each part, to get it again page by
# page.
_MATRIX_CELLS = 3 << 16
# Number of bytes a cell while a mask is made: booleans.
_MASK_BYTES = 3
# Sizes of the blocks of scores that each thread of torch's fused kernel has, twice in its backward:
# queries by the number of queries from which on it takes so many, and keys. A row of results is
# beside them.
_FUSED_ROWS, _FUSED_COLUMNS = {768: 256, 192: 64, 0: 32}, 512

_untiled = UntiledKernel()


def matrix_part(heads: int) -> PartSize:
    """Parts for matrices of scores of this number of heads, over all batch rows."""
    side = max(128, isqrt(_MATRIX_CELLS // heads) // 64 * 64)
    return PartSize(side, side, 1)


def scratch_bytes(forward: bool, dtype: torch.dtype, tile: TileShape, *, wide: bool) -> int:
    """The most memory in bytes that a tile takes: the sizes of its parts bound it.

    It counts casts of the inputs, and copies of those with fewer channels; O' (see `stand_in`), the
    fused kernel's results and own buffers, the mask, twice, and matrices of scores or of distances;
    for bands, what `scratch_of_band` says. A gradient of lse alone takes up to twice as much,
    because all inputs then get more channels. wide: whether the fused kernel works in the type of
    the sums.
    """
    size = sum_dtype(dtype).itemsize
    # One channel more, which some rows need (see `CpuKernel.backward`).
    channels = tile.batch * (tile.head_dim if forward else tile.head_dim + 1) * size
    q_part = kv_part = matrix = 0
    of_heads = tile.scores.softcap or tile.scores.alibi_slopes
    parts = (DISTANCES_PART,) if of_heads else (PART, SMALL_PART)
    if tile.scores.softcap:
        parts = (matrix_part(tile.batch * (tile.num_heads // tile.num_kv_heads)),)
    group = tile.num_heads // tile.num_kv_heads
    strips = tile.banded and (of_heads or not wide)
    for part in parts:
        of_longest = part.kv_heads * torch.get_num_threads()
        kv_heads = min(tile.num_kv_heads, of_longest)
        # A call has few rows of many heads, or many rows of few.
        rows = min(tile.q_len * tile.num_kv_heads, part.q_len * of_longest) * group
        columns = min(tile.kv_len * tile.num_kv_heads, part.kv_len * of_longest)
        if strips:
            columns = STRIP_COLUMNS * kv_heads
        elif tile.banded:
            of_narrow = MOST_STRIP_COLUMNS["forward" if forward else "backward"] * tile.q_len
            columns = max(columns, min(STRIP_COLUMNS, of_narrow + STRIP) * kv_heads)
        q_part = max(q_part, rows * channels)
        kv_part = max(kv_part, columns * channels)
        shape = tile._replace(
            num_heads=kv_heads * group,
            q_len=min(tile.q_len, part.q_len),
            kv_len=min(tile.kv_len, part.kv_len),
        )
        matrix = _untiled.scratch_bytes(forward, dtype, shape) if of_heads else 0
    mask = _mask_bytes(tile, size, strips=tile.banded)
    cast = sum_dtype(dtype) != dtype
    q_parts, kv_parts = (1 + cast, 2 * cast) if forward else (2 + 2 * cast, 2 + 2 * cast)
    if tile.uneven:
        # In a forward q is copied where v is wider. In a backward either dout or q is, once more
        # for O' unless it is cast.
        q_parts += int(tile.uneven < 0) if forward else 2 - cast
        kv_parts += 1
    rows = next(rows for least, rows in _FUSED_ROWS.items() if tile.q_len >= least)
    fused = torch.get_num_threads() * rows * (_FUSED_COLUMNS + tile.head_dim) * size
    fused *= 1 if forward else 2
    by_fused = q_part * q_parts + kv_part * kv_parts + mask + matrix + fused
    if not tile.banded or strips:
        return by_fused
    return max(by_fused, scratch_of_band(forward, dtype, tile, PART.q_len))


def _mask_bytes(tile: TileShape, size: int, *, strips: bool) -> int:
    """Bytes of a mask while it is made. size: bytes of a number of the mask."""
    masked = min(tile.q_len, SMALL_PART.q_len) * min(tile.kv_len, SMALL_PART.kv_len)
    masked = min(masked * tile.masked, MOST_MASKED)
    if strips:
        masked = max(masked, STRIP * min(tile.kv_len, STRIP_COLUMNS))
    return masked * (size + _MASK_BYTES)
