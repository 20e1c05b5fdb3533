"""How a context joins telemetry: who asked for it, who starts the hub, the rank's one agent.

One rank that asks for it is enough.

The rest of telemetry is imported only once a rank has asked for it. Nothing here can fail a run:
without a hub, figures are missing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from burst_rt.errors import BurstError, InputError
from burst_rt.job import launched
from burst_rt.job.telling import tell
from burst_rt.telemetry.wire import Settings, connect_to_hub, read_settings, readable

if TYPE_CHECKING:
    from burst_rt.runtime.joining import Presence
    from burst_rt.runtime.runtime import Runtime
    from burst_rt.telemetry.rank.agent import Agent
    from burst_rt.transport.meeting import Store

__all__ = ["check_sendable_name", "check_step", "current_agent", "farewell", "follow", "report"]

_SAMPLE_HZ = 5.0
# Maximum number of values of one report. Viewers show 64 of a job's values.
_MAX_VALUES = 256
_MAX_NAME_BYTES = 256
# Groups of one job find its hub in a store. A job may have so many hubs, one after another.
_MAX_HUBS = 100
_NO_HUB = "none"
_OTHERS_HUB = timedelta(seconds=20)  # until another group has started it
_ANSWER_S = 2.0

_log = logging.getLogger("burst_rt.telemetry")
# The agents by rank: of this process (None), or of each rank that is a thread of it.
_agents: dict[object, Agent] = {}
_current = threading.local()


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """The contribution of a rank to the decision whether telemetry is on."""

    asked: bool
    address: str  # address of a hub that the rank knows, else ""
    rank: int  # number of the rank in the job
    world_size: int  # number of ranks of the job
    host: str
    device: str  # "cpu" or "cuda:N"
    gpu: str  # UUID, "" on a CPU
    pci: str  # address, "" on a CPU


def _wish(asked: bool | None, presence: Presence) -> _Wish:
    """This rank's wish. asked: what the program says; None leaves it to the environment."""
    settings = read_settings()
    agent = _agents.get(presence.thread)
    address = agent.address if agent is not None and agent.alive else settings.address
    asked = settings.asked if asked is None else asked
    return _Wish(
        asked=asked, address=address if asked else "",
        rank=presence.job_rank, world_size=presence.job_size, host=presence.host,
        device=presence.device, gpu=presence.gpu, pci=presence.pci,
    )  # fmt: skip


def follow(runtime: Runtime, presence: Presence, *, asked: bool | None, within_s: float) -> None:
    """Gives the runtime an observer, where any of its ranks asked for telemetry. Collective; blocks
    at most `within_s` for each of two steps, and 15 s more on the rank that starts a hub.

    asked: what the program says; None leaves it to the environment.
    """

    def gather(text: bytes) -> list[bytes]:
        """Every rank's text."""
        pending = runtime.collective(
            {"call": "init: telemetry"}, lambda: runtime.control.allgather(text), within_s
        )
        return pending.result()

    texts = gather(json.dumps(asdict(_wish(asked, presence))).encode())
    wishes = [_Wish(**json.loads(text)) for text in texts]
    if not any(wish.asked for wish in wishes):
        return
    # The key names a rank that is a thread; None means this process.
    key, place = presence.thread, runtime.rank
    folder = runtime.flight.folder if runtime.flight is not None else None
    start = partial(_start, read_settings(), wishes, folder, presence.whole)
    address, secret = _meet(key, place, wishes, gather, start)
    if not address:
        return
    agent = _agents.get(key)
    if agent is None or not agent.alive:
        agent = _agents[key] = _make_agent(address, secret, place, wishes)
    _current.agent = agent
    # A rank that is a thread ends with its context; a process has a `farewell`.
    when_left = partial(_end, key) if key is not None else None
    machine, ranks = runtime.machine, [wish.rank for wish in wishes]
    runtime.observer = agent.follow(ranks, *machine.choice[:2], when_left, machine.enter_to_watch)


def _meet(
    key: object,
    place: int,
    wishes: Sequence[_Wish],
    gather: Callable[[bytes], Sequence[bytes]],
    start: Callable[[], bytes],
) -> tuple[str, str]:
    """The address and the secret of the hub that all ranks of a context tell; "" without a hub.

    place: this rank's, among `wishes`. gather: called on all ranks or on none. start: starts a hub,
    and returns its address and secret. Blocks as long as `gather` does, and on the rank that starts
    a hub up to 15 s more.
    """
    settings, agent = read_settings(), _agents.get(key)
    address, secret = wishes[place].address, settings.secret
    if all(wish.address for wish in wishes):
        return address, secret
    # The first rank that knows a hub tells the others. Where none knows one, the first rank starts
    # one.
    teller = next((i for i, wish in enumerate(wishes) if wish.address), 0)
    text = b""
    if teller == place and address:
        text = f"{address} {agent.secret if agent is not None else secret}".encode()
    elif teller == place:
        text = start()
    address, _, secret = gather(text)[teller].decode().partition(" ")
    return address, secret


def _end(key: object, code: int) -> None:
    """A rank that is a thread has ended."""
    agent = _agents.pop(key, None)
    if agent is not None:
        agent.close(code)


def farewell(code: int, error: BaseException | None = None) -> None:
    """This process ends, and its agents say so. Waits at most half a second an agent."""
    for agent in list(_agents.values()):
        agent.close(code, _in_a_line(error) if error is not None and code else "")
    _agents.clear()


def _forked() -> None:
    """Lets go of the parent's connection in a child of this process (a data loader's worker): the
    connection must end with the parent.
    """
    for agent in _agents.values():
        agent.forked()
    _agents.clear()


