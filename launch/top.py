"""`burst-rt top`: the dashboard's overview in a terminal, over ssh, without a browser."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst_rt.launch.watch import open_viewer, viewer_options

if TYPE_CHECKING:
    from burst_rt.dashboard.links import LinkView
    from burst_rt.telemetry.model.views import JobView, RankView, Snapshot, Verdict
    from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["command", "render"]

_PERIOD_S = 1.0
_PRINTED_EVERY_S = 10.0  # where the picture cannot be drawn over
_SHOWN_EVENTS = 5
_SHOWN_LINKS = 8
# Each state has a sign as well as a colour, for readers who cannot tell the colours apart.
_STATES = {
    "live": ("●", "green"),
    "silent": ("▲", "yellow"),
    "lost": ("✕", "bold red"),
    "left": ("○", "dim"),
    "ended": ("◌", "dim"),
    "stopped": ("○", "dim"),
}
_SEVERITIES = {"info": "dim", "warning": "yellow", "error": "bold red"}
# The column of the share of time in which a rank computes: a bar and a number.
_COMPUTES = "computes"
# Columns that a narrow terminal leaves out, in this order, until "doing" has room. _COMPUTES loses
# only its bar.
_DROPPED = ("graph calls", "flop/s", _COMPUTES, "sends", "away", "power", "temp", "memory", "waits")
_LEAST_DOING = 24
_BARS = "▁▂▃▄▅▆▇█"


@click.command()
@viewer_options
@click.option("--once", is_flag=True, help="Print the job's state once and end.")
def command(attach: int | None, replay: Path | None, until: float | None, once: bool) -> None:
    """Show a running job, or a record, in this terminal: ranks, links, progress, events.

    Ends with the job, or with Ctrl-C.
    """
    with open_viewer(attach, replay, until) as viewer, contextlib.suppress(KeyboardInterrupt):
        _watch(viewer, once=once or replay is not None)


def _watch(viewer: Viewer, *, once: bool) -> None:
    from burst_rt.dashboard.links import LinkStates
    from burst_rt.errors import ConfigError, Stalled

    links, losses, console = LinkStates(), deque[float](maxlen=40), Console()

    def look() -> tuple[Group, bool]:
        snapshot, views = links.read(viewer)
        loss = snapshot.progress.values.get("loss")
        if loss is not None and (not losses or losses[-1] != loss):
            losses.append(loss)
        return render(snapshot, views, losses), snapshot.job.ended

    last, ended = look()
    if once:
        console.print(last)
        return
    if not console.is_terminal or console.is_dumb_terminal:
        with contextlib.suppress(ConfigError):  # the hub has gone
            while not ended:
                console.print(last)
                time.sleep(_PRINTED_EVERY_S)
                with contextlib.suppress(Stalled):
                    last, ended = look()
        console.print(last, "the job has ended")
        return
    screen = Live(last, console=console, screen=True, auto_refresh=False)
    with screen as live, contextlib.suppress(ConfigError):  # the hub has gone
        while not ended:
            time.sleep(_PERIOD_S)
            try:
                last, ended = look()
            except Stalled as error:
                late = Text(f"{error.message}; trying again", style="bold yellow")
                live.update(Group(last, late), refresh=True)
            else:
                live.update(last, refresh=True)
    # The shell has its screen back: the last picture stays there.
    console.print(last)
    console.print("[dim]the job has ended[/dim]")


def render(snapshot: Snapshot, links: Iterable[LinkView], losses: Iterable[float] = ()) -> Group:
    """The whole picture. losses: the last losses, drawn as a small curve."""
    head = [_head(snapshot, losses), *_limit(snapshot.job.verdict)]
    parts: list[RenderableType] = [*head, _Ranks(snapshot)]
    parts += _links(list(links))
    post_mortem = snapshot.job.post_mortem
    if post_mortem is not None:
        parts.append(Text("\n".join((*post_mortem.heading, *post_mortem.advice))))
    events = _events(snapshot)
    if events.row_count:
        parts.append(events)
    return Group(*parts)


def _events(snapshot: Snapshot) -> Table:
    """The job's last events; above them the rank that was lost first, however long ago."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(ratio=1)
    cause = next((rank for rank in snapshot.ranks if rank.rank == snapshot.job.first_lost), None)
    last = snapshot.events[-_SHOWN_EVENTS:]
    if cause is not None:
        last = [event for event in last if (event.rank, event.kind) != (cause.rank, cause.status)]
        words = f"first: rank {cause.rank} {cause.status}: {cause.ending}"
        table.add_row(f"{cause.status_since_s:.1f} s", escape(words), style=_SEVERITIES["error"])
    for event in last:
        who = "job" if event.rank < 0 else f"rank {event.rank}"
        table.add_row(
            f"{event.at_s:.1f} s",
            escape(f"{who} {event.kind}: {event.text}"),
            style=_SEVERITIES[event.severity],
        )
    return table


