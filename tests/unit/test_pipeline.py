"""Custom pipelines: a user's own graph on the engine, from threads."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.errors import (
    BurstError,
    ConfigError,
    ContractMismatch,
    DeviceError,
    InputError,
    PeerLost,
)
from burst_rt.scheduler import HOST_LANES, NCCL_LANES, Graph, GraphBuilder, Op

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
SIZE_BYTES = 64


def build(rank: int, world_size: int) -> Graph:
    """Every rank adds up what it holds, and passes it on, once round the ring."""
    g = GraphBuilder(rank, world_size)
    slots = [
        g.buffer("here", size_bytes=SIZE_BYTES, initialised=True),
        g.buffer("there", size_bytes=SIZE_BYTES),
    ]
    total = g.buffer("total", initialised=True)
    for hop in range(world_size):
        here, coming = slots[hop % 2], slots[(hop + 1) % 2]
        if hop + 1 < world_size:
            g.exchange(
                f"hop {hop}",
                sends=[(here, (rank + 1) % world_size)],
                recvs=[(coming, (rank - 1) % world_size)],
                tag=hop,
            )
        g.compute(f"add {hop}", Op("add", (here.name,)), reads=[here], accumulates=[total])
    return g.build()


def run(ctx: Context) -> float:
    pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
    buffers = {
        "here": torch.full((16,), float(ctx.rank + 1)),
        "there": torch.full((16,), torch.nan),
    }
    total = torch.zeros(16)

    def add(name: str) -> None:
        pipeline.progress()
        total.add_(buffers[name])

    trace = pipeline.run(buffers=buffers, ops={"add": add})
    assert len(trace) == len(pipeline.graph.tasks)
    assert total.min() == total.max()
    return float(total[0])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_ring_of_ones_own(world: int) -> None:
    assert burst_rt.run_local(world, run) == [sum(range(1, world + 1))] * world


def failure(ctx: Context, *, odd: bool) -> BurstError:
    """What a rank gets when rank 1 does something odd and the others do not, and that the context
    is as good as before.
    """
    pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
    if ctx.rank == 1 and odd:
        pipeline.fingerprint = "another"
    there = torch.zeros(16 if odd or ctx.rank != 1 else 15)
    with pytest.raises(BurstError) as caught:
        pipeline.run(
            buffers={"here": torch.zeros(16), "there": there}, ops={"add": lambda name: None}
        )
    assert ctx.runtime.transport.bytes_sent == 0
    run(ctx)
    return caught.value


def test_a_buffer_too_small_on_one_rank_is_refused_on_all() -> None:
    for error in burst_rt.run_local(3, lambda ctx: failure(ctx, odd=False)):
        assert type(error) is InputError
        assert "rank 1" in str(error)
        assert "there[0] must be a contiguous tensor of its 64 bytes, got 60 bytes" in str(error)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "must be a tensor, got nothing"),
        ([], "must be a tensor, got nothing"),
        ([3.0], "must be a tensor, got float"),
        (torch.zeros(16).numpy(), "must be a tensor, got ndarray"),
        (torch.zeros(16, device="meta"), "must be on cpu, the context's device, got meta"),
        (
            torch.zeros(32)[::2],
            "must be a contiguous tensor of its 64 bytes, got 64 bytes, contiguous: False",
        ),
        (
            torch.zeros(16).to_sparse(),
            "must be a contiguous tensor of its 64 bytes, got torch.sparse_coo",
        ),
    ],
)
def test_what_is_no_buffer_on_one_rank_is_refused_on_all(wrong: Any, got: str) -> None:
    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        buffers = {"here": torch.zeros(16), "there": wrong if ctx.rank == 1 else torch.zeros(16)}
        with pytest.raises(InputError, match=re.escape(f"rank 1: Pipeline.run: there[0] {got}")):
            pipeline.run(buffers=buffers, ops={"add": lambda name: None})
        run(ctx)

    burst_rt.run_local(2, call)


def test_a_tensor_of_another_size_is_refused_though_its_messages_would_fit() -> None:
    """Half of a float64 tensor would travel as float32."""

    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        buffers = {"here": torch.zeros(16), "there": torch.zeros(16, dtype=torch.float64)}
        expected = r"there\[0\] must be a contiguous tensor of its 64 bytes, got 128 bytes"
        with pytest.raises(InputError, match=expected):
            pipeline.run(buffers=buffers, ops={"add": print})

    burst_rt.run_local(2, call)


def test_a_name_that_no_buffer_has_is_refused() -> None:
    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        buffers = {"here": torch.zeros(16), "their": torch.zeros(16)}
        expected = r"must be among the graph's \['here', 'there', 'total'\], got \['their'\]"
        with pytest.raises(InputError, match=expected):
            pipeline.run(buffers=buffers, ops={"add": print})

    burst_rt.run_local(2, call)


def test_a_build_that_is_of_another_rank_is_refused() -> None:
    def call(ctx: Context) -> None:
        with pytest.raises(InputError, match=r"build\(0\) must return the graph of rank 0 of 2"):
            ctx.pipeline(lambda rank: build(1, 2))
        with pytest.raises(InputError, match=r"build\(0\) must return a Graph, got NoneType"):
            ctx.pipeline(lambda rank: None)  # type: ignore[arg-type, return-value]

    burst_rt.run_local(2, call)


def test_a_mismatch_inside_a_run_breaks_the_context() -> None:
    """Of another context, say: unlike one of this run's own it comes when messages are under
    way.
    """

    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))

        def add(name: str) -> None:
            if ctx.rank == 0:
                raise ContractMismatch("of another context")

        buffers = {"here": torch.zeros(16), "there": torch.zeros(16)}
        if ctx.rank == 0:
            with pytest.raises(ContractMismatch, match="of another context"):
                pipeline.run(buffers=buffers, ops={"add": add})
        else:
            with contextlib.suppress(PeerLost):  # unless it had all it needed by then
                pipeline.run(buffers=buffers, ops={"add": add})
        with pytest.raises(
            PeerLost,
            match="this context broke in an earlier call" if ctx.rank == 0 else "rank 0 failed",
        ):
            pipeline.run(buffers=buffers, ops={"add": add})

    burst_rt.run_local(2, call)


def test_device_memory_is_not_staged() -> None:
    def call(ctx: Context) -> str:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        machine = ctx.runtime.machine
        machine.choice = machine.choice._replace(staged=True)
        # "meta" stands for a GPU: it is no CPU either.
        buffers = {
            name: torch.zeros(16, device="meta" if ctx.rank else "cpu")
            for name in ("here", "there")
        }
        with pytest.raises(ConfigError) as caught:
            pipeline.run(buffers=buffers, ops={"add": lambda name: None})
        return str(caught.value)

    for message in burst_rt.run_local(2, call):
        assert (
            "rank 1: Pipeline.run: here[0] is on meta, and the staged transport does not support "
            "custom pipelines" in message
        )


def test_device_memory_needs_the_lanes_of_a_device() -> None:
    def call(ctx: Context) -> str:
        pipeline = ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        # "meta" stands for a GPU.
        ctx.runtime.device = torch.device("meta")
        buffers = {name: torch.zeros(16, device="meta") for name in ("here", "there")}
        with pytest.raises(ConfigError) as caught:
            pipeline.run(buffers=buffers, ops={"add": lambda name: None})
        return str(caught.value)

    for message in burst_rt.run_local(2, call):
        assert "here[0] is on meta, and the graph has the lanes of a host" in message


def test_tags_that_the_transport_cannot_take_are_refused_when_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(ctx: Context) -> bool:
        monkeypatch.setattr(ctx.runtime.machine.transport, "max_tag", 0)
        with pytest.raises(ConfigError, match=r"message tags up to \d+; this MPI allows 0"):
            ctx.pipeline(lambda rank: build(rank, ctx.world_size))
        layout = ctx.layout(8)
        x = torch.ones(1, layout.shard_len, 2, 16)
        with pytest.raises(ConfigError, match="this MPI allows 0"):
            burst_rt.burst_attention(x, x, x, layout=layout, strategy="direct")
        return True

    assert burst_rt.run_local(3, call) == [True] * 3


def test_another_graph_on_one_rank_is_refused_on_all() -> None:
    for error in burst_rt.run_local(3, lambda ctx: failure(ctx, odd=True)):
        assert type(error) is ContractMismatch
        assert "graphs" in str(error)


def test_graphs_that_do_not_fit_are_refused_when_made() -> None:
    def lonely(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", size_bytes=8, initialised=True)
        g.exchange("to nobody", sends=[(own, 1 - rank)], tag=0)
        return g.build()

    def make(ctx: Context) -> None:
        with pytest.raises(InputError, match=r"Context.pipeline: rank 0: .* never receives"):
            ctx.pipeline(lonely)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable

    burst_rt.run_local(2, make)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example().main()
    assert "the result is right" in capsys.readouterr().out
    assert (tmp_path / "pipeline.png").stat().st_size > 1000


def test_a_graph_for_other_lanes_is_refused() -> None:
    """Before anything is sent; and every rank refuses it alike, since all have the same kind of
    machine.
    """

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 2, NCCL_LANES)
        here, there = (
            g.buffer("here", size_bytes=4, initialised=True),
            g.buffer("there", size_bytes=4),
        )
        g.exchange("swap", sends=[(here, 1 - rank)], recvs=[(there, 1 - rank)], tag=0)
        return g.build()

    def call(ctx: Context) -> str:
        with pytest.raises(ConfigError) as caught:
            ctx.pipeline(build).run(
                buffers={name: torch.zeros(1) for name in ("here", "there")}, ops={}
            )
        assert ctx.lanes == HOST_LANES
        return str(caught.value)

    for message in burst_rt.run_local(2, call):
        assert "the lanes of this context (local on cpu), got others" in message


def test_operations_get_the_tensors_that_they_name() -> None:
    """Parts and buffers come as tensors, also those that the run itself makes."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", parts=2, size_bytes=[8, 16], initialised=True)
        slot, total = g.buffer("slot", size_bytes=16), g.buffer("total", initialised=True)
        g.exchange("swap", sends=[(own[1], 1 - rank)], recvs=[(slot, 1 - rank)], tag=0)
        g.compute("add", Op("add", (total, slot)), reads=[slot], accumulates=[total])
        g.compute("both", Op("both", (own, total[0], 7)), reads=[own], accumulates=[total])
        return g.build()

    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(build)
        assert pipeline.graph.wire_bytes == 16
        total = torch.zeros(2, dtype=torch.float64)

        def both(parts: tuple[torch.Tensor, ...], into: torch.Tensor, number: int) -> None:
            assert [part.numel() for part in parts] == [1, 2]
            into.add_(number + parts[0])

        for once in (1.0, 2.0):  # other tensors, the same pipeline
            own = [torch.full((n,), once * (1 + ctx.rank), dtype=torch.float64) for n in (1, 2)]
            pipeline.run(buffers={"own": own, "total": total.zero_()}, ops={"both": both})
            assert total.tolist() == [7 + 3 * once] * 2
        with pytest.raises(InputError, match=r"own\[0\] must be a tensor, got nothing"):
            pipeline.run(buffers={"total": total}, ops={"both": both})

    burst_rt.run_local(2, call)


