"""The planner: from a problem to a verified plan, cached.

A plan is everything about one direction of a call that does not depend on the tensors' values: the graph of this rank, its schedule, the
kernel, what is sent, what memory it takes. Plans of all ranks are built and verified together (up to 64 ranks; above, each rank checks its
own graph and the message sequences of its neighbours), as the machine runs them: with its lanes, and lowered (staged) where it lowers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from burst_rt.attention.problem import Problem
from burst_rt.attention.strategies import Choice, choose
from burst_rt.kernels import Kernel, Picked, pick
from burst_rt.scheduler import HOST_LANES, Graph, Lane, Part, Schedule, check_graph, check_messages, check_world

__all__ = ["Memory", "Plan", "PlanKey", "Planner"]

_VERIFY_ALL_UP_TO = 64


class PlanKey(NamedTuple):
    """What a plan depends on, beside the rank."""

    forward: bool
    problem: Problem
    strategy: str
    kernel: str
    dtype: torch.dtype
    device: torch.device


class Memory(NamedTuple):
    """Bytes one call takes on this rank beyond its inputs and outputs.

    slots: the double buffer, travelling sums included. sums: running state, gradient sums that are not outputs themselves, lse and delta.
    packed: copies of own blocks that are not contiguous and must travel (batch > 1 or strided inputs; counted as if all were). scratch:
    the most a tile allocates. chunks: pinned host memory (0 where nothing is staged).
    """

    slots: int
    sums: int
    packed: int
    scratch: int
    chunks: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Plan:
    """One direction of one call on one rank, verified. `ring_graph` is what the strategy built, `graph` what the machine makes of it."""

    key: PlanKey
    rank: int
    choice: Choice
    picked: Picked
    ring_graph: Graph
    schedule: Schedule

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @property
    def kernel(self) -> Kernel:
        return self.picked.kernel

    @cached_property
    def slots(self) -> tuple[Part, ...]:
        """The slots this rank uses (a short ring may leave some of the double buffer untouched)."""
        graph = self.ring_graph
        return tuple(part for part in graph.parts if part.id in graph.written and part.size_bytes and not part.initialised)

    @cached_property
    def chunks(self) -> tuple[Part, ...]:
        """Pinned host memory that messages are staged through, if they are. Parts keep their numbers when they are."""
        return self.graph.parts[len(self.ring_graph.parts) :]

    @cached_property
    def part_ids(self) -> dict[tuple[str, int], int]:
        """Part numbers by (buffer, index)."""
        return {(part.buffer, part.index): part.id for part in self.ring_graph.parts}

    def bytes_sent(self) -> int:
        """Bytes this rank sends in one run: the sum over the graph's messages."""
        return sum(m.size_bytes for task in self.graph.tasks for m in task.sends)

    def memory(self) -> Memory:
        """What one run takes, in bytes."""
        problem, forward = self.key.problem, self.key.forward
        q_len, kv_len = problem.q_layout.shard_len(self.rank), problem.kv_layout.shard_len(self.rank)
        slots = sum(part.size_bytes for part in self.slots)
        # An output of the sums' own type is the sum itself.
        in_place = problem.input_bytes == problem.sum_bytes
        if forward:
            sums = q_len * (problem.row_bytes + (0 if in_place else problem.q_sum_bytes))
        else:
            needs_q, needs_k, needs_v = problem.needs_grad
            wide = q_len * problem.q_sum_bytes * needs_q + kv_len * problem.kv_sum_bytes * (needs_k + needs_v)
            sums = q_len * problem.row_bytes + (0 if in_place else wide)
        own = sum(
            part.size_bytes for part in self.graph.parts if part.id in self.ring_graph.sent and part.initialised and part.buffer != "rows"
        )
        packed = own if problem.batch > 1 else 0
        block = max(len(b) for blocks in self.choice.ring.travelling for b in blocks)
        tile = (block, kv_len) if self.choice.ring.queries_travel else (q_len, block)
        heads = (problem.batch, problem.num_heads, problem.num_kv_heads, problem.head_dim)
        scratch = self.kernel.scratch_bytes(forward, *heads, self.key.dtype, *tile)
        return Memory(slots, sums, packed, scratch, sum(part.size_bytes for part in self.chunks))


class Planner:
    """Makes plans for one rank and keeps the `capacity` most recently used."""

    def __init__(
        self, rank: int, lanes: tuple[Lane, ...] = HOST_LANES, lower: Callable[[Graph], Graph] = lambda graph: graph, capacity: int = 64
    ) -> None:
        self._rank = rank
        self._lanes = lanes
        self._lower = lower
        self._capacity = capacity
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()

    def plan(self, key: PlanKey) -> Plan:
        """The plan for a key, built and verified on first use. Raises InputError for what no kernel or strategy can do."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(key)
            if len(self._plans) > self._capacity:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def _make(self, key: PlanKey) -> Plan:
        picked = pick(key.device, key.dtype, key.problem.head_dim, key.problem.mask, key.kernel)
        choice = choose(key.problem, key.strategy, forward=key.forward)
        world = key.problem.world_size

        def graph(rank: int) -> Graph:
            return choice.ring.graph(rank % world, self._lanes)

        own = graph(self._rank)
        lowered = self._lower(own)
        if world <= _VERIFY_ALL_UP_TO:
            check_world([lowered if rank == self._rank else self._lower(graph(rank)) for rank in range(world)])
        else:
            check_graph(lowered)
            check_messages([self._lower(graph(self._rank - 1)), lowered, self._lower(graph(self._rank + 1))])
        return Plan(key, self._rank, choice, picked, own, Schedule.of(lowered))
