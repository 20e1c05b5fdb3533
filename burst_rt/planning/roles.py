"""The tensors of attention by what they are for, and the side on which each of them stands."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GRADIENTS", "INPUTS", "Role"]


class Role(StrEnum):
    """A tensor's part in attention. Buffers of graphs are named by their role."""

    Q = "q"
    K = "k"
    V = "v"
    DOUT = "dout"
    ROWS = "rows"  # lse and delta together
    OUT = "out"
    LSE = "lse"
    STATE = "state"  # the running forward state
    SCORES = "scores"  # whole rows of scores
    DQ = "dq"
    DK = "dk"
    DV = "dv"

    # Set below and not a property: an enum's properties are slow, and every call of attention reads
    # this.
    queries: bool
    """Whether the tensor has a row for each query; else it has one for each key."""


for _role in Role:
    _role.queries = _role not in (Role.K, Role.V, Role.DK, Role.DV)

INPUTS = (Role.Q, Role.K, Role.V)
# Their gradients, in the same order.
GRADIENTS = (Role.DQ, Role.DK, Role.DV)