def _head(snapshot: Snapshot, losses: Iterable[float]) -> Text:
    job, progress = snapshot.job, snapshot.progress
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("burst_rt ", style="bold")
    began = time.strftime("%H:%M:%S", time.localtime(job.began_at_s))
    text.append(
        f"{job.world_size} ranks, {job.now_s:.0f} s since "
        f"{began}{', a record' if job.replayed else ''}  ",
        style="dim",
    )
    text.append(f"{job.command}\n", style="cyan")
    if "time_to_first_token_s" in progress.values:
        text.append(_serving(progress.values))
    elif progress.at_s is not None:
        text.append(f"step {progress.step}", style="bold")
        for name, value in progress.values.items():
            text.append(f"  {name} ", style="dim")
            text.append(f"{value:.4g}" if abs(value) < 1000 else _counted(value, ""))
        text.append(f"  {_curve(list(losses))}", style="cyan")
    else:
        text.append("no report yet", style="dim")
    if job.step_share is not None:
        text.append(f"  attention is {100 * job.step_share:.0f} % of a step", style="dim")
    return text


def _limit(verdict: Verdict | None) -> list[RenderableType]:
    """What limits the job, and what to do."""
    if verdict is None:
        return []
    text = Text(f"limits: {verdict.text}", style="" if verdict.advice else "dim")
    text.append(f"; {verdict.advice}" if verdict.advice else "", style="dim")
    return [text]


def _serving(values: Mapping[str, float]) -> str:
    """The job's report about tokens and their cache, in a line."""
    words = [f"first token {_milliseconds(values['time_to_first_token_s'])}"]
    # A program may report some of these names alone.
    last, mean = values.get("time_per_token_s"), values.get("mean_time_per_token_s")
    if last is not None and mean is not None:
        words.append(f"a token {_milliseconds(last)} (mean {_milliseconds(mean)})")
    elif last is not None:
        words.append(f"a token {_milliseconds(last)}")
    elif mean is not None:
        words.append(f"a token {_milliseconds(mean)} in the mean")
    if "output_tokens_per_s" in values:
        words.append(f"{_counted(values['output_tokens_per_s'], '')} tokens/s")
    if "cached_tokens" in values:
        room = values.get("cache_capacity_tokens")
        of_room = "" if room is None else f" of {room:,.0f}"
        words.append(f"cache {values['cached_tokens']:,.0f}{of_room} tokens")
    return "  ".join(words)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


