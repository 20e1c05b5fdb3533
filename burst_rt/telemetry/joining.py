"""How a context joins telemetry: whether anybody asked, who starts the hub, and the rank's one
agent.

Nothing of telemetry is imported before somebody has asked for it, and nothing here can fail a run:
without a hub there are no figures.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst_rt.errors import BurstError, InputError
from burst_rt.telemetry.wire import Settings, read_settings

if TYPE_CHECKING:
    from burst_rt.telemetry.agent import Agent
    from burst_rt.telemetry.calls import CallLog

__all__ = ["Wish", "farewell", "follow", "leave", "report", "wish"]

_SAMPLE_HZ = 5.0

_log = logging.getLogger("burst_rt.telemetry")
# One agent a rank: of this process (None), or of each rank that is a thread of it.
_agents: dict[object, Agent] = {}
_current = threading.local()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a rank brings to the question whether there is telemetry."""

    asked: bool
    address: str  # of a hub that the rank knows, else ""
    rank: int  # in the job
    world_size: int  # of the job
    host: str
    device: str  # "cpu" or "cuda:N"
    gpu: str  # UUID, "" on a CPU
    pci: str  # address, "" on a CPU


def wish(
    asked: bool | None,
    key: object,
    place: tuple[int, int],
    host: str,
    device: str,
    gpu: str,
    pci: str,
) -> Wish:
    """This rank's wish. asked: the program's own word, None: the environment's. key: of a rank that
    is a thread; None: this process.
    """
    settings = read_settings()
    agent = _agents.get(key)
    address = agent.address if agent is not None and agent.alive else settings.address
    wanted = settings.asked if asked is None else asked
    rank, world_size = place
    return Wish(
        asked=wanted,
        address=address if wanted else "",
        rank=rank,
        world_size=world_size,
        host=host,
        device=device,
        gpu=gpu,
        pci=pci,
    )


def follow(
    key: object,
    place: int,
    wishes: Sequence[Wish],
    transport: str,
    reason: str,
    gather: Callable[[bytes], Sequence[bytes]],
) -> CallLog | None:
    """The log of a new context, where any of its ranks asked; None without telemetry. `place`: this
    rank's among `wishes`.

    gather: every rank's bytes on every rank; called on all ranks or on none. Blocks as long as
    that, and on the rank that starts a hub up to 15 s.
    """
    if not any(wished.asked for wished in wishes):
        return None
    settings = read_settings()
    address, secret = wishes[place].address, settings.secret
    if not all(wished.address for wished in wishes):
        # The first that knows a hub tells the others; where none does, the first starts one.
        teller = next((i for i, wished in enumerate(wishes) if wished.address), 0)
        mine = b""
        if teller == place:
            if address:
                known = _agents.get(key)
                mine = f"{address} {known.secret if known is not None else secret}".encode()
            else:
                mine = _start(settings, wishes)
        told = gather(mine)[teller].decode()
        if not told:
            return None
        address, _, secret = told.partition(" ")
    agent = _agents.get(key)
    if agent is None or not agent.alive:
        agent = _agents[key] = _make_agent(address, secret, place, wishes)
    _current.agent = agent
    return agent.follow([wished.rank for wished in wishes], transport, reason)


def leave(key: object, log: CallLog, code: int) -> None:
    """A context is closed; a rank that is a thread has ended with it."""
    agent = _agents.get(key)
    if agent is not None:
        agent.unfollow(log)
        if key is not None:
            agent.close(code)
            del _agents[key]


def farewell(code: int, error: BaseException | None = None) -> None:
    """This process ends: its agents say so. Waits at most half a second."""
    for agent in list(_agents.values()):
        agent.close(code, _in_a_line(error) if error is not None and code else "")
    _agents.clear()


def _forked() -> None:
    """In a child of this process (a data loader's worker): the connection is the parent's, and must
    end with it.
    """
    for agent in _agents.values():
        agent.forked()
    _agents.clear()


def report(step: int = 0, **values: float) -> None:
    """Tells viewers how the job is doing: `report(step, loss=..., tokens_per_s=...)`, and any other
    number by its name.

    Returns at once. Does nothing without telemetry, and before `init`, which begins it. One rank's
    word is enough. Raises InputError for a value that is no number.
    """
    agent: Agent | None = getattr(_current, "agent", None) or _agents.get(None)
    if agent is None:
        return
    try:
        agent.report(int(step), {name: float(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"telemetry.report: expected numbers, got {values}") from error


def _start(settings: Settings, wishes: Sequence[Wish]) -> bytes:
    """Starts a hub for these ranks: its address and secret; nothing where that fails."""
    from burst_rt.telemetry.starting import start_hub

    try:
        one_host = len({wished.host for wished in wishes}) == 1
        hub = start_hub(
            one_host=one_host,
            record=settings.record,
            dashboard=settings.dashboard,
            metrics_port=settings.metrics_port,
        )
    except (BurstError, OSError) as error:
        _log.warning("no telemetry: %s", error)
        return b""
    hub.forget()
    for link in hub.links:
        print(f"burst-rt: {link}", file=sys.stderr, flush=True)
    return f"{hub.address} {hub.secret}".encode()


def _make_agent(address: str, secret: str, place: int, wishes: Sequence[Wish]) -> Agent:
    from burst_rt.telemetry.agent import Agent
    from burst_rt.telemetry.jobs import readable
    from burst_rt.telemetry.messages import VERSION, Hello
    from burst_rt.telemetry.nvml import GpuId, gpu_source
    from burst_rt.version import __version__

    own = wishes[place]
    here = [i for i, wished in enumerate(wishes) if wished.host == own.host]
    hello = Hello(
        version=VERSION,
        secret=secret,
        rank=own.rank,
        world_size=own.world_size,
        local_rank=here.index(place),
        host=own.host,
        pid=os.getpid(),
        device=own.device,
        gpu=gpu_source(own.gpu),
        command=readable(" ".join(sys.argv)[:500]),
        package=__version__,
        sample_hz=_SAMPLE_HZ,
    )
    gpus = [GpuId(wishes[i].gpu, wishes[i].pci) for i in here if wishes[i].gpu]
    return Agent(address, hello, list(dict.fromkeys(gpus)) if here[0] == place else None)


def _in_a_line(error: BaseException) -> str:
    text = error.message if isinstance(error, BurstError) else str(error)
    return f"{type(error).__name__}: {text}".splitlines()[0][:300]


os.register_at_fork(after_in_child=_forked)
