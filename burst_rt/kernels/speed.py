"""Which of several tile kernels is fastest on this machine, measured once.

Each kernel is timed once for a class of work, and the answer is kept. A class is chip and versions,
input type, head size, direction, mask (Full or Causal, whichever the tiles are like), and whether a
tile is the only tile of its call; on a CPU also the number of threads. One standard tile represents
the class. The first rank of a host that asks measures. The other ranks wait for its answer and take
the same kernel, and so do later jobs: one kernel for all and always means results with the same
bits from run to run.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.attention

from burst_rt.kernels.base import (
    QKV,
    Gradients,
    Kernel,
    State,
    Tile,
    Upstream,
    Work,
    sum_dtype,
    write_from_sums,
)
from burst_rt.kernels.conditions import cpu_capabilities, told_to_repeat
from burst_rt.planning.masks import Causal, Documents, Full, Mask, Rule, Shape, SlidingWindow
from burst_rt.planning.problem import TileShape
from burst_rt.remembered import alone, recall, remember

__all__ = [
    "KIND",
    "Figures",
    "KernelTimes",
    "TileProblem",
    "chip_and_versions",
    "error_in_words",
    "failures",
    "fastest_kernel",
    "fastest_of",
    "issue_timed",
    "known_figures",
    "seconds_in_turn",
    "seconds_of",
    "speed_key",
]

# The answers' name in `remembered`.
KIND = "kernel-speed"

# The standard tile. A CPU is near its full speed with far fewer rows, and a job should not wait.
_TOKENS = {"cuda": 4096, "cpu": 1024}
_CHANNELS = 2048  # number of heads x head_dim, on a GPU
_ROUNDS = {"cuda": 5, "cpu": 3}
# The largest relative error of a kernel that is right: sums in 16 bits are off by some hundredths,
# another mask or layout by tenths.
_MOST_OFF = 0.1
# Seconds until a rank that waits measures for itself. Compiling takes seconds a kernel.
_DEADLINE_S = 120.0

# Seconds by kernel, or the reason why there are none; and what measures them.
Figures: TypeAlias = dict[str, float | str]
_Measure: TypeAlias = Callable[[Work, Sequence[Kernel]], Figures]

_lock = threading.Lock()
_known: dict[tuple[str, ...], Figures] = {}


class KernelTimes(NamedTuple):
    """The fastest kernel, and the figures that decided."""

    kernel: Kernel
    reason: str


class TileProblem:
    """A standard tile of a class of work, bound to memory, for kernels to be timed on.

    heads: on a CPU, for each thread.
    """

    def __init__(
        self, work: Work, *, tokens: int | None = None, alone: bool = True, heads: int = 1
    ) -> None:
        device, wide = work.device, sum_dtype(work.dtype)
        self.dtype = work.dtype
        tokens = tokens or _TOKENS[device.type]
        if device.type == "cpu":
            heads *= torch.get_num_threads()
        else:
            heads = max(1, _CHANNELS // work.head_dim)
        kv_heads = max(1, heads // 2) if work.grouped else heads
        if work.grouped:
            heads = 2 * kv_heads
        dim, v_dim = work.head_dims
        # Numbers of the usual size, the same in every run.
        generator = torch.Generator().manual_seed(0)
        some = torch.randn((1, tokens, heads, max(dim, v_dim)), generator=generator, device="cpu")
        q, k, v, dout = (some.roll(i).to(work.dtype).to(device) for i in range(4))
        q, k = q[..., :dim].contiguous(), k[:, :, :kv_heads, :dim].contiguous()
        v, dout = v[:, :, :kv_heads, :v_dim].contiguous(), dout[..., :v_dim].contiguous()
        self._qkv = qkv = QKV(q, k, v)
        whole = (range(tokens),)
        pieces = work.mask.pieces(*whole, *whole)
        self.pieces = pieces
        self._tile = Tile(
            pieces,
            whole,
            whole,
            work.mask,
            work.head_dim**-0.5,
            lambda: None,
            first=alone,
            last=alone,
            in_order=work.deterministic,
        )
        acc, *self._sums = (torch.zeros_like(x, dtype=wide) for x in (dout, *qkv))
        self._written = [torch.zeros_like(x) for x in qkv] if alone else []
        m, l, lse = (torch.zeros(1, heads, tokens, dtype=wide, device=device) for _ in range(3))  # noqa: E741
        self._state = State(acc, m, l, torch.empty_like(dout), lse)
        # Every row has an lse of about its right size, and an out that is not its own.
        out = dout.roll(1, 1)
        delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()
        self._upstream = Upstream(dout, torch.full_like(delta, 10.0), delta, out if alone else None)
        self.work = work._replace(tiles=(pieces,), places=(whole, whole))
        self.num_heads = heads
        self._shape = TileShape(1, heads, kv_heads, max(dim, v_dim), tokens, tokens)

    def _backward(self, kernel: Kernel) -> tuple[Tile, list[torch.Tensor]]:
        """The tile as a kernel's backward gets it, and what the gradients go into."""
        only = self._tile.only and kernel.writes_gradients(self.work, self._shape)
        tile = self._tile._replace(first=only, last=only)
        return tile, self._written if self._tile.only else self._sums

    def run(self, kernel: Kernel, needs: tuple[bool, bool, bool] = (True, True, True)) -> None:
        """Has the kernel do the tile once, in the backward with the gradients that are needed.

        Does not wait for the device.
        """
        if self.work.forward:
            kernel.forward(self._qkv, self._tile, self._state)
        else:
            tile, into = self._backward(kernel)
            grads = Gradients(
                *(x if needed else None for x, needed in zip(into, needs, strict=True))
            )

            def add(into: Gradients) -> None:
                kernel.backward(self._qkv, self._upstream, tile, into)

            # A call whose only tile does not write its gradients makes them of sums.
            write_from_sums(grads, add) if self._tile.only and not tile.only else add(grads)

    def results(
        self, kernel: Kernel, needs: tuple[bool, bool, bool] = (True, True, True)
    ) -> list[torch.Tensor]:
        """The kernel's results: out and lse, or the gradients that are needed.

        A forward tile that is not the only one of its call is done twice, as the first tile and as
        the last.
        """
        _, into = self._backward(kernel)
        for x in into:
            x.zero_()
        if self.work.forward and not self._tile.first:
            for first in (True, False):
                tile = self._tile._replace(first=first, last=not first)
                kernel.forward(self._qkv, tile, self._state)
        else:
            self.run(kernel, needs)
        if self.work.forward:
            return [self._state.out.clone(), self._state.lse.clone()]
        return [x.clone() for x, needed in zip(into, needs, strict=True) if needed]


