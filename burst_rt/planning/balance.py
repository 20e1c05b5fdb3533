"""Balance: what each position costs under a mask, and positions dealt so that ranks are even.

A tile is computed where its side at home is. Where keys travel (every forward, and the backward of
`ring-kv`), the cells of a query are its owner's work; where queries travel (the backward of
`burst`), the cells of a key are. So `deal` makes three numbers even: tokens, cells by query, cells
by key, in this order of importance. Tokens come first because everything but attention costs by
tokens, and because shapes must not change with the mask. Cells by query come before cells by key
because every call has a forward, and because the planner may do without `burst`.

Ranks are halved again and again, and so is the sequence. A group of ranks has some runs of the
sequence; laid end to end they are a line. The first half of the ranks gets [0, x) and [y, z) of the
line, the other half gets the rest. Three cuts are enough to halve a line evenly by three measures
at once (the necklace theorem: N. Alon, "Splitting necklaces", Advances in Mathematics 63, 1987).
Each halving adds at most one run to what a rank has, so a rank has at most 1 + ceil(log2(W)) runs.
With one long causal document this comes to zigzag, and with equal cells to contiguous shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks import Mask
from burst_rt.planning.masks.spans import Positions, Spans

__all__ = ["Load", "cut_runs", "deal", "even_bounds", "load_of", "step_of"]

# The most tokens of the step in which cuts move, about a kernel's block; and how many steps a shard
# has at least, unless it has fewer tokens.
_STEP, _STEPS = 128, 64
# Number of places that are tried for the first cut.
_PLACES = 64
# Maximum deviation of a rank's cells from the even number, as a share of it, where this saves
# transfers.
_SLACK = 0.01
# Cuts whose prices differ by less than this share count as equal; the most even one among them is
# taken.
_ALIKE = 0.125
# Maximum number of tokens. About 100 bytes are held for each.
_MOST_TOKENS = 1 << 26
# Mean number of tokens that share a label, from which on a label is looked at once for all its
# tokens.
_SHARED = 4
# Number of spans that are looked at together.
_SPANS = 1 << 18


class Load(NamedTuple):
    """The cost of the positions of a sequence under a mask, summed over the mask's batch rows.

    rows: int64 `[Sq]`, the cells of each query. columns: int64 `[Skv]`, the cells of each key.
    torn: int64 `[Sq]`, how many keys come from the other side, if the sequence is cut before a
    query: keys before the cut that the query sees, and keys after it that the last query sees.
    """

    rows: Positions
    columns: Positions
    torn: Positions


@lru_cache(maxsize=1)
def load_of(mask: Mask, q_len: int, kv_len: int) -> Load:
    """The load of a mask for sequences of these lengths.

    A mask without spans costs the cells of its outline, which kernels ask it about. Takes about
    0.1 us for a token, batch row and span. For a mask with labels that a few tokens share, it takes
    0.6 us for a token and batch row, and 0.4 us for a span of a label. Raises InputError for more
    than 2**26 tokens.
    """
    if max(q_len, kv_len) > _MOST_TOKENS:
        raise InputError(
            f"layout: balancing looks at every token, at most 2**26, got {max(q_len, kv_len)}; "
            "take kind='zigzag' or 'striped'"
        )
    mask = mask.bound(q_len, kv_len)
    apart = mask.by_label()
    if apart is not None:
        labels = apart[0].labels(np.arange(q_len) + kv_len - q_len)
        if q_len < _SHARED * (1 + np.count_nonzero(np.diff(labels))):
            apart = None
    rows, before, after = (np.zeros(q_len, np.int64) for _ in range(3))
    edges = np.zeros(kv_len + 1, np.int64)
    start, num_rows = 0, 1
    while start < q_len:
        at = slice(start, min(start + num_rows, q_len))
        position = np.arange(at.start, at.stop) + kv_len - q_len
        if apart is None:
            spans = mask.outline(position)
            loads = _look(spans, position, edges)
        else:
            spans = apart[1].outline(position)
            loads = _look_by_label(apart[0], spans, position, edges)
        rows[at], before[at], after[at] = loads
        start, num_rows = at.stop, max(1, _SPANS // (len(spans.starts) * spans.width))
    before[1:] += after[:-1]
    return Load(rows, np.cumsum(edges)[:-1], before)


def _look(spans: Spans, position: Positions, edges: Positions) -> list[Positions]:
    """Three numbers for each query: the keys that it sees, the ones before its position, and the
    ones behind it.

    edges: int64 `[Skv + 1]`. Added to entry j: the number of queries that see key j, less the
    number that see key j - 1.
    """
    starts, stops = (np.clip(bound, 0, len(edges) - 1) for bound in spans)
    for sign, bound in ((1, starts), (-1, stops)):
        np.add.at(edges, bound.ravel(), sign)
    here = position[:, None]
    return [
        (last - first).sum((0, 2))
        for first, last in _before_and_after(starts, stops, here, here + 1)
    ]


def _look_by_label(
    labelled: Mask, others: Spans, position: Positions, edges: Positions
) -> list[Positions]:
    """`_look` for a mask that is `labelled & others`. A label may have hundreds of spans.

    Keys get a place for each label, label after label, on one axis. There the spans of all labels
    follow each other. A look-up counts the places before a key that are shown; the difference of
    two look-ups in one label counts keys of that label.
    """
    end = len(edges) - 1
    _, shown, label = np.unique(labelled.labels(position), return_index=True, return_inverse=True)
    by_label = labelled.spans(position[shown])
    origins, origin = (x[:, None] * (end + 1) for x in (np.arange(len(shown)), label))
    at, past = (np.clip(x, 0, end)[:, None] + origin for x in (position, position + 1))
    loads = [np.zeros(len(position), np.int64) for _ in range(3)]
    for row in range(max(len(by_label.starts), len(others.starts))):
        starts, stops = (np.clip(bound[0], 0, end) + origins for bound in by_label.row(row))
        starts, stops = starts[starts < stops], stops[starts < stops]
        first, last = (np.clip(bound[0], 0, end) + origin for bound in others.row(row))
        seen = _counter(starts, stops)
        for total, (low, high) in zip(loads, _before_and_after(first, last, at, past), strict=True):
            total += (seen(high) - seen(low)).sum(1)
        # For one label, the number of queries that see a key is a product: whether the label shows
        # the key, times how many of the label's queries look there. It changes where the second
        # factor changes, and where the first one does.
        for sign, bound in ((1, first), (-1, last)):
            shows = seen(bound + 1) - seen(bound)
            np.add.at(edges, (bound - origin).ravel(), sign * shows.ravel())
        begins, ends = (np.sort(bound, axis=None) for bound in (first, last))
        for sign, bound in ((1, starts), (-1, stops)):
            begun, ended = (np.searchsorted(x, bound - 1, "right") for x in (begins, ends))
            np.add.at(edges, bound % (end + 1), sign * (begun - ended))
    return loads


def _before_and_after(
    first: Positions, last: Positions, at: Positions, past: Positions
) -> Iterator[tuple[Positions, Positions]]:
    """The keys from `first` to `last`: all, those before `here`, and those from `past` on."""
    yield first, last
    yield np.minimum(first, at), np.minimum(last, at)
    yield np.maximum(first, past), np.maximum(last, past)


def _counter(starts: Positions, stops: Positions) -> Callable[[Positions], Positions]:
    """A function that says how many places of some spans, which ascend, lie before given places."""
    if not len(starts):
        return np.zeros_like
    edges = np.stack([starts, stops], 1)
    sums = np.cumsum(stops - starts)[:, None] - (edges[:, 1:] - edges)

    def seen_before(places: Positions) -> Positions:
        # Exact: whole numbers below 2**53, and the sum grows by 1 a place, or not at all.
        count: Positions = np.interp(places, edges.ravel(), sums.ravel()).astype(np.int64)
        return count

    return seen_before


def step_of(seq_len: int, world_size: int) -> int:
    """The step in which cuts move, in tokens: a power of two, 128 where shards are long."""
    return 1 << (max(1, min(_STEP, seq_len // (world_size * _STEPS))).bit_length() - 1)


def even_bounds(seq_len: int, world_size: int) -> list[int]:
    """Bounds for `deal` by which tokens differ by at most one between ranks."""
    return [seq_len * rank // world_size for rank in range(world_size + 1)]


def deal(load: Load, bounds: Sequence[int]) -> tuple[tuple[range, ...], ...]:
    """The ranks' runs of positions, ascending, by rank. Every position has one owner.

    bounds: from 0 on, of the ranks' tokens: rank r has `bounds[r + 1] - bounds[r]` under every
    mask. A rank's cells by query are off by at most 2 percent of a rank's mean from its share of
    the tokens, or by the cells of one step (`step_of`) of queries where these are more. Cells by
    key are as even as is possible then; they are looked at where there are as many keys as queries.
    The remaining freedom goes to cuts across which the fewest keys are needed. Local; the same on
    every rank.
    """
    seq_len, world_size = len(load.rows), len(bounds) - 1
    step = step_of(seq_len, world_size)
    measures = [load.rows, *([load.columns] if len(load.columns) == seq_len else [])]
    slack = [int(_SLACK * measure.sum() / world_size) for measure in measures]

    def share(runs: list[range], ranks: range) -> Iterator[tuple[range, ...]]:
        if len(ranks) == 1 or not runs:
            yield from [tuple(runs)] * len(ranks)
            return
        middle = ranks[len(ranks) // 2]
        sums = [_sums(measure, runs) for measure in measures]
        # Off by a third of a step's cells at each halving is off by less than a step's in the end.
        at_most = [max(slack[0], _heaviest(sums[0], step) // 3), *slack[1:]]
        tokens = bounds[middle] - bounds[ranks.start]
        x, y, z = _cuts(sums, _prices(load.torn, runs, step), tokens, step, at_most)
        total = sum(map(len, runs))
        yield from share(cut_runs(runs, (0, x), (y, z)), range(ranks.start, middle))
        yield from share(cut_runs(runs, (x, y), (z, total)), range(middle, ranks.stop))

    return tuple(share([range(seq_len)], range(world_size)))


def _cuts(
    sums: list[Positions], prices: Positions, tokens: int, step: int, at_most: list[int]
) -> tuple[int, int, int]:
    """Three cuts of a line: [0, x) and [y, z) hold `tokens` tokens and their share of each measure.

    sums: by measure, the sums along the line, from 0 on. prices: the cost of a cut at each place.
    at_most: by measure, the tolerated deviation from the even share, traded for balance in the
    later measures and for a lower price.
    """
    total = len(prices) - 1
    # The cheapest place for x in each stretch. The last ones come first: among equal cuts, the one
    # is taken that keeps the most of the line's head together.
    stretch = max(1, -(-tokens // (_PLACES * step))) * step
    firsts = [
        low + step * int(np.argmin(prices[low : min(low + stretch, tokens + 1) : step]))
        for low in reversed(range(0, tokens + 1, stretch))
    ]
    x = np.array(firsts)[:, None]
    y = np.clip(np.arange(0, total + step, step), x, total - tokens + x)
    z = y + tokens - x
    fits, unevenness = np.ones(y.shape, bool), np.zeros(y.shape)
    for measure, limit in zip(sums, at_most, strict=True):
        even = int(measure[-1]) * tokens // total
        off = np.abs(measure[x] + measure[z] - measure[y] - even)
        fits &= off <= max(off[fits].min(), limit)
        unevenness += off / max(1, even)
    price = np.where(x == y, 0, prices[x] + prices[y]) + prices[z]
    fits &= price <= price[fits].min() * (1 + _ALIKE)
    best = int(np.argmin(np.where(fits, unevenness, np.inf)))
    first, second = int(x[best // y.shape[1], 0]), int(y.flat[best])
    return first, second, second + tokens - first


def _heaviest(sums: Positions, step: int) -> int:
    """The most that `step` neighbours of a line come to."""
    return int((sums[step:] - sums[:-step]).max(initial=0))


def _sums(numbers: Positions, runs: list[range]) -> Positions:
    """The sums of numbers along runs laid end to end."""
    line = np.concatenate([[0], *(numbers[run.start : run.stop] for run in runs)])
    return np.cumsum(line, out=line)


def _prices(torn: Positions, runs: list[range], step: int) -> Positions:
    """The cost of a cut at each place of a line: the keys it tears, and a step for one more run."""
    line = np.concatenate([*(torn[run.start : run.stop] + step for run in runs), [0]])
    line[[0, *accumulate(map(len, runs))]] = 0  # there is a cut already
    return line


def cut_runs(runs: Sequence[range], *stretches: tuple[int, int]) -> list[range]:
    """The runs of stretches (start, stop) of a line of runs; runs that touch are joined."""
    parts: list[range] = []
    for start, stop in stretches:
        first = 0
        for run in runs:
            part = run[max(start - first, 0) : max(stop - first, 0)]
            first += len(run)
            if part and parts and parts[-1].stop == part.start:
                part = range(parts.pop().start, part.stop)
            if part:
                parts.append(part)
    return parts
