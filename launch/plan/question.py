"""What a plan is asked: a model, its tokens, and the mesh of ranks that is to compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from burst_rt.errors import InputError
from burst_rt.launch.plan.models import Model
from burst_rt.launch.plan.shards import Shard

__all__ = ["ACTIVATIONS", "Activations", "Axes", "Phase", "Question"]

Phase: TypeAlias = Literal["first-token", "train"]
# Names of the treatments of activations in training: the fastest first, the smallest last.
# "attention kept": a layer's input, and attention's output and lse, are kept. "computed again":
# only a layer's input is kept.
Activations: TypeAlias = Literal["kept", "attention kept", "computed again"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)


class Axes(NamedTuple):
    """How many ranks there are on each axis; the last axis has neighbouring ranks."""

    pipeline: int  # stages, each with its part of the layers
    data: int  # contexts with batches of their own
    context: int  # places among which a sequence is cut
    tensor: int  # ranks that split each layer's weights and heads

    @property
    def stage(self) -> int:
        """The ranks of a stage."""
        return self.data * self.context * self.tensor


@dataclass(frozen=True)
class Question:
    """What is to be computed, on any number of ranks."""

    model: Model
    seq_len: int
    phase: Phase
    mask: str = "causal"  # see `parse_mask`
    batch: int = 1  # sequences of one micro-batch
    # One of LAYOUTS, or "auto": for each strategy the one with the best forecast.
    layout: str = "zigzag"
    # What becomes of activations in training; None: the first of ACTIVATIONS that fits.
    activations: Activations | None = None
    shard: Shard = "zero1"  # what training shards
    # Places among which a sequence is cut; other ranks have batches of their own. None: all.
    context: int | None = None
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1  # a step of training
    optimizer: str = "adamw"  # one of OPTIMIZERS

    def mesh(self, world_size: int) -> Axes:
        """The axes of so many ranks. Raises InputError where they do not divide."""
        for name, size in (("--pipeline", self.pipeline), ("--tensor", self.tensor)):
            if world_size % size:
                raise InputError(f"{name}: expected a divisor of --world {world_size}, got {size}")
        inner = self.pipeline * self.tensor
        if world_size % inner:
            raise InputError(
                f"--pipeline, --tensor: expected their product to divide --world {world_size}, got "
                f"{self.pipeline} x {self.tensor}"
            )
        places = world_size // inner
        context = self.context or places
        if places % context:
            each = f" / {inner} = {places}" * (inner > 1)
            raise InputError(
                f"--context: expected a divisor of --world {world_size}{each}, got {context}"
            )
        if self.pipeline > self.model.num_layers:
            raise InputError(
                f"--pipeline: expected at most a stage a layer, {self.model.num_layers}, got "
                f"{self.pipeline}"
            )
        return Axes(self.pipeline, places // context, context, self.tensor)