def fastest_kernel(
    work: Work,
    candidates: Sequence[Kernel],
    measure: _Measure | None = None,
) -> KernelTimes:
    """The fastest of several kernels that can do this work.

    Remembered figures decide; where there are none, the kernels are measured now. Blocks while this
    rank measures, and at most 120 s while another rank of the host does. Where no kernel can be
    measured, the first candidate is taken.

    measure: gives seconds by kernel, or the reason why there are none; by default it measures on
    the device.
    """
    work = work._replace(mask=_standard(work))
    names = [kernel.name for kernel in candidates]
    figures, whence = known_figures(
        KIND, speed_key(work), names, lambda: (measure or seconds_of)(work, candidates)
    )
    tokens = _TOKENS[work.device.type]
    best, reason = fastest_of(figures, names, f"a tile of {tokens:,} x {tokens:,}", whence)
    return KernelTimes(candidates[names.index(best)], reason)


def fastest_of(figures: Figures, names: Sequence[str], what: str, whence: str) -> tuple[str, str]:
    """The name of the fastest kernel, the first one where none could be measured; and the reason.

    what: was measured. whence: the figures come from.
    """
    times = {name: x for name in names if isinstance(x := figures.get(name), float)}
    failed = ", ".join(f"{name} failed: {x}" for name, x in figures.items() if isinstance(x, str))
    if not times:
        return names[0], f"no kernel could be measured ({failed})"
    in_order = ", ".join(
        f"{name} {1e3 * x:.3f} ms" for name, x in sorted(times.items(), key=lambda item: item[1])
    )
    reason = f"the fastest of {in_order} for {what} ({whence}{'; ' + failed if failed else ''})"
    return min(times, key=times.__getitem__), reason


