"""Problems, and the graphs of all ranks for them: what the tests of strategies share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from burst_rt import Causal, Full, Mask, Relation
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import Program, Ring
from burst_rt.planning.strategies.ring import sends_single_blocks
from burst_rt.scheduler import Graph, Transfer, check_share

__all__ = [
    "KIND_PAIRS",
    "MASKS",
    "SIZES",
    "Window",
    "as_ring",
    "bytes_of",
    "check_shares",
    "graphs_of",
    "other_rings",
    "problem",
]


class States(Protocol):
    """What states the messages of a world."""

    def messages(self, rank: int) -> Iterator[Transfer]: ...


@dataclass(frozen=True)
class Window(Mask):
    """A query sees its own position and the 6 before; FULL and EMPTY where that is certain."""

    def relation(self, q: range, kv: range) -> Relation:
        if kv[-1] < q[0] - 6 or kv[0] > q[-1]:
            return Relation.EMPTY
        return Relation.FULL if kv[0] >= q[-1] - 6 and kv[-1] <= q[0] else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return (kv_position <= q_position) & (kv_position >= q_position - 6)


def problem(
    q_len: int,
    kv_len: int,
    world_size: int,
    *,
    mask: Mask | None = None,
    kinds: tuple[str, str] = ("zigzag", "zigzag"),
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 16,
    input_bytes: int = 4,
    batch: int = 1,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> Problem:
    layouts = make_layout(kinds[0], q_len, world_size), make_layout(kinds[1], kv_len, world_size)
    return Problem(
        q_layout=layouts[0],
        kv_layout=layouts[1],
        mask=mask or Full(),
        batch=batch,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        input_bytes=input_bytes,
        sum_bytes=max(input_bytes, 4),
        needs_grad=needs_grad,
    )


def other_rings(p: Problem) -> Iterator[Ring]:
    """Both directions of the rings that go another way round than the plain ring.

    Where shards travel as one block, also the plain rings.
    """
    if sends_single_blocks(p, sums=False):
        yield as_ring(choose(p, "ring-kv", forward=True).program)
    if sends_single_blocks(p, sums=True):
        for strategy in ("ring-kv", "burst"):
            yield as_ring(choose(p, strategy, forward=False).program)
    for strategy in (
        "bidirectional",
        "direct",
        *(f"two-level:{n}" for n in range(1, p.world_size + 1) if p.world_size % n == 0),
    ):
        for forward in (True, False):
            yield as_ring(choose(p, strategy, forward=forward).program)


def as_ring(program: Program) -> Ring:
    assert isinstance(program, Ring)
    return program


def graphs_of(program: Program) -> list[Graph]:
    return [program.graph(rank) for rank in range(program.problem.world_size)]


def bytes_of(graph: Graph) -> int:
    return sum(m.size_bytes for task in graph.tasks for m in task.sends)


# (q_len, kv_len, world): lengths that divide by nothing, shorter than the world, Sq != Skv both
# ways.
SIZES = [
    (37, 37, 1),
    (48, 48, 2),
    (37, 37, 3),
    (64, 64, 4),
    (61, 61, 5),
    (3, 3, 5),
    (1, 1, 2),
    (20, 45, 3),
    (45, 20, 4),
    (70, 70, 8),
]
KIND_PAIRS = [(k, k) for k in KINDS] + [("zigzag", "contiguous"), ("contiguous", "striped")]
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(),
    "both": Window() & Causal(),
}


def check_shares(graphs: Sequence[Graph], program: States | None = None) -> None:
    """What the ranks of a world check, each its share.

    program: states the messages; None: what the sender's graph has is stated to both ranks.
    """
    sent = [
        Transfer(graph.rank, m.peer, m.tag, m.size_bytes)
        for graph in graphs
        for task in graph.tasks
        for m in task.sends
    ]
    if program is not None:
        stated = [list(program.messages(graph.rank)) for graph in graphs]
        # Each message is stated to both of its ranks, and to no other.
        assert all(
            sorted(each for each in stated[a] if b in each[:2])
            == sorted(each for each in stated[b] if a in each[:2])
            for a in range(len(graphs))
            for b in range(a)
        )
        assert all(rank in each[:2] for rank, own in enumerate(stated) for each in own)
    else:
        stated = [[each for each in sent if graph.rank in each[:2]] for graph in graphs]
    for graph, own in zip(graphs, stated, strict=True):
        check_share(graph, own)
