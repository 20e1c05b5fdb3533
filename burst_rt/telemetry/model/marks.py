"""What is worth a mark on the curves of a job: checkpoints, evaluations, restarts, loss spikes.

Bounded: the last `_MOST` are kept.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from burst_rt.telemetry.messages import Hello, JobReport, PhaseEnded, Severity
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.ranks import Rank
from burst_rt.telemetry.model.views import MarkView

__all__ = ["Marks"]

_MOST = 400
# Spans of these names are marks where they end (`telemetry.span`).
_SPANS = ("checkpoint", "evaluation")
_HELDOUT = "heldout_loss"
# A loss is a spike if it is above the median of the reports before by at least six of their usual
# distances from it (`statistics.NormalDist` has 1.4826 median distances in a standard deviation),
# and by a tenth of it. The first losses of a job fall fast, and say nothing yet.
_RECENT, _FIRST = 32, 8
_DISTANCES = 6 * 1.4826
_LEAST = 0.1


class Marks:
    """See the module."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._marks: deque[MarkView] = deque(maxlen=_MOST)
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._spiking = False
        self._step = -1  # the last one that was reported or has ended

    def join(self, at_s: float, hello: Hello, *, again: bool) -> None:
        """A rank joins. again: it had joined before."""
        if again:
            self._add(at_s, "restart", f"rank {hello.rank} has begun again")
        elif hello.restarts and not any(mark.kind == "restart" for mark in self._marks):
            text = f"the job was started again: restart {hello.restarts}"
            self._add(at_s, "restart", text)

    def phase(self, rank: Rank, phase: PhaseEnded) -> None:
        """A step or a span of the job has ended."""
        if phase.step >= 0:
            self._reach(phase.step)
        if phase.name in _SPANS:
            took_s = phase.ended_s - phase.started_s
            self._add(rank.at(phase.ended_s), phase.name, f"{phase.name} in {took_s:.3g} s")

    def report(self, at_s: float, report: JobReport, finite: Mapping[str, float]) -> None:
        """The job reports its progress. finite: those of its values that are finite numbers."""
        self._reach(report.step)
        if _HELDOUT in finite:
            self._add(at_s, "evaluation", f"held-out loss {finite[_HELDOUT]:.4g}")
        loss = finite.get("loss")
        if loss is None:
            return
        usual = self._usual()
        spikes = usual is not None and loss > usual
        if spikes and not self._spiking and usual is not None:
            text = f"loss {loss:.4g}: losses before it were below {usual:.4g}"
            self._add(at_s, "loss spike", text)
            words = f"{text}, at step {report.step}"
            self._events.add(-1, Severity.WARNING, "loss spike", words)
        self._spiking = spikes
        self._losses.append(loss)

    def window(self, since_s: float, until_s: float) -> list[MarkView]:
        """Those of a window, oldest first."""
        return [mark for mark in self._marks if since_s <= mark.at_s <= until_s]

    def _usual(self) -> float | None:
        """The least loss that is a spike; None before there are enough."""
        if len(self._losses) < _FIRST:
            return None
        middle = statistics.median(self._losses)
        distance = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + max(_DISTANCES * distance, _LEAST * abs(middle))

    def _reach(self, step: int) -> None:
        if self._step < 0:
            # What came before the first step lies there.
            for mark in self._marks:
                mark.step = step
        self._step = max(self._step, step)

    def _add(self, at_s: float, kind: str, text: str) -> None:
        """Each rank tells of the same evaluation, and a report of its loss: one mark has all."""
        for mark in reversed(self._marks):
            if mark.step != self._step or kind not in _SPANS:
                break
            if mark.kind == kind:
                if kind == "evaluation" and "loss" in text and "loss" not in mark.text:
                    mark.text = f"{mark.text}, {text}"
                return
        self._marks.append(MarkView(at_s=at_s, step=self._step, kind=kind, text=text))
