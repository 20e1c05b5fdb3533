"""`TritonKernel`: the Triton kernels behind the `Kernel` protocol. Checks, positions, and which
kernel is started; no kernel code.

triton is imported with the first tile: that takes time, and TRITON_INTERPRET=1 (CPU tensors, for
tests) must be set before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from functools import lru_cache
from importlib.util import find_spec

import torch

from burst_rt.errors import InternalError
from burst_rt.kernels.base import State, Tile, Work
from burst_rt.kernels.triton.configs import Config, arch_of, choose
from burst_rt.kernels.triton.launch import Problem
from burst_rt.kernels.triton.runs import Runs, runs_of
from burst_rt.kernels.triton.tuned import tuned
from burst_rt.planning.masks import Rule
from burst_rt.planning.problem import TileShape

__all__ = ["TritonKernel"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256

# Ranks may be threads. The interpreter keeps the program it is at in a global; and while a compiled
# kernel is first started, the launcher leaves it half made for a moment in which another thread
# would take it.
_one_at_a_time = threading.RLock()


class TritonKernel:
    """See `Kernel`. float32, bfloat16, float16; head_dim 16 to 256; masks Full and Causal.

    Launches are asynchronous, on the current stream. Of a tile it reads positions and mask, not the
    pieces. The state's m is in powers of two. float32 is multiplied in float32 (no TF32); 16-bit
    inputs on the tensor cores with float32 sums, probabilities and score gradients rounded to the
    inputs' type.
    """

    name = "triton"

    def refuses(self, work: Work) -> str | None:
        """CUDA tensors (CPU tensors under TRITON_INTERPRET=1) of the types, head sizes and masks it
        has code for.
        """
        wanted = "cpu" if _interpreting() else "cuda"
        if work.device.type != wanted:
            why = (
                "TRITON_INTERPRET=1 is set"
                if wanted == "cpu"
                else "CPU tensors only where TRITON_INTERPRET=1 is set"
            )
            return f"the triton kernel takes {wanted.upper()} tensors ({why}), got {work.device}"
        if find_spec("triton") is None:
            return "the triton kernel needs the package triton, which is not installed"
        if work.dtype not in _DTYPES:
            return f"the triton kernel takes float32, bfloat16 and float16, got {work.dtype}"
        if not _MIN_HEAD_DIM <= work.head_dim <= _MAX_HEAD_DIM:
            return (
                f"the triton kernel takes a head_dim of {_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}, got "
                f"{work.head_dim}"
            )
        if work.mask.rule is Rule.OWN:
            return f"the triton kernel has code for the masks Full and Causal, got {work.mask!r}"
        return None

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`: yes; it has no atomic additions."""
        return True

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: whether block sizes are those of `burst-rt bench tune`."""
        kinds = ("forward",) if work.forward else ("dq", "dkdv")
        found = {kind: tuned(kind, work.device, work.head_dim, work.dtype) for kind in kinds}
        if not any(found.values()):
            return ()
        told = ", ".join(f"{kind} {config}" for kind, config in found.items() if config)
        return (f"blocks tuned on this machine: {told}",)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, state: State
    ) -> None:
        """See `Kernel.forward`."""
        from burst_rt.kernels.triton.forward import launch_forward

        _check_dense(state.acc, state.m, state.l, state.out, state.lse)
        problem = _problem(q, k, tile)
        out = state.out
        if problem.interpret and tile.last and out.dtype != state.acc.dtype:
            # The interpreter rounds towards zero when it stores 16-bit numbers; torch does not.
            out = torch.empty_like(state.acc)
        _start(
            q.device,
            launch_forward,
            q,
            k,
            v,
            state,
            out,
            problem,
            _config("forward", q),
            (tile.first, tile.last),
        )
        if tile.last and out is not state.out:
            state.out.copy_(out)
        tile.progress()

    def delta(
        self,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> None:
        """See `Kernel.delta`."""
        from burst_rt.kernels.triton.delta import launch_delta

        _check_dense(rows)
        _start(
            dout.device,
            launch_delta,
            dout,
            out,
            lse,
            dlse,
            rows,
            _config("delta", dout),
            _interpreting(),
        )

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        tile: Tile,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> None:
        """See `Kernel.backward`."""
        from burst_rt.kernels.triton.backward import launch_dkdv, launch_dq

        _check_dense(lse, delta)
        problem = _problem(q, k, tile)
        inputs = (q, k, v, dout, lse, delta)
        if dk is not None or dv is not None:
            _start(q.device, launch_dkdv, inputs, dk, dv, problem, _config("dkdv", q))
        if dq is not None:
            _start(q.device, launch_dq, inputs, dq, problem, _config("dq", q))
        tile.progress()

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """Nothing: all there is is registers and shared memory.

        Not counted: tensor descriptors, where they are used (at most 512 bytes a block of the
        grid), and the interpreter's temporaries.
        """
        return 0


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _problem(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> Problem:
    causal = tile.mask.rule is Rule.NOT_LATER
    q_len, kv_len = q.shape[1], k.shape[1]
    if causal:
        q_runs, kv_runs = runs_of(tile.q_positions, q_len), runs_of(tile.kv_positions, kv_len)
    else:
        # Nobody asks where anything stands.
        q_runs, kv_runs = Runs(0, q_len, 0, 1, q_len), Runs(0, kv_len, 0, 1, kv_len)
    return Problem(q_runs, kv_runs, causal, tile.scale, _interpreting())


def _config(kind: str, x: torch.Tensor) -> Config:
    arch = None if x.device.type == "cpu" else _arch(x.device)
    return tuned(kind, x.device, x.shape[3], x.dtype) or choose(
        kind, arch, x.shape[3], x.dtype.itemsize
    )


@lru_cache
def _arch(device: torch.device) -> int:
    return arch_of(torch.cuda.get_device_capability(device))


def _start(device: torch.device, launch: Callable[..., None], *args: object) -> None:
    """Triton starts kernels on the current device. One thread at a time: starting one does not wait
    for the device.
    """
    with _one_at_a_time, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # In a context of its own, for the program may have set an allocator for kernels of its own.
        copy_context().run(_start_with_scratch, launch, args)


def _start_with_scratch(launch: Callable[..., None], args: tuple[object, ...]) -> None:
    import triton

    triton.set_allocator(_scratch)
    launch(*args)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where a kernel makes its tensor descriptors, on the current stream: torch gives the memory to
    what comes after the kernel there.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _check_dense(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise InternalError(
                f"the triton kernel takes dense states, lse and delta, got {tuple(x.shape)} with "
                f"strides {x.stride()}"
            )
