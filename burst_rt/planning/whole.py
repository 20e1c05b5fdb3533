"""Documents dealt whole: short ones to one rank each, long ones over as many ranks as they need.

A unit is a stretch of the sequence that sees nothing outside itself and that nothing outside sees:
a document, or a tree. A unit on one rank sends nothing, so only those are cut that would make ranks
uneven:

1. Units that are more than a rank's share are laid end to end, and cut where a share is full.
2. Other heavy units follow, the heaviest first, each to the rank that has the least.
3. The rest, many light units, fills the ranks up in the order of the sequence, so that a rank has
   few runs.
4. While a rank has more than is tolerated, one of its units is cut, and the rank that has the least
   takes a part.

Ranks have different numbers of tokens then. A unit weighs its cells, as attention costs, and a
price for each token, as everything else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from burst_rt.planning.balance import Load, cut_runs, deal
from burst_rt.planning.masks.spans import Positions

__all__ = ["deal_whole"]

# Units of at least this part of a rank's share are placed one by one.
_HEAVY = 1 / 32
# Parts of a unit of less than this part of a rank's share are not worth a cut.
_CRUMB = 1 / 32


def deal_whole(
    load: Load, world_size: int, token_cells: float, tolerance: float
) -> tuple[tuple[range, ...], ...]:
    """The ranks' runs of positions, ascending, by rank. Every position has one owner.

    load: of as many queries as keys. token_cells: the price of a token, in cells. tolerance: what
    the busiest rank may have above its share, as a part of that. Local; the same on every rank.
    """
    seq_len = len(load.rows)
    edges = np.unique([0, *np.flatnonzero(load.torn == 0), seq_len])
    ranks = _Ranks(load, world_size, token_cells)
    weights = np.diff(ranks.sums[edges])
    is_heavy = weights >= _HEAVY * ranks.share
    heavy = [
        range(*edges[i : i + 2].tolist())
        for i in np.argsort(-weights, kind="stable")[: np.count_nonzero(is_heavy)]
    ]
    most = ranks.share * (1 + tolerance)
    ranks.wrap([unit for unit in heavy if ranks.weight(unit) > most])
    for unit in heavy:
        if ranks.weight(unit) <= most:
            ranks.place(unit, int(np.argmin(ranks.weights)))
    ranks.fill(edges[:-1][~is_heavy], edges[1:][~is_heavy])
    ranks.even_out(tolerance)
    return tuple(_joined(runs) for runs in ranks.runs)


class _Ranks:
    """What the ranks have so far. share: what each would have if all were even."""

    def __init__(self, load: Load, world_size: int, token_cells: float) -> None:
        self._load = load
        self.sums = np.append(0.0, np.cumsum(load.rows + max(1.0, token_cells)))
        self.share = float(self.sums[-1]) / world_size
        self.weights = np.zeros(world_size)
        self.runs: list[list[range]] = [[] for _ in range(world_size)]
        self._whole: list[list[range]] = [[] for _ in range(world_size)]  # which may be cut

    def weight(self, run: range) -> float:
        """The weight of consecutive positions."""
        return float(self.sums[run.stop] - self.sums[run.start])

    def place(self, unit: range, rank: int) -> None:
        """Gives a whole unit to a rank."""
        self._give(rank, [unit])
        self._whole[rank].append(unit)

    def wrap(self, units: Sequence[range]) -> None:
        """Lays units end to end over the ranks, from rank 0 on. Crumbs go to the rank of the part
        beside them.
        """
        begin, margin = 0.0, _CRUMB * self.share
        for unit in units:
            weight = self.weight(unit)
            fulls = self.share * np.arange(1, len(self.weights))
            cuts = fulls[(fulls > begin + margin) & (fulls < begin + weight - margin)]
            ends = [*(cuts - begin), weight]
            middles = begin + (np.array([0.0, *ends[:-1]]) + ends) / 2
            owners = np.minimum(middles / self.share, len(self.weights) - 1).astype(int)
            self._cut(unit, owners.tolist(), [end / weight for end in ends])
            begin += weight

    def fill(self, starts: Positions, stops: Positions) -> None:
        """Gives units to the ranks, in order: to each what it lacks of an even level."""
        weights = self.sums[stops] - self.sums[starts]
        total = float(weights.sum())
        # The level at which the ranks below it lack what there is.
        sizes = np.sort(self.weights)
        levels = (total + np.cumsum(sizes)) / np.arange(1, len(sizes) + 1)
        level = levels[np.count_nonzero(levels >= sizes) - 1]
        ends = np.cumsum(np.maximum(level - self.weights, 0))
        middles = np.cumsum(weights) - weights / 2
        owners = np.minimum(np.searchsorted(ends, middles, "right"), len(sizes) - 1)
        for rank in np.unique(owners).tolist():
            mine = owners == rank
            pairs = zip(starts[mine].tolist(), stops[mine].tolist(), strict=True)
            self._give(rank, [range(*pair) for pair in pairs])

    def even_out(self, tolerance: float) -> None:
        """Moves units, or parts of them, from the busiest rank to the one with the least."""
        for _ in range(2 * len(self.weights)):
            top, low = int(np.argmax(self.weights)), int(np.argmin(self.weights))
            excess = min(self.weights[top] - self.share, self.share - self.weights[low])
            able = [unit for unit in self._whole[top] if self.weight(unit) > excess]
            even = self.weights[top] <= self.share * (1 + tolerance)
            if (even and self.weights[low]) or not able:
                return
            unit = min(able, key=self.weight)  # whose parts send the least
            self._whole[top].remove(unit)
            self.runs[top].remove(unit)
            weight = self.weight(unit)
            self.weights[top] -= weight
            self._cut(unit, [top, low], [1 - excess / weight, 1.0])

    def _cut(self, unit: range, owners: Sequence[int], ends: Sequence[float]) -> None:
        """Gives parts of a unit to ranks. ends: of each part, as shares of the unit."""
        part = slice(unit.start, unit.stop)
        load = Load(*(numbers[part] for numbers in self._load))
        bounds = [0, *(round(end * len(unit)) for end in ends)]
        for owner, runs in zip(owners, deal(load, bounds), strict=True):
            self._give(owner, [range(r.start + unit.start, r.stop + unit.start) for r in runs])

    def _give(self, rank: int, runs: Sequence[range]) -> None:
        self.runs[rank] += [run for run in runs if run]
        self.weights[rank] += sum(map(self.weight, runs))


def _joined(runs: list[range]) -> tuple[range, ...]:
    """Runs in the order of the sequence; those that touch are one."""
    line = sorted(runs, key=attrgetter("start"))
    return tuple(cut_runs(line, (0, sum(map(len, line)))))
