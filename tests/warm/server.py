"""Imports modules once, and forks a process for each program that is handed over.

`server.py LISTENER PYTHON MODULES...`: LISTENER is the descriptor of a listening socket, PYTHON the
program that hands over. Ends when its standard input is closed. The server has one thread and has
started neither MPI nor torch's threads; a fork is then what a fresh process is after its imports.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from warm import import_environment
from warm.hand_over import COLD, SIGNALS

sys.path.pop(0)

# Seconds that a program that has connected may take to say what it is.
_REQUEST_S = 10.0
_PR_SET_PDEATHSIG = 1
# Commands that start ranks, by `sys.executable`.
_COMMANDS = ("burst_rt.launch.main", "benchmarks")
_MODULES = (*_COMMANDS, "burst_rt.launch.child", "torch.distributed.run")


@dataclass(frozen=True)
class _Program:
    """A program to run as Python would run it: a module or a script, and its arguments."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    heeded: list[int]  # of SIGNALS; the others are ignored
    streams: list[int]

    @property
    def words(self) -> list[str]:
        """The arguments without Python's options."""
        options = ("-P", "-u")
        start = next((i for i, word in enumerate(self.arguments) if word not in options), 0)
        return self.arguments[start:]

    def is_known(self) -> bool:
        """Whether a fork runs it as a fresh Python would."""
        words = self.words
        known = words[0].endswith(".py") or (words[0] == "-m" and words[1] in _MODULES)
        return known and import_environment(self.environment) == _IMPORTED_IN

    def say_why_not(self) -> None:
        """For whoever wonders why tests are slow: WARM_SHOWS=1 pytest -s ..."""
        if "WARM_SHOWS" in os.environ:
            differ = import_environment(self.environment).items() ^ _IMPORTED_IN.items()
            print("run by Python itself:", self.arguments, dict(differ), file=sys.stderr)

    def become(self, python: str) -> None:
        """Gives this process the program's environment, folder and streams."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        # As mpirun starts ranks: signals for a group of processes do not reach the server.
        os.setpgid(0, 0)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL if number in self.heeded else signal.SIG_IGN)
        if signal.SIGINT in self.heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.orig_argv[1:] = self.arguments
        if self.words[0] == "-m" and self.words[1] in _COMMANDS:
            sys.executable = python
        if "-u" in self.arguments[: len(self.arguments) - len(self.words)]:
            for output in (sys.stdout, sys.stderr):
                assert isinstance(output, io.TextIOWrapper)
                output.reconfigure(write_through=True)
        random.seed()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()

    def run(self) -> None:
        words, safe_path = self.words, "-P" in self.arguments
        if words[0] == "-m":
            sys.argv = words[1:]
            if not safe_path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            if not safe_path:
                sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")


@dataclass
class _Child:
    """A forked process, and the connection to the program that handed it over."""

    pid: int
    pidfd: int
    connection: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.connection.close()

    def kill(self) -> None:
        """Kills the process and all below it: its ranks are not below the one that waits for it."""
        import psutil

        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _receive(connection: socket.socket) -> _Program | None:
    """What is handed over; None where the other side has ended."""
    connection.settimeout(_REQUEST_S)
    try:
        content, streams, *_ = socket.recv_fds(connection, 65536, 3)
        if not content:
            return None
        size = int.from_bytes(content[:4], "little")
        while len(content) < 4 + size:
            more = connection.recv(65536)
            if not more:
                return None
            content += more
    except OSError:
        return None
    connection.settimeout(None)
    return _Program(**json.loads(content[4:]), streams=streams)


def _serve(listener: socket.socket) -> _Program | None:
    """Forks a process for each program; returns the program in that process, None at the end."""
    poller = select.poll()
    owner = sys.stdin.fileno()
    poller.register(owner, select.POLLIN)
    poller.register(listener, select.POLLIN)
    by_connection: dict[int, _Child] = {}
    by_pidfd: dict[int, _Child] = {}

    def forget(child: _Child) -> None:
        for descriptor, known in (
            (child.pidfd, by_pidfd),
            (child.connection.fileno(), by_connection),
        ):
            if known.pop(descriptor, None) is not None:
                poller.unregister(descriptor)

    def start() -> _Program | None:
        connection, _ = listener.accept()
        program = _receive(connection)
        if program is None or not program.is_known():
            if program is not None:
                program.say_why_not()
                for stream in program.streams:
                    os.close(stream)
                with suppress(OSError):
                    connection.sendall(COLD)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            connection.close()
            for child in by_pidfd.values():
                child.close()
            return program
        for stream in program.streams:
            os.close(stream)
        child = _Child(pid, os.pidfd_open(pid), connection)
        by_connection[connection.fileno()] = by_pidfd[child.pidfd] = child
        poller.register(connection, select.POLLIN)
        poller.register(child.pidfd, select.POLLIN)
        return None

    def end(child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):
            child.connection.sendall(b"s" + bytes([-code]) if code < 0 else b"x" + bytes([code]))
        forget(child)
        child.close()

    while True:
        for descriptor, _ in poller.poll():
            if descriptor == owner:
                for child in by_pidfd.values():
                    child.kill()
                return None
            if descriptor == listener.fileno():
                program = start()
                if program is not None:
                    listener.close()
                    return program
            elif descriptor in by_pidfd:
                end(by_pidfd[descriptor])
            elif descriptor in by_connection:
                child = by_connection[descriptor]
                try:
                    signals = child.connection.recv(64)
                except OSError:
                    signals = b""
                for number in signals:
                    os.kill(child.pid, number)
                if not signals:
                    child.kill()
                    by_connection.pop(descriptor)
                    poller.unregister(descriptor)


_IMPORTED_IN = import_environment(os.environ)

if __name__ == "__main__":
    # pyarrow, which TRL imports, has an allocator that would start a thread.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for _name in sys.argv[3:]:
        importlib.import_module(_name)
    if len(os.listdir("/proc/self/task")) > 1 or "mpi4py.MPI" in sys.modules:
        sys.exit("warm Python: an import has started a thread, or MPI, which no fork would have")
    gc.collect()
    gc.freeze()
    _program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        _program.become(sys.argv[2])
        _program.run()
    else:
        # Tests that were killed have not done it.
        shutil.rmtree(Path(sys.argv[2]).parent, ignore_errors=True)
