"""Samplers drawn from each epoch's seed: a resumed run of Trainer sees the rows it would have seen.

accelerate skips the batches of the epoch that a checkpoint is in, so the epoch's order must be made
again. In an unbroken run a sampler, or a stream of rows, that draws goes on where it stopped; in a
resumed run it would begin anew. Only transformers' own random sampler takes the epoch's seed. Here
every sampler with a generator does, and an order that cannot be made again is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

__all__ = ["Resumable", "draw_by_epoch", "why_not_resumed"]


class _ByEpoch(Sampler[int]):
    """A sampler whose generator begins each epoch with its first seed plus the epoch's number."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self._epoch = sampler, 0
        self._seed = sampler.generator.initial_seed()

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate, before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator.manual_seed(self._seed + self._epoch)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def draw_by_epoch(loader: Any, sampler: Any) -> None:
    """Has a sampler draw each epoch from the epoch's seed, in a loader that accelerate prepared.

    A sampler without a generator, or one that knows the epoch, stays as it is. It is put where
    accelerate looks for samplers to tell them the epoch: behind skipped batches too.
    """
    drawn = isinstance(getattr(sampler, "generator", None), torch.Generator)
    known = hasattr(sampler, "set_epoch") or not drawn
    loader.set_sampler(sampler if known else _ByEpoch(sampler))


def why_not_resumed(loader: Any, epoch: float) -> str | None:
    """Why a run that is in an epoch cannot see the rows that it would have seen, in words."""
    rows = loader.dataset
    rows = getattr(rows, "dataset", rows) if isinstance(rows, IterableDataset) else rows
    if isinstance(rows, IterableDataset):
        name = type(rows).__name__
        if epoch >= 1 and not has_length(loader):
            return (
                "train_dataset: expected one that has a length, to go on after its first pass, got "
                f"{name}: transformers skips rows of the first pass only; give it __len__"
            )
        if epoch >= 1 and hasattr(rows, "generator") and not hasattr(rows, "set_epoch"):
            return (
                f"train_dataset: expected a method set_epoch(epoch) of one that draws, to go on "
                f"after its first pass, got {name} without; seed its generator there"
            )
        return None
    batches = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # the loader dealt it to contexts
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch"):
        return None
    return (
        f"sampler: expected one whose order can be made again, got {type(sampler).__name__}; give "
        "it a method set_epoch(epoch) and draw from a seed of the epoch's own, or draw from a "
        "torch.Generator that is its attribute `generator`"
    )


class Resumable(TrainerCallback):  # type: ignore[misc]  # of changing types, so Any
    """Has a resumed run refused that would see other rows than it would have seen.

    refuse: called with the reason, in words.
    """

    def __init__(self, refuse: Any) -> None:
        self._refuse = refuse

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        loader = known.get("train_dataloader")
        if state.global_step and not args.ignore_data_skip and loader is not None:
            reason = why_not_resumed(loader, state.epoch or 0.0)
            if reason:
                self._refuse(reason)
