"""The algebra of maps: what takes a state through a chunk of tokens, and what chunks read of it.

A chunk of tokens with the state S before it is four tensors: its map, S -> A S + B; what its tokens
get of each other, O; and how they read the state, Q: out = O + Q S. A is a matrix for each head
(`MATRICES`: delta rules), or scales the state (`FACTORS`: a number for a head, for a key channel or
for an element). All recurrences differ in how they make the four, and in nothing that comes after.

Every tensor has the chunks first: `[chunks, batch, ...]`. The stages of a segment run over them in
both directions. Sources: gated delta rules in chunks, arXiv 2412.06464, section 3.3 (WY form);
state spaces in chunks, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

__all__ = ["ELEMENTS", "FACTORS", "LEAST", "MATRICES", "ROWS", "Algebra", "Chunks", "Reader"]

Tensor = torch.Tensor

# Smaller decays are taken for 0. They add nothing, and a CPU multiplies denormal numbers a hundred
# times slower than others.
LEAST = 1e-35


class Chunks(NamedTuple):
    """The chunks of one segment; see the module. float32, or float64 for float64 inputs."""

    a: Tensor
    b: Tensor  # `[chunks, batch, *state]`
    q: Tensor
    o: Tensor


class Algebra(Protocol):
    """The maps' linear parts: A of any number of chunks."""

    def apply(self, a: Tensor, s: Tensor) -> Tensor:
        """A S."""

    def apply_transposed(self, a: Tensor, ds: Tensor) -> Tensor:
        """The gradient of S, from that of A S."""

    def grad(self, a: Tensor, s: Tensor, ds: Tensor) -> Tensor:
        """The gradient of A, from that of A S."""

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """A of two maps, one after the other."""


class _Matrices:
    """A is `[..., K, K]`, the state `[..., K, V]`."""

    def apply(self, a: Tensor, s: Tensor) -> Tensor:
        return a @ s

    def apply_transposed(self, a: Tensor, ds: Tensor) -> Tensor:
        return a.mT @ ds

    def grad(self, a: Tensor, s: Tensor, ds: Tensor) -> Tensor:
        return ds @ s.mT

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later @ earlier


class _Factors:
    """A broadcasts to the state."""

    def apply(self, a: Tensor, s: Tensor) -> Tensor:
        return a * s

    def apply_transposed(self, a: Tensor, ds: Tensor) -> Tensor:
        return a * ds

    def grad(self, a: Tensor, s: Tensor, ds: Tensor) -> Tensor:
        return (ds * s).sum_to_size(a.shape)

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later * earlier


class Reader(Protocol):
    """How the tokens of chunks read the state: Q S, and its gradients; and how they are cut."""

    def cut(self, x: Tensor, size: int) -> Tensor:
        """Tokens `[batch, tokens, ...]` as chunks; the last chunk is filled with zeros."""

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """`cut` undone, for results."""

    def read(self, q: Tensor, s: Tensor) -> Tensor:
        """Q S."""

    def grad_q(self, s: Tensor, dout: Tensor) -> Tensor:
        """The gradient of Q."""

    def grad_s(self, q: Tensor, dout: Tensor) -> Tensor:
        """The gradient of S."""


class _Rows:
    """Tokens are `[batch, tokens, heads, ...]`, in chunks `[chunks, batch, heads, size, ...]`.

    Q is `[..., size, K]`, the state `[..., K, V]`, out `[..., size, V]`.
    """

    def cut(self, x: Tensor, size: int) -> Tensor:
        # Contiguous, or every product would copy it again.
        return _cut(x, size).transpose(2, 3).contiguous()

    def join(self, x: Tensor, tokens: int) -> Tensor:
        return x.transpose(2, 3).movedim(0, 1).flatten(1, 2)[:, :tokens]

    def read(self, q: Tensor, s: Tensor) -> Tensor:
        return q @ s

    def grad_q(self, s: Tensor, dout: Tensor) -> Tensor:
        return dout @ s.mT

    def grad_s(self, q: Tensor, dout: Tensor) -> Tensor:
        return q.mT @ dout


class _Elements:
    """Tokens are `[batch, tokens, ...]`, in chunks `[chunks, batch, size, ...]`.

    Q is `[..., size, D, N]`, the state `[..., D, N]`, out `[..., size, D]`.
    """

    def cut(self, x: Tensor, size: int) -> Tensor:
        return _cut(x, size)

    def join(self, x: Tensor, tokens: int) -> Tensor:
        return x.movedim(0, 1).flatten(1, 2)[:, :tokens]

    def read(self, q: Tensor, s: Tensor) -> Tensor:
        return (q * s.unsqueeze(-3)).sum(-1)

    def grad_q(self, s: Tensor, dout: Tensor) -> Tensor:
        dq: Tensor = dout.unsqueeze(-1) * s.unsqueeze(-3)
        return dq

    def grad_s(self, q: Tensor, dout: Tensor) -> Tensor:
        return (q * dout.unsqueeze(-1)).sum(-3)


def _cut(x: Tensor, size: int) -> Tensor:
    """`[batch, tokens, ...]` as `[chunks, batch, size, ...]`."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    chunks: Tensor = x.unflatten(1, (-1, size))
    return chunks.movedim(1, 0)


MATRICES: Algebra = _Matrices()
FACTORS: Algebra = _Factors()
ROWS: Reader = _Rows()
ELEMENTS: Reader = _Elements()
