"""What would make a model fit into memory that does not: one setting changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import TENSOR_PARALLEL
from burst_rt.launch.plan.model import ModelForecast, SpreadModel
from burst_rt.launch.plan.question import Question
from burst_rt.scheduler.simulator import Hardware

__all__ = ["Remedy", "remedies"]

_TOKENS = 1024  # tokens are told in multiples of so many: "64K"


class Remedy(NamedTuple):
    """A changed setting, and the bytes that a rank then holds."""

    words: str
    size_bytes: int
    fits: bool


def remedies(
    question: Question, lacking: ModelForecast, world_size: int, hardware: Hardware
) -> list[Remedy]:
    """What each change makes of a strategy that does not fit; the changes that are possible.

    The smallest size of an axis that fits is told, or else the largest. The last change is the most
    tokens that fit.
    """
    asked = replace(question, layout=lacking.layout)
    strategy = lacking.strategy.partition(":")[0]  # whose groups follow from the ranks

    def held(changed: Question) -> SpreadModel | None:
        try:
            return SpreadModel(changed, strategy, world_size, hardware)
        except InputError:
            return None  # these ranks, or this model, cannot

    changes: list[Remedy] = []
    for ways in _ways(asked, strategy, world_size):
        told: Remedy | None = None
        for words, changed in ways:
            model = held(changed)
            if model is not None:
                told = Remedy(words, model.memory_bytes, model.fits)
            if told is not None and told.fits:
                break
        changes += [told] if told else []
    few, many = 0, asked.seq_len // _TOKENS  # in units of `_TOKENS`: fits, does not fit
    best: Remedy | None = None
    while many - few > max(1, few // 64):
        middle = (few + many) // 2
        model = held(replace(asked, seq_len=middle * _TOKENS))
        if model is None or not model.fits:
            many = middle
        else:
            few, best = middle, Remedy(f"--seq {middle}K", model.memory_bytes, True)
    return [*changes, *([best] if best else [])]


def _ways(asked: Question, strategy: str, world_size: int) -> Iterator[list[tuple[str, Question]]]:
    """Changes of each setting, the least first."""
    if asked.phase == "train":
        if asked.shard != "fsdp":
            yield [("--shard fsdp", replace(asked, shard="fsdp"))]
        if asked.activations is not None:
            yield [("--activations auto", replace(asked, activations=None))]
        if asked.optimizer in ("adamw", "adamw-bf16"):
            yield [("--optimizer adamw-8bit", replace(asked, optimizer="adamw-8bit"))]
    if strategy in TENSOR_PARALLEL:
        return
    sizes = [2**n for n in range(1, 11) if 2**n <= world_size]
    yield [(f"--tensor {n}", replace(asked, tensor=n)) for n in sizes if n > asked.tensor]
    if asked.phase == "train":
        stages = [n for n in sizes if n > asked.pipeline]
        yield [
            (
                f"--pipeline {n}",
                replace(asked, pipeline=n, micro_batches=max(n, asked.micro_batches)),
            )
            for n in stages
        ]
