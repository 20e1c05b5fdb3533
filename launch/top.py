"""`burst-rt top`: the dashboard's overview in a terminal, over ssh, without a browser."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from burst_rt.launch.watch import open_reader, viewer_options

if TYPE_CHECKING:
    from burst_rt.dashboard.links import LinkView
    from burst_rt.dashboard.reader import Reader
    from burst_rt.telemetry.views import RankView, Snapshot, SourceView

__all__ = ["command", "render"]

_PERIOD_S = 1.0
_LINKS_SPANS = 2000
_SHOWN_EVENTS = 5
_SHOWN_LINKS = 8
# A sign as well as a colour, for those who do not see the difference.
_STATES = {
    "live": ("●", "green"),
    "silent": ("▲", "yellow"),
    "lost": ("✕", "bold red"),
    "left": ("○", "dim"),
    "ended": ("◌", "dim"),
    "stopped": ("○", "dim"),
}
_SEVERITIES = {"info": "dim", "warning": "yellow", "error": "bold red"}
_BARS = "▁▂▃▄▅▆▇█"


@click.command()
@viewer_options
@click.option("--once", is_flag=True, help="Print it once and end.")
def command(attach: int | None, replay: Path | None, until: float | None, once: bool) -> None:
    """Show a running job, or a record, in this terminal: ranks, links, progress, events. Ends with Ctrl-C, or with the job."""
    with open_reader(attach, replay, until) as reader, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(reader, once=once or replay is not None))


async def _watch(reader: Reader, *, once: bool) -> None:
    from burst_rt.dashboard.links import WINDOW_S, Links
    from burst_rt.errors import ConfigError, Stalled

    links, losses, console = Links(), deque[float](maxlen=40), Console()

    async def look() -> Group:
        snapshot = await reader.snapshot()
        links.look(await reader.timeline(-WINDOW_S, None, (), _LINKS_SPANS))
        loss = snapshot.progress.values.get("loss")
        if loss is not None and (not losses or losses[-1] != loss):
            losses.append(loss)
        return render(snapshot, links.now(snapshot), losses)

    if once:
        console.print(await look())
        return
    with Live(await look(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        last = live.renderable
        try:
            while True:
                await asyncio.sleep(_PERIOD_S)
                try:
                    last = await look()
                except Stalled as error:
                    live.update(Group(last, Text(f"{error.message}; trying again", style="bold yellow")), refresh=True)
                else:
                    live.update(last, refresh=True)
        except ConfigError:
            pass
    # The screen is the shell's again: what was last seen stays on it.
    console.print(last)
    console.print("[dim]the job has ended[/dim]")


def render(snapshot: Snapshot, links: Iterable[LinkView], losses: Iterable[float] = ()) -> Group:
    """The whole picture. losses: the last ones, for a small curve."""
    sources = {source.name: source for source in snapshot.sources}
    parts: list[Panel | Table | Text] = [_head(snapshot, losses), _ranks(snapshot, sources)]
    parts += _links(list(links))
    events = snapshot.events[-_SHOWN_EVENTS:]
    if events:
        text = Text()
        for event in events:
            who = "job" if event.rank < 0 else f"rank {event.rank}"
            text.append(f"{event.at_s:8.1f} s  {who} {event.kind}: {event.text}\n", style=_SEVERITIES[event.severity])
        text.rstrip()
        parts.append(text)
    return Group(*parts)


def _head(snapshot: Snapshot, losses: Iterable[float]) -> Text:
    job, progress = snapshot.job, snapshot.progress
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("burst_rt ", style="bold")
    text.append(f"{job.command}  ", style="cyan")
    began = time.strftime("%H:%M:%S", time.localtime(job.began_at_s))
    text.append(f"{job.world_size} ranks, {job.now_s:.0f} s since {began}{', a record' if job.replayed else ''}\n", style="dim")
    if progress.at_s is not None:
        text.append(f"step {progress.step}", style="bold")
        for name, value in progress.values.items():
            text.append(f"  {name} ", style="dim")
            text.append(f"{value:.4g}" if abs(value) < 1000 else _count(value))
        text.append(f"  {_curve(list(losses))}", style="cyan")
    else:
        text.append("no report yet", style="dim")
    return text


def _ranks(snapshot: Snapshot, sources: dict[str, SourceView]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    gpus = any(rank.gpu for rank in snapshot.ranks)
    names = (
        "rank",
        "state",
        "computing",
        "waits",
        *(("GPU", "memory", "power", "temp") if gpus else ("core", "memory")),
        "sends",
        "flop/s",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("state", "computing") else "right", no_wrap=True)
    # What does not fit the terminal goes first.
    table.add_column("calls", justify="right", no_wrap=True, overflow="crop")
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for rank in snapshot.ranks:
        own = sources[rank.source].values if rank.source in sources and rank.status == "live" else {}
        gpu = sources[rank.gpu].values if rank.gpu in sources and rank.status == "live" else {}
        sign, style = _STATES["lost" if rank.status == "left" and rank.exit_code else rank.status]
        cells: list[str | Text] = [
            str(rank.rank),
            Text(f"{sign} {rank.status}", style),
            _bar(own.get("compute_percent", 0.0)),
            _percent(own.get("wait_percent")),
        ]
        if gpus:
            cells += [_percent(gpu.get("sm_percent")), _bytes(gpu.get("memory_used_bytes"))]
            cells += [_plain(gpu.get("power_w"), "W"), _plain(gpu.get("temperature_c"), "°C")]
        else:
            cells += [_percent(own.get("process_percent")), _bytes(own.get("rss_bytes"))]
        cells += [_bytes(own.get("sent_bytes_per_s"), "/s"), _count(own.get("flops_per_s"))]
        table.add_row(*cells, _count(rank.calls), _doing(rank, snapshot))
    return table


def _links(links: list[LinkView]) -> list[Text]:
    bad = [link for link in links if link.state != "ok"]
    if not links:
        return []
    text = Text(f"{len(links)} links, {_bytes(sum(link.bytes_per_s for link in links), '/s')}", style="dim")
    for link in bad[:_SHOWN_LINKS]:
        style = "bold red" if link.state == "silent" else "yellow"
        text.append(f"   {link.sender} → {link.receiver} {link.state} {_bytes(link.bytes_per_s, '/s')}", style=style)
    return [text]


def _doing(rank: RankView, snapshot: Snapshot) -> str:
    if rank.call < 0:
        return ""
    return f"{rank.doing or 'between tasks'} of call {rank.call}, {max(0.0, snapshot.job.now_s - rank.doing_since_s):.1f} s"


def _bar(percent: float) -> Text:
    full = round(percent / 12.5)
    return Text("█" * full + "░" * (8 - full) + f" {percent:3.0f} %", style="blue")


def _curve(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    return "".join(_BARS[round((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in values)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _plain(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.0f} {unit}"


def _bytes(value: float | None, per: str = "") -> str:
    return _count(value, f"B{per}")


def _count(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}".strip() if prefix or not float(value).is_integer() else f"{value:.0f} {unit}".strip()
        value /= 1000
    raise AssertionError("T is the last prefix")
