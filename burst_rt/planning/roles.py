"""The tensors of attention by what they are for, and on which side each of them stands."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Role"]


class Role(StrEnum):
    """A tensor's part in attention. Buffers of graphs are named by it.

    ROWS: lse and delta together. STATE: the running forward state. SCORES: whole rows of scores.
    """

    Q = "q"
    K = "k"
    V = "v"
    DOUT = "dout"
    ROWS = "rows"
    OUT = "out"
    LSE = "lse"
    STATE = "state"
    SCORES = "scores"
    DQ = "dq"
    DK = "dk"
    DV = "dv"

    # Set below: an enum's own properties are slow, and every call of attention asks for it.
    queries: bool
    """Whether the tensor has a row for each query; else it has one for each key."""


for _role in Role:
    _role.queries = _role not in (Role.K, Role.V, Role.DK, Role.DV)
