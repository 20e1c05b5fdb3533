"""What `burst-rt plan` answers: all strategies on one number of ranks, the best, and why.

One sentence of an answer is one claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from burst_rt.errors import InputError
from burst_rt.launch.plan.bounds import Known
from burst_rt.launch.plan.layers import TENSOR_PARALLEL
from burst_rt.launch.plan.model import (
    EVERY_UP_TO,
    ModelForecast,
    Question,
    SpreadModel,
    candidates_of,
    fewest_ranks,
    tile_of,
)
from burst_rt.launch.plan.program import how_to_run
from burst_rt.launch.plan.remedies import remedies
from burst_rt.planning.choose import CANDIDATES
from burst_rt.scheduler.simulator import Hardware

__all__ = ["COMPARED", "Answer", "best_worlds", "compare"]

# The strategies that are compared; the last two are for comparing only.
COMPARED = (*CANDIDATES, "sliced", *TENSOR_PARALLEL)
_UP_TO = 512
# The most ranks of which all strategies are simulated: in a second or two.
_ALL_UP_TO = 16
# Rounded quotient of two times that count as equal.
_EQUAL = "1.00"
_NOT_OURS = "burst_attention has no {}: it is Megatron-LM's."


@dataclass(frozen=True)
class Answer:
    """All strategies on one number of ranks, the fastest that fits first."""

    question: Question
    hardware: Hardware
    world_size: int
    found: list[ModelForecast]
    refused: dict[str, str]  # why a strategy cannot be used here
    best: ModelForecast | None  # None where none fits

    @cached_property
    def fewest(self) -> tuple[int | None, str | None]:
        """The fewest ranks that hold the model, and with which strategy.

        The strategy is the best one. Where none fits here, it is the one that needs fewest.
        """
        if self.best is not None:
            name = _plain(self.best.strategy)
            return self._fewest_with(name, self.best.layout), name
        layouts = {_plain(f.strategy): f.layout for f in self.found}
        asked = "zigzag" if self.question.layout == "auto" else self.question.layout
        fewest, strategy = None, None
        for name in COMPARED:
            up_to = _UP_TO if fewest is None else fewest - 1
            layout = layouts.get(name, asked)
            less = self._fewest_with(name, layout, up_to=up_to)
            if less is not None:
                fewest, strategy = less, name
        return fewest, strategy

    def _fewest_with(self, strategy: str, layout: str, *, up_to: int = _UP_TO) -> int | None:
        return fewest_ranks(replace(self.question, layout=layout), strategy, self.hardware, up_to)

    @property
    def rank_seconds(self) -> float | None:
        """The time of all ranks together: what the best one costs in devices."""
        if self.best is None:
            return None
        return self.world_size * self.best.time_s

    @property
    def tile(self) -> tuple[int, int] | None:
        """Queries and keys of the best one's largest tile, if any layer has attention."""
        if self.best is None:
            return None
        question = replace(self.question, layout=self.best.layout)
        return tile_of(question, self.best.strategy, self.world_size, self.hardware)

    @cached_property
    def why(self) -> tuple[str, ...]:
        """Sentences that say what to take and why."""
        return tuple(self._sentences())

    @cached_property
    def how_to_run(self) -> tuple[str, ...]:
        """Lines of a program that does what is forecast for the best, and how it is started."""
        if self.best is None or self.best.strategy in TENSOR_PARALLEL or self.world_size == 1:
            return ()
        return how_to_run(self.question, self.best, self.world_size, self.hardware)

    def _sentences(self) -> Iterator[str]:
        best = self.best
        if not self.found:
            reasons = "; ".join(dict.fromkeys(self.refused.values()))
            yield f"Take none: no strategy is possible on {_ranks(self.world_size)}: {reasons}."
            return
        if best is None:
            yield from self._of_none()
            return
        has_no_layout = best.layout == "zigzag" or best.strategy in TENSOR_PARALLEL
        on = "" if has_no_layout else f" with the {best.layout} layout"
        total = self.world_size * best.time_s
        together = f", {total:,.{0 if total >= 100 else 1}f} s of all ranks together"
        least = "at least " * (not best.simulated)
        yield (
            f"Take {best.strategy}{on}: {least}{best.time_s:.3g} s"
            f"{together * (self.world_size > 1)}."
        )
        if best.strategy in TENSOR_PARALLEL:
            yield from self._of_own(best.strategy, best.time_s)
        yield from self._of_others(best.time_s)
        yield from self._of_memory(best)
        if self.tile is not None:
            queries, keys = self.tile
            yield f"The largest call of a kernel has {queries:,} queries x {keys:,} keys."

    def _of_none(self) -> Iterator[str]:
        """The sentences where no strategy fits into memory."""
        fewest, strategy = self.fewest
        limit = self.hardware.device.memory_bytes / 1e9
        yield (
            f"Take none: on {_ranks(self.world_size)} no strategy fits into a device's "
            f"{limit:,.1f} GB."
        )
        if fewest is not None:
            yield (
                f"The fewest ranks on which one fits are {fewest}, with {strategy}.{_tried(fewest)}"
            )
        else:
            yield f"None fits on any number of ranks up to {_UP_TO}."
        yield from self._of_remedies()

    def _of_remedies(self) -> Iterator[str]:
        """The sentences on what would make one of its own strategies fit."""
        least = next((f for f in self.found if f.strategy not in TENSOR_PARALLEL), None)
        if least is None:
            return
        lacking = (least.memory_bytes - self.hardware.device.memory_bytes) / 1e9
        yield f"{least.strategy} lacks {lacking:,.1f} GB on {_ranks(self.world_size)}."
        changed = remedies(self.question, least, self.world_size, self.hardware)
        fitting = [f"{words} ({size / 1e9:,.1f} GB)" for words, size, fits in changed if fits]
        if fitting:
            yield f"Each of these makes it fit: {'; '.join(fitting)}."
        elif changed:
            words, size, _ = min(changed, key=lambda remedy: remedy.size_bytes)
            yield f"No other setting alone makes it fit; {words} takes {size / 1e9:,.1f} GB."

    def _of_others(self, best_s: float) -> Iterator[str]:
        """The sentences on strategies that do the same, and on the next one."""
        same, *others = _alike(f for f in self.found if not f.out_of_memory)
        if len(same) > 1:
            names = " and ".join(f.strategy for f in same[1:])
            yield f"Here {names} {'does' if len(same) == 2 else 'do'} the same."
        if others:
            times, name = f"{others[0][0].time_s / best_s:.2f}", others[0][0].strategy
            least = "at least " * (not others[0][0].simulated)
            if least and others[0][0].time_s < best_s:
                yield (
                    f"So many ranks were not simulated with {name}, which takes at least "
                    f"{others[0][0].time_s:.3g} s."
                )
            elif times == _EQUAL and not least:
                yield f"The next, {name}, is less than 1 % slower: take either."
            else:
                yield f"The next, {name}, takes {least}{times} times as long."

    def _of_own(self, taken: str, time_s: float) -> Iterator[str]:
        """The sentences for tensor parallelism, which is here only for comparing: they name a
        strategy to use instead.
        """
        yield _NOT_OURS.format(taken)
        own = (f for f in self.found if f.strategy not in TENSOR_PARALLEL and not f.out_of_memory)
        fastest = next(own, None)
        if fastest is None:
            yield "None of its own strategies fits here."
            yield from self._of_remedies()
        else:
            yield (
                f"The fastest of its own strategies is {fastest.strategy}, which takes "
                f"{fastest.time_s / time_s:.2f} times as long."
            )

    def _of_memory(self, best: ModelForecast) -> Iterator[str]:
        fewest, name = self.fewest
        if name is None or fewest is None:
            return
        yield f"With {name} the model fits on {_ranks(fewest)}, and on no fewer.{_tried(fewest)}"
        if best.activations is None or self.question.activations is not None:
            return
        kept = replace(self.question, layout=best.layout, activations="attention kept")
        keeps = fewest_ranks(kept, name, self.hardware, _UP_TO)
        if keeps is not None and keeps > fewest:
            yield f"On fewer than {keeps}, attention is computed again to save memory."


