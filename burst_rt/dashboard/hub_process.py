"""The hub's process: the hub, its record and, where asked for, the dashboard.

`telemetry.hub.starting.start_hub` starts it as `python -m burst_rt.dashboard.hub_process`.

It joins the hub (`telemetry.hub`) with what shows the job to people: the record and, where it is
asked for, the dashboard. The job's secret comes by the environment, all other settings as
arguments; the hub's address goes out as one line on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from burst_rt.errors import BurstError
from burst_rt.job.launched import SECRET_VARIABLE
from burst_rt.telemetry.hub.hub import Hub, serve
from burst_rt.telemetry.read.record import Recorder
from burst_rt.telemetry.wire import readable
from burst_rt.version import __version__

if TYPE_CHECKING:
    from burst_rt.dashboard.server import RunningDashboard

__all__ = ["main"]

# Maximum length of the folder's path: the path of a Unix socket has room for 107 bytes, and viewers
# outside this process's container put /proc/PID/root before it.
_MAX_FOLDER_BYTES = 80


def main() -> None:
    """Runs a hub until its job has ended."""
    options = _options()
    level = os.environ.get("BURST_RT_LOG", "warning").upper()
    logging.basicConfig(
        format="burst-rt: %(message)s", level=level if options.log else logging.CRITICAL
    )
    hub = Hub(
        os.environ.pop(SECRET_VARIABLE, ""), None, readable(options.record), notify=not options.log
    )
    if options.record:
        try:
            hub.recorder = Recorder(Path(options.record), hub.model.began_at_s, __version__)
            if hub.recorder.kept is not None:
                kept = readable(str(hub.recorder.kept))
                hub.lines.append(f"the record that was there is kept as {kept}")
        except OSError as error:
            hub.lines.append(f"no record: cannot write {hub.model.record}: {error.strerror}")
            hub.model.record = ""
    hub.job_folder = options.job_folder
    folder = Path(tempfile.mkdtemp(prefix="burst-rt-hub-"))
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="burst-rt-hub-", dir="/tmp"))
    try:
        dashboard = _show(hub, options.dashboard, options.metrics_port)
        asyncio.run(serve(hub, options.listen, folder, held=options.held, service=dashboard))
    finally:
        if hub.recorder is not None:
            hub.recorder.close()
        shutil.rmtree(folder, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The telemetry hub of one job; started by burst_rt itself."
    )
    parser.add_argument(
        "--listen", default="unix", help='"unix", or the address to listen on with TCP'
    )
    parser.add_argument("--record", default="")
    parser.add_argument("--held", action="store_true", help="stay while standard input is open")
    parser.add_argument(
        "--log",
        action="store_true",
        help="log to standard error; else warnings go to the first rank's log",
    )
    parser.add_argument("--dashboard", default="", help='"1", or [HOST:]PORT')
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--job-folder", type=Path, help="where the ranks leave their traces")
    return parser.parse_args()


def _show(hub: Hub, dashboard: str, metrics_port: int | None) -> RunningDashboard | None:
    """The dashboard, where one is asked for. Without it telemetry goes on."""
    if not dashboard and metrics_port is None:
        return None
    # A hub without a dashboard starts sooner without a web server, and takes less memory.
    from burst_rt.dashboard.server import RunningDashboard, Where
    from burst_rt.telemetry.read.viewer import ModelViewer

    try:
        where = Where.parse(dashboard) if dashboard else None
        viewer = ModelViewer(hub.model, hub.now_s)
        return RunningDashboard(viewer, where, metrics_port=metrics_port)
    except BurstError as error:
        hub.lines.append(f"no {'dashboard' if dashboard else 'metrics'}: {error}")
        return None


if __name__ == "__main__":
    main()
    sys.exit(0)
