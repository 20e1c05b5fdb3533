"""The hosts that arguments of mpirun name, in a file or in a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from burst_rt.errors import InputError

__all__ = ["HOST_FILES", "HostArgs", "find_hosts"]

# Arguments of mpirun with a file of hosts, and with a list of hosts.
HOST_FILES = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_LISTS = ("-H", "--host", "-host", "--hosts", "-hosts")


class HostArgs(NamedTuple):
    """What mpirun's arguments say of hosts. entries: each host's name, and its text with slots."""

    entries: Sequence[tuple[str, str]]
    option: str  # which names them
    others: Sequence[str]  # the other arguments


def find_hosts(mpi_args: Sequence[str]) -> HostArgs | None:
    """The hosts; None where none are named. Raises InputError for a file that cannot be read."""
    words = list(mpi_args)
    for at, word in enumerate(words):
        option, is_one_word, value = word.partition("=")
        if option not in (*HOST_FILES, *_LISTS) or not (is_one_word or at + 1 < len(words)):
            continue
        others = [*words[:at], *words[at + (1 if is_one_word else 2) :]]
        value = value if is_one_word else words[at + 1]
        texts = _lines(Path(value)) if option in HOST_FILES else value.split(",")
        entries = [(re.split(r"[:\s]", text)[0], text) for text in texts if text]
        return HostArgs(entries, option, others)
    return None


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--mpi-arg: the file of hosts cannot be read: {error}") from error
    return [line.partition("#")[0].strip() for line in lines]
