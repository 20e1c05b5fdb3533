"""The choice of a transport, by the facts of all ranks: two tables of rows, read from the top.

Pure: every rank has the same facts, and so makes the same choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch

from burst_rt.errors import ConfigError
from burst_rt.runtime.facts import Facts, facts_of, resolve_device
from burst_rt.transport import KINDS, Meeting, Wire

__all__ = [
    "AUTO",
    "REFUSED",
    "GroupFacts",
    "TransportChoice",
    "choose_transport",
    "describe_choice",
]

_IN_WORDS: dict[Meeting, str] = {
    "threads": "threads of one process",
    "mpi": "processes of an MPI job",
    "store": "processes of a torch.distributed group",
}
# The name of the transport of host memory for ranks that have met in each way.
_HOST_TRANSPORT = {kind.meeting: name for name, kind in KINDS.items() if kind.meeting}
# Number of the first NCCL version that takes several ranks on one GPU, in an experimental mode.
_NCCL_MULTI_RANK = 23000


class TransportChoice(NamedTuple):
    """A transport for a group of ranks."""

    name: str  # as users know it
    reason: str
    wire: Wire = "host"  # what carries messages
    staged: bool = False  # whether graphs are lowered to copies and chunks of host memory


class GroupFacts:
    """A group of ranks as the tables see it. The ranks are all on GPUs, or all on CPUs."""

    def __init__(self, facts: Sequence[Facts]) -> None:
        self._facts = facts
        self.on_gpus = bool(facts[0].gpu)
        self.alone = len(facts) == 1
        self.meeting = facts[0].meeting
        # A rank alone needs no messages: it is its own world of threads.
        self.host = "local" if self.alone else _HOST_TRANSPORT[self.meeting]
        # Where torch has met, so has its NCCL.
        self.nccl = "torch" if self.host == "torch" else "nccl"
        self.in_words = _IN_WORDS[self.meeting]

    @property
    def threads(self) -> bool:
        """Whether the ranks are threads of this process."""
        return self.host == "local"

    @cached_property
    def no_nccl(self) -> str | None:
        """Why these ranks cannot use the NCCL that suits them, or None."""
        return self.lacks(KINDS[self.nccl].wire)

    @property
    def device_mpi(self) -> bool | None:
        """Whether this MPI takes device memory on every rank; None: some rank does not know."""
        answers = {rank.device_mpi for rank in self._facts}
        return False if False in answers else None if None in answers else True

    def lacks(self, wire: Wire) -> str | None:
        """Why these ranks cannot use this NCCL, or None."""
        if not self.on_gpus:
            return "NCCL needs GPUs, and these ranks are on CPUs"
        if self.meeting == "threads" and not self.alone:
            return "NCCL needs a process for each rank, and these ranks are threads"
        versions = [rank.nccl if wire == "nccl" else rank.torch_nccl for rank in self._facts]
        without = [rank for rank, version in enumerate(versions) if not version]
        if without and wire == "torch-nccl":
            return f"ranks {without} have a torch without NCCL"
        if without:
            return f"ranks {without} have no CuPy with NCCL (in the clone: pip install '.[cuda13]')"
        return self._shares_gpu(min(versions))

    def _shares_gpu(self, version: int) -> str | None:
        """Which GPU several ranks share that this version of NCCL cannot serve, or None."""
        gpu, most = Counter((rank.host, rank.gpu) for rank in self._facts).most_common(1)[0]
        new = version >= _NCCL_MULTI_RANK and all(rank.multi_rank for rank in self._facts)
        if most == 1 or new:
            return None
        return (
            f"{most} ranks share GPU {gpu[1]} of {gpu[0]} (NCCL takes one rank a GPU; NCCL 2.30 "
            "or newer takes more with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )


class Row(NamedTuple):
    """A row of "auto": the first whose condition holds is taken."""

    holds: Callable[[GroupFacts], bool]
    # Formats with the ranks as `ranks`.
    name: str
    reason: str


# What "auto" takes. Two ranks on one GPU, say, come to the rows after NCCL's.
AUTO = (
    Row(lambda ranks: ranks.alone, "{ranks.host}", "one rank"),
    Row(lambda ranks: ranks.threads, "{ranks.host}", "ranks are threads of this process"),
    Row(lambda ranks: not ranks.on_gpus, "{ranks.host}", "host memory"),
    Row(lambda ranks: ranks.no_nccl is None, "{ranks.nccl}", "a GPU each"),
    Row(
        lambda ranks: ranks.device_mpi is True,
        "mpi",
        "this MPI takes device memory, and {ranks.no_nccl}",
    ),
    Row(
        lambda ranks: ranks.device_mpi is False,
        "staged",
        "through pinned host memory: {ranks.no_nccl}; this MPI does not take device memory "
        "(`burst-rt doctor` finds out)",
    ),
    Row(
        lambda ranks: True,
        "staged",
        "through pinned host memory: {ranks.no_nccl}; whether this MPI takes device memory is not "
        "known (`burst-rt doctor` finds out)",
    ),
)


class Refusal(NamedTuple):
    """A row of what these ranks cannot use, though it was asked for by name."""

    holds: Callable[[GroupFacts, str], bool]
    why: Callable[[GroupFacts, str], str]
    use: str


def _met_otherwise(ranks: GroupFacts, name: str) -> bool:
    return KINDS[name].meeting is not None and name != ranks.host and not ranks.alone


def _lacks_nccl(ranks: GroupFacts, name: str) -> bool:
    kind = KINDS[name]
    # Where ranks that met through a store are on CPUs, their sockets carry the messages.
    needed = kind.wire != "host" and (kind.meeting is None or (ranks.on_gpus and not ranks.alone))
    return needed and ranks.lacks(kind.wire) is not None


REFUSED = (
    Refusal(
        _met_otherwise,
        lambda ranks, name: f"these ranks are {ranks.in_words}",
        "{ranks.host!r} or 'auto'",
    ),
    Refusal(
        _lacks_nccl,
        lambda ranks, name: str(ranks.lacks(KINDS[name].wire)),
        "transport='staged' or 'auto'",
    ),
)


def choose_transport(asked: str, facts: Sequence[Facts]) -> TransportChoice:
    """The transport for these ranks. Pure: the same on every rank.

    asked: one of `TRANSPORTS`. Raises ConfigError for a transport that these ranks cannot use.
    """
    gpus = [rank.gpu for rank in facts]
    if any(gpus) != all(gpus):
        without = [i for i, gpu in enumerate(gpus) if not gpu]
        raise ConfigError(
            f"init: ranks {without} compute on the CPU, the other ranks on GPUs; give every rank "
            "device='cuda', or every rank device='cpu'"
        )
    ranks = GroupFacts(facts)
    if asked == "auto":
        row = next(row for row in AUTO if row.holds(ranks))
        return _choice(ranks, row.name.format(ranks=ranks), row.reason.format(ranks=ranks))
    for refusal in REFUSED:
        if refusal.holds(ranks, asked):
            raise ConfigError(
                f"init: transport {asked!r} was asked for, but {refusal.why(ranks, asked)}; use "
                f"{refusal.use.format(ranks=ranks)}"
            )
    return _choice(ranks, asked, "asked for")


def _choice(ranks: GroupFacts, name: str, reason: str) -> TransportChoice:
    kind = KINDS[name]
    # A rank alone has met nobody, so there is no store by which torch's NCCL would meet.
    on_host = not ranks.on_gpus or (ranks.alone and kind.meeting is not None)
    return TransportChoice(name, reason, "host" if on_host else kind.wire, kind.staged)


def describe_choice(meeting: Meeting = "mpi") -> str:
    """The choice of "auto" on this host with a rank for each GPU, or two ranks on CPUs, in words.

    meeting: "mpi" or "store".
    """
    with suppress(ImportError, RuntimeError):
        import mpi4py.MPI  # noqa: F401  (its library's name is a fact)
    device = resolve_device("auto")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    devices = [torch.device("cuda", i) for i in range(count)] or [device]
    facts = [facts_of(devices[i % len(devices)], meeting) for i in range(max(2, count))]
    choice = choose_transport("auto", facts)
    return f"{len(facts)} ranks would use {device.type} and {choice.name} ({choice.reason})"
