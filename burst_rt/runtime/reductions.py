"""Collectives over the control group: sums of tensors, and the traces of the last runs.

On devices large sums go from device to device instead (`device_sums.py`).
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from burst_rt.arguments import describe_value, holds_values
from burst_rt.eager import eager
from burst_rt.errors import InputError
from burst_rt.runtime.device_sums import goes_between_devices, sum_between_devices
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Graph, Span

__all__ = ["all_reduce", "gather_last_run"]

_SUMMED = (torch.float32, torch.float64, torch.int64)


@eager
def all_reduce(
    runtime: Runtime, x: torch.Tensor, about: Mapping[str, str] | None = None
) -> torch.Tensor:
    """Sums a tensor over the ranks, in place; blocks and raises as `Context.all_reduce` does.

    about: more that the ranks compare, in words.
    """
    error = _refuses(x)
    if error is not None:
        runtime.refuse("all_reduce", error)
    words = {"call": "all_reduce", "shape": str(tuple(x.shape)), "dtype": str(x.dtype)}
    words.update(about or {})
    if goes_between_devices(runtime, x):
        sum_between_devices(runtime, x, words)
        return x
    host = x.detach().cpu()  # shares x's memory where x is on the CPU
    runtime.collective(words, lambda: runtime.control.allreduce_sum(host.numpy()))
    if x.device.type != "cpu":
        x.detach().copy_(host)
    else:
        # The sum was written through numpy, which autograd does not see.
        torch.autograd.graph.increment_version(x)
    return x


def _refuses(x: object) -> InputError | None:
    """Why `all_reduce` cannot take this rank's tensor, or None."""
    where = (
        "all_reduce: expected a contiguous tensor of float32, float64 or int64 on a CPU or GPU, got"
    )
    if not isinstance(x, torch.Tensor):
        return InputError(f"{where} {type(x).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return InputError(f"{where} one that a transform of torch.func wraps")
    if x.requires_grad and torch.is_grad_enabled():
        return InputError(
            "all_reduce: expected a tensor that does not require grad, got one that does: no "
            "gradient flows through this sum; give x.detach(), or call under torch.no_grad()"
        )
    dense = holds_values(x) and x.is_contiguous()
    if x.dtype in _SUMMED and dense and x.device.type in ("cpu", "cuda") and not x.is_neg():
        return None
    view = ", a negative view" if x.is_neg() else "" if x.is_contiguous() else ", not contiguous"
    return InputError(f"{where} {describe_value(x)}{view}")


def gather_last_run(runtime: Runtime) -> list[tuple[Graph, list[Span]]]:
    """Every rank's graph and trace of its last run; blocks as `Context.gather_last_run` does.

    Raises InputError on every rank where nothing has run yet, and where the last run took no times.
    """
    if runtime.last_run is None:
        runtime.refuse(
            "gather_last_run", InputError("gather_last_run: nothing has run on this context yet")
        )
    graph, driver = runtime.last_run
    timed = driver is not None and driver.timed
    if driver is not None and timed:
        driver.settle(runtime.timeout_s)
    runtime.timed = True
    # Unpickling is safe: only ranks of this job send on the control group's communicator.
    run = (graph, list(driver.trace)) if driver is not None and timed else None
    payload = pickle.dumps((_clock(), run))
    pending = runtime.collective(
        {"call": "gather_last_run"}, lambda: runtime.control.allgather(payload)
    )
    gathered: list[tuple[_Clock, tuple[Graph, list[Span]] | None]] = [
        pickle.loads(raw) for raw in pending.result()
    ]
    first = gathered[0][0]
    timed_runs = [
        (run[0], [_moved(span, _ahead(clock, first)) for span in run[1]])
        for clock, run in gathered
        if run is not None
    ]
    if len(timed_runs) < len(gathered):
        raise InputError(
            "gather_last_run: the last run took no times on "
            f"{len(gathered) - len(timed_runs)} of {len(gathered)} ranks, because nobody had asked "
            "for times of their GPUs; from now on runs take them: make the call again"
        )
    return timed_runs


class _Clock(NamedTuple):
    """A host's clock: the time that `time.perf_counter` counts from, in seconds since the epoch."""

    host: str
    began_s: float


def _clock() -> _Clock:
    return _Clock(socket.gethostname(), time.time() - time.perf_counter())


def _ahead(clock: _Clock, first: _Clock) -> float:
    """Seconds from the first clock's beginning to this one's. Ranks of one host have one clock."""
    return 0.0 if clock.host == first.host else clock.began_s - first.began_s


def _moved(span: Span, by_s: float) -> Span:
    if not by_s:
        return span
    issued_s, started_s, ended_s = (x + by_s for x in (span.issued_s, span.started_s, span.ended_s))
    return span._replace(issued_s=issued_s, started_s=started_s, ended_s=ended_s)
