"""`python -m benchmarks scaling`: the same work on more ranks, and more work on more ranks.

There is one job for each number of ranks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import strategies
from benchmarks.options import WORLDS, heads_option
from benchmarks.plots import draw_lines
from burst_rt.launch.measure.options import OUT, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.launch.mpirun import num_usable_cores
from burst_rt.launch.where import machine_options

__all__ = ["command"]


@click.command()
@WORLDS
@click.option(
    "--tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(64),
    help="Tokens of the sequence. In the weak series, half as many for each rank.",
)
@heads_option(4)
@machine_options
@REPEATS
@OUT
def command(
    worlds: tuple[int, ...], tokens: int, heads: int, repeats: int, out: Path | None
) -> None:
    """One sequence over more and more ranks (strong scaling), and a sequence that grows with the
    number of ranks (weak scaling); forward + backward, full and causal.

    Work grows with the square of the sequence. So in the weak series the work of a rank grows with
    the number of ranks, and the efficiency allows for that. Default: 1, 2 and 4 ranks.
    """
    worlds = worlds or (1, 2, 4)
    series = {"strong": dict.fromkeys(worlds, tokens), "weak": {n: tokens // 2 * n for n in worlds}}
    took: dict[tuple[int, int], dict[str, float]] = {}
    for num_ranks in worlds:
        lengths_of_job = sorted({lengths[num_ranks] for lengths in series.values()})
        for row in _job(num_ranks, lengths_of_job, heads, repeats):
            key = num_ranks, int(row["tokens"])
            took.setdefault(key, {})[str(row["mask"])] = float(row["seconds"])
    for name, lengths in series.items():
        rows: list[dict[str, Cell]] = []
        first = worlds[0]
        for num_ranks in worlds:
            cells: dict[str, Cell] = {"ranks": num_ranks, "tokens": lengths[num_ranks]}
            for mask, seconds in took[num_ranks, lengths[num_ranks]].items():
                # The time with `first` ranks, times the growth of the work, times the ranks there
                # were over the ranks there are.
                ideal_s = (
                    took[first, lengths[first]][mask]
                    * (lengths[num_ranks] / lengths[first]) ** 2
                    * first
                    / num_ranks
                )
                cells |= {f"{mask} s": seconds, f"{mask}, of ideal": ideal_s / seconds}
            rows.append(cells)
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
        times = Path(folder) / "times.json"
        options = {
            "part": "time", "tokens": lengths, "heads": heads, "groups": [1], "repeats": repeats,
            "out": times,
        }  # fmt: skip
        run_on_ranks(strategies.measure, num_ranks, options, threads=1)
        rows: list[dict[str, float | str]] = json.loads(times.read_text())
        return rows
