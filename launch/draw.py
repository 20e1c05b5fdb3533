"""Pictures of the runtime: the ring with what travels on it, and timelines of real traces.

`burst-rt draw` runs one forward and backward on the ranks of an MPI job and draws both.
`draw_timeline` draws any trace, such as a custom pipeline's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from burst_rt.planning.strategies import check_name
from burst_rt.scheduler import Graph, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from burst_rt.context import Context

__all__ = ["command", "draw_ring", "draw_timeline"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7")
_LANES = ("compute", "network", "control")
_TRANSFER, _OTHER = "#BBBBBB", "#444444"
_PLAIN = (("network", _TRANSFER, "transfer"), ("control", _OTHER, "agreement, others"))
# The bend of an arrow as a part of its length. The two arrows between two ranks have the same ends
# and bend more.
_BEND, _BEND_OF_TWO = 0.22, 0.34


def draw_timeline(
    traces: Sequence[Iterable[Span]], path: Path, *, title: str, ranks: Sequence[int] | None = None
) -> None:
    """Draws spans over milliseconds, a row for each rank and lane.

    The file is a PNG, or what the end of `path` says. `ranks` names the traces; None means 0, 1 and
    so on. Compute tasks with a hop are coloured by the hop. Transfers that overlap are stacked.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(ranks) if ranks is not None else list(range(len(traces)))
    spans = [list(trace) for trace in traces]
    start = min(span.issued_s for trace in spans for span in trace)
    rows = []
    for rank, trace in zip(names, spans, strict=True):
        for lane in _LANES:
            found = [span for span in trace if span.lane == lane]
            if found:
                rows.append((rank, lane, found))
    figure = Figure(figsize=(11, 1.2 + 0.62 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for y, (_, lane, found) in enumerate(rows):
        _draw_lane(axes, y, lane, found, start)
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    hops = sorted(
        {
            hop
            for _, lane, found in rows
            if lane == "compute"
            for span in found
            if (hop := span.hop) is not None
        }
    )
    handles = [Patch(facecolor=_COLOURS[hop % len(_COLOURS)], label=f"hop {hop}") for hop in hops]
    here = {lane for _, lane, _ in rows}
    handles += [
        Patch(facecolor=colour, label=what) for lane, colour, what in _PLAIN if lane in here
    ]
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(handles), 10),
            frameon=False,
            fontsize=8,
        )
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_lane(axes: Axes, y: int, lane: str, spans: list[Span], start: float) -> None:
    stacked_until: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda s: s.started_s):
        level = next(
            (i for i, end in enumerate(stacked_until) if end <= span.started_s), len(stacked_until)
        )
        stacked_until[level:level + 1] = [span.ended_s]  # fmt: skip
        placed.append((span, level))
    height = 0.8 / len(stacked_until)
    for span, level in placed:
        left, width = (span.started_s - start) * 1e3, (span.ended_s - span.started_s) * 1e3
        hop = span.hop
        colour = (
            _TRANSFER
            if lane == "network"
            else _OTHER
            if lane == "control" or hop is None
            else _COLOURS[hop % len(_COLOURS)]
        )
        bottom = y - 0.4 + level * height
        axes.broken_barh(
            [(left, width)], (bottom, height), facecolor=colour, edgecolor="white", linewidth=0.5
        )
        label = span.name if lane == "network" else ""
        if label and width > 0:
            axes.annotate(
                label,
                (left + width / 2, bottom + height / 2),
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
            )


def draw_ring(graphs: Sequence[Graph], path: Path, *, title: str, labels: Sequence[str]) -> None:
    """Draws ranks on a ring, each with its label, and arrows with the bytes sent along them.

    The bytes are counted from the graphs of all ranks.
    """
    _ring(graphs, title, labels).savefig(path, dpi=130)


