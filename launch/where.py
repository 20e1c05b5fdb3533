"""Options of every command that starts ranks: `--device`, `--transport`, `--telemetry` and others.

The options set environment variables. `burst_rt.init` obeys these variables wherever the program
itself leaves the choice open, so that the options work for any program. The others are `--record`,
`--dashboard`, `--dashboard-at` and `--metrics-port`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from burst_rt.job.launched import (
    DASHBOARD_VARIABLE,
    DEVICE_VARIABLE,
    METRICS_VARIABLE,
    RECORD_VARIABLE,
    TELEMETRY_VARIABLE,
    TRANSPORT_VARIABLE,
)
from burst_rt.telemetry.wire import read_settings
from burst_rt.transport import TRANSPORTS

__all__ = [
    "TERMINAL_VARIABLE",
    "VARIABLES",
    "machine_options",
    "restart_options",
    "telemetry_options",
]

# Name of the variable that tells the ranks that the person who started them has a terminal; under
# mpirun a rank cannot see that.
TERMINAL_VARIABLE = "BURST_RT_TERMINAL"

# The variables that pass the values of the options on to the ranks.
VARIABLES = {"device": DEVICE_VARIABLE, "transport": TRANSPORT_VARIABLE}
_F = TypeVar("_F", bound=Callable[..., Any])


def _export(_: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and parameter.name is not None:
        os.environ[VARIABLES[parameter.name]] = value


def _ask(_: click.Context, parameter: click.Parameter, value: bool | int | str | None) -> None:
    if value or (value == 0 and parameter.name == "metrics_port"):
        # The variable may hold the address of a hub that runs already; that stays. "0" is
        # overruled.
        if not os.environ.get(TELEMETRY_VARIABLE, "").startswith(("unix:", "tcp:")):
            os.environ[TELEMETRY_VARIABLE] = "1"
        if parameter.name == "record":
            os.environ[RECORD_VARIABLE] = os.path.abspath(str(value))
        elif parameter.name == "dashboard":
            # Its own place stays; "off" is overruled.
            os.environ[DASHBOARD_VARIABLE] = read_settings().dashboard or "1"
        elif parameter.name == "dashboard_at":
            os.environ[DASHBOARD_VARIABLE] = str(value)
        elif parameter.name == "metrics_port":
            os.environ[METRICS_VARIABLE] = str(value)


def restart_options(command: _F) -> _F:
    """Adds `--restarts` and `--restart-window` to a command, as its `restarts` and
    `restart_window`.
    """
    restarts = click.option(
        "--restarts",
        type=click.IntRange(min=0),
        default=0,
        help="How often a job that fails is started again; not after a mistake, a signal, or the "
        "same failure twice.",
    )
    window = click.option(
        "--restart-window",
        type=click.FloatRange(min=0, min_open=True),
        default=None,
        metavar="SECONDS",
        help="After so long without a failure the count of restarts begins anew.",
    )
    return restarts(window(command))


def telemetry_options(command: _F) -> _F:
    """Adds `--telemetry`, `--record` and the dashboard's options to a command.

    Their values go into the environment, and so to the ranks that the command starts.
    """
    telemetry = click.option(
        "--telemetry",
        is_flag=True,
        expose_value=False,
        callback=_ask,
        help="Watch ranks, GPUs and transfers, and name a lost rank at once.",
    )
    record = click.option(
        "--record",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        expose_value=False,
        callback=_ask,
        help=(
            "Record the telemetry in FILE, for `burst-rt trace`. An existing FILE is renamed to "
            "FILE.1, the next one to FILE.2."
        ),
    )
    dashboard = click.option(
        "--dashboard",
        is_flag=True,
        expose_value=False,
        callback=_ask,
        help="Show the telemetry in a browser, and print the link.",
    )
    at = click.option(
        "--dashboard-at",
        metavar="[HOST:]PORT",
        expose_value=False,
        callback=_ask,
        help=(
            "The dashboard's address. A HOST other than loopback lets others connect. [default: "
            "127.0.0.1:8870, or a free port]"
        ),
        show_default=False,
    )
    metrics = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        expose_value=False,
        callback=_ask,
        help="Serve Prometheus' /metrics on this loopback port, without a token.",
    )
    return telemetry(record(dashboard(at(metrics(command)))))


def machine_options(command: _F) -> _F:
    """Adds `--device` and `--transport` to a command.

    Their values go into the environment, and so to the ranks that the command starts.
    """
    device = click.option(
        "--device",
        metavar="NAME",
        expose_value=False,
        callback=_export,
        help=(
            "Where ranks compute: cpu, cuda (the GPU of the local rank), cuda:N, auto. "
            "[default: auto]"
        ),
    )
    transport = click.option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        expose_value=False,
        callback=_export,
        help="What carries messages; `burst-rt doctor` says what auto is here. [default: auto]",
    )
    return device(transport(command))
