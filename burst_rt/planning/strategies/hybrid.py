"""All-to-all, alone or inside groups of ranks with a ring between the groups.

Heads are spread inside a group, the sequence over the groups. One group of all ranks is
DeepSpeed-Ulysses (arXiv 2309.14509), several groups are USP (arXiv 2405.07719), groups of one rank
are the plain ring. Group g is ranks g * size to g * size + size - 1, so that the all-to-all stays
inside a node where the group fits in one. Or it is rank g of each node, and rings stay inside
nodes: between W nodes an all-to-all sends each tensor once, a ring W - 1 times.

Heads may go in slices, one slice after another, so that attention of a slice runs while the next
slices travel: only the first slice's way there and the last one's way back are waited for. Slices
of the query heads of one kv head share it; it comes with the first of them, and its gradients go
back after the last.

For every other member, a rank packs that member's heads, for its own tokens. One exchange later the
rank has its own heads of the whole group's tokens. The members then run the ring as if their group
were one rank with a part of the heads. Another exchange takes the results back. The backward does
the same with dO, lse and delta in addition to q, k, v, and brings dq, dk, dv back in the inputs'
type: their sums are complete then.

Bytes that a rank sends, with n tokens each, s bytes an input, a bytes a sum, U ranks a group, R
groups, E = n x heads x head_dim, g query heads a kv head, full mask:

* forward: (U - 1) / U x (2 s E + 2 s E / g + a n heads) and (R - 1) x 2 s E / g for the ring;
* backward: (U - 1) / U x (2 s E + 2 s E / g + 2 a n heads, and s E for dq, s E / g each for dk and
  dv) and the ring's own bytes for E and E / g.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

from burst_rt.planning.caches import kept_results
from burst_rt.planning.operations import Delta
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import GRADIENTS, Role
from burst_rt.planning.strategies.groups import of_groups, of_slice
from burst_rt.planning.strategies.program import Footprint
from burst_rt.planning.strategies.ring import Ring, backward_ring, forward_ring
from burst_rt.planning.strategies.ring_builder import RingBuilder, dsinks
from burst_rt.scheduler import HOST_LANES, Buffer, Cost, Graph, GraphBuilder, Lane, Part, Transfer

__all__ = ["Hybrid", "Keep", "Pack", "Unpack", "backward_hybrid", "forward_hybrid"]


@dataclass(frozen=True)
class Pack:
    """Copies what another member of an all-to-all group needs into the part to be sent."""

    tensor: Role
    gather: bool  # whether tokens were spread and heads will be; else the way back
    member: int  # number of the other member in the group
    part: int  # number of the part that is written
    slice: int = 0  # number of the tensor's slice
    name: ClassVar[str] = "pack"


@dataclass(frozen=True)
class Unpack:
    """Copies tensors of another member out of the part that received them."""

    tensor: Role
    gather: bool  # as in `Pack`
    member: int  # number of the other member in the group
    part: int  # number of the part that is read
    slice: int = 0  # number of the tensor's slice
    name: ClassVar[str] = "unpack"


@dataclass(frozen=True)
class Keep:
    """Copies the tensors that stay on this rank: its own heads, for its own tokens."""

    tensor: Role
    gather: bool  # as in `Pack`
    slice: int = 0  # as in `Pack`
    name: ClassVar[str] = "keep"


@dataclass(frozen=True)
class Hybrid:
    """A `Program`: an all-to-all in every group around a ring of the groups."""

    problem: Problem  # the problem of all ranks
    # The ring that a group's members run on the group's shard and a slice of their heads.
    ring: Ring
    group_size: int
    slices: int = 1  # slices of a member's query heads
    across: bool = False  # whether a group is a rank of each node, and not neighbouring ranks

    @property
    def forward(self) -> bool:
        return self.ring.forward

    @property
    def queries_travel(self) -> bool:
        return self.ring.queries_travel

    @property
    def ring_size(self) -> int:
        return self.problem.world_size // self.group_size

    def place(self, rank: int) -> tuple[int, int]:
        """The number of a rank's group, and the rank's number in it."""
        if self.across:
            number, group = divmod(rank, self.ring_size)
            return group, number
        return divmod(rank, self.group_size)

    def rank_of(self, group: int, number: int) -> int:
        """The rank with a number in a group."""
        if self.across:
            return number * self.ring_size + group
        return group * self.group_size + number

    def members(self, rank: int) -> list[int]:
        """The ranks of a rank's group, in the order of their numbers."""
        group, _ = self.place(rank)
        return [self.rank_of(group, number) for number in range(self.group_size)]

    @property
    def wiring(self) -> Hashable:
        """See `Program.wiring`."""
        roles, ranks = (*self.gathered, *self.returned), range(self.problem.world_size)
        lengths = tuple(self.shard_len(role, rank) for role in (Role.Q, Role.K) for rank in ranks)
        sizes = tuple((role, self.token_bytes(role)) for role in roles)
        return (
            self.ring.wiring, self.group_size, self.slices, self.across, lengths, sizes,
            self.problem.sink_bytes,
        )  # fmt: skip

    def graph(self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES) -> Graph:
        """See `Program.graph`."""
        return _HybridBuilder(self, rank, lanes).build()

    def messages(self, rank: int) -> Iterator[Transfer]:
        """See `Program.messages`."""
        group, member = self.place(rank)
        for number in range(self.slices):
            yield from self._spread_messages(rank, number, number, gather=True)
        tag = self.slices
        for number in range(self.slices):
            for each in self.ring.messages(group, tag):
                source, receiver = (self.rank_of(at, member) for at in each[:2])
                yield each._replace(source=source, receiver=receiver)
            tag += self.ring.num_tags
            yield from self._spread_messages(rank, number, tag, gather=False)
            tag += 1

    def _spread_messages(
        self, rank: int, number: int, tag: int, *, gather: bool
    ) -> Iterator[Transfer]:
        """The messages of a slice between a rank and the other members of its group.

        gather: whether each member gives the others their heads for its tokens; else they return
        them.
        """
        for role in self.travelling(number, gather=gather):
            for peer in self.members(rank):
                for source, receiver in ((rank, peer), (peer, rank)) if peer != rank else ():
                    length = self.shard_len(role, source if gather else receiver)
                    if length:
                        yield Transfer(source, receiver, tag, length * self.token_bytes(role))

    def __str__(self) -> str:
        size, slices = self.group_size, f" in {self.slices} slices" if self.slices > 1 else ""
        if size == self.problem.world_size:
            return f"heads are spread over all ranks{slices}"
        members = "ranks, one of each node" if self.across else "ranks"
        return (
            f"heads are spread over groups of {size} {members}{slices}; between groups {self.ring}"
        )

    @property
    def gathered(self) -> tuple[Role, ...]:
        """The tensors that a rank has for its own tokens first, and later for its own heads."""
        if self.forward:
            return (Role.Q, Role.K, Role.V)
        return (Role.Q, Role.DOUT, Role.ROWS, Role.K, Role.V)

    @property
    def returned(self) -> tuple[Role, ...]:
        """The tensors that go back."""
        if self.forward:
            return (Role.OUT, Role.LSE)
        return tuple(
            role for role, needed in zip(GRADIENTS, self.problem.needs_grad, strict=True) if needed
        )

    def num_slices(self, role: Role) -> int:
        """The number of slices that a tensor of a member's heads has."""
        kv_heads = self.group_size * self.ring.problem.num_kv_heads
        return self.slices if role.queries else self.problem.num_kv_heads // kv_heads

    def slice_of(self, role: Role, number: int) -> int:
        """The slice of a tensor that is computed with slice `number` of the queries."""
        return number * self.num_slices(role) // self.slices

    def mark(self, number: int, role: Role) -> str:
        """What the names of a slice's buffers end with: nothing where there is one slice."""
        return f".{self.slice_of(role, number)}" if self.slices > 1 else ""

    def travelling(self, number: int, *, gather: bool) -> tuple[Role, ...]:
        """The tensors that travel with slice `number` of the queries, there or back."""
        other = number - 1 if gather else number + 1
        return tuple(
            role
            for role in (self.gathered if gather else self.returned)
            if not 0 <= other < self.slices
            or self.slice_of(role, number) != self.slice_of(role, other)
        )

    def token_bytes(self, role: Role) -> int:
        """Bytes on the wire of one token's share of a tensor: one slice of one member's heads."""
        inner = self.ring.problem
        sizes = {
            Role.LSE: inner.row_bytes // 2,
            Role.ROWS: inner.row_bytes,
            Role.OUT: inner.out_token_bytes,
            Role.DOUT: inner.out_token_bytes,
            Role.V: inner.v_token_bytes,
            Role.DV: inner.v_token_bytes,
        }
        return sizes.get(role, inner.q_token_bytes if role.queries else inner.k_token_bytes)

    def shard_len(self, role: Role, rank: int) -> int:
        """Number of tokens in a rank's shard, on the tensor's side."""
        layout = self.problem.q_layout if role.queries else self.problem.kv_layout
        return layout.shard_len(rank)

    def places(self, role: Role, rank: int) -> tuple[range, ...]:
        """The places of the tokens of a rank's runs, in local order, in the shard of its group."""
        inner, group = self.ring.problem, self.place(rank)[0]
        runs = (self.problem.q_runs if role.queries else self.problem.kv_runs)[rank]
        joined = (inner.q_runs if role.queries else inner.kv_runs)[group]
        starts = accumulate(map(len, joined), initial=0)
        of_group = list(zip(joined, starts, strict=False))
        places = []
        for run in filter(None, runs):
            of, start = next((of, start) for of, start in of_group if run[0] in of)
            at, step = start + of.index(run[0]), max(1, run.step // of.step)
            places.append(range(at, at + len(run) * step, step))
        return tuple(places)

    def forget(self) -> None:
        """See `Program.forget`."""
        self.ring.forget()

    def tiles(self, rank: int) -> Iterator[tuple[tuple[range, ...], tuple[range, ...]]]:
        """See `Program.tiles`."""
        return self.ring.tiles(self.place(rank)[0])

    def wire_bytes(self) -> int:
        """Bytes that all ranks together send."""
        others = self.group_size - 1
        spread = sum(
            others * self.shard_len(role, rank) * self.token_bytes(role) * self.num_slices(role)
            for role in (*self.gathered, *self.returned)
            for rank in range(self.problem.world_size)
        )
        return spread + self.group_size * self.slices * self.ring.wire_bytes()

    def footprint(self, rank: int) -> Footprint:
        """See `Program.footprint`. Copies are gathered tensors, and results that go back."""
        group, _ = self.place(rank)
        tile, inner = self.ring.footprint(group).tile, self._unsliced.footprint(group)
        members = self.members(rank)
        # Where gradients are summed in a wider type, the sums themselves go back and are not
        # copied.
        wider = self.problem.input_bytes != self.problem.sum_bytes
        sums = set(GRADIENTS) & set(self.returned) if wider else set[Role]()
        held = set(self.gathered + self.returned) - {Role.ROWS, Role.LSE} - sums
        copies, of_sums = (
            sum(
                self.shard_len(role, member) * self.token_bytes(role) * self.num_slices(role)
                for role in roles
                for member in members
            )
            for roles in (held, sums)
        )
        # lse and delta of the rank's own queries, before they are spread over the group.
        # The sinks' gradient is of these queries too.
        own_rows = self.shard_len(Role.ROWS, rank) * self.problem.row_bytes
        own_rows = 0 if self.forward else own_rows + self.problem.sink_bytes
        # Gradients that the kernel writes itself are in the inputs' type, and go back.
        return Footprint(inner.sums + own_rows, copies, tile, inner.spared - of_sums)

    @property
    def _unsliced(self) -> Ring:
        """The ring of all of a member's heads."""
        if self.slices == 1:
            return self.ring
        problem = of_groups(self.problem, self.group_size, self.across)
        if self.forward:
            return forward_ring(problem)
        return backward_ring(problem, queries_travel=self.queries_travel)


class _HybridBuilder:
    """Builds one rank's graph.

    Buffer "x > 2" goes to member 2 of the group, buffer "x < 2" comes from member 2.
    """

    def __init__(self, hybrid: Hybrid, rank: int, lanes: tuple[Lane, ...]) -> None:
        self.hybrid, self.rank = hybrid, rank
        self.group, self.number = hybrid.place(rank)
        self.g = GraphBuilder(rank, hybrid.problem.world_size, lanes)
        peers = [hybrid.rank_of(group, self.number) for group in range(hybrid.ring_size)]
        # Slices are computed one after another. Else a later one might take the place of what the
        # results of an earlier one wait for.
        self.turn = [self.g.buffer("turn", initialised=True)] if hybrid.slices > 1 else []
        self.rings = [
            RingBuilder(hybrid.ring, self.group, self.g, peers, partial(hybrid.mark, number))
            for number in range(hybrid.slices)
        ]
        self.local = {
            role: self.g.buffer(f"local {role}", initialised=True)
            for role in (*hybrid.gathered, *hybrid.returned)
        }

    def build(self) -> Graph:
        self.rings[0].agree()
        if not self.hybrid.forward:
            self._delta()
        arrived: list[Part] = []
        for number in range(self.hybrid.slices):
            # All at once, all slices would arrive when the last one does.
            arrived = self._spread(number, number, gather=True, after=arrived[:1])
        tag = self.hybrid.slices
        for number, ring in enumerate(self.rings):
            tag = ring.go_round(tag)
            self._spread(number, tag, gather=False)
            tag += 1
        return self.g.build()

    def _delta(self) -> None:
        """Adds lse and delta of the rank's own queries, from which the sinks' gradient follows."""
        problem, rows = self.hybrid.problem, self.hybrid.shard_len(Role.ROWS, self.rank)
        if rows:
            cost = Cost(0, 2 * rows * problem.out_token_bytes)
            adds: list[Buffer | Part] = [self.local[Role.ROWS], *dsinks(self.g, problem)]
            self.g.compute("delta", Delta(0), accumulates=adds, cost=cost)

    def _spread(
        self, number: int, tag: int, *, gather: bool, after: Sequence[Part] = ()
    ) -> list[Part]:
        """Adds one exchange of all that travels with a slice between the members.

        gather: whether tokens were spread and heads will be; else the way back. after: parts that
        must have arrived before. Returns the parts that arrive.
        """
        hybrid, members = self.hybrid, self.hybrid.members(self.rank)
        sends: list[tuple[Part, int]] = []
        recvs: list[tuple[Part, int]] = []
        arrived: list[tuple[Unpack, Part]] = []
        for role in hybrid.travelling(number, gather=gather):
            gathered: list[Buffer | Part] = self._gathered(role, number)
            at, name = hybrid.slice_of(role, number), f"{role}{hybrid.mark(number, role)}"
            local: list[Buffer | Part] = [self.local[role]]
            source, target = (local, gathered) if gather else (gathered, local)
            # On the way there a message has as many tokens as its sender's shard, on the way back
            # as its receiver's.
            for member, peer in enumerate(members):
                if member == self.number:
                    if hybrid.shard_len(role, self.rank):
                        self._copy("keep", Keep(role, gather, at), source, accumulates=target)
                    continue
                out_of, into = (self.rank, peer) if gather else (peer, self.rank)
                sent, received = (
                    hybrid.shard_len(role, owner) * hybrid.token_bytes(role)
                    for owner in (out_of, into)
                )
                if sent:
                    part = self.g.buffer(f"{name} > {member}", size_bytes=sent)[0]
                    pack = Pack(role, gather, member, part.id, at)
                    turn = () if gather else self.turn
                    self._copy(f"pack {member}", pack, source, writes=[part], accumulates=turn)
                    sends.append((part, peer))
                if received:
                    part = self.g.buffer(f"{name} < {member}", size_bytes=received)[0]
                    recvs.append((part, peer))
                    arrived.append((Unpack(role, gather, member, part.id, at), part))
        if sends or recvs:
            self.g.exchange(
                "gather" if gather else "give back",
                sends=sends,
                recvs=recvs,
                tag=tag,
                reads=[self.rings[0].agreed, *after],
            )
        for unpack, part in arrived:
            role = unpack.tensor
            target = self._gathered(role, number) if gather else [self.local[role]]
            self._copy(f"unpack {unpack.member}", unpack, [part], accumulates=target)
        return [part for _, part in arrived]

    def _copy(
        self,
        verb: str,
        operation: Keep | Pack | Unpack,
        reads: Sequence[Buffer | Part],
        *,
        writes: Sequence[Buffer | Part] = (),
        accumulates: Sequence[Buffer | Part] = (),
    ) -> None:
        role = operation.tensor
        cost = Cost(0, 2 * self.hybrid.shard_len(role, self.rank) * self.hybrid.token_bytes(role))
        self.g.compute(
            f"{verb} {role}",
            operation,
            reads=reads,
            writes=writes,
            accumulates=accumulates,
            cost=cost,
        )

    def _gathered(self, role: Role, number: int) -> list[Buffer | Part]:
        """The buffer for a slice of the tensor, of the slice's ring."""
        ring = self.rings[number]
        if role in (Role.OUT, Role.LSE):
            return [ring.resident_sums[Role.STATE]]
        buffers = ring.resident | ring.owner_bundle | ring.resident_sums | ring.owner_sums
        return [buffers[role]]


@kept_results(8, lambda problem, *_, **options: problem.mask)
def forward_hybrid(problem: Problem, size: int, slices: int = 1, across: bool = False) -> Hybrid:
    """The forward, with `size` ranks a group. Raises InputError where groups, heads or slices do
    not divide.
    """
    ring = forward_ring(of_slice(of_groups(problem, size, across), slices))
    return Hybrid(problem, ring, size, slices, across)


@kept_results(8, lambda problem, *_, **options: problem.mask)
def backward_hybrid(
    problem: Problem, size: int, slices: int = 1, across: bool = False, *, queries_travel: bool
) -> Hybrid:
    """The backward; see `forward_hybrid`.

    queries_travel: whether the query side travels between the groups.
    """
    inner = of_slice(of_groups(problem, size, across), slices)
    ring = backward_ring(inner, queries_travel=queries_travel)
    return Hybrid(problem, ring, size, slices, across)
