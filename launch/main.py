"""The command `burst-rt`: a group whose commands are imported only when they are used.

`burst-rt --help` and `burst-rt run` must not wait for torch, so a table here has each command's
place and one line of help.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import signal
import sys
from typing import IO, Any

import click

from burst_rt.errors import BurstError, DeviceError, InputError
from burst_rt.job.telling import tell

__all__ = ["cli", "main"]

_COMMANDS = {
    "run": ("burst_rt.launch.run:command", "Run a Python program on several ranks under MPI."),
    "train": (
        "burst_rt.launch.train.cli:train_command",
        "Train a language model with the sequence split over ranks.",
    ),
    "eval": (
        "burst_rt.launch.train.cli:eval_command",
        "Measure the perplexity of a checkpoint or a transformers model.",
    ),
    "generate": (
        "burst_rt.launch.generate.cli:command",
        "Generate text with a trained model, with the KV cache over ranks.",
    ),
    "serve": (
        "burst_rt.launch.serve.cli:command",
        "Serve a model over ranks to clients of OpenAI's protocol.",
    ),
    "export": (
        "burst_rt.launch.train.cli:export_command",
        "Write a trained model as a folder that transformers loads.",
    ),
    "draw": (
        "burst_rt.launch.draw:command",
        "Draw the ring, and a measured timeline of one backward.",
    ),
    "plan": (
        "burst_rt.launch.plan.cli:plan",
        "Compare strategies for a model on any machine, by simulation.",
    ),
    "simulate": (
        "burst_rt.launch.plan.cli:simulate",
        "Forecast time, communication and memory of one strategy on any machine.",
    ),
    "calibrate": (
        "burst_rt.launch.plan.cli:calibrate",
        'Measure this machine, for plan, simulate and strategy="auto".',
    ),
    "bench": ("burst_rt.launch.bench.cli:command", "Run the project's benchmarks on this machine."),
    "dashboard": (
        "burst_rt.launch.dashboard:command",
        "Show a running job, or a record, in a browser.",
    ),
    "top": ("burst_rt.launch.top:command", "Show a running job, or a record, in this terminal."),
    "trace": (
        "burst_rt.launch.trace:command",
        "Turn a recorded run into a trace for Perfetto, or explain its longest stalls.",
    ),
    "postmortem": (
        "burst_rt.launch.postmortem:command",
        "Say who stopped first in a job that failed, and who waited for whom.",
    ),
    "doctor": (
        "burst_rt.launch.doctor:command",
        "Check what this machine has and lacks for a job, and say what to do.",
    ),
}


class _Misused(click.ClickException):
    """A usage error, printed in one line as every other error is."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        path = error.ctx.command_path if error.ctx else "burst-rt"
        super().__init__(f"{error.format_message().rstrip('.')}; see {path} --help")

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"burst-rt: {self.format_message()}", file=file, err=True)


class _LazyGroup(click.Group):
    """A click group that imports a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = (
            difflib.get_close_matches(args[0], _COMMANDS, n=1)
            if args and args[0] not in _COMMANDS
            else []
        )
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("burst-rt: interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _Misused(error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="burst-rt", prog_name="burst-rt")
def cli() -> None:
    """Exact attention over sequences too long for one device, on the ranks of an MPI job.

    Start with `burst-rt doctor`, then `burst-rt train -n 2`. Every command has its own --help.
    """


def main() -> None:
    """Entry point of `burst-rt`.

    A BurstError ends the process with the error's message and exit code, without a traceback.
    """
    try:
        if sys.stdout is None:
            raise InputError(
                "standard output is closed: what is printed would be lost; expected a file, a "
                "pipe or a terminal; open it (>/dev/null)"
            )
        for stream in (sys.stdout, sys.stderr):
            # Others than UTF-8 lack the bars of pictures, and letters of names.
            if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
                stream.reconfigure(errors="replace")
        try:
            cli(prog_name="burst-rt")
        finally:
            _flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        tell(f"burst-rt: no room is left for what is written: {error}")
        sys.exit(DeviceError.exit_code)
    except BurstError as error:
        tell(f"burst-rt: {type(error).__name__}: {error}")
        sys.exit(error.exit_code)
    except MemoryError as error:
        said = f": {error}" if str(error) else ""
        advice = "ask for fewer tokens or ranks"
        tell(f"burst-rt: this machine has too little memory{said}; {advice}")
        sys.exit(DeviceError.exit_code)


def _flush() -> None:
    """Writes what is still to be printed. A reader that has ended, such as `head`, does not want
    more.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python must not try to write the rest again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            raise


if __name__ == "__main__":
    main()
