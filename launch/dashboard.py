"""`burst-rt dashboard`: shows a running job, or a record, in a browser.

The option `--dashboard` of other commands starts a dashboard together with the job instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import click

from burst_rt.launch.watch import open_tape, open_viewer, viewer_options

__all__ = ["command"]


@click.command(context_settings={"show_default": True})
@viewer_options
@click.option(
    "--beside",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --replay: compare with this record.",
)
@click.option(
    "--at",
    default="",
    metavar="[HOST:]PORT",
    help="Where to listen. [default: 127.0.0.1:8870, or a free port]",
    show_default=False,
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus' /metrics on this loopback port, without a token.",
)
def command(
    attach: int | None, replay: Path | None, until: float | None, beside: Path | None, at: str,
    metrics_port: int | None,
) -> None:  # fmt: skip
    """Show a running job, or a record, in a browser.

    Prints a link that carries a token. Open the link on this machine, or through a tunnel (ssh -L
    8870:127.0.0.1:8870 HOST). Ctrl-C ends the dashboard.
    """
    from burst_rt.dashboard.server import RunningDashboard, Where
    from burst_rt.telemetry.read.viewer import Viewer

    if beside is not None and (replay is None or until is not None):
        raise click.UsageError("--beside works only with --replay, and without --until")

    async def show(viewer: Viewer) -> None:
        tape = open_tape(beside, None) if beside is not None else None
        served = RunningDashboard(viewer, Where.parse(at), metrics_port=metrics_port, beside=tape)
        for line in served.lines:
            click.echo(f"burst-rt: {line}", err=True)
        await served.run()

    with open_viewer(attach, replay, until) as viewer, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(viewer))
