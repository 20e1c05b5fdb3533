"""`burst-rt bench scaling`: the same work on more ranks, and more work on more ranks.

There is one job for each number of ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from burst_rt.launch.bench.plots import draw_lines
from burst_rt.launch.bench.report import Cell, publish
from burst_rt.launch.mpirun import num_usable_cores
from burst_rt.launch.run import launch

__all__ = ["main"]


def main(worlds: Sequence[int], tokens: int, heads: int, repeats: int, out: Path | None) -> None:
    """Starts the jobs, blocks until they have ended, and prints one table for each series."""
    series = {"strong": dict.fromkeys(worlds, tokens), "weak": {n: tokens // 2 * n for n in worlds}}
    took: dict[tuple[int, int], dict[str, float]] = {}
    for num_ranks in worlds:
        for found in _job(
            num_ranks, sorted({lengths[num_ranks] for lengths in series.values()}), heads, repeats
        ):
            took.setdefault((num_ranks, int(found["tokens"])), {})[str(found["mask"])] = float(
                found["seconds"]
            )
    for name, lengths in series.items():
        rows: list[dict[str, Cell]] = []
        first = worlds[0]
        for num_ranks in worlds:
            row: dict[str, Cell] = {"ranks": num_ranks, "tokens": lengths[num_ranks]}
            for mask, seconds in took[num_ranks, lengths[num_ranks]].items():
                # The time with `first` ranks, times the growth of the work, times the ranks there
                # were over the ranks there are.
                ideal_s = (
                    took[first, lengths[first]][mask]
                    * (lengths[num_ranks] / lengths[first]) ** 2
                    * first
                    / num_ranks
                )
                row |= {f"{mask} s": seconds, f"{mask}, of ideal": ideal_s / seconds}
            rows.append(row)
        cores = num_usable_cores()
        title = f"{name} scaling, forward + backward, {heads} heads x 64"
        publish(
            title,
            rows,
            out,
            f"medians of {repeats}; this machine has {cores} cores: more ranks share them",
        )
        if out:
            draw_lines(
                out.with_suffix(f".{name}.png"),
                rows,
                "ranks",
                ["full s", "causal s"],
                ylabel="seconds",
                title=title,
            )


def _job(
    num_ranks: int, lengths: Sequence[int], heads: int, repeats: int
) -> list[dict[str, float | str]]:
    with tempfile.TemporaryDirectory(prefix="burst-rt-") as folder:
        found = Path(folder) / "times.json"
        options = [
            "--tokens",
            *map(str, lengths),
            "--heads",
            str(heads),
            "--repeats",
            str(repeats),
            "--out",
            str(found),
        ]
        code = launch(
            ["-m", "burst_rt.launch.bench.strategies", "time", *options],
            num_ranks=num_ranks,
            threads=1,
        )
        if code:
            sys.exit(code)
        rows: list[dict[str, float | str]] = json.loads(found.read_text())
        return rows
