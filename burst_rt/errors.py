"""Every error that burst_rt raises: one tree, told apart by who is at fault.

Standard library only: the scheduler, the transports and the launcher import this file too.

Who is at fault decides the class:

* the caller: `InputError` (an argument), `ConfigError` (the set-up), `ContractMismatch` (ranks
  disagree);
* another rank or the network: `PeerLost`, `Stalled`, `ProtocolError`;
* the machine: `DeviceError`;
* burst_rt itself: `InternalError` (please report it).

A caller's error is raised as the same class on every rank before anything is sent, and leaves the
context usable. Any other error raised inside a call breaks its context: later calls raise at once.
Each class has its own process exit code, except `MissingPackage`, which shares `ConfigError`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BurstError",
    "ConfigError",
    "ContractMismatch",
    "DeviceError",
    "InputError",
    "InternalError",
    "MissingPackage",
    "PeerLost",
    "ProtocolError",
    "Stalled",
]


class BurstError(Exception):
    """Base of all errors of burst_rt.

    A field is None where it has no meaning. rank: the rank that raises. peer: the other rank
    concerned. task: the name of the graph's task. hop: the ring's step that the task belongs to,
    from 0. elapsed_s: seconds waited.
    """

    exit_code = 70

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        task: str | None = None,
        hop: int | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.task = task
        self.hop = hop
        self.elapsed_s = elapsed_s

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields do not survive the default pickling of exceptions, which
        # concurrent.futures relies on.
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


class InputError(BurstError, ValueError):
    """An argument is wrong: shape, dtype, device, value or an unknown name.

    Nothing was sent; the context stays usable.
    """

    exit_code = 64


class ConfigError(BurstError):
    """The set-up is wrong: no MPI library, a missing package, an impossible device or option.

    Nothing was sent.
    """

    exit_code = 78


class MissingPackage(ConfigError, ImportError):
    """A package that a part of burst_rt needs is not installed, or another version of it is.

    Nothing was sent.
    """


class ContractMismatch(BurstError):
    """The ranks entered one call with different arguments, or entered different calls.

    Nothing was sent; the context stays usable.
    """

    exit_code = 65


class ProtocolError(BurstError):
    """A message arrived that the plan does not foresee: a wrong size, an unknown message.

    The context is broken.
    """

    exit_code = 76


class PeerLost(BurstError):
    """Another rank left, died or closed its context while this rank needed it.

    The context is broken.
    """

    exit_code = 69


class Stalled(BurstError):
    """A deadline passed: a peer did not enter a call in time, or nothing moved inside the call.

    A peer has `timeout_s` to enter a call. Inside a call, something must move every `stall_s`.
    """

    exit_code = 75


class DeviceError(BurstError):
    """A device, its driver or its library failed."""

    exit_code = 74


class InternalError(BurstError):
    """A defect of burst_rt. Please report it with the whole message; do not go on after it."""

    exit_code = 70


def _rebuild(cls: type[BurstError], message: str, fields: Mapping[str, object]) -> BurstError:
    error = cls(message)
    error.__dict__.update(fields)
    return error