def compare(
    question: Question,
    hardware: Hardware,
    world_size: int,
    going_through: Callable[[Sequence[SpreadModel]], Iterable[SpreadModel]] = iter,
) -> Answer:
    """Forecasts the strategies. The answer names the strategies that cannot use these ranks, with
    the reason.

    On many ranks, a strategy that takes at least as long as the fastest, by its bound, is not
    simulated, unless it may be the next one. On very many, only one is whose ranks do the same, or
    whose hops are alike. going_through: shows progress.
    """
    candidates: list[SpreadModel] = []
    refused: dict[str, str] = {}
    for strategy in COMPARED:
        try:
            kinds = candidates_of(question, strategy, world_size, hardware)
            candidates += sorted(kinds, key=lambda candidate: candidate.bound.rank)
        except InputError as error:
            refused[strategy] = error.message.removeprefix(f"{strategy}: ")
    candidates.sort(key=lambda candidate: candidate.bound.rank)
    forecasts: dict[str, ModelForecast] = {}  # the best of each strategy
    of_forecast: dict[str, SpreadModel] = {}
    best_s = {False: inf, True: inf}  # by whether memory lacks
    passes: Known = {}
    for candidate in going_through(candidates):
        forecast = candidate.bound
        limit_s = best_s[forecast.out_of_memory] if world_size > _ALL_UP_TO else inf
        if candidate.simulates and forecast.time_s < limit_s:
            forecast = candidate.simulated(limit_s, passes)
        if forecast.simulated:
            for lacks in {forecast.out_of_memory, True}:
                best_s[lacks] = min(best_s[lacks], forecast.time_s)
        name = forecast.strategy
        # A layout that was not simulated may be faster than the one that was.
        known = forecasts.get(name, forecast)
        forecasts[name] = min(known, forecast, key=lambda f: f.rank._replace(bounded=False))
        if forecasts[name] is forecast:
            of_forecast[name] = candidate
    second, limit_s = _second(forecasts.values())
    if second is not None and of_forecast[second].simulates:
        forecasts[second] = of_forecast[second].simulated(limit_s, passes)
    in_order = sorted(forecasts.values(), key=lambda f: f.rank)
    best = in_order[0] if in_order and not in_order[0].out_of_memory else None
    return Answer(question, hardware, world_size, in_order, refused, best)