def test_one_tensor_is_cut_for_the_parts_of_its_buffer() -> None:
    """Along its first dimension; what does not fit on one rank is refused on all."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", parts=3, size_bytes=[32, 0, 16], initialised=True)
        got = g.buffer("got", size_bytes=16)
        g.exchange("swap", sends=[(own[2], 1 - rank)], recvs=[(got, 1 - rank)], tag=0)
        g.compute("look", "look", reads=[own, got])
        return g.build()

    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(build)
        own, got = torch.arange(6.0).view(3, 2).double() + 10 * ctx.rank, torch.empty(2).double()
        shapes: list[torch.Size] = []

        def look(parts: tuple[torch.Tensor, ...], got: torch.Tensor) -> None:
            shapes.extend(part.shape for part in parts)
            assert got.tolist() == [14 - 10 * ctx.rank, 15 - 10 * ctx.rank]
            assert torch.equal(torch.cat(parts), own)

        pipeline.run(buffers={"own": own, "got": got}, ops={"look": look})
        assert shapes == [(2, 2), (0, 2), (1, 2)]
        for wrong, said in (
            (torch.zeros(5, 2).double(), r"got 5 rows of 16 bytes"),
            (torch.zeros(2, 3).double(), r"got 2 rows of 24 bytes"),
            (torch.zeros(()).double(), r"got 0 rows of 8 bytes"),
            (torch.zeros(3, 0).double(), r"got 3 rows of 0 bytes"),
        ):
            buffers = {"own": wrong if ctx.rank else own, "got": got}
            with pytest.raises(InputError, match=r"rank 1: .* own must be a tensor .*" + said):
                pipeline.run(buffers=buffers, ops={"look": look})

    burst_rt.run_local(2, call)


def test_a_term_is_added_from_a_byte_on() -> None:
    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", size_bytes=16, initialised=True)
        slot, total = g.buffer("slot", size_bytes=16), g.buffer("total", initialised=True)
        g.exchange("swap", sends=[(own, 1 - rank)], recvs=[(slot, 1 - rank)], tag=0)
        g.compute("add", Op("add", (total, slot, 8)), reads=[slot], accumulates=[total])
        return g.build()

    def call(ctx: Context) -> list[list[float]]:
        total = torch.ones(2, 2, dtype=torch.float64)
        own = torch.tensor([3.0, 4.0], dtype=torch.float64)
        ctx.pipeline(build).run(buffers={"own": own, "total": total}, ops={})
        return total.tolist()

    assert burst_rt.run_local(2, call) == [[[1, 4], [5, 1]]] * 2


def test_an_operation_names_what_its_task_declares() -> None:
    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 1)
        g.compute("t", Op("f", (g.buffer("hidden"),)))
        return g.build()

    def call(ctx: Context) -> None:
        with pytest.raises(InputError, match=r"task 't': the operation names hidden\[0\], which"):
            ctx.pipeline(build)

    burst_rt.run_local(1, call)


def _swap(rank: int, **of_tasks: Any) -> Graph:
    """Two ranks send each other x; and x, then what came, are added to the output."""
    g = GraphBuilder(rank, 2)
    x = g.buffer("x", size_bytes=16, initialised=True)
    far, out = g.buffer("far", size_bytes=16), g.buffer("out", initialised=True)
    g.exchange("swap", sends=[(x, 1 - rank)], recvs=[(far, 1 - rank)], tag=0, **of_tasks)
    g.compute("mine", Op("f", (out, x)), reads=[x], accumulates=[out])
    g.compute("theirs", Op("f", (out, far)), reads=[far], accumulates=[out])
    return g.build()


def _add_threefold(out: torch.Tensor, x: torch.Tensor) -> None:
    out.add_(3 * x.view(out.dtype))


@pytest.mark.parametrize("name", ["x", "far", "out"])
def test_what_autograd_would_record_in_part_is_refused(name: str) -> None:
    """Operations were recorded, and messages were not: the gradient was this rank's share."""

    def call(ctx: Context) -> float:
        pipeline = ctx.pipeline(_swap)
        buffers = {name: torch.ones(4) for name in ("x", "far", "out")}
        buffers[name].requires_grad_()
        with pytest.raises(InputError, match=rf"{name}\[0\] requires grad, .*differentiable"):
            pipeline.run(buffers=buffers, ops={"f": _add_threefold})
        with torch.no_grad():
            pipeline.run(buffers=buffers, ops={"f": _add_threefold})
        return float(buffers["out"][0].detach())

    assert burst_rt.run_local(2, call) == [7.0, 7.0]


