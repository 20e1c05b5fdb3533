"""One layer as graphs: they fit, send what the formulas say, take the time of what they do, and
hold what a rank holds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerShape, SpreadLayer
from burst_rt.planning.choose import choose
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Full
from burst_rt.scheduler import NCCL_LANES, Schedule, check_world
from burst_rt.scheduler.simulator import Device, Hardware, Link, Node, Rate, Rotated, simulate

_SHAPE = LayerShape(dim=64, num_heads=8, num_kv_heads=4, head_dim=8, ffn_dim=96)
_LARGE = LayerShape(dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_dim=14336)
_SPLIT = ("ring-kv", "burst", "all-to-all", "two-level:1", "ring-naive")


def _machine(flops_per_s: float, bytes_per_s: float, masked: float | None = None) -> Hardware:
    work = Rate(launch_s=0.0, flops_per_s=flops_per_s, masked=masked)
    rates = {"forward": work, "backward": work, "linear": work, "default": Rate(launch_s=0.0)}
    return Hardware("test", Device(1 << 36, rates), Node(64, Link(0.0, bytes_per_s, 1.0, "full")))


@pytest.mark.parametrize("strategy", [*TENSOR_PARALLEL, *_SPLIT])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [37, 64, 3])
def test_graphs_of_all_ranks_fit(seq_len: int, world: int, strategy: str) -> None:
    layer = SpreadLayer(_SHAPE, seq_len, world, strategy)
    check_world([layer.graph(rank, forward=True, attention=False) for rank in range(world)])
    for forward in (True, False):
        check_world([layer.graph(rank, forward=forward) for rank in range(world)])
        if strategy != "ring-naive":
            check_world(
                [layer.graph(rank, forward=forward, lanes=NCCL_LANES) for rank in range(world)]
            )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_are_those_of_the_formulas(world: int) -> None:
    batch, seq_len, size = 3, 32, 2
    activations = batch * seq_len * _SHAPE.dim * size * (world - 1) // world
    norms = 2 * 2 * _SHAPE.dim * size * (world - 1) // world
    weights = 2 * _SHAPE.num_weights() * size * (world - 1) // world
    expected = {
        "tensor-parallel": (4 * activations, 4 * activations),
        "tensor-parallel+sequence": (4 * activations, 6 * activations + norms),
    }
    for rank in range(world):
        for strategy, (forward, backward) in expected.items():
            layer = SpreadLayer(_SHAPE, seq_len, world, strategy, batch=batch)
            assert layer.sent_bytes(rank, forward=True) == forward
            assert layer.sent_bytes(rank, forward=False) == backward
    for strategy in _SPLIT:
        layer = SpreadLayer(_SHAPE, seq_len, world, strategy, batch=batch)
        for forward in (True, False):
            everyone = sum(layer.sent_bytes(rank, forward=forward) for rank in range(world))
            assert everyone == layer.program(forward=forward).wire_bytes() + (
                0 if forward else world * weights
            )


@pytest.mark.parametrize("strategy", [*TENSOR_PARALLEL, "ring-kv", "burst", "all-to-all"])
def test_a_layer_takes_the_time_of_its_products_and_tiles(strategy: str) -> None:
    """On a slow device and a fast network nothing else counts, and every strategy takes as long:
    all do the same work.
    """
    world, seq_len = 4, 64
    layer = SpreadLayer(_SHAPE, seq_len, world, strategy, mask=Full())
    matrices = 2 * seq_len * _SHAPE.num_weights("qkv", "out", "gate_up", "down")
    cells = seq_len * seq_len * _SHAPE.num_heads * _SHAPE.head_dim
    slow = _machine(1e6, 1e30)
    for forward, flops in ((True, matrices + 4 * cells), (False, 2 * matrices + 10 * cells)):
        assert layer.seconds(slow, forward=forward) == pytest.approx(flops / world / 1e6, rel=1e-6)
    again = layer.simulated(slow, forward=True, attention=False)
    assert again.end_s == pytest.approx(matrices / world / 1e6, rel=1e-6)
    # Tensor parallelism sends what it sends outside attention, and nothing inside.
    sent = layer.sent_bytes(0, forward=True) if layer.tensor_parallel else 0
    assert again.ranks[0].sent_bytes == sent


@pytest.mark.parametrize("strategy", TENSOR_PARALLEL)
def test_a_starved_layer_takes_the_time_of_its_bytes(strategy: str) -> None:
    layer = SpreadLayer(_SHAPE, 64, 4, strategy)
    for forward in (True, False):
        took = layer.seconds(_machine(1e30, 1e6), forward=forward)
        assert took == pytest.approx(layer.sent_bytes(0, forward=forward) / 1e6, rel=0.02)


def test_a_strategy_with_a_kernel_of_its_own_takes_that_kernels_time() -> None:
    machine = _machine(1e6, 1e30)
    slower = replace(
        machine.device,
        rates={**machine.device.rates, "forward-untiled": Rate(launch_s=0.0, flops_per_s=1e5)},
    )
    tiled, untiled = (
        SpreadLayer(_SHAPE, 64, 2, strategy).seconds(replace(machine, device=slower), forward=True)
        for strategy in ("burst", "burst-untiled")
    )
    assert tiled < untiled


def test_causal_tiles_are_masked_in_every_strategy() -> None:
    for strategy in (*TENSOR_PARALLEL, "burst"):
        full, causal = (
            SpreadLayer(_SHAPE, 64, 2, strategy, mask=mask) for mask in (Full(), Causal())
        )
        times = [
            layer.seconds(_machine(1e6, 1e30, masked), forward=True)
            for layer in (full, causal)
            for masked in (None, 0.5)
        ]
        assert times[0] == times[1]
        assert times[2] < times[3]
        assert times[2] < times[0]


def test_ranks_of_tensor_parallelism_that_do_the_same_share_a_schedule() -> None:
    machine = load_hardware("a100-sxm")
    for strategy in TENSOR_PARALLEL:
        layer = SpreadLayer(_LARGE, 8192, 8, strategy)
        ragged = SpreadLayer(replace(_SHAPE, dim=63), 37, 4, strategy)
        for forward in (True, False):
            shared = layer.schedules(forward=forward)
            assert all(isinstance(each, Rotated) for each in shared)
            apart = [Schedule.of(layer.graph(rank, forward=forward)) for rank in range(8)]
            assert simulate(shared, machine).end_s == simulate(apart, machine).end_s
            assert not any(isinstance(each, Rotated) for each in ragged.schedules(forward=forward))


def test_transfers_of_a_layer_hide_behind_gradients_of_weights() -> None:
    """The backward's all-reduces of tensor parallelism wait for nothing but their sums; the
    products beside them go on.
    """
    layer = SpreadLayer(_LARGE, 8192, 8, "tensor-parallel")
    machine = load_hardware("a100-sxm")
    alone = sum(
        machine.device.seconds(task)
        for task in layer.graph(0, forward=False).tasks
        if task.lane == "compute"
    )
    assert layer.seconds(machine, forward=False) < alone + layer.sent_bytes(0, forward=False) / (
        machine.node.link.bytes_per_s * machine.node.link.efficiency
    )


def test_memory_of_a_rank() -> None:
    world, seq_len, size = 8, 8192, 2
    shape = _LARGE
    v1, v3, ring = (
        SpreadLayer(shape, seq_len, world, strategy).memory(0)
        for strategy in (*TENSOR_PARALLEL, "burst")
    )
    matrices = shape.num_weights("qkv", "out", "gate_up", "down")
    assert v1.weights == v3.weights == (matrices // world + 2 * shape.dim) * size
    assert ring.weights == ring.gradients == (matrices + 2 * shape.dim) * size
    inner = seq_len * (2 * (32 + 8) * 128 + 3 * 14336) * size // world + seq_len * 32 * 4 // world
    assert v1.activations == 4 * seq_len * shape.dim * size + inner
    assert v3.activations == ring.activations == 4 * seq_len * shape.dim * size // world + inner
    assert v1.working == seq_len * shape.dim * size
    assert v3.working == 2 * v1.working
    held = choose(
        SpreadLayer(shape, seq_len, world, "burst").program(forward=False).problem,
        "burst",
        forward=False,
    ).program.footprint(0)
    assert ring.working > held.sums
    assert ring.total == sum(ring)
    x, lse = seq_len * shape.dim * size, seq_len * 32 * 4
    for strategy, inputs in (("tensor-parallel", x), ("burst", x // world)):
        layer = SpreadLayer(shape, seq_len, world, strategy)
        assert layer.checkpointed_bytes(0, attention=False) == inputs
        outputs = (seq_len * 32 * 128 * size + lse) // world
        assert layer.checkpointed_bytes(0, attention=True) == inputs + outputs


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_heads": 12, "num_kv_heads": 4}, "num_heads"),
        ({}, "num_kv_heads"),
        ({"num_kv_heads": 8, "ffn_dim": 100}, "ffn_dim"),
    ],
)
def test_what_the_ranks_cannot_share_is_named(change: dict[str, int], name: str) -> None:
    shape = LayerShape(**(vars(_SHAPE) | change))
    with pytest.raises(InputError, match=f"the number of ranks must divide {name}, got 8 ranks"):
        SpreadLayer(shape, 64, 8, "tensor-parallel")


@pytest.mark.parametrize(
    "change", [{"dim": 0}, {"num_kv_heads": 3}, {"head_dim": 7}, {"ffn_dim": True}]
)
def test_shapes_that_are_none_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match=f"LayerShape: {next(iter(change))}"):
        LayerShape(**(vars(_SHAPE) | change))


def test_a_strategy_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="strategy must be one of"):
        SpreadLayer(_SHAPE, 64, 2, "tensor")
