"""Starting kernels: by Triton's own way the first time, then by launches that were kept.

What Triton's own way asks at each launch (what every argument is, and which compiled kernel that
means) is asked once for a task. A warm task swaps pointers, and does nothing else. A launch is
found by all that the answer depends on and that may differ between two calls of a task: strides,
and whether addresses are multiples of 16 bytes.

Triton's public way to start a compiled kernel is `compiled[grid](*arguments, stream=...)`. It takes
an address for a pointer. An address keeps no memory alive: so whoever starts a launch holds the
tensors, and tables that are gone are noticed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import cache
from typing import Any, TypeAlias

import torch

from burst_rt.kernels.base import Kept

__all__ = [
    "Launch",
    "Layouts",
    "Pointers",
    "keep_launch",
    "launch_of",
    "restart",
    "start",
    "untried_triton",
]

Pointers: TypeAlias = Sequence[int]
# Strides, and the types of tensors that a plan does not know.
Layouts: TypeAlias = tuple[object, ...]

# Triton's releases that compile all kernels here, and whose compiled kernels were read to take
# addresses and a stream. With others nothing is kept.
_TRIED = ((3, 6), (3, 7), (3, 8), (3, 9))
# Maximum number of launches that are kept for one task.
_MOST_ENTRIES = 64

# Ranks may be threads. The interpreter keeps its current program in a global. And while a compiled
# kernel is started for the first time, the launcher leaves it half made for a moment in which
# another thread would use it.
_one_at_a_time = threading.RLock()


class Launch:
    """A compiled kernel on a grid, with all arguments but the first ones, which are pointers."""

    __slots__ = ("_tables", "rest", "run", "scratch")

    def __init__(
        self, run: Callable[..., None], rest: tuple[object, ...],
        tables: Sequence[torch.Tensor], scratch: bool,
    ) -> None:  # fmt: skip
        self.run, self.rest = run, rest
        # Not kept alive: tables have a bound, and those that were used longest ago go first.
        self._tables = [weakref.ref(table) for table in tables]
        self.scratch = scratch  # whether the launch takes memory from Triton's allocator

    def tables(self) -> list[torch.Tensor] | None:
        """The tables; None where one is gone."""
        tables = []
        for ref in self._tables:
            table = ref()
            if table is None:
                return None
            tables.append(table)
        return tables


def start(
    device: torch.device, launch: Callable[..., Launch | None], *args: object
) -> Launch | None:
    """Starts a kernel on the tensors' device, since Triton starts kernels on the current device.

    One thread starts kernels at a time; another thread waits for the lock. Starting a kernel does
    not wait for the device. launch: starts it by Triton's own way, and returns what can be kept.
    """
    with _one_at_a_time, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        # The launch has a context of its own, because the program may have set an allocator for its
        # own kernels.
        return copy_context().run(_with_scratch, launch, args)


def restart(kept: Kept, kind: str, pointers: Pointers, layouts: Layouts) -> bool:
    """Starts what was kept for such tensors; False where nothing was, or where it is gone.

    kind: the kernel. pointers: those that differ from call to call, in the kernel's order. layouts:
    all else that may: strides that the kernel takes, types. Does not wait for the device.
    """
    launch = kept.entries.get((kind, kept.stream, layouts))
    # The tables are held while the launch is started.
    if launch is None or _odd(pointers) or (tables := launch.tables()) is None:
        return False
    if launch.scratch:
        arguments = (*pointers, *launch.rest)
        copy_context().run(_with_scratch, launch.run, arguments, stream=kept.stream)
    else:
        launch.run(*pointers, *launch.rest, stream=kept.stream)
    del tables
    return True


def keep_launch(
    kept: Kept, kind: str, pointers: Pointers, layouts: Layouts, launch: Launch | None
) -> None:
    """Keeps a launch for `restart`, if it can be kept. Arguments: those of `restart`."""
    if launch is not None and not _odd(pointers):
        if len(kept.entries) >= _MOST_ENTRIES:  # by calls from many streams, say
            kept.entries.clear()
        kept.entries[kind, kept.stream, layouts] = launch


def launch_of(
    compiled: Any, grid: tuple[int], rest: tuple[object, ...], tables: Sequence[torch.Tensor] = ()
) -> Launch | None:
    """What a launch by Triton's own way leaves to keep; None where it cannot be kept.

    compiled: what that way has returned; None in the interpreter. rest: the arguments behind the
    pointers that differ from call to call, in the kernel's order. tables: a tensor of each table in
    `rest`.
    """
    if compiled is None or untried_triton():
        return None
    numbers = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in rest)
    scratch = bool(getattr(compiled.metadata, "global_scratch_size", 1))
    return Launch(compiled[(*grid, 1, 1)], numbers, tables, scratch)


@cache
def untried_triton() -> str | None:
    """What to say of the installed Triton if this project was not tried with it."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) in _TRIED:
        return None
    first, *_, last = (f"{major}.{minor}" for major, minor in _TRIED)
    return f"triton {triton.__version__} was not tried with burst_rt; {first} to {last} were"


def _odd(pointers: Pointers) -> bool:
    """Whether an address is no multiple of 16 bytes: such calls have other kernels."""
    odd = 0
    for pointer in pointers:
        odd |= pointer
    return bool(odd & 15)


def _with_scratch(
    launch: Callable[..., Launch | None], args: tuple[object, ...], **options: int
) -> Launch | None:
    import triton

    triton.set_allocator(_scratch)
    return launch(*args, **options)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for a kernel's tensor descriptors, on the current stream.

    torch gives the memory again to work that comes after the kernel on that stream.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")
