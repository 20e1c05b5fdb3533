"""Transports move bytes between ranks; each has a small control group beside it.

`LocalTransport` joins threads, `MpiTransport` processes. `burst_rt.transport.mpi` needs an MPI
library and is imported only when asked for.
"""

from burst_rt.transport.base import (
    KINDS,
    TRANSPORTS,
    Completion,
    ControlGroup,
    Meeting,
    Memory,
    Notice,
    NoticeKind,
    OrderedTransport,
    Pending,
    PendingBytes,
    PendingInts,
    Transport,
    TransportKind,
    Wire,
)
from burst_rt.transport.local import LocalControl, LocalTransport, LocalWorld

__all__ = [
    "KINDS", "TRANSPORTS", "Completion", "ControlGroup", "LocalControl", "LocalTransport",
    "LocalWorld", "Meeting", "Memory", "Notice", "NoticeKind", "OrderedTransport", "Pending",
    "PendingBytes", "PendingInts", "Transport", "TransportKind", "Wire",
]  # fmt: skip
