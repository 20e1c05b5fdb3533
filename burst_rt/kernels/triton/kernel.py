"""`TritonKernel`: the Triton kernels behind the `Kernel` protocol.

Checks, positions, and the choice of the kernel to start; no kernel code. triton is imported with
the first tile: the import takes time, and TRITON_INTERPRET=1 (CPU tensors, for tests) must be set
before it.
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
from burst_rt.kernels.triton.configs import Config, arch_of, default_config
from burst_rt.kernels.triton.launch import TileArguments
from burst_rt.kernels.triton.runs import Runs, runs_of
from burst_rt.kernels.triton.tuned import tuned
from burst_rt.planning.masks import Rule
from burst_rt.planning.problem import TileShape

__all__ = ["TritonKernel"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256

# Ranks may be threads. The interpreter keeps its current program in a global. And while a compiled
# kernel is started for the first time, the launcher leaves it half made for a moment in which
# another thread would use it.
_one_at_a_time = threading.RLock()


class TritonKernel:
    """See `Kernel`. float32, bfloat16, float16; head_dim 16 to 256; masks Full and Causal.

    Launches are asynchronous, on the current stream: no method waits for the device. The kernel
    reads a tile's positions and mask, not its pieces. The state's m is in powers of two. float32 is
    multiplied in float32 (no TF32). 16-bit inputs are multiplied on the tensor cores with float32
    sums; probabilities and score gradients are rounded to the inputs' type.
    """

    name = "triton"

    def refuses(self, work: Work) -> str | None:
        """Refuses all but the devices, types, head sizes and masks that it has code for.

        The device is a GPU, or a CPU under TRITON_INTERPRET=1.
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
            return f"the triton kernel takes the masks Full and Causal only, got {work.mask!r}"
        return None

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`: always, because it has no atomic additions."""
        return True

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: whether block sizes come from `burst-rt bench tune`."""
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
        """See `Kernel.scratch_bytes`: none, because sums stay in registers and shared memory.

        Not counted are tensor descriptors, where they are used (at most 512 bytes a block of the
        grid), and the interpreter's temporaries.
        """
        return 0


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _problem(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> TileArguments:
    causal = tile.mask.rule is Rule.NOT_LATER
    q_len, kv_len = q.shape[1], k.shape[1]
    if causal:
        q_runs, kv_runs = runs_of(tile.q_positions, q_len), runs_of(tile.kv_positions, kv_len)
    else:
        # Without a causal mask nothing reads the positions.
        q_runs, kv_runs = Runs(0, q_len, 0, 1, q_len), Runs(0, kv_len, 0, 1, kv_len)
    return TileArguments(q_runs, kv_runs, causal, tile.scale, _interpreting())


def _config(kind: str, x: torch.Tensor) -> Config:
    arch = None if x.device.type == "cpu" else _arch(x.device)
    return tuned(kind, x.device, x.shape[3], x.dtype) or default_config(
        kind, arch, x.shape[3], x.dtype.itemsize
    )


@lru_cache
def _arch(device: torch.device) -> int:
    return arch_of(torch.cuda.get_device_capability(device))


def _start(device: torch.device, launch: Callable[..., None], *args: object) -> None:
    """Starts a kernel on the tensors' device, since Triton starts kernels on the current device.

    One thread starts kernels at a time; another thread waits for the lock. Starting a kernel does
    not wait for the device.
    """
    with _one_at_a_time, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # In a context of its own, because the program may have set an allocator for its own
        # kernels.
        copy_context().run(_start_with_scratch, launch, args)


def _start_with_scratch(launch: Callable[..., None], args: tuple[object, ...]) -> None:
    import triton

    triton.set_allocator(_scratch)
    launch(*args)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for a kernel's tensor descriptors, on the current stream.

    torch gives the memory again to work that comes after the kernel on that stream.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _check_dense(*tensors: torch.Tensor) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise InternalError(
                f"the triton kernel takes dense states, lse and delta, got {tuple(x.shape)} with "
                f"strides {x.stride()}"
            )
