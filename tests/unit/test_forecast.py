"""Forecasts: what a strategy would take on a machine, from its graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from graphs import Window, problem

from burst_rt.errors import InputError
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.kernels.naive import UntiledKernel
from burst_rt.planning import ranking
from burst_rt.planning.choose import CANDIDATES, choose
from burst_rt.planning.chooser import Chooser
from burst_rt.planning.forecast import (
    fold_of,
    memory_bytes,
    of_choice,
    schedules_of,
    untiled_bytes,
)
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    Mask,
    Prefix,
    SlidingWindow,
)
from burst_rt.planning.problem import Problem
from burst_rt.planning.ranking import fastest_strategy, forecast, rank_strategies, typical
from burst_rt.scheduler import Schedule
from burst_rt.scheduler.simulator import Device, Hardware, Link, Node, Rate, Rotated, simulate

_WIRE = Link(latency_s=0.0, bytes_per_s=1e9, efficiency=1.0, duplex="full")
_GIB = 1 << 30


def _machine(flops_per_s: float, masked: float | None = None) -> Hardware:
    tiles = Rate(launch_s=0.0, flops_per_s=flops_per_s, masked=masked)
    return Hardware(
        "test",
        Device(_GIB, {"forward": tiles, "backward": tiles, "default": Rate(launch_s=0.0)}),
        Node(8, _WIRE),
    )


def _problem(
    world: int, seq_len: int = 4096, mask: Mask | None = None, kv_heads: int = 8
) -> Problem:
    return problem(
        seq_len, seq_len, world, mask=mask, heads=(8, kv_heads), head_dim=64, input_bytes=2
    )


def test_a_ring_that_hides_its_transfers_takes_the_time_of_its_tiles() -> None:
    given = _problem(4)
    flops = 4 * 64 * 8 * 4096 * 4096 / 4
    found = forecast(given, "ring-kv", _machine(1e10), forward=True)
    assert found.time_s == pytest.approx(flops / 1e10, rel=1e-6)
    assert found.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert found.fits
    # The same ring on a fast device waits for the wire: three hops of a shard's keys and values.
    starved = forecast(given, "ring-kv", _machine(1e15), forward=True)
    assert starved.time_s == pytest.approx(3 * 2 * 1024 * 8 * 64 * 2 / 1e9, rel=1e-3)
    assert starved.exposed_s == pytest.approx(starved.time_s, rel=1e-2)
    assert starved.sent_bytes == 3 * 2 * 1024 * 8 * 64 * 2


def test_a_mask_that_cuts_through_tiles_costs_what_the_machine_says() -> None:
    given = _problem(1, mask=Causal())
    plain, slow = (
        forecast(given, "ring-kv", _machine(1e10, masked), forward=True).time_s
        for masked in (None, 0.5)
    )
    assert slow == pytest.approx(2 * plain)


def test_ranks_that_do_the_same_share_a_schedule_and_take_the_same_time() -> None:
    machine = _machine(1e11)
    program = choose(_problem(4), "burst", forward=False).program
    shared = schedules_of(program)
    assert all(isinstance(each, Rotated) for each in shared)
    ragged = schedules_of(choose(_problem(4, 4097), "burst", forward=False).program)
    causal = schedules_of(choose(_problem(4, mask=Causal()), "burst", forward=False).program)
    assert not any(isinstance(each, Rotated) for each in (*ragged, *causal))
    apart = [Schedule.of(program.graph(rank)) for rank in range(4)]
    assert simulate(shared, machine).end_s == simulate(apart, machine).end_s


def test_memory_is_tensors_sums_and_slots() -> None:
    given = _problem(4)
    choice = choose(given, "ring-kv", forward=True)
    program = choice.program
    shard = 1024 * 8 * 64 * 2
    # q, k, v, out; two slots of keys and values; the running state in float32.
    assert (
        memory_bytes(choice, 0, program.graph(0))
        == 4 * shard + 4 * shard + program.footprint(0).sums
    )


def test_what_does_not_fit_says_so_and_what_is_not_allowed_is_refused() -> None:
    machine = _machine(1e11)
    given = _problem(4, seq_len=65536)
    assert forecast(given, "ring-kv", machine, forward=True).fits
    assert not forecast(given, "ring-naive", machine, forward=True).fits
    grouped = _problem(4, kv_heads=2)
    with pytest.raises(InputError, match="heads"):
        forecast(grouped, "all-to-all", machine, forward=True)
    # The planner weighs the others, each by its own name.
    seconds = fastest_strategy(grouped, machine, forward=False, ranks_per_node=4).seconds
    assert seconds is not None
    assert not any("all-to-all" in name for name in seconds)
    assert len(seconds) == len(CANDIDATES) - 1


def test_the_fastest_is_taken_and_of_equals_the_one_that_sends_least() -> None:
    # Nothing to hide transfers behind: what is on the wire decides. Grouped heads make K and V the
    # smaller side.
    hasty = _machine(1e16)
    for given, wanted in ((_problem(4), "all-to-all"), (_problem(4, kv_heads=1), "ring-kv")):
        taken = fastest_strategy(given, hasty, forward=False, ranks_per_node=1)
        assert taken.strategy == wanted
        assert taken.seconds is not None
        assert taken.seconds[wanted] == min(taken.seconds.values())
    # All is hidden: equal times, fewest bytes.
    slow = fastest_strategy(_problem(4, kv_heads=1), _machine(1e9), forward=True, ranks_per_node=1)
    assert slow.seconds is not None
    assert max(slow.seconds.values()) < min(slow.seconds.values()) * 1.02
    assert slow.program.wire_bytes() == min(slow.candidates.values())


def test_few_queries_travel_where_that_is_forecast_to_be_faster() -> None:
    hasty = _machine(1e16)
    for q_len, wanted in ((512, "ring-q"), (4096, "ring-kv")):
        given = problem(q_len, 4096, 4, heads=(8, 8), head_dim=64, input_bytes=2)
        ranked = rank_strategies(given, hasty, forward=True, ranks_per_node=1)
        assert ("ring-q" in ranked.seconds) == (wanted == "ring-q")
        taken = fastest_strategy(given, hasty, forward=True, ranks_per_node=1).program
        assert taken.queries_travel is (wanted == "ring-q")
        if wanted == "ring-q":
            assert ranked.seconds["ring-q"] < ranked.seconds["ring-kv"]
            assert ranked.candidates["ring-q"] < ranked.candidates["ring-kv"]


def test_what_does_not_fit_is_not_taken_while_something_does() -> None:
    given = _problem(4, seq_len=1 << 15)
    machine = _machine(1e16)
    sizes = {
        name: forecast(given, name, machine, forward=False) for name in ("all-to-all", "ring-kv")
    }
    small = replace(
        machine, device=replace(machine.device, memory_bytes=sizes["ring-kv"].memory_bytes)
    )
    assert sizes["all-to-all"].memory_bytes > sizes["ring-kv"].memory_bytes
    assert (
        fastest_strategy(given, machine, forward=False, ranks_per_node=1).strategy == "all-to-all"
    )
    assert fastest_strategy(given, small, forward=False, ranks_per_node=1).strategy != "all-to-all"


def test_fresh_masks_have_few_forecasts() -> None:
    """Of the batches of a training run: documents of queries and keys, prefixes."""
    chance = random.Random(0)

    def parts(total: int, count: int) -> list[int]:
        cuts = sorted(chance.sample(range(1, total), count - 1))
        return [b - a for a, b in pairwise([0, *cuts, total])]

    fresh = [
        Causal() & Documents(parts(2048, count), parts(4096, count))
        for count in chance.choices(range(12, 20), k=100)
    ]
    alike = {mask.alike for mask in fresh}
    assert len(set(fresh)) == 100
    assert len(alike) <= 3
    # As many queries and keys, and about as many cells.
    for mask in fresh:
        assert mask.alike.refuses(2048, 4096, 1) is None
    whole = range(2048, 4096), range(4096)
    cells = [sum(x.num_cells for x in mask.pieces(*whole)) for mask in (fresh[0], fresh[0].alike)]
    assert 0.6 < cells[1] / cells[0] < 1.6

    prefixes = {Prefix(n).alike for n in range(1, 10_000)}
    assert len(prefixes) < 4 * 14
    for n in range(10_000):
        length = Prefix(n).alike.length
        assert isinstance(length, int)
        assert n <= length <= 1.25 * n


def test_layouts_of_fresh_documents_have_one_forecast() -> None:
    found = []
    for first in (1000, 1040, 1100):
        mask = Causal() & Documents([first, 2048 - first] * 2)
        layout = make_layout("balanced", 4096, 4, mask)
        found.append(replace(_problem(4, mask=mask), q_layout=layout, kv_layout=layout))
    assert len({problem.q_layout for problem in found}) == 3
    (like,) = {typical(problem) for problem in found}
    assert like.q_layout == make_layout("balanced", 4096, 4, like.mask)
    # A layout that no mask of the call's kind could have led to stays.
    odd = replace(found[0], mask=BlockSparse([[True]], 8))
    assert typical(odd) == odd


def test_the_untiled_kernel_takes_as_much_as_forecasts_say() -> None:
    program = choose(_problem(4), "burst-untiled", forward=True).program
    assert untiled_bytes(program, 1) == UntiledKernel().scratch_bytes(
        True, torch.bfloat16, program.footprint(1).tile
    )


def test_plans_say_whether_tiles_are_computed_under_the_mask_itself() -> None:
    for forward in (True, False):
        plain, masked = (
            choose(_problem(4, mask=mask), "ring-kv", forward=forward).program.footprint(1).tile
            for mask in (Causal(), Window())
        )
        assert (plain.masked, masked.masked) == (False, True)
        assert plain == masked._replace(masked=False)
        assert CpuKernel().scratch_bytes(
            forward, torch.float32, masked
        ) > CpuKernel().scratch_bytes(forward, torch.float32, plain)


def _of_nodes(rate: float) -> Hardware:
    """Nodes of 8 GPUs, each with a card of so many bytes a second."""
    machine = load_hardware("h100-sxm")
    assert machine.nics is not None
    link = replace(machine.nics.link, bytes_per_s=rate)
    return replace(machine, nics=replace(machine.nics, link=link))


@pytest.mark.parametrize(
    ("mask", "forward"), [(Causal(), True), (Causal(), False), (SlidingWindow(4095), True)]
)
def test_what_cannot_win_by_its_bound_is_not_simulated(
    mask: Mask, forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _problem(24, 24 << 10, mask=mask)
    for rate in (1e9, 50e9):
        machine = _of_nodes(rate)
        ranked = rank_strategies(given, machine, forward=forward, ranks_per_node=8)
        with monkeypatch.context() as changed:
            changed.setattr(ranking, "_EVERY_UP_TO", 24)
            every = rank_strategies(given, machine, forward=forward, ranks_per_node=8)
        assert ranked.strategy == every.strategy
        assert ranked.seconds.items() <= every.seconds.items()
        assert len(ranked.seconds) < len(every.seconds)


@pytest.mark.parametrize("forward", [True, False])
def test_one_rank_of_a_node_tells_about_all_that_share_its_heads(forward: bool) -> None:
    given, machine = _problem(24, 24 << 10, mask=Causal()), _of_nodes(12.5e9)
    choice = choose(given, "hybrid", forward=forward, ranks_per_node=8)
    assert fold_of(choice.program, machine) == 8
    told = of_choice(choice, machine)
    run = simulate(schedules_of(choice.program), machine, seconds=machine.device.seconds)
    assert told.time_s == pytest.approx(run.end_s, rel=1e-4)
    assert told.sent_bytes == max(rank.sent_bytes for rank in run.ranks)
    held = [memory_bytes(choice, r, choice.program.graph(r)) for r in range(24)]
    assert told.memory_bytes == max(held)
    # Rings, smaller groups, and shards of different lengths.
    for strategy, seq_len in (("ring-kv", 24 << 10), ("hybrid:4", 24 << 10), ("hybrid", 2001)):
        other = choose(
            _problem(24, seq_len, mask=Causal()), strategy, forward=forward, ranks_per_node=8
        )
        assert fold_of(other.program, machine) == 1


def test_a_slow_network_between_nodes_decides_in_a_world_of_64() -> None:
    """Fewest bytes would be a ring's, which waits for the slowest link in every hop."""
    machine = _of_nodes(12.5e9)
    given = _problem(64, 1 << 19, mask=Causal())
    by_bytes = choose(given, "auto", forward=True, ranks_per_node=8)
    taken = Chooser(machine, 8, 4).choose(given, "auto", forward=True)
    assert (by_bytes.strategy, taken.strategy) == ("ring-kv", "two-level:8")
    assert of_choice(taken, machine).time_s < 0.8 * of_choice(by_bytes, machine).time_s