def report(step: int = 0, **values: float) -> None:
    """Tells viewers how the job is doing: `report(step, loss=..., tokens_per_s=...)`, and any other
    number by its name. It is enough that one rank reports.

    Returns at once. Does nothing without telemetry, or before `init`, with which telemetry begins.
    Raises InputError for a value that is not a number or too large for a float, a step that needs
    more than 64 bits, a name that is not UTF-8 or longer than 256 bytes, and more than 256 values.
    """
    agent = current_agent()
    if agent is None:
        return
    if len(values) > _MAX_VALUES:
        raise InputError(
            f"telemetry.report: expected at most {_MAX_VALUES} values, got {len(values):,}; report "
            "fewer"
        )
    for name in values:
        check_sendable_name("telemetry.report", name)
    number = check_step("telemetry.report", step)
    try:
        numbers = {name: float(value) for name, value in values.items()}
    except OverflowError as error:
        raise InputError(
            f"telemetry.report: expected values that fit a float, got others ({error}); report "
            "smaller numbers"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor's is the last
        raise InputError(f"telemetry.report: expected numbers, got {values}") from error
    agent.report(number, numbers)


def current_agent() -> Agent | None:
    """The agent of the rank that calls; None without telemetry."""
    agent: Agent | None = getattr(_current, "agent", None) or _agents.get(None)
    return agent


def check_sendable_name(where: str, name: str) -> None:
    """Raises InputError for a name that no message can carry. where: the public function."""
    if readable(name) != name or len(name.encode()) > _MAX_NAME_BYTES:
        raise InputError(
            f"{where}: expected names in UTF-8 of at most {_MAX_NAME_BYTES} bytes, got "
            f"{name[:80]!a}; choose another name"
        )


def check_step(where: str, step: int) -> int:
    """A step's number. Raises InputError for one that no message can carry. where: the public
    function.
    """
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # a tensor's is the last
        raise InputError(
            f"{where}: expected a step that is a finite number, got {step!r:.80}; give a whole "
            "number"
        ) from error
    if not -(1 << 63) <= number < 1 << 63:
        raise InputError(
            f"{where}: expected a step of 64 bits, got one of {number.bit_length()} bits; give a "
            "smaller step"
        )
    return number


def _start(
    settings: Settings, wishes: Sequence[_Wish], folder: Path | None, whole: Store | None
) -> bytes:
    """Starts a hub for these ranks, or finds the one that another group of the job has started.
    Returns the hub's address and secret, or nothing where it does not start. whole: the store of
    the whole job, where these ranks are a part of it.
    """
    one_host = len({wish.host for wish in wishes}) == 1
    if whole is None:
        return _start_alone(settings, folder, one_host=one_host)
    one_host = one_host and launched.num_local_ranks() == wishes[0].world_size
    try:
        for number in range(_MAX_HUBS):
            key = f"burst_rt/hub/{number}"
            if whole.add(f"{key}/claims", 1) == 1:
                text = _start_alone(settings, folder, one_host=one_host)
                whole.set(f"{key}/address", text.decode() or _NO_HUB)
                return text
            whole.wait([f"{key}/address"], _OTHERS_HUB)
            text = whole.get(f"{key}/address")
            if text.decode() == _NO_HUB or _answers(text.decode().partition(" ")[0]):
                return text.removeprefix(_NO_HUB.encode())
            # That hub has ended with its ranks.
    except RuntimeError as error:  # torch's, of its stores
        _log.warning("no telemetry: the job's store does not say where the hub is: %s", error)
    return b""


def _answers(address: str) -> bool:
    try:
        connect_to_hub(address, _ANSWER_S).close()
    except OSError:
        return False
    return True


def _start_alone(settings: Settings, folder: Path | None, *, one_host: bool) -> bytes:
    """Starts a hub. Returns its address and secret, or nothing where it does not start."""
    from burst_rt.telemetry.hub.starting import start_hub

    try:
        hub = start_hub(
            one_host=one_host,
            record=settings.record,
            dashboard=settings.dashboard,
            metrics_port=settings.metrics_port,
            job_folder=folder,
        )
    except (BurstError, OSError) as error:
        _log.warning("no telemetry: %s", error)
        return b""
    hub.forget()
    for line in hub.lines:
        tell(f"burst-rt: {line}")
    return f"{hub.address} {hub.secret}".encode()


def _make_agent(address: str, secret: str, place: int, wishes: Sequence[_Wish]) -> Agent:
    from burst_rt.telemetry.messages import VERSION, Hello
    from burst_rt.telemetry.rank.agent import Agent
    from burst_rt.telemetry.rank.nvml import GpuId, gpu_source
    from burst_rt.version import __version__

    mine = wishes[place]
    neighbours = [i for i, wish in enumerate(wishes) if wish.host == mine.host]
    hello = Hello(
        version=VERSION, secret=secret, rank=mine.rank, world_size=mine.world_size,
        local_rank=neighbours.index(place), host=mine.host, pid=os.getpid(), device=mine.device,
        gpu=gpu_source(mine.gpu), command=readable(" ".join(sys.argv)[:500]), package=__version__,
        sample_hz=_SAMPLE_HZ, restarts=launched.restarts(),
    )  # fmt: skip
    gpus = [GpuId(wishes[i].gpu, wishes[i].pci) for i in neighbours if wishes[i].gpu]
    return Agent(address, hello, list(dict.fromkeys(gpus)) if neighbours[0] == place else None)


def _in_a_line(error: BaseException) -> str:
    text = error.message if isinstance(error, BurstError) else str(error)
    return f"{type(error).__name__}: {text}".splitlines()[0][:300]


os.register_at_fork(after_in_child=_forked)
