"""Programs forked from one Python, which has imported what they need.

An import of torch takes longer than all that most of them do. `Forked` starts that Python. Each
program is a process of its own, forked before the imported modules have started a thread or MPI; it
has its own environment, output and exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "Forked", "with_torch"]

# SIGALRM ends a program that takes too long. What a program has imported shows in its sys.modules.
_SERVER = """
import json, os, signal, sys
exec(sys.argv[1])
assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
for line in sys.stdin:
    program, words, environment, stdout, stderr, timeout_s = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(timeout_s)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    sys.exit()
"""
_ENDING_S = 10.0


class Ended(NamedTuple):
    """What a program has left; as `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


class Forked:
    """Runs programs, one after the other, as forks of a Python that has run `imports`.

    folder: where programs run; default: where this process does.
    """

    def __init__(self, imports: str, folder: Path | None = None) -> None:
        self._outputs = tempfile.TemporaryDirectory(prefix="burst-rt-forked-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, imports],
            # numpy's OpenBLAS would start a thread when it is imported.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self,
        program: str,
        *words: str,
        env: Mapping[str, str] | None = None,
        timeout_s: int = 60,
    ) -> Ended:
        """Runs a program's text; blocks until it has ended, `timeout_s` at most.

        words: its sys.argv. env: its environment; default: that of this process, as it is now.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        outputs = [Path(self._outputs.name, name) for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        request = [program, words, environment, *map(str, outputs), timeout_s]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline()
        assert code, "the Python that forks has ended"
        return Ended(int(code), *(path.read_text() for path in outputs))

    def close(self) -> None:
        """Ends the Python that forks."""
        self._process.communicate(timeout=_ENDING_S)
        self._outputs.cleanup()


@cache
def with_torch() -> Forked:
    """Of a Python with torch and what `burst_rt.init` imports; one for all tests of a process."""
    forked = Forked("import torch, burst_rt.context, burst_rt.local")
    atexit.register(forked.close)
    return forked