@pytest.mark.parametrize(
    ("mask", "kind", "forward"),
    [
        (Causal(), "zigzag", True),
        (Full(), "contiguous", False),
        pytest.param(Causal(), "zigzag", False, marks=pytest.mark.long),
        pytest.param(Full(), "contiguous", True, marks=pytest.mark.long),
    ],
)
def test_shorter_rings_tell_what_the_whole_would(
    forward: bool, mask: Mask, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(
        48 << 12, 48 << 12, 48, mask=mask, kinds=(kind, kind), heads=(8, 8), head_dim=64,
        input_bytes=2,
    )  # fmt: skip
    machine = _of_nodes(12.5e9)
    told = rank_strategies(given, machine, forward=forward, ranks_per_node=8)
    monkeypatch.setattr(ranking, "_WHOLE_UP_TO", 48)
    whole = rank_strategies(given, machine, forward=forward, ranks_per_node=8)
    assert told.strategy == whole.strategy
    # Off by most where ranks wait much.
    assert told.seconds == pytest.approx(
        {name: whole.seconds[name] for name in told.seconds}, rel=0.03
    )


def test_very_large_worlds_are_forecast_where_hops_are_alike() -> None:
    machine = _of_nodes(12.5e9)
    chooser = Chooser(machine, 8, 4)
    taken = chooser.choose(_problem(512, 1 << 20, mask=Causal()), "auto", forward=True)
    assert taken.strategy == "hybrid:8"
    assert taken.seconds is not None
    assert taken.seconds["hybrid:8"] > 0
    # Hops differ under a window, so that bytes decide.
    assert (
        chooser.choose(
            _problem(512, 1 << 20, mask=SlidingWindow(4095)), "auto", forward=True
        ).seconds
        is None
    )