def known_figures(
    kind: str, key: Mapping[str, str], names: Iterable[str], measure: Callable[[], Figures]
) -> tuple[Figures, str]:
    """The figures of kernels by name, measured once for a key; and where they come from.

    Blocks while this rank measures, and at most 120 s while another rank of the host does.
    """
    names = tuple(sorted(names))
    asked = dict(key) | {"kernels": " ".join(names)}
    with _lock:
        known = _known.get((kind, *asked.values()))
        if known is not None:
            return known, "measured before in this process"
        with alone(kind, asked, _DEADLINE_S):
            figures = recall(kind, asked, partial(_are_times, names))
            whence = "remembered for this chip"
            if figures is None:
                figures, whence = measure(), "measured now"
                # The answer is not kept where a kernel found no memory: another time there may be
                # some.
                if not any(_out_of_memory(x) for x in figures.values()):
                    remember(kind, asked, figures)
        _known[kind, *asked.values()] = figures
    return figures, whence


def _out_of_memory(figure: float | str) -> bool:
    return isinstance(figure, str) and figure.startswith("OutOfMemoryError")


def _are_times(names: Sequence[str], remembered: object) -> bool:
    """Whether these are the kernels' seconds, or why there are none."""
    return (
        isinstance(remembered, dict)
        and remembered.keys() == set(names)
        and all(
            isinstance(x, str) or (isinstance(x, float) and 0 < x < math.inf)
            for x in remembered.values()
        )
    )


def seconds_of(work: Work, candidates: Sequence[Kernel]) -> Figures:
    """Median seconds of each kernel on a standard tile, or the kernel's error in words.

    The kernels run in turn. A kernel whose results are not the first one's has no time. Blocks
    until all are done.
    """
    try:
        problem = TileProblem(work, alone=work.ring_size == 1)
    except torch.OutOfMemoryError as error:
        return {kernel.name: error_in_words(error) for kernel in candidates}
    figures = seconds_in_turn(
        work.device, {kernel.name: partial(problem.run, kernel) for kernel in candidates}
    )
    able = [kernel for kernel in candidates if isinstance(figures[kernel.name], float)]
    del problem
    for kernel in able[1:]:
        try:
            wrong = _wrong(kernel, able[0], work)
        except failures() as error:
            wrong = error_in_words(error)
        if wrong:
            figures[kernel.name] = wrong
    return figures


