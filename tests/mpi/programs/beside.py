"""Rank program: attention beside the other ways to spread a training, a function each.

`beside.py FOLDER COMPOSITION...` trains with each composition, and writes the losses to
FOLDER/losses.json. docs/beside.md shows these lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_training import (
    DEVICE,
    STEPS,
    TOKENS,
    Stage,
    adamw,
    make_decoder,
    sequences,
    sgd,
    train,
    train_by_rows,
)
from torch import nn
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import burst_rt
from burst_rt.errors import ContractMismatch


def fsdp2(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    mine = slice(mesh.get_local_rank("dp"), None, 2)
    model = make_decoder()
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    with burst_rt.init(group=mesh["cp"]) as ctx:
        return train(model, sgd(model.parameters()), ctx, everyone, mine)


def micro_batches(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    mine = slice(mesh.get_local_rank("dp"), None, 2)
    model = make_decoder()
    fully_shard(model, mesh=everyone)
    with burst_rt.init(group=mesh["cp"]) as ctx:
        dp = mesh["dp"].get_group()
        return train_by_rows(model, sgd(model.parameters()), ctx, everyone, mine, dp)


def hsdp(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    mine = slice(mesh.get_local_rank("dp"), None, 2)
    model = make_decoder()
    fully_shard(model, mesh=mesh)
    with burst_rt.init(group=mesh["cp"]) as ctx:
        return train(model, sgd(model.parameters()), ctx, None, mine)


def ddp(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "cp"))
    mine = slice(mesh.get_local_rank("dp"), None, 2)
    model = DistributedDataParallel(make_decoder())
    with burst_rt.init(group=mesh["cp"]) as ctx:
        return train(model, sgd(model.parameters()), ctx, None, mine)


def tensor_parallel(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("cp", "tp"))
    model = make_decoder()
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        attention = block.get_submodule("attention")
        sinks = distribute_tensor(attention.get_parameter("sinks"), mesh["tp"], [Shard(0)])
        attention.sinks = nn.Parameter(sinks)
    fully_shard(model, mesh=mesh["cp"])
    with burst_rt.init(group=mesh["cp"]) as ctx:
        return train(model, sgd(model.parameters()), ctx, mesh["cp"])


def pipeline(folder: Path) -> list[float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pp", "cp"))
    index = mesh.get_local_rank("pp")
    with burst_rt.init(group=mesh["cp"]) as ctx:
        layout = ctx.layout(TOKENS)
        attend = partial(burst_rt.burst_attention, causal=True, layout=layout)
        tokens, labels = (layout.shard(x) for x in sequences())
        model = Stage(make_decoder(), index, 2, layout.positions(), attend)
        fully_shard(model, mesh=mesh["cp"])

        def mean_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scores, labels = scores.flatten(0, 1), labels.flatten()
            losses = functional.cross_entropy(scores, labels, reduction="none")
            return burst_rt.mean_over_ranks(losses, labels != -100, group=mesh["cp"])

        stage = PipelineStage(model, index, 2, ctx.device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mean_loss)
        optimizer = sgd(model.parameters())
        found = []
        for _ in range(STEPS):
            losses: list[torch.Tensor] = []
            if index == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=labels, losses=losses)
                found.append(torch.stack(losses).mean().item())
            optimizer.step()
            optimizer.zero_grad()
        return found


def zero(folder: Path) -> list[float]:
    """The first half of the steps on any number of ranks, and then the second half on another."""
    path = folder / "checkpoint"
    resumed = path.exists()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    mine = slice(mesh.get_local_rank("dp"), None, mesh.size(0))
    model = make_decoder()
    fully_shard(model, mesh=everyone)
    optimizer = adamw(model.parameters())
    if resumed:
        weights, moments = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    with burst_rt.init(group=mesh["cp"]) as ctx:
        losses = train(model, optimizer, ctx, everyone, mine, STEPS // 2)
    if not resumed:
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    return losses


class Takes(nn.Module):
    """Attends by what it is called with. `attend` is a function of all its arguments."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self._attend = nn.Linear(16, 16), attend

    def forward(self, x: torch.Tensor, *things: object) -> torch.Tensor:
        return self._attend(self.linear(x).unflatten(-1, (2, 8)), *things)


