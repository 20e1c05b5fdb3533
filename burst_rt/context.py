"""`init` and `Context`: a user's handle on a group of ranks that attend together.

`init` joins the MPI job, or makes a world of one. Several contexts may live in one process (context
parallel together with data, tensor and pipeline parallel); each context duplicates its
communicator. A context makes one call at a time. A context joins the floors below it: the runtime,
attention's state, and telemetry.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from burst_rt.arguments import wrong_kind
from burst_rt.attention.sharding import ContextLayout, LayerCosts, choose_layout
from burst_rt.attention.state import AttentionState
from burst_rt.errors import BurstError, InputError
from burst_rt.job import launched
from burst_rt.job.ending import error_line, exit_code_of
from burst_rt.job.stopped import end_if_stopped
from burst_rt.kernels import KERNELS, PARTIALS
from burst_rt.planning.choose import FORECAST_UP_TO
from burst_rt.planning.masks import Mask
from burst_rt.planning.recurrences import RECURRENCE_KERNELS, RecurrenceSizes
from burst_rt.runtime.calibrated import HARDWARE_VARIABLE
from burst_rt.runtime.connections import Comm, Group
from burst_rt.runtime.joining import check_seconds, join
from burst_rt.runtime.objects import all_gather, first, together
from burst_rt.runtime.pipeline import Pipeline, make_pipeline
from burst_rt.runtime.process import process
from burst_rt.runtime.reductions import all_reduce, gather_last_run
from burst_rt.runtime.refusing import refuse, refuse_kinds
from burst_rt.runtime.runtime import Runtime
from burst_rt.runtime.stats import Stats
from burst_rt.scheduler import Graph, Lane, Span
from burst_rt.telemetry.rank.joining import farewell, follow

__all__ = ["Context", "init"]

_T = TypeVar("_T")

_FUNCTIONS = (
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log1p, torch.log2, torch.sqrt,
    torch.rsqrt, torch.tanh, torch.erf, torch.sin, torch.cos,
)  # fmt: skip


_first_calls = threading.Lock()


@cache
def _call_first() -> None:
    """Calls each function of a CPU's vectors once.

    MKL looks for a function's fastest version in the first call of a process. Where several threads
    make that call at once, one of them may get half the digits (pytorch issue 188792; seen in 1 of
    some 1,000 processes with torch 2.13). So one thread makes it, before ranks that are threads
    compute; and not when this module is imported, as MKL also reads its settings then.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(one)