def _wrong(kernel: Kernel, other: Kernel, work: Work) -> str | None:
    """How far a kernel's results are off from another one's, if by too much.

    On the standard tile, and under a window and for documents if the kernel takes them so.
    """
    tokens = _TOKENS[work.device.type]
    ends = sorted({1, tokens // 3, tokens // 2})
    documents = Documents([b - a for a, b in pairwise((0, *ends, tokens))]) & Causal()
    for mask in (work.mask, SlidingWindow(tokens // 10, 0), documents):
        problem = TileProblem(work._replace(mask=mask), alone=work.ring_size == 1)
        if mask is not work.mask and kernel.refuses(problem.work):
            continue
        off = _most_off(problem.results(kernel), problem.results(other))
        if not off <= _MOST_OFF:  # NaN is not
            return f"its results are off from {other.name}'s by {off:.2g} under {mask!r}"
    return None


def _most_off(results: Iterable[torch.Tensor], truth: Iterable[torch.Tensor]) -> float:
    """The largest error of results, relative to the truth, in the Frobenius norm."""
    norm, pairs = torch.linalg.vector_norm, zip(results, truth, strict=True)
    errors = [norm(x.float() - y.float()) / norm(y.float()) for x, y in pairs]
    return torch.stack(errors).max().item()


def seconds_in_turn(device: torch.device, runs: Mapping[str, Callable[[], object]]) -> Figures:
    """Median seconds of functions by name, or an error in words. Blocks until all are done."""
    results: Figures = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(_ROUNDS[device.type] + 1):
        for name, run in runs.items():
            if name in results:
                continue
            try:
                took_s = _took_s(device, run)
            except failures() as error:
                # A kernel that fails is not taken, and `explain` says so.
                results[name] = error_in_words(error)
                continue
            if i:  # the first round compiles
                times[name].append(took_s)
    return results | {
        name: statistics.median(seen) for name, seen in times.items() if name not in results
    }


def _took_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds that a function takes; on a GPU by events of the device."""
    if device.type == "cpu":
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s
    with torch.cuda.device(device):
        return issue_timed(run).seconds()


class TimedRuns(NamedTuple):
    """Runs that have been issued, and the events around them."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    times: int

    def seconds(self) -> float:
        """Seconds of one run. Blocks until the last has ended."""
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3 / self.times


def issue_timed(run: Callable[[], object], times: int = 4) -> TimedRuns:
    """Issues `times` runs on the current stream, to be timed together. Does not wait.

    One run more comes before them. While the device does it the host gets ahead, so the time
    between the events is the device's own, not what the host takes to start kernels.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(times):
        run()
    end.record()
    return TimedRuns(start, end, times)


def _standard(work: Work) -> Mask:
    """The mask of the standard tile.

    The work's own mask may be for other lengths than the standard tile's.
    """
    if work.mask.rule is not Rule.OWN:
        return work.mask
    triangles = any(piece.shape is Shape.LOWER for pieces in work.tiles for piece in pieces)
    return Causal() if triangles else Full()


def speed_key(work: Work) -> dict[str, str]:
    """Everything that a speed depends on."""
    return chip_and_versions(work.device, "flash-attn-4", "nvidia-cutlass-dsl") | {
        "cudnn": str(
            torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        ),
        # A program may put another implementation behind torch's operators
        # (`activate_flash_attention_impl`).
        "flash": str(getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()),
        "dtype": str(work.dtype),
        "head_dim": str(work.head_dims),
        "query heads": "share keys" if work.grouped else "have keys of their own",
        "direction": "forward" if work.forward else "backward",
        "order of sums": "any" if not (work.forward or work.deterministic) else "fixed",
        "told to repeat": str(not work.forward and told_to_repeat()),
        "mask": repr(work.mask),
        "tile": "the only one" if work.ring_size == 1 else "one of several",
    }


def chip_and_versions(device: torch.device, *packages: str) -> dict[str, str]:
    """What every speed depends on. packages: whose versions count too."""
    from burst_rt.version import __version__

    if device.type == "cuda":
        chip = {"chip": torch.cuda.get_device_name(device)}
    else:
        chip = {
            "chip": str(cpu_capabilities().get("cpu_name")),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
    versions = {name: _version(name) for name in ("triton", *packages)}
    return chip | {"torch": torch.__version__, "burst_rt": __version__} | versions


def failures() -> tuple[type[Exception], ...]:
    """The errors of a kernel that does not fit.

    torch's operators and the device raise RuntimeError, triton raises its own. ValueError comes
    from an implementation behind torch's operators that does not fit torch.
    """
    known, triton = (RuntimeError, ValueError), sys.modules.get("triton.errors")
    return known if triton is None else (*known, triton.TritonError)


def error_in_words(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
