"""`burst-rt trace`: a recorded run as a trace for Perfetto, or its figures and longest stalls."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from burst_rt.telemetry.read.compare import SameCall, SameStep
    from burst_rt.telemetry.read.summary import RankSummary

__all__ = ["command"]

_SHOWN = 3  # steps, and calls, that changed most

_RUN = click.argument(
    "run", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="RUN"
)


class _ExportByDefault(click.Group):
    """`burst-rt trace RUN` is `burst-rt trace export RUN`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["export", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=_ExportByDefault,
    context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True},
)
def command() -> None:
    """Show what a recorded run did (`burst-rt run --record RUN`, `burst-rt train --record RUN`).

    \b
    burst-rt trace RUN -o trace.json    all ranks on one clock, for ui.perfetto.dev
    burst-rt trace summary RUN          exposed communication, overlap, imbalance, longest stalls
    burst-rt trace compare RUN OTHER    what changed: the same steps and calls of both
    """


@command.command()
@_RUN
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write the trace to (JSON).",
)
def export(run: Path, output: Path) -> None:
    """Write one trace of all ranks: tasks by lane, messages as arrows, waits, power and use of
    GPUs.
    """
    from burst_rt.telemetry.read.chrome import write_trace
    from burst_rt.telemetry.read.record import Record

    num_events = write_trace(Record(run), output)
    click.echo(f"{output}: {num_events:,} events; open it in ui.perfetto.dev or chrome://tracing")


@command.command()
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def summary(run: Path, as_json: bool) -> None:
    """Print exposed communication, overlap and imbalance per rank, and the three longest stalls
    with their cause.
    """
    from rich.console import Console
    from rich.table import Table

    from burst_rt.telemetry.read.record import Record
    from burst_rt.telemetry.read.summary import RankSummary, summarise

    report = summarise(Record(run))
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    console = Console(width=140, force_terminal=False, color_system=None, highlight=False)
    table = Table(title=f"{run}", title_justify="left")
    mean_s = sum(rank.compute_s for rank in report.ranks) / max(1, len(report.ranks))
    rows = [_cells(rank, mean_s) for rank in report.ranks]
    for name in _cells(RankSummary(rank=0), mean_s):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    late = report.latecomer
    if late is not None:
        console.print(
            f"rank {late.rank} comes late: between calls it spends {late.beyond_s * 1e3:.1f} ms "
            f"more than the others (at most {late.most_s * 1e3:.1f} ms). They waited "
            f"{late.waited_s:.3f} s for it: {100 * late.waited_share:.1f} % of their time in calls",
            soft_wrap=True,
        )
    console.print("longest stalls:" if report.stalls else "no stalls")
    for stall in report.stalls:
        where = f"rank {stall.rank}, {stall.kind} call {stall.call} at {stall.started_s:.3f} s"
        line = f"  {stall.duration_s * 1e3:8.2f} ms  {where}: {stall.cause}"
        console.print(line, markup=False, soft_wrap=True)
    if report.incomplete:
        console.print(
            f"left out: {report.incomplete} calls, because spans of some ranks are missing"
        )
    if report.dropped:
        console.print(
            f"not in the record: {report.dropped:,} messages that found no room, most of them calls"
        )


@command.command("compare")
@_RUN
@click.argument("other", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def compare_runs(run: Path, other: Path, as_json: bool) -> None:
    """Print what changed from one recorded run to another: medians over the steps and calls that
    both have, and those that changed most.
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from burst_rt.telemetry.read.compare import compare_records
    from burst_rt.telemetry.read.record import Record

    comparison = compare_records(Record(run), Record(other))
    if as_json:
        click.echo(msgspec.json.encode(comparison))
        return
    console = Console(width=140, force_terminal=False, color_system=None, highlight=False)
    title = (
        f"{run} and {other}: medians of {comparison.num_steps:,} steps and "
        f"{comparison.num_calls:,} calls that both have"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="right" if name else "left")
    for one in comparison.differences:
        table.add_row(
            one.name, *(_measured(value, one.unit) for value in (one.before, one.after)), one.change
        )
    console.print(table)
    changed: list[SameStep | SameCall] = [*comparison.steps[:_SHOWN], *comparison.calls[:_SHOWN]]
    for same in changed:
        then_s, now_s = same.took_s
        line = f"  {(now_s - then_s) * 1e3:+9.2f} ms  {same.name}: {same.change}"
        console.print(line, markup=False, soft_wrap=True)


def _measured(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "s":
        return f"{value * 1e3:,.2f} ms"
    return f"{value:,.0f} {unit}" if unit in ("B", "1/s") else f"{value:.4g}"


def _cells(rank: RankSummary, mean_compute_s: float) -> dict[str, str]:
    """The row of a rank, by column."""
    total_s, transfer_s = max(1e-9, rank.total_s), rank.transfer_s
    return {
        "rank": str(rank.rank),
        "calls": str(rank.calls),
        "in calls s": f"{rank.total_s:.3f}",
        "between s": f"{rank.between_s:.3f}",
        "compute s": f"{rank.compute_s:.3f}",
        "exposed %": f"{100 * rank.exposed_s / total_s:.2f}",
        "skew %": f"{100 * rank.skew_s / total_s:.2f}",
        "late entry %": f"{100 * rank.late_s / total_s:.2f}",
        "transfers hidden %": f"{100 * rank.hidden_s / transfer_s:.1f}" if transfer_s else "-",
        "compute / mean": f"{rank.compute_s / mean_compute_s:.3f}" if mean_compute_s else "-",
    }
