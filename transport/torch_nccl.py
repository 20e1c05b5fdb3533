"""torch's own NCCL, as a communicator for `NcclTransport`: no CuPy is needed.

The group belongs to this project and has its own communicator, made from the store by which the
ranks met. torch does not list it, so the program's groups and their order stay as they are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from burst_rt.transport.base import Memory

__all__ = ["NcclGroup", "TorchCommunicator", "make_group", "makes_wait", "version", "with_backend"]

# torch's variable, its former name, and the beginnings of the values that turn it off.
_BLOCKING_WAIT, _OFF = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"), tuple("0nNfF")
# torch ends a process whose messages wait for longer. Here the deadlines of calls end it sooner.
_TORCHS_OWN_DEADLINE = timedelta(days=1)


class NcclGroup(Protocol):
    """The part of `torch.distributed.ProcessGroup` that is used."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Starts a send."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Starts a receive."""

    def _start_coalescing(self, device: torch.device, /) -> None:
        """Begins a group of messages."""

    def _end_coalescing(self, device: torch.device, /) -> Any:
        """Ends a group of messages and starts it; returns its `Work`."""

    def _get_backend(self, device: torch.device, /) -> Any:
        """Returns the object that does the work."""

    def abort(self) -> None:
        """Ends everything under way."""

    def shutdown(self) -> None:
        """Releases the group."""


def version() -> int:
    """The version of torch's NCCL as NCCL counts it (22907 for 2.29.7); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (int(part) for part in torch.cuda.nccl.version()[:3])
    return major * 10000 + minor * 100 + patch


def makes_wait() -> str:
    """The environment variable that has torch's groups wait on the host; "" if none is set."""
    given = {name: os.environ.get(name, "") for name in _BLOCKING_WAIT}
    return next((name for name, x in given.items() if x and not x.startswith(_OFF)), "")


def make_group(store: Any, name: str, rank: int, size: int, device: torch.device) -> NcclGroup:
    """A group over NCCL. Does not wait for the other ranks.

    store: of the ranks that have met. name: the same on every rank, and new for every group. Warns
    where the environment makes torch's groups wait.
    """
    if variable := makes_wait():
        warnings.warn(
            f"{variable} is set: the host waits for each message, so that none travels while tiles "
            "are computed; unset it",
            RuntimeWarning,
            stacklevel=2,
        )
    prefixed = PrefixStore(f"burst_rt/nccl/{name}", store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TORCHS_OWN_DEADLINE
    # Its messages go before the tiles that are on the device already, as those of lanes do.
    options.is_high_priority_stream = True
    group: NcclGroup = with_backend(
        dist.ProcessGroupNCCL(prefixed, rank, size, options), "NCCL", prefixed, device
    )
    return group


def with_backend(backend: Any, kind: str, store: Any, device: torch.device) -> Any:
    """A process group with one backend, as `torch.distributed.new_group` makes one."""
    known = getattr(dist.ProcessGroup.BackendType, kind)
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(known)
    group._register_backend(device, known, backend)
    return group


def _on(stream: int, device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))


class TorchCommunicator:
    """See `Communicator`. Tags are 0: messages match in the order they are started."""

    def __init__(
        self,
        group: NcclGroup,
        device: torch.device,
        on: Callable[[int, torch.device], AbstractContextManager[object]] = _on,
    ) -> None:
        """on: makes a stream current; tests on a CPU give another."""
        self._group = group
        self._device = device
        self._on = on

    def exchange(
        self, sends: Sequence[tuple[Memory, int]], recvs: Sequence[tuple[Memory, int]], stream: int
    ) -> None:
        """See `Communicator.exchange`.

        NCCL works on a stream of torch's, which waits for the stream given here before and is
        waited for after. The host waits for neither.
        """
        with self._on(stream, self._device):
            self._group._start_coalescing(self._device)
            try:
                for buffer, peer in sends:
                    self._group.send([buffer], peer, 0)
                for buffer, peer in recvs:
                    self._group.recv([buffer], peer, 0)
            finally:
                # A group left open would swallow every later call.
                work = self._group._end_coalescing(self._device)
            work.wait()

    def check(self) -> None:
        """See `Communicator.check`.

        Where torch does not tell, it ends the process by itself when NCCL fails.
        """
        get_error = getattr(self._group._get_backend(self._device), "get_error", None)
        error = None if get_error is None else get_error()
        if error is not None and error.name != "SUCCESS":
            raise RuntimeError(f"torch's NCCL reports {error.name}")

    def abort(self) -> None:
        """See `Communicator.abort`."""
        self._group.abort()

    def destroy(self) -> None:
        """See `Communicator.destroy`."""
        self._group.shutdown()
