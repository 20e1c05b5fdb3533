"""Pictures of the runtime: the ring with what travels on it, and timelines of real traces.

`burst-rt draw` runs one forward and backward on the ranks of an MPI job and draws both.
`draw_timeline` draws any trace, such as a custom pipeline's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from burst_rt.planning.strategies import check_name
from burst_rt.scheduler import Graph, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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


class _Row(NamedTuple):
    """A row of a timeline: the spans of a lane of a rank."""

    name: str
    lane: str
    spans: list[Span]


def draw_timeline(
    traces: Sequence[Iterable[Span]], path: Path, *, title: str, ranks: Sequence[int] | None = None
) -> None:
    """Draws spans over milliseconds, a row for each rank and lane.

    The file is a PNG, or what the end of `path` says. `ranks` names the traces; None means 0, 1 and
    so on. Compute tasks with a hop are coloured by the hop. Transfers that overlap are stacked.
    """
    from matplotlib.figure import Figure

    names = list(ranks) if ranks is not None else list(range(len(traces)))
    spans = [list(trace) for trace in traces]
    start = min(span.issued_s for trace in spans for span in trace)
    rows = [
        _Row(f"rank {rank} {lane}", lane, lane_spans)
        for rank, trace in zip(names, spans, strict=True)
        for lane in _LANES
        if (lane_spans := [span for span in trace if span.lane == lane])
    ]
    figure = Figure(figsize=(11, 1.2 + 0.62 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        _draw_lane(axes, y, row, start)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = _legend(rows)
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 10),
            frameon=False, fontsize=8,
        )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _legend(rows: Sequence[_Row]) -> list[Patch]:
    """What the colours of these rows mean."""
    from matplotlib.patches import Patch

    lanes = {row.lane for row in rows}
    tiles = (span for row in rows if row.lane == "compute" for span in row.spans)
    hops = {span.hop for span in tiles if span.hop is not None}
    patches = [Patch(facecolor=_hop_colour(hop), label=f"hop {hop}") for hop in sorted(hops)]
    plain = ((colour, label) for lane, colour, label in _PLAIN if lane in lanes)
    return patches + [Patch(facecolor=colour, label=label) for colour, label in plain]


def _hop_colour(hop: int) -> str:
    return _COLOURS[hop % len(_COLOURS)]


def _draw_lane(axes: Axes, y: int, row: _Row, start: float) -> None:
    stacked_until: list[float] = []
    placed = []
    for span in sorted(row.spans, key=lambda s: s.started_s):
        level = next(
            (i for i, end in enumerate(stacked_until) if end <= span.started_s), len(stacked_until)
        )
        stacked_until[level:level + 1] = [span.ended_s]  # fmt: skip
        placed.append((span, level))
    height = 0.8 / len(stacked_until)
    for span, level in placed:
        left, width = (span.started_s - start) * 1e3, (span.ended_s - span.started_s) * 1e3
        if row.lane == "network":
            colour = _TRANSFER
        elif row.lane == "control" or span.hop is None:
            colour = _OTHER
        else:
            colour = _hop_colour(span.hop)
        bottom = y - 0.4 + level * height
        axes.broken_barh(
            [(left, width)], (bottom, height), facecolor=colour, edgecolor="white", linewidth=0.5
        )
        if row.lane == "network" and span.name and width > 0:
            middle = left + width / 2, bottom + height / 2
            axes.annotate(span.name, middle, ha="center", va="center", fontsize=7, clip_on=True)


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
        ends = {"patchA": boxes[source], "patchB": boxes[peer], "shrinkA": 3, "shrinkB": 3}
        style = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={-bend}", "color": "#555555"}
        axes.annotate("", at[peer], at[source], arrowprops={**style, **ends, "lw": 1.6})
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

        argv = ["-m", "burst_rt.launch.draw", "--tokens", str(tokens), "--strategy", strategy]
        argv += ["--out", str(out), *(["--full"] if full else [])]
        sys.exit(launch(argv, num_ranks=num_ranks))
    import burst_rt

    with burst_rt.init() as ctx:
        _draw_backward(ctx, tokens, strategy, full, out)


def _draw_backward(ctx: Context, tokens: int, strategy: str, full: bool, out: Path) -> None:
    import torch

    import burst_rt

    layout = ctx.layout(tokens, "contiguous" if full else "zigzag")
    shape = (1, layout.shard_len, 4, 64)
    q, k, v = (torch.randn(shape, device=ctx.device, requires_grad=True) for _ in range(3))
    ctx.stats()  # from here on, GPUs take times
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
        graphs, title = [graph for graph, _ in traces], f"Tokens owned, bytes sent: {what}"
        draw_ring(graphs, out / "ring.png", title=title, labels=owned)
        draw_timeline([traces[0][1]], out / "timeline.png", title=f"One backward on rank 0: {what}")
        print(f"wrote {out / 'ring.png'} and {out / 'timeline.png'}")


def _owned(runs: Sequence[range]) -> str:
    """The first and last position of each block, a line each."""
    return "\n".join(f"{run[0]:,} - {run[-1]:,}" for run in runs if run)


if __name__ == "__main__":
    command()