class Context:
    """A group of ranks. Made by `init`; use it as a context manager or call `close`.

    rank: this rank's number. world_size: how many ranks the group has. device: where tensors of
    calls must live. timeout_s: how long a peer may take to enter a call. stall_s: how long nothing
    may move inside a call.
    """

    def __init__(self, runtime: Runtime, attention: AttentionState) -> None:
        self.runtime = runtime
        self.attention = attention
        self.rank = runtime.rank
        self.world_size = runtime.world_size
        self.device = runtime.device
        self.timeout_s = runtime.timeout_s
        self.stall_s = runtime.stall_s

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(0 if error is None else exit_code_of(error), error_line(error))

    def __deepcopy__(self, memo: object) -> Context:
        """The context itself: a copy of a model is on the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "Context: a context belongs to its process, and cannot be pickled; make one there with "
            "burst_rt.init"
        )

    def __repr__(self) -> str:
        return f"<burst_rt.Context rank {self.rank} of {self.world_size} on {self.device}>"

    @refuse_kinds
    def layout(
        self,
        seq_len: int,
        kind: str = "zigzag",
        *,
        mask: Mask | None = None,
        heads: tuple[int, int] | None = None,
        head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        recurrences: Sequence[RecurrenceSizes] = (),
        token_cells: float | None = None,
    ) -> ContextLayout:
        """The layout of `seq_len` tokens over the ranks.

        kind: "zigzag" (equal work under a causal mask), "contiguous", "striped", or one that
            follows the mask:
            "balanced" gives every rank the same tokens and nearly the same cells, in at most
            2 + log2(W) runs (see `planning.balance`). Every such layout of one length has the same
            shard lengths, so packed batches may bring a new mask every step. Masks without spans
            count by what is known of them: a function by `within`, others as if all keys were seen.
            "whole" gives a document to one rank, and cuts only long ones and those that would leave
            ranks uneven. Ranks have different numbers of tokens. Where the machine was measured, up
            to 16 ranks, it cuts as many as are forecast to pay (0.4 s at 16 ranks); elsewhere the
            busiest rank has at most 5 percent above its share, where that is possible.
            "auto" takes "zigzag", "contiguous", "striped" or "balanced". Up to 64 ranks, and where
            `burst-rt calibrate` has measured the machine, it takes the one whose forward and
            backward are forecast to take the least time, with the strategies that calls will take.
            Elsewhere, of those whose cells are even, the one that sends the fewest bytes. Takes
            seconds, a quarter of a minute at most, and is kept by mask: for masks that stay.
        mask: for "balanced", "whole" and "auto": the mask that calls will have, for as many queries
            as keys. Another mask gives right results too. Every rank must give the same mask; ranks
            compare layouts when they make a call.
        heads, head_dim, dtype: for "auto" and "whole": (query heads, kv heads), their width and the
            type of the calls' tensors. The default is (32, 8), 128 and bfloat16.
        recurrences: for "auto": the recurrent layers (`burst_rt.recurrence`) that a model has for
            each layer of attention. They have no striped layout, and their states go from run to
            run.
        token_cells: for "whole": what all but attention costs for a token, in cells of attention
            (a query that sees a key, in all heads). None: 6 times heads times head_dim, as in a
            usual transformer layer. 0: attention alone.

        Local; does not block, unless an argument is wrong. Raises InputError for a wrong argument,
        on every rank that waits for this one: this rank blocks at most `timeout_s` for the others,
        which raise the error in the call they make next.
        """
        try:
            costs = LayerCosts(heads, head_dim, dtype, token_cells)
            chosen = choose_layout(self.attention, seq_len, kind, mask, costs, recurrences)
        except InputError as error:
            refuse("layout", error, self.runtime)
        return ContextLayout(self.attention, chosen)

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group. True, too, in a process forked from the rank."""
        return self.runtime.closed

    @property
    def restarts(self) -> int:
        """How often this rank's job has been started again: by `burst-rt run --restarts`, Slurm's
        requeues, or torchrun. Each agent of torchrun's counts for itself, and only failures.
        """
        return launched.restarts()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of this rank's compute and transfers, for the `GraphBuilder` of a pipeline;
        and "control", which has nothing but the ranks' agreement.
        """
        return self.runtime.machine.lanes

    @property
    def why_transport(self) -> str:
        """The transport that this context uses, and why."""
        machine = self.runtime.machine
        return f"{machine.choice.name}: {machine.choice.reason}"

    def stats(self) -> Stats:
        """Counts and times of this context's attention calls so far. Does not block.

        On a GPU, compute_s and wait_s cover only the calls that have ended on the device and that
        were made after the first `stats()` or `gather_last_run()`: timing costs each call some
        microseconds, so it is off until you ask for it. With telemetry all calls are timed.
        """
        return self.runtime.stats()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums a contiguous float32, float64 or int64 tensor over the ranks, in place.

        No gradient flows through the sum, so that x must not require grad where grad is enabled.
        Collective; blocks at most `timeout_s` for each of its two rounds. Every rank gets the same
        bits. On GPUs 1 MiB and more goes from device to device, in pieces of 64 MiB or more, where
        messages carry device memory (NCCL, MPI); else through the host's memory. Raises InputError
        on every rank alike.
        """
        return all_reduce(self.runtime, x)

    def all_gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order, on every rank: for the small things beside a step.

        value: plain data: None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts
        of these. Ranks may give values of different types and lengths. A tuple arrives as a list.
        It costs a round of messages and copies on the host; tensors of a step go elsewhere.

        Collective; blocks at most `timeout_s` for each of its two rounds. Raises InputError on
        every rank for anything but plain data.
        """
        return all_gather(self.runtime, value)

    def together(self, fn: Callable[[], _T]) -> _T:
        """Runs `fn()` on every rank and returns this rank's result, or raises on every rank.

        If `fn` raised on any rank, every rank raises the error of the lowest of these ranks. The
        message begins with that rank's number: a BurstError keeps its class; an OSError becomes a
        ConfigError, or a DeviceError where the machine failed (a full disk); any other Exception
        becomes an InputError. The context stays usable.

        Collective; blocks at most `timeout_s` for the other ranks, after `fn` has ended here. `fn`
        may make collective calls, the same on every rank. Where `fn` fails on a rank before such a
        call, the call raises the error on the others, and that rank waits until their `fn` ends.
        """
        return together(self.runtime, fn)

    @refuse_kinds
    def first(self, fn: Callable[[], _T]) -> _T:
        """Runs `fn()` on rank 0 alone; every rank gets its result, or raises its error.

        The result is plain data, as `all_gather` takes it. Errors are those of `together`.

        Collective; blocks at most `timeout_s` for each of its two rounds, so `fn` must take less.
        `fn` must make no collective call: the other ranks would not make it.
        """
        return first(self.runtime, fn)

    @refuse_kinds
    def pipeline(self, build: Callable[[int], Graph]) -> Pipeline:
        """Builds and verifies the graphs of a custom pipeline.

        build: `build(rank)` returns the graph of a rank, and must be the same pure function on
        every rank. See examples/.

        Local; does not block, unless something is wrong. Raises InputError for a build that raises,
        or whose graphs do not fit together, and ConfigError for tags that the transport cannot
        take: on every rank that waits for this one, as `layout` does.
        """
        return make_pipeline(self.runtime, build)

    def gather_last_run(self) -> list[tuple[Graph, list[Span]]]:
        """Every rank's graph and trace of its last attention call or pipeline, in rank order.

        On GPUs, an attention call takes times after the first `stats()` or `gather_last_run()` of
        its rank, and under telemetry. Raises InputError on every rank where the last run took none
        on some rank: make the call again.

        Collective; blocks at most `timeout_s` each for the device, the agreement and the gathering.
        The traces share the clock of rank 0's host, so `scheduler.exposed` can compare them. Those
        of other hosts are as exact as the hosts' wall clocks agree.
        """
        return gather_last_run(self.runtime)

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group, and tells the other ranks. Does not wait for them. Idempotent.

        The other ranks can then enter no further call with this rank. code: 0, or the exit code
        where this rank failed. error: the error in words. In a process that was forked from a rank
        `close` does nothing.
        """
        self.runtime.close(code, error)
        if self.runtime.broken is None:
            self.attention.close()