def arguments(folder: Path) -> list[float]:
    """Layouts, batches and masks as arguments of a module that FSDP2 shards.

    With a policy for mixed precision FSDP2 goes through all arguments.
    """
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("cp",))
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    batch = {"input_ids": ids, "position_ids": ids % 29}
    with burst_rt.init(group=mesh["cp"]) as ctx:
        part = burst_rt.shard_batch(batch, ctx)

        def attend(
            x: torch.Tensor, given: burst_rt.ShardedBatch, layout: object, mask: burst_rt.Mask
        ) -> torch.Tensor:
            assert layout is part.layout is given.layout
            assert x.dtype == torch.bfloat16
            return burst_rt.burst_attention(x, x, x, layout=given.layout, mask=mask & given.mask)

        whole = torch.rand(2, TOKENS, 16, generator=torch.Generator().manual_seed(0))
        x = part.layout.shard(whole.to(DEVICE))
        torch.manual_seed(0)  # the same weights on every rank
        module = Takes(attend).to(DEVICE)
        expected = attend(
            module.linear(x).bfloat16().unflatten(-1, (2, 8)), part, part.layout, burst_rt.Causal()
        )
        fully_shard(module, mesh=mesh["cp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        found = module(x, part, part.layout, burst_rt.Causal())
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    return []


def check_mean_over_ranks() -> None:
    """Value and gradient against one process's; ranks have different numbers of values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    lengths = [5 * rank for rank in range(size)]  # rank 0 has none
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.rand(sum(lengths), generator=generator).to(dtype).requires_grad_()
        random = torch.rand(sum(lengths), generator=generator)
        for weights in (None, random, random > 0.5):
            mine = None if weights is None else weights.split(lengths)[rank]
            mean = burst_rt.mean_over_ranks(values.split(lengths)[rank], mine)
            (grad,) = torch.autograd.grad(3 * mean, values)
            dist.all_reduce(grad)
            w = (torch.ones_like(random) if weights is None else weights).double()
            expected = (w * values).sum() / w.sum()
            (wanted,) = torch.autograd.grad(3 * expected, values)
            assert mean.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(mean, expected.to(mean.dtype))
            # DDP and FSDP2 divide the sum of the ranks' gradients by their number.
            torch.testing.assert_close(grad / size, wanted)


def check_what_is_paired_up_by_order() -> None:
    """Backwards, counts and parameters that differ on the last rank: all ranks are told."""
    odd = dist.get_rank() == dist.get_world_size() - 1

    def means(count: int | None = None) -> list[torch.Tensor]:
        x = torch.ones(2, 3, requires_grad=True)
        return [burst_rt.mean_over_ranks(each, count=count) for each in x]

    def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for parameter in found:
            parameter.grad = parameter.detach().clone()
        return found

    one, other = means()
    with pytest.raises(ContractMismatch, match="in the backwards of different means"):
        (other if odd else one).backward()
    for mean in means(count=8):
        mean.backward()
    for count in (8 + odd, 8 if odd else None):
        with pytest.raises(ContractMismatch, match="count must be the same on every rank"):
            means(count=count)
    with pytest.raises(ContractMismatch, match="other numbers of parameters"):
        burst_rt.average_gradients([] if odd else parameters((2, 3)))
    burst_rt.average_gradients([])
    for shapes, said in (
        (((2, 3), (6,)), "other shapes or dtypes"),
        (((90, 90), (90, 90)), r"parameter 0, float32 \(90, 90\), has other values on some ranks"),
    ):
        given = parameters(*shapes)
        with pytest.raises(ContractMismatch, match=said):
            burst_rt.average_gradients(given[:: -1 if odd else 1])
        burst_rt.average_gradients(given)
        for parameter in given:
            torch.testing.assert_close(parameter.grad, parameter.detach())


def check_a_compiled_mean() -> None:
    """One program, without a break, whatever the step; its gradient is the eager one."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: torch.Tensor) -> torch.Tensor:
        return burst_rt.mean_over_ranks(x * x)

    torch._dynamo.utils.counters.clear()
    for step in range(12):
        x = torch.full((3,), step + dist.get_rank() + 1.0, requires_grad=True)
        mean = loss(x)
        (grad,) = torch.autograd.grad(mean, x)
        torch.testing.assert_close(grad, 2 * x.detach() / 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def check_groups_made_anew(folder: Path) -> None:
    """A group's sums are counted from its beginning: torch gives names of groups again."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 3:
        return
    for other in (1, 2):
        path = str(folder / f"store-{other}")
        store = dist.FileStore(path, size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        group = dist.new_group([0, other])
        if rank in (0, other):
            x = torch.ones(2, requires_grad=True)
            burst_rt.mean_over_ranks(x, group=group).backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, torch.full((2,), 0.5))
        dist.barrier()
        dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    check_groups_made_anew(folder)
    dist.init_process_group("gloo")
    check_a_compiled_mean()
    check_mean_over_ranks()
    check_what_is_paired_up_by_order()
    found = {}
    for name in names:
        everyones: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, globals()[name](folder))
        found[name] = everyones[-1]
        # Every rank that has a loss has the same, bit for bit.
        assert all(each in ([], everyones[-1]) for each in everyones), everyones
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    # torch 2.13 keeps the groups that `fully_shard` was given. A thread of such a gloo group that
    # frees the tensors of the last collective while the interpreter ends aborts the process.
    os._exit(0)


main(Path(sys.argv[1]), sys.argv[2:])
