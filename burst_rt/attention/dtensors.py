"""q, k and v as DTensors whose tokens are sharded over a context's ranks.

Each rank attends with its local tensors, and the results are DTensors with q's placements. The
mesh's other axes may shard batch and heads, over which nothing is summed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from burst_rt.attention.options import Options, check_types
from burst_rt.attention.state import AttentionState
from burst_rt.eager import eager
from burst_rt.errors import InputError
from burst_rt.kernels import QKV
from burst_rt.runtime.objects import all_gather
from burst_rt.runtime.refusing import refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["any_dtensor", "over_mesh"]

_WHERE = "burst_attention"
_TOKENS = 1  # the dimension of tokens
# Where the dimensions of out are in lse.
_IN_LSE = {0: 0, 1: 2, 2: 1}


class _OverMesh(NamedTuple):
    """What makes DTensors of this rank's out and lse."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # q's, over all ranks

    def out(self, out: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, heads, v's head_dim]`, sharded as q."""
        return self._of(out, self.placements, (*self.shape[:3], out.shape[3]))

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, tokens]`, sharded alike."""
        from torch.distributed.tensor import Shard

        placements = tuple(
            Shard(_IN_LSE[placement.dim]) if isinstance(placement, Shard) else placement
            for placement in self.placements
        )
        batch, tokens, heads, _ = self.shape
        return self._of(lse, placements, (batch, heads, tokens))

    def _of(
        self, local: torch.Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def any_dtensor(*tensors: object) -> bool:
    """Whether one of them is a DTensor."""
    # Where the module is not imported there is none, and importing it takes time.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and any(isinstance(x, kind) for x in tensors)


@eager
def over_mesh(attend: Callable[..., Any], qkv: QKV, options: Options) -> Any:
    """`attend`, which is `burst_attention`, with this rank's tensors; its results as DTensors.

    The first call of a context that is given DTensors is collective, and blocks at most
    `timeout_s`: the ranks tell each other their numbers in torch.distributed. Raises InputError, on
    every rank alike, for DTensors that are not sharded as the layout and the context are.
    """
    try:
        parts, over = _locals_of(qkv, options)
    except InputError as error:
        refuse(_WHERE, error, getattr(options.layout, "runtime", None))
    out, lse = attend(*parts, **options._replace(return_lse=True)._asdict())
    return (over.out(out), over.lse(lse)) if options.return_lse else over.out(out)


def _locals_of(qkv: QKV, options: Options) -> tuple[QKV, _OverMesh]:
    """This rank's q, k and v, and how its results become DTensors again."""
    given = {**qkv._asdict(), "sinks": options.sinks, "alibi_slopes": options.alibi_slopes}
    kinds = {name: any_dtensor(x) for name, x in given.items()}
    check_types(options)
    for name in ("sinks", "alibi_slopes"):
        if kinds[name]:
            raise InputError(
                f"{_WHERE}: {name} must be a plain tensor with a number for each of this rank's "
                f"heads, got a DTensor; pass {name}.to_local()"
            )
    if not all(kinds[name] for name in qkv._fields):
        plain = ", ".join(name for name in qkv._fields if not kinds[name])
        raise InputError(
            f"{_WHERE}: q, k and v must all be DTensors, or none of them, got plain {plain}; "
            "pass to_local() of those that are DTensors"
        )
    whole: dict[str, DTensor] = qkv._asdict()
    q = whole["q"]
    over = _OverMesh(q.device_mesh, tuple(q.placements), tuple(q.shape))
    for name, x in whole.items():
        if x.device_mesh != over.mesh or tuple(x.placements) != over.placements:
            raise InputError(
                f"{_WHERE}: {name} must have q's mesh and placements {over.placements}, got "
                f"{x.placements} on {x.device_mesh}; redistribute it"
            )
    _check_axis(over, options.layout.attention)
    layout, kv_layout = options.layout, options.kv_layout or options.layout
    parts = QKV(*(x.to_local() for x in whole.values()))
    for name, part in parts._asdict().items():
        side = layout if name == "q" else kv_layout
        if part.shape[_TOKENS] != side.shard_len:
            raise InputError(
                f"{_WHERE}: {name}, a DTensor, must have this rank's {side.shard_len} of "
                f"{side.seq_len} tokens ({side.kind}) in its local tensor, got "
                f"{part.shape[_TOKENS]} of {whole[name].shape[_TOKENS]}; where the ranks do not "
                "divide the tokens, DTensor cuts as torch.chunk does: pad the sequence, or make it "
                "with DTensor.from_local(shard, ..., shape=, stride=)"
            )
    return parts, over


def _check_axis(over: _OverMesh, attention: AttentionState) -> None:
    """Raises InputError unless tokens are sharded over one axis, which has the context's ranks."""
    from torch.distributed.tensor import Replicate, Shard

    axes = []
    for axis, placement in enumerate(over.placements):
        # Subclasses of Shard interleave.
        dim = placement.dim if isinstance(placement, Shard) and type(placement) is Shard else None
        if dim == _TOKENS:
            axes.append(axis)
        elif dim not in (0, 2) and not isinstance(placement, Replicate):
            raise InputError(
                f"{_WHERE}: DTensors [batch, tokens, heads, head_dim] must be Shard(1) over the "
                "context's ranks, and Shard(0), Shard(2) or Replicate() over other axes, got "
                f"{over.placements}"
            )
    if len(axes) != 1:
        raise InputError(
            f"{_WHERE}: the tokens of DTensors, their dimension 1, must be sharded over one axis "
            f"of the mesh, got {over.placements}; redistribute them, or pass to_local()"
        )
    group = over.mesh.get_group(axes[0])
    _check_processes(torch.distributed.get_process_group_ranks(group), attention)


def _check_processes(processes: list[int], attention: AttentionState) -> None:
    """Raises InputError unless these processes are the context's ranks, in their order."""
    if attention.processes is None:
        mine = torch.distributed.get_rank()
        attention.processes = list(all_gather(attention.runtime, mine))
    if attention.processes != processes:
        raise InputError(
            f"{_WHERE}: tokens of DTensors must be sharded over the context's ranks, which are the "
            f"processes {attention.processes} of torch.distributed, got the mesh axis of "
            f"{processes}; make the context with burst_rt.init(group=mesh[axis])"
        )