class _Ranks:
    """A table with a row for each rank and as many whole columns as the terminal has room for.

    Columns that do not fit are left out in the order of _DROPPED.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._job = snapshot.job
        self._ranks = snapshot.ranks
        self._sources = {source.name: source for source in snapshot.sources}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [self._cells(rank) for rank in self._ranks]
        names = list(rows[0]) if rows else []
        widths = {}
        for name in names:
            cells = [name, *(str(row[name]) for row in rows)]
            widths[name] = 1 + max(map(cell_len, cells))
        barred = True
        for name in _DROPPED:
            if sum(widths.values()) + _LEAST_DOING <= options.max_width:
                break
            widths.pop(name, None)
            if name == _COMPUTES:
                barred = False
                widths[name] = 1 + max(cell_len(name), cell_len("100 %"))
        names = [name for name in names if name in widths]
        table = Table(
            box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False, expand=True
        )
        for name in names:
            table.add_column(
                name,
                justify="left" if name == "state" or (barred and name == _COMPUTES) else "right",
                no_wrap=True,
                width=widths[name] - 1,
            )
        table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
        for rank, row in zip(self._ranks, rows, strict=True):
            if not barred:
                row[_COMPUTES] = Text(row[_COMPUTES].plain.lstrip("█░ "))
            table.add_row(*(row[name] for name in names), escape(_doing(rank, self._job)))
        yield table

    def _cells(self, rank: RankView) -> dict[str, Text]:
        sources = self._sources if rank.status == "live" else {}
        process = sources[rank.source].values if rank.source in sources else {}
        gpu = sources[rank.gpu].values if rank.gpu in sources else {}
        sign, style = _STATES["lost" if rank.status == "left" and rank.exit_code else rank.status]
        cells = {
            "rank": Text(str(rank.rank)),
            "state": Text(
                f"{sign} {rank.status}{' first' if rank.rank == self._job.first_lost else ''}",
                style,
            ),
            _COMPUTES: _bar(process.get("compute_percent", 0.0)),
            "waits": _percent(process.get("wait_percent")),
            "away": _percent(process.get("outside_percent")),
        }
        if any(rank.gpu for rank in self._ranks):
            cells |= {
                "GPU": _percent(gpu.get("sm_percent")),
                "memory": _bytes(gpu.get("memory_used_bytes")),
            }
            cells |= {
                "power": _plain(gpu.get("power_w"), "W"),
                "temp": _plain(gpu.get("temperature_c"), "°C"),
            }
        else:
            cells |= {
                "core": _percent(process.get("process_percent")),
                "memory": _bytes(process.get("rss_bytes")),
            }
        cells |= {
            "sends": _bytes(process.get("sent_bytes_per_s"), "/s"),
            "flop/s": _count(process.get("flops_per_s")),
        }
        return cells | {"graph calls": _count(rank.calls)}


def _links(links: list[LinkView]) -> list[Text]:
    bad = [link for link in links if link.state != "ok"]
    if not links:
        return []
    text = Text(
        f"{len(links)} links, {_counted(sum(link.bytes_per_s for link in links), 'B/s')}",
        style="dim",
    )
    for link in bad[:_SHOWN_LINKS]:
        style = "bold red" if link.state == "silent" else "yellow"
        text.append(
            f"   {link.sender} → {link.receiver} {link.state} {_counted(link.bytes_per_s, 'B/s')}",
            style=style,
        )
    return [text]


def _doing(rank: RankView, job: JobView) -> str:
    if rank.ending:
        return rank.ending
    if rank.call < 0:
        return f"after call {rank.last_call}" if rank.last_call >= 0 else ""
    return (
        f"call {rank.call}, {rank.doing or 'between tasks'}, "
        f"{max(0.0, job.now_s - rank.doing_since_s):.1f} s"
    )


def _bar(percent: float) -> Text:
    full = round(percent / 12.5)
    return Text("█" * full + "░" * (8 - full) + f" {percent:3.0f} %", style="blue")


def _curve(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join(
        _BARS[round((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in values
    )


def _percent(value: float | None) -> Text:
    return _plain(value, "%")


def _plain(value: float | None, unit: str) -> Text:
    return Text("" if value is None else f"{value:.0f} {unit}")


def _bytes(value: float | None, per: str = "") -> Text:
    return _count(value, f"B{per}")


def _count(value: float | None, unit: str = "") -> Text:
    return Text("" if value is None else _counted(value, unit))


def _counted(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            return (
                f"{value:.3g} {prefix}{unit}".strip()
                if prefix or not float(value).is_integer()
                else f"{value:.0f} {unit}".strip()
            )
        value /= 1000
    raise AssertionError("T is the last prefix")
