"""What is worth a mark on the curves of a job: checkpoints, evaluations, restarts, loss spikes.

Bounded: the last `_MOST` are kept.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
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
# Ranks evaluate together, and the held-out loss is reported at the end of that, or a little later:
# what is so many seconds apart, or less, is the same.
_SAME_S = 0.25
# Times of reports and of steps' ends that are remembered: ranks tell up to a second late.
_STEPS = 256
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
        self._began_s: deque[float] = deque(maxlen=_MOST)  # when what each mark is for began
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._spiking = False
        self._reached: list[tuple[float, int]] = []  # when which step was reported or ended

    def join(self, at_s: float, hello: Hello, *, again: bool) -> None:
        """A rank joins. again: it had joined before."""
        if again:
            self._add(at_s, "restart", f"rank {hello.rank} has begun again")
        elif hello.restarts and not any(mark.kind == "restart" for mark in self._marks):
            text = f"the job was started again: restart {hello.restarts}"
            self._add(at_s, "restart", text)

    def phase(self, rank: Rank, phase: PhaseEnded) -> None:
        """A step or a span of the job has ended."""
        began_s, ended_s = rank.at(phase.started_s), rank.at(phase.ended_s)
        if not phase.name:
            self._reach(ended_s, phase.step)
        elif phase.name in _SPANS:
            self._meet(began_s, ended_s, phase.name, f"in {ended_s - began_s:.3g} s")

    def report(self, at_s: float, report: JobReport, finite: Mapping[str, float]) -> None:
        """The job reports its progress. finite: those of its values that are finite numbers."""
        self._reach(at_s, report.step)
        if _HELDOUT in finite:
            words = f"held-out loss {finite[_HELDOUT]:.4g}"
            self._meet(at_s, at_s, "evaluation", words)
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

    def _reach(self, at_s: float, step: int) -> None:
        if not self._reached:
            # What came before the first step lies there.
            for mark in self._marks:
                mark.step = step
        self._reached.insert(bisect_right(self._reached, (at_s, step)), (at_s, step))
        del self._reached[:-_STEPS]

    def _step_at(self, at_s: float) -> int:
        """The step that the job had reached; the first one that is known where that is later."""
        place = bisect_right(self._reached, at_s, key=lambda reached: reached[0])
        return self._reached[max(0, place - 1)][1] if self._reached else -1

    def _meet(self, began_s: float, ended_s: float, kind: str, words: str) -> None:
        """Ranks do something together: each tells of it, and one mark has all that is told."""
        for mark, other_s in zip(reversed(self._marks), reversed(self._began_s), strict=True):
            apart_s = max(began_s - mark.at_s, other_s - ended_s)
            if mark.kind == kind and apart_s <= _SAME_S:
                if words.split()[0] not in mark.text:
                    mark.text = f"{mark.text}, {words}"
                return
        self._add(ended_s, kind, f"{kind} {words}", began_s)

    def _add(self, at_s: float, kind: str, text: str, began_s: float | None = None) -> None:
        self._marks.append(MarkView(at_s=at_s, step=self._step_at(at_s), kind=kind, text=text))
        self._began_s.append(at_s if began_s is None else began_s)