def _second(forecasts: Iterable[ModelForecast]) -> tuple[str | None, float]:
    """The strategy that may be the next after the fastest, where it was not simulated, and the
    seconds of the next one that was.
    """
    others = sorted((f for f in forecasts if not f.out_of_memory), key=lambda f: f.rank)[1:]
    limit_s = min((f.time_s for f in others if f.simulated), default=inf)
    second = min(others, key=lambda f: f.time_s, default=None)
    return (None if second is None or second.simulated else second.strategy), limit_s


def best_worlds(answers: Sequence[Answer]) -> Iterator[str]:
    """The fastest of several numbers of ranks, and the one that costs the least time of devices."""
    able = [answer for answer in answers if answer.best is not None]
    if not able:
        yield f"Take none of these: {answers[-1].why[-1]}"
        return
    for name in dict.fromkeys(answer.best.strategy for answer in able if answer.best):
        if name in TENSOR_PARALLEL:
            yield _NOT_OURS.format(name)
    quick = min(able, key=lambda answer: (answer.best and answer.best.time_s) or 0.0)
    cheap = min(able, key=lambda answer: answer.rank_seconds or 0.0)
    yield f"{_ranks(quick.world_size)}: the least time."
    yield f"{_ranks(cheap.world_size)}: the least ranks x s, which is the time of all devices."


def _alike(forecasts: Iterable[ModelForecast]) -> list[list[ModelForecast]]:
    """Groups of strategies whose forecasts are the same, in the order in which they come.

    Two levels on one node, for example, are a plain ring.
    """
    alike: dict[ModelForecast, list[ModelForecast]] = {}
    for f in forecasts:
        alike.setdefault(replace(f, strategy=""), []).append(f)
    return list(alike.values())


def _plain(strategy: str) -> str:
    """The name without the ranks of a group, which follow from the number of ranks."""
    return strategy.partition(":")[0]


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _tried(count: int) -> str:
    return f" Above {EVERY_UP_TO} only whole nodes were tried." * (count > EVERY_UP_TO)
