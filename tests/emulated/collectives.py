"""Collectives of torch.distributed on emulated GPUs: Gloo's, on the same memory.

Groups that ask for NCCL get Gloo. NCCL's collectives are work of a stream; here the host waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from emulated.books import place
from emulated.cuda import BOOKS, current
from emulated.tensors import host_of, span_of

__all__ = ["install"]

_NAMES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "gather_", "scatter_",
    "barrier",
)  # fmt: skip
# Of which Gloo compares shapes, and NCCL numbers of elements.
_FLAT = ("_allgather_base_", "_reduce_scatter_base_")
# Of two ranks: who started one waits for it later.
_MESSAGES = ("send", "recv_")
_libraries: list[torch.library.Library] = []


def _give_to_host(group: dist.ProcessGroup) -> None:
    """Has a group that is for GPUs only take tensors of the host."""
    host, gpu = torch.device("cpu"), torch.device("cuda")
    if host not in group._device_types:
        group._register_backend(host, dist.ProcessGroup.BackendType.GLOO, group._get_backend(gpu))


def _by_gloo(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.c10d, name).default

    def collective(*args: Any, **kwargs: Any) -> Any:
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the ids of the host's

        def on_host(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return [on_host(item) for item in x]
            if not isinstance(x, torch.Tensor) or not x.is_cuda:
                return x
            of_host = host_of(x.detach())
            if name in _FLAT:
                of_host = of_host.view(-1)
            given[id(of_host)] = of_host, x
            return of_host

        def back(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(back(item) for item in x)
            return given[id(x)][1] if id(x) in given else x

        of_host = [on_host(x) for x in args]
        for x in args:
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
                _give_to_host(dist.ProcessGroup.unbox(x))
        tensors = [x for _, x in given.values()]
        stream = current(tensors[0].device.index)
        stream.finish()
        results = op(*of_host, **kwargs)
        if name not in _MESSAGES:
            (results[-1] if isinstance(results, tuple) else results).wait()
        spans = [span_of(x) for x in tensors if x.numel()]
        BOOKS.use(stream.key, [], spans, f"{name} at {place()}")
        return back(results)

    # torch.compiler.disable would import torch's compiler, for a second, in every process.
    untraced: Callable[..., Any] = _disable_dynamo(collective)
    return untraced


def install() -> None:
    """Has torch take them."""
    dist.Backend.NCCL = dist.Backend.GLOO
    c10d = torch.library.Library("c10d", "IMPL")
    _libraries.append(c10d)  # operators end with their library
    with warnings.catch_warnings():
        # That torch's own, which look for NCCL, are replaced.
        warnings.simplefilter("ignore")
        for name in (*_NAMES, *_MESSAGES):
            c10d.impl(name, _by_gloo(name), "CUDA")