def _ring(graphs: Sequence[Graph], title: str, labels: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    world = len(graphs)
    figure = Figure(figsize=(5.6, 5.9), layout="constrained")
    axes = figure.add_subplot(aspect="equal")
    at = [
        (math.sin(2 * math.pi * r / world), math.cos(2 * math.pi * r / world)) for r in range(world)
    ]
    sent: dict[tuple[int, int], int] = {}
    for graph in graphs:
        for task in graph.tasks:
            for m in task.sends:
                sent[graph.rank, m.peer] = sent.get((graph.rank, m.peer), 0) + m.size_bytes
    boxes = [
        axes.annotate(
            f"rank {rank}\n{labels[rank]}", where, ha="center", va="center", fontsize=9,
            color="white",
            bbox={"boxstyle": "round,pad=0.6", "facecolor": _COLOURS[0], "edgecolor": "none"},
        ).get_bbox_patch()
        for rank, where in enumerate(at)
    ]  # fmt: skip
    bend = _BEND_OF_TWO if world == 2 else _BEND
    for (source, peer), size in sent.items():
        # The arrow goes from box to box.
        style = {
            "arrowstyle": "-|>",
            "color": "#555555",
            "lw": 1.6,
            "patchA": boxes[source],
            "patchB": boxes[peer],
        }
        style |= {"shrinkA": 3, "shrinkB": 3, "connectionstyle": f"arc3,rad={-bend}"}
        axes.annotate("", at[peer], at[source], arrowprops=style)
        # The words go beside the middle of the curve. They are wider than high, so they need more
        # distance sideways.
        dx, dy = at[peer][0] - at[source][0], at[peer][1] - at[source][1]
        length = math.hypot(dx, dy)
        nx, ny = -dy / length, dx / length
        out = bend / 2 * length + 0.06 + 0.2 * abs(nx)
        x, y = (
            (at[source][0] + at[peer][0]) / 2 + out * nx,
            (at[source][1] + at[peer][1]) / 2 + out * ny,
        )
        axes.annotate(
            f"{size / 2**20:.1f} MiB", (x, y), ha="center", va="center", fontsize=9, color="#333333"
        )
    axes.set_xlim(-1.6, 1.6)
    axes.set_ylim(-1.45, 1.45)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11)
    return figure


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-n",
    "--num-ranks",
    type=click.IntRange(min=1),
    help="Number of ranks to start. Omit it inside an MPI job.",
)
@click.option(
    "--tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(min=1),
    help="Length of the whole sequence.",
)
@click.option(
    "--strategy",
    default="burst",
    show_default=True,
    help="Strategy of burst_attention: auto, ring-kv, burst, bidirectional, ...",
)
@click.option("--full", is_flag=True, help="Full attention instead of causal.")
@click.option(
    "--out",
    default=Path("."),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for ring.png and timeline.png.",
)
def command(num_ranks: int | None, tokens: int, strategy: str, full: bool, out: Path) -> None:
    """Draw the ring and a timeline of one backward (4 heads x 64, float32), measured on the ranks
    of this machine.
    """
    check_name(strategy)
    if num_ranks is not None:
        from burst_rt.launch.run import launch

        flags = ["--full"] if full else []
        argv = [
            "-m",
            "burst_rt.launch.draw",
            "--tokens",
            str(tokens),
            "--strategy",
            strategy,
            "--out",
            str(out),
            *flags,
        ]
        sys.exit(launch(argv, num_ranks=num_ranks))
    import burst_rt

    with burst_rt.init() as ctx:
        _draw_backward(ctx, tokens, strategy, full, out)


def _draw_backward(ctx: Context, tokens: int, strategy: str, full: bool, out: Path) -> None:
    import torch

    import burst_rt

    layout = ctx.layout(tokens, "contiguous" if full else "zigzag")
    q, k, v = (torch.randn(1, layout.shard_len, 4, 64, requires_grad=True) for _ in range(3))
    for _ in range(2):  # the first run also makes the plans
        result = burst_rt.burst_attention(
            q, k, v, causal=not full, layout=layout, strategy=strategy
        )
        torch.autograd.grad(result, (q, k, v), torch.ones_like(result))
    traces = ctx.gather_last_run()
    if ctx.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        mask = "full" if full else "causal"
        what = f"{strategy}, {mask}, {tokens:,} tokens, {ctx.world_size} ranks"
        owned = [_owned(runs) for runs in layout.map.runs]
        draw_ring(
            [graph for graph, _ in traces],
            out / "ring.png",
            title=f"Tokens owned, bytes sent: {what}",
            labels=owned,
        )
        draw_timeline([traces[0][1]], out / "timeline.png", title=f"One backward on rank 0: {what}")
        print(f"wrote {out / 'ring.png'} and {out / 'timeline.png'}")


def _owned(runs: Sequence[range]) -> str:
    """The first and last position of each block, a line each."""
    return "\n".join(f"{run[0]:,} - {run[-1]:,}" for run in runs if run)


if __name__ == "__main__":
    command()