def require_context(ctx: object, name: str) -> None:
    """Raises InputError, on every rank that waits for this one, for anything but a context.

    name: the name of the call that was given ctx.
    """
    if not isinstance(ctx, Context):
        got = type(ctx).__name__
        refuse(name, InputError(f"{name}: ctx must be a context of burst_rt.init, got {got}"))


def init(
    comm: Comm | None = None,
    device: str | torch.device = "auto",
    timeout_s: float = 600.0,
    stall_s: float = 30.0,
    *,
    group: Group | None = None,
    join_s: float | None = None,
    transport: str = "auto",
    kernel: str = "auto",
    recurrence_kernel: str = "auto",
    partials: str = "exact",
    deterministic: bool = True,
    check_finite: bool = False,
    telemetry: bool | None = None,
    survey: bool | None = None,
) -> Context:
    """Joins a group of ranks and returns this rank's context.

    Collective over `comm` or `group`; blocks at most `join_s` for each of a few steps.

    comm: an mpi4py intracommunicator, which is duplicated, so yours stays yours. None: all ranks of
        `run_local`, of the MPI job, or of torchrun; a world of one outside a job.
    group: a process group of torch.distributed, or a DeviceMesh of one axis (`mesh["cp"]`), instead
        of `comm`. Its store tells the ranks where to connect to each other; its collectives stay
        the program's.
    device: "auto" (a GPU if torch sees one), "cpu", "cuda" (the GPU with this rank's number on its
        host) or "cuda:N". A GPU becomes the calling thread's current device, so that device="cuda"
        means the same GPU to torch.
    timeout_s: how long a peer may take to enter a call; with NCCL also how long a call may go on
        without any of its tasks ending.
    stall_s: how long nothing may move inside a call.
    join_s: how long the other ranks may take to come here, MPI_Init included. None: the environment
        variable BURST_RT_JOIN_S, else 60.
    transport: "auto", "nccl", "mpi", "torch", "staged" or "local". `ctx.why_transport` says which
        transport was taken and why.
    kernel: "auto" (the kernel measured to be fastest on this machine) or a tile kernel's name.
    recurrence_kernel: "auto", "torch" or "fla" (flash-linear-attention): the kernel of
        `burst_rt.recurrence`. Recurrences that fla does not serve take torch's operators.
    partials: "exact" or "16bit". "16bit" lets kernels round the result of each tile to the inputs'
        16 bits before results are added up, as cuDNN's attention and FlashAttention do, and on CPUs
        torch's bfloat16 attention. Errors then grow with the number of ranks.
    deterministic: whether kernel="auto" takes only kernels that give the same bits every time. If
        False, it also takes backward kernels whose sums differ in the last bits from run to run, as
        cuDNN's do; but not while torch.use_deterministic_algorithms(True) is in force.
    check_finite: whether inputs with NaN or infinities are refused, which costs a pass over them.
    telemetry: whether this rank asks for telemetry; None: the environment decides.
    survey: whether the ranks measure what decides between strategies, where no machine file fits
        (`burst-rt calibrate` writes one); strategy="auto" then goes by forecasts, and not by bytes.
        Takes up to 3 s; on one host, later jobs find the figures. None: in jobs of several
        processes on CPUs, unless BURST_RT_SURVEY is 0 or BURST_RT_HARDWARE is set.

    Raises InputError (an option), ConfigError (no MPI library in an MPI job, a device that is not
    there), ContractMismatch (options differ between ranks), Stalled. Where ranks do not come to
    MPI_Init, the process ends with Stalled's exit code.
    """
    process.install_exit_hooks()
    process.say_at_end(farewell)
    wrong: BurstError | None = None
    try:
        given = {
            "comm": comm, "device": device, "group": group, "transport": transport,
            "kernel": kernel, "recurrence_kernel": recurrence_kernel, "partials": partials,
            "deterministic": deterministic, "check_finite": check_finite, "telemetry": telemetry,
        }  # fmt: skip
        error = wrong_kind(init, (), given)
        if error is not None:
            raise error
        check_seconds("timeout_s", timeout_s)
        check_seconds("stall_s", stall_s)
        if kernel != "auto" and kernel not in KERNELS:
            raise InputError(
                f"init: kernel must be 'auto' or one of {sorted(KERNELS)}, got {kernel!r}"
            )
        if recurrence_kernel != "auto" and recurrence_kernel not in RECURRENCE_KERNELS:
            raise InputError(
                "init: recurrence_kernel must be 'auto' or one of "
                f"{sorted(RECURRENCE_KERNELS)}, got {recurrence_kernel!r}"
            )
        if partials not in PARTIALS:
            raise InputError(f"init: partials must be one of {list(PARTIALS)}, got {partials!r}")
    except InputError as error:
        wrong = error
    with _first_calls:
        _call_first()
    joined = join(comm, group, str(device), transport if wrong is None else "auto", join_s, wrong)
    machine, within_s = joined.machine, joined.within_s
    machine.enter()
    runtime = Runtime(
        machine, joined.control, timeout_s=timeout_s, stall_s=stall_s, flight=joined.flight
    )
    terms = {
        "call": "init",
        "timeout_s": str(timeout_s),
        "stall_s": str(stall_s),
        "kernel": kernel,
        "recurrence_kernel": recurrence_kernel,
        "partials": partials,
        "deterministic": str(deterministic),
        "check_finite": str(check_finite),
        "device": machine.device.type,
        "survey": str(survey),
    }
    try:
        runtime.agree(terms, within_s=within_s)
        if _surveys(survey, runtime, threads=joined.presence.thread is not None):
            from burst_rt.attention.survey import survey as measured  # with the simulator

            machine.hardware = measured(runtime)
    except BurstError:
        runtime.close()
        raise
    attention = AttentionState(
        runtime, kernel=kernel, partials=partials, deterministic=deterministic,
        check_finite=check_finite, recurrence_kernel=recurrence_kernel,
    )  # fmt: skip
    follow(runtime, joined.presence, asked=telemetry, within_s=within_s)
    if runtime.world_size > 1 and joined.presence.thread is None:
        end_if_stopped(timeout_s + stall_s, runtime.rank)
    return Context(runtime, attention)


def _surveys(asked: bool | None, runtime: Runtime, *, threads: bool) -> bool:
    """Whether the ranks of a new context measure their machine; the same on every rank."""
    machine = runtime.machine
    # For more ranks bytes decide, if hops differ.
    if not 1 < runtime.world_size <= FORECAST_UP_TO:
        return False
    if machine.hardware is not None or machine.choice.staged:
        return False
    if asked is not None:
        return asked
    chosen = os.environ.get(HARDWARE_VARIABLE) or os.environ.get("BURST_RT_SURVEY") == "0"
    # The environment of rank 0 decides.
    mine = not (threads or chosen or machine.device.type != "cpu")
    return bool(all_gather(runtime, mine)[0])
