"""What was done to a cache: its sequences' lengths, and whether a step may go on."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["History"]


class History:
    """What was done to a cache, which every rank does alike.

    lengths, padding: tokens of each sequence, and how many of them are padding at its left.
    said: what the layers of the last step were called with. reordered: what rows became since then.
    """

    def __init__(self, batch: int) -> None:
        self.lengths, self.padding = [0] * batch, [0] * batch
        self.said = ""
        self.reordered: list[list[int] | str] = []
        # Last number of the begun steps and of the changes of rows, which are numbered together.
        self._last = 0
        self._uncommitted: int | None = None  # a step that lacks its commit alone

    def begin(self) -> int:
        """A step begins: its number. A step begun before can go on no more."""
        self._last += 1
        return self._last

    def goes_on(self, step: int) -> bool:
        """Whether nothing was begun or changed since a step."""
        return step == self._last

    def attended(self, step: int) -> None:
        """All layers of a step have attended, so that it lacks its commit alone."""
        self._uncommitted = step

    @property
    def lacks_commit(self) -> bool:
        """Whether the last step lacks its commit alone."""
        return self._uncommitted == self._last

    def commit(self, new: Sequence[int], padding: Sequence[int], said: str) -> None:
        """A step ends: the sequences have so many new tokens."""
        self.lengths = [at + more for at, more in zip(self.lengths, new, strict=True)]
        self.padding = list(padding)
        self.said = said
        self._uncommitted = None

    def truncate(self, lengths: list[int]) -> None:
        """The sequences keep so many tokens."""
        self._last += 1
        self.lengths = lengths
        self.padding = [min(p, n) for p, n in zip(self.padding, lengths, strict=True)]

    def replace(self, row: int, tokens: int, padding: int, source: str) -> None:
        """A row becomes what another one is. source: that one, in words that the ranks compare."""
        self._last += 1
        self.reordered.append(f"{row} from {source}")
        self.lengths = [*self.lengths[:row], tokens, *self.lengths[row + 1 :]]
        self.padding = [*self.padding[:row], padding, *self.padding[row + 1 :]]

    def reorder(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was. A step that lacks its commit lacks it still."""
        lost = self.lacks_commit
        self._last += 1
        if lost:
            self._uncommitted = self._last
        self.reordered.append(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.padding = [self.padding[row] for row in rows]
