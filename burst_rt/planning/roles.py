"""The roles of attention's tensors, and the side, queries or keys, that each belongs to."""

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
    STATE = "state"  # the running forward state at home
    ACC = "acc"  # acc of a running forward state that travels
    ML = "ml"  # m and l of that state, together
    SCORES = "scores"  # whole rows of scores
    DQ = "dq"
    DK = "dk"
    DV = "dv"
    DSINKS = "dsinks"  # a rank's share of the gradient of the sinks: one number a head

    # Set below and not a property: an enum's properties are slow, and every call of attention reads
    # this.
    queries: bool
    """Whether the tensor has a row for each query; else it has one for each key."""
    values: bool
    """Whether it has the head_dim of v, which out has too; else it has the head_dim of q and k."""
    pairs: bool
    """Whether it is two numbers for each query and head, `[2, batch, heads, tokens]`."""
    sums: bool
    """Whether it has the type of the sums wherever it travels."""


for _role in Role:
    _role.queries = _role not in (Role.K, Role.V, Role.DK, Role.DV)
    _role.values = _role in (Role.V, Role.OUT, Role.DOUT, Role.STATE, Role.ACC, Role.DV)
    _role.pairs = _role in (Role.ROWS, Role.ML)
    _role.sums = _role.pairs or _role in (Role.ACC, Role.DQ, Role.DK, Role.DV)

INPUTS = (Role.Q, Role.K, Role.V)
# Roles of the gradients of these, in the same order.
GRADIENTS = (Role.DQ, Role.DK, Role.DV)
