"""Runs in place of Python: hands a program over to the server that runs it, and ends as it ends.

`hand_over.py FOLDER PYTHON ARGUMENTS...`. Imports little, as a start is what this saves. Where the
server cannot run the program as Python would, this process becomes Python.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

# What the server answers: run it yourself. Otherwise it answers how the program ended.
COLD = b"c"
_NUM_SEEDS = 2
# Of a rank, as mpirun, MPICH's mpirun or torchrun numbers it.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
# Passed on to the program, but for those that this process was started to ignore (nohup).
SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# The exit code where the server has ended.
_LOST = 70


def _main(folder: str, python: str, arguments: list[str]) -> None:
    rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "heeded": heeded,
    }
    content = json.dumps(request).encode()
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(f"{folder}/server-{rank % _NUM_SEEDS}")
        sent = socket.send_fds(server, [len(content).to_bytes(4, "little") + content], [0, 1, 2])
        server.sendall((len(content).to_bytes(4, "little") + content)[sent:])
    except OSError:
        answer = COLD
    else:
        for number in heeded:
            signal.signal(number, lambda sent, _: server.sendall(bytes([sent])))
        try:
            answer = server.recv(8)
        except OSError:
            answer = b""
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    if answer == COLD:
        os.execv(python, [python, *arguments])
    if not answer:
        print("the server of warm Pythons has ended", file=sys.stderr)
        os._exit(_LOST)
    how, code = answer[:1], answer[1]
    if how == b"s":
        os.kill(os.getpid(), code)
    os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
