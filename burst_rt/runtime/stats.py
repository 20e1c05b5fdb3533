"""Statistics of a context's attention calls, as `Context.stats` gives them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Stats"]


class Stats(NamedTuple):
    """Cumulative counts of a context's attention calls, forward and backward."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    compute_s: float = 0.0  # seconds in compute tasks; on a GPU see `Context.stats`
    # Seconds that the compute lane idled while a transfer was under way or a rank had not entered
    # the call: exposed communication and late peers together.
    wait_s: float = 0.0
    total_s: float = 0.0  # seconds inside calls