def test_a_backward_does_not_use_what_a_message_has_overwritten() -> None:
    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(_swap)
        slot, scale = torch.zeros(4), torch.ones((), requires_grad=True)
        out = scale * slot
        buffers = {"x": torch.ones(4), "far": slot, "out": torch.zeros(4)}
        pipeline.run(buffers=buffers, ops={"f": _add_threefold})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        with torch.inference_mode():
            buffers = {"x": torch.ones(4), "far": torch.ones(4), "out": torch.zeros(4)}
            pipeline.run(buffers=buffers, ops={"f": _add_threefold})

    burst_rt.run_local(2, call)


@dataclasses.dataclass(frozen=True)
class _OwnOperation:
    name: str = "f"


def test_tasks_that_no_run_performs_are_refused() -> None:
    def unknown(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        g.compute("own", _OwnOperation(), accumulates=[g.buffer("x", initialised=True)])
        return g.build()

    def on_control(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        g.compute("f", "f", accumulates=[g.buffer("x", initialised=True)], lane="control")
        return g.build()

    def call(ctx: Context) -> None:
        for build, said in (
            (lambda rank: _swap(rank, lane="control"), "task 'swap' is on the lane 'control'"),
            (on_control, "task 'f' is on the lane 'control'"),
            (unknown, "task 'own': op: expected a name or an Op, got _OwnOperation"),
        ):
            with pytest.raises(InputError, match=said):
                ctx.pipeline(build)

    burst_rt.run_local(2, call)


def test_parts_that_tasks_change_have_memory_of_their_own() -> None:
    def call(ctx: Context) -> None:
        pipeline = ctx.pipeline(_swap)
        shared = torch.ones(8)
        for buffers in (
            {"x": shared[:4], "out": shared[:4], "far": torch.ones(4)},
            {"x": torch.ones(4), "out": shared[2:6], "far": shared[:4]},
        ):
            with pytest.raises(InputError, match="share memory, and a task changes one of them"):
                pipeline.run(buffers=buffers, ops={"f": _add_threefold})
        buffers = {"x": shared[:4], "out": shared[4:], "far": torch.ones(4)}
        pipeline.run(buffers=buffers, ops={"f": _add_threefold})

    burst_rt.run_local(2, call)


def test_a_rank_without_memory_for_a_slot_is_every_ranks_error() -> None:
    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, 2)
        x = g.buffer("x", initialised=True)
        g.compute("f", Op("f", (x,)), accumulates=[x])
        slot = g.buffer("slot", size_bytes=16 << (42 * (rank == 0)))
        g.compute("g", Op("f", (slot,)), writes=[slot])
        return g.build()

    def call(ctx: Context) -> float:
        pipeline = ctx.pipeline(build)
        with pytest.raises(DeviceError, match=r"out of memory: .* take 70,368,744,177,664 bytes"):
            pipeline.run(buffers={"x": torch.ones(1)}, ops={"f": print})
        return run(ctx)  # the context stays usable

    assert burst_rt.run_local(2, call) == [3.0, 3.0]


def test_compiled_programs_break_at_a_run() -> None:
    with burst_rt.init() as ctx:
        g = GraphBuilder(0, 1)
        x = g.buffer("x", initialised=True)
        g.compute("double", Op("double", (x,)), accumulates=[x])
        pipeline = ctx.pipeline(lambda _: g.build())

        def doubled(t: torch.Tensor) -> torch.Tensor:
            made = t * 2
            pipeline.run(buffers={"x": made}, ops={"double": lambda y: y.mul_(2)})
            return made + 1

        found = torch.compile(doubled, backend="aot_eager")(torch.ones(3))
    assert found.tolist() == [5.0] * 3


def test_a_call_in_a_pipelines_operation_is_told_what_it_is() -> None:
    def call(ctx: Context) -> None:
        g = GraphBuilder(0, 1)
        x = g.buffer("x", initialised=True)
        g.compute("f", Op("f", (x,)), accumulates=[x])
        pipeline = ctx.pipeline(lambda _: g.build())
        with pytest.raises(ConfigError, match="this thread is in a call of this context"):
            pipeline.run(
                buffers={"x": torch.ones(1)}, ops={"f": lambda x: print(ctx.all_reduce(x))}
            )

    burst_rt.run_local(1, call)
