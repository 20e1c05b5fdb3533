"""Runs a case on processes of this machine, each forked for it, and says how it ended.

A fork has all that this process has imported, and nothing of the cases before. So neither a hang
nor a crash reaches the next case. The ranks meet in a file and talk over the loopback interface.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from burst_rt.conformance.attention import draw_tensors, real_tokens, true_attention
from burst_rt.conformance.cases import AttentionCase, ModelCase, NotOffered
from burst_rt.conformance.models import draw_batch, make_model, true_model

__all__ = ["Comparison", "Outcome", "inputs_of", "run_case", "truth_of"]

Tensors = dict[str, torch.Tensor]
Case = AttentionCase | ModelCase
_Event = tuple[int, str, float | None, str]

# Largest differences from the truth, as parts of the truth's largest value; measured 2e-7 to 2e-6
# and 1e-6 to 2e-5. What libraries left out or mixed up was off by 2e-2 and more.
_BOUND = {AttentionCase: 2e-5, ModelCase: 2e-4}
_GRACE_S = 5.0  # for the other ranks, once one has raised or died


@dataclass(frozen=True)
class Comparison:
    """What all cases of an adapter share: its module, its name, the ranks, and a case's seconds."""

    adapter: ModuleType
    name: str
    world: int
    deadline_s: float


@dataclass(frozen=True)
class Outcome:
    """How a case ended with an adapter.

    kind: "exact", "wrong", "refused" (the library raised), "hung", "crashed", "cannot run here",
    "not offered". error: the largest difference, as a part of the truth's largest value; None
    without results. told: which results are off, or the message. seconds: of the whole case.
    """

    adapter: str
    case: str
    kind: str
    error: float | None = None
    told: str = ""
    seconds: float = 0.0


def inputs_of(case: Case) -> Tensors:
    """The tensors of a case: those of an attention call, or a batch and a model's weights."""
    if isinstance(case, AttentionCase):
        return draw_tensors(case)
    weights = make_model(case).state_dict()
    return draw_batch(case) | {f"weights.{name}": x for name, x in weights.items()}


def truth_of(case: Case, inputs: Tensors) -> Tensors:
    """The results of a case in one process, in float64."""
    if isinstance(case, AttentionCase):
        return true_attention(case, inputs)
    return true_model(case, _model(case, inputs), _batch(inputs))


def run_case(comparison: Comparison, case: Case, inputs: Tensors) -> Outcome:
    """Runs a case on new processes. Blocks at most the comparison's deadline and a few seconds.

    Call it in a process that has started no threads: the ranks are forks of it.
    """
    began = time.monotonic()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        ends, ranks = {}, []
        for rank in range(comparison.world):
            end, other = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_rank,
                args=(rank, comparison, case, inputs, Path(folder), other),
                daemon=True,
            )
            process.start()
            other.close()
            ends[end] = rank
            ranks.append(process)
        events = _events(ends, ranks, began + comparison.deadline_s)
        for process in ranks:
            process.kill()
            process.join()
        logs = [_last_line(Path(folder) / f"rank{rank}") for rank in range(comparison.world)]
    return _outcome(comparison, case, events, logs, time.monotonic() - began)


def _events(ends: dict[Connection, int], ranks: list[Any], until: float) -> list[_Event]:
    """(rank, kind, error, message), in the order in which they came."""
    events: list[_Event] = []
    while ends:
        ready = wait(list(ends), timeout=max(until - time.monotonic(), 0))
        if not ready:
            return events + [(rank, "hung", None, "no answer") for rank in ends.values()]
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.pop(end)
            try:
                events.append((rank, *end.recv()))
            except EOFError:
                ranks[rank].join()
                code = ranks[rank].exitcode
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                events.append((rank, "crashed", None, how))
            end.close()
            if events[-1][1] not in ("exact", "wrong"):
                until = min(until, time.monotonic() + _GRACE_S)
    return events


def _outcome(
    comparison: Comparison,
    case: Case,
    events: list[_Event],
    logs: list[str],
    seconds: float,
) -> Outcome:
    ended = [event for event in events if event[1] not in ("exact", "wrong")]
    if not ended:
        _, kind, error, told = max(events, key=lambda event: event[2] or 0.0)
        return Outcome(comparison.name, case.name, kind, error, told, seconds)
    # What happens to one rank makes others raise or wait: an end that can be no consequence counts.
    order = ("not offered", "cannot run here", "crashed", "refused", "hung")
    rank, kind, _, told = min(ended, key=lambda event: order.index(event[1]))
    if kind == "crashed" and logs[rank]:
        told += f": {logs[rank]}"
    others = sorted({event[1] for event in events} - {kind})
    if others and kind not in order[:2]:
        told += f" (rank {rank}; others: {', '.join(others)})"
    return Outcome(comparison.name, case.name, kind, None, told, seconds)


def _rank(
    rank: int, comparison: Comparison, case: Case, inputs: Tensors, folder: Path, end: Connection
) -> None:
    """One rank's process; it ends here."""
    # Where nobody is left to kill it.
    signal.alarm(int(comparison.deadline_s + 2 * _GRACE_S))
    log = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(comparison.world),
        "LOCAL_WORLD_SIZE": str(comparison.world), "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    truth = truth_of(case, inputs)
    try:
        results = _results(rank, comparison, case, inputs, folder)
        end.send(_compared(case, inputs, results, truth))
    except NotOffered as error:
        end.send(("not offered", None, str(error)))
    except ImportError as error:
        end.send(("cannot run here", None, str(error)))
    except _NoDevice as error:
        end.send(("cannot run here", None, str(error)))
    except Exception as error:  # noqa: BLE001  (whatever a library raises is its answer)
        words = " ".join(str(error).split())
        end.send(("refused", None, f"{type(error).__name__}: {words[:300]}"))
    os._exit(0)


class _NoDevice(Exception):
    """This machine lacks the GPUs that an adapter needs."""


def _results(
    rank: int, comparison: Comparison, case: Case, inputs: Tensors, folder: Path
) -> Tensors:
    """What the adapter returns, on the CPU."""
    function = getattr(
        comparison.adapter, "attention" if isinstance(case, AttentionCase) else "model", None
    )
    if function is None:
        raise NotOffered("the adapter has no function for this")
    device = torch.device("cpu")
    if getattr(comparison.adapter, "DEVICE", "cpu") == "cuda":
        if torch.cuda.device_count() < comparison.world:
            raise _NoDevice(f"needs {comparison.world} GPUs")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=comparison.world,
        timeout=timedelta(seconds=2 * comparison.deadline_s),
    )
    with torch.set_grad_enabled(case.train):
        if isinstance(case, AttentionCase):
            used = {name: x.to(device) for name, x in inputs.items()}
            if not case.train:
                del used["dout"]
            results = function(case, used)
        else:
            batch = {name: x.to(device) for name, x in _batch(inputs).items()}
            results = function(case, _model(case, inputs).to(device), batch)
    # Nobody leaves while others still receive.
    dist.barrier()
    return {name: x.detach().cpu() for name, x in results.items()}


def _batch(inputs: Tensors) -> Tensors:
    return {name: x.clone() for name, x in inputs.items() if not name.startswith("weights.")}


def _model(case: ModelCase, inputs: Tensors) -> Any:
    model = make_model(case)
    weights = {name.removeprefix("weights."): x for name, x in inputs.items() if "." in name}
    model.load_state_dict(weights)
    return model


def _compared(
    case: Case, inputs: Tensors, results: Tensors, truth: Tensors
) -> tuple[str, float, str]:
    """Kind, error, and which results are off."""
    if isinstance(case, AttentionCase):
        real = real_tokens(case)
    else:
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    # A gradient that is all but 0, as that of a bias of keys, is compared with the others.
    steepest = max(
        [float(x.abs().max()) for name, x in truth.items() if "gradient" in name], default=0.0
    )
    errors = {}
    for name, right in truth.items():
        result = results.get(name)
        if result is None or result.shape != right.shape:
            errors[name] = 1.0  # as wrong as zeros
            continue
        if name in ("out", "logits"):
            result, right = result[real], right[real]
        size = max(float(right.abs().max()), 1e-2 * steepest if "gradient" in name else 0.0)
        off = float((result.double() - right).abs().max()) / (size or 1.0)
        errors[name] = torch.inf if off != off else off
    worst = max(errors.values())
    wrong = [name for name, off in errors.items() if off > _BOUND[type(case)]]
    if not wrong:
        return "exact", worst, ""
    shown = wrong if len(wrong) < 5 else [*wrong[:3], f"{len(wrong) - 3} more"]
    return "wrong", worst, f"off: {', '.join(shown)}"


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
