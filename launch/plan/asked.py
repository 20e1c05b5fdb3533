"""What `simulate` and `plan` are asked: their options, and the question that these make."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from burst_rt.errors import InputError
from burst_rt.launch.plan.models import MODELS, Model, parse_model
from burst_rt.launch.plan.question import ACTIVATIONS, Activations, Phase, Question
from burst_rt.launch.plan.shards import OPTIMIZERS, SHARDS, Shard
from burst_rt.launch.plan.words import MASK_HELP, fitting_mask, parse_tokens
from burst_rt.launch.train.config import require_transformers
from burst_rt.planning.chooser import LAYOUTS
from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler.simulator import Hardware

__all__ = ["MOST_RANKS", "PlanOptions", "SimulateOptions", "questions"]

_F = TypeVar("_F", bound=Callable[..., Any])
# Maximum number of ranks. Every rank has a graph of its own: for more ranks, planning would take
# hours.
MOST_RANKS = 1024
_MOST_MICRO_BATCHES = 1024


def _worlds(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers of ranks with commas between them."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,3}", x) and int(x) <= MOST_RANKS for x in words):
        raise click.BadParameter(
            f"expected numbers of ranks such as 8 or 8,16,32, each at most {MOST_RANKS:,}, got "
            f"{text[:40]!r}"
        )
    return tuple(map(int, words))


def questions(*, one: bool) -> Callable[[_F], _F]:
    """The options of `simulate` and `plan` that say what is computed where.

    Both commands have the same defaults, so that their figures can be compared. one: `simulate`,
    which has one strategy on one number of ranks, and whose --mask may be "published".
    """
    options = [
        click.option(
            "--hardware",
            required=True,
            help="a100-pcie, a100-sxm, h100-sxm, h200-sxm, b200-sxm, gb200-nvl72, mi300x, or the "
            "path of a machine file.",
        ),
        click.option(
            "--model",
            "model_text",
            default="llama-7b",
            show_default=True,
            help=f"{', '.join(MODELS)}; a config.json of transformers or a folder that has one; or "
            "sizes: layers=32,dim=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,vocab=128256. "
            "kv_heads defaults to heads, head_dim to dim / heads, vocab to 32000.",
        ),
        click.option(
            "--world",
            type=click.IntRange(1, MOST_RANKS),
            required=True,
            help="Ranks, one device each.",
        )
        if one
        else click.option(
            "--world",
            "worlds",
            callback=_worlds,
            metavar="N[,N...]",
            required=True,
            help="Ranks, one device each; several numbers to compare: 8,16,32.",
        ),
        click.option(
            "--nodes",
            type=click.IntRange(1),
            help="Nodes, with equal numbers of ranks. [default: as few as possible]",
        ),
        click.option(
            "--link",
            metavar="RATE",
            help="Rate of a network card, such as 400Gbit or 800Mbit. [default: the machine's]",
        ),
        click.option(
            "--seq", "seq_text", required=True, help="Tokens of one sequence: 131072, 128K, 1M."
        ),
        click.option(
            "--batch",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Sequences in a batch, or in each of several micro-batches.",
        ),
        click.option(
            "--phase",
            type=click.Choice(["first-token", "train"]),
            default="train",
            show_default=True,
            help="first-token: one forward. train: one training step.",
        ),
        click.option(
            "--mask",
            default="causal",
            show_default=True,
            help=MASK_HELP
            + " published: as in the BurstAttention paper, whose rings compute all scores." * one,
        ),
        click.option(
            "--layout",
            type=click.Choice([*LAYOUTS, "auto"]),
            default="zigzag",
            show_default=True,
            help="Which rank holds which tokens. balanced: equal work under the mask. auto: for "
            "each strategy, the layout with the best forecast; planning takes four times as long. "
            "Tensor parallelism has contiguous shards or none.",
        ),
        click.option(
            "--activations",
            "kept",
            type=click.Choice(["auto", *(name.replace(" ", "-") for name in ACTIVATIONS)]),
            default="auto",
            show_default=True,
            help="What training keeps for the backward. kept: everything. attention-kept: each "
            "layer's input and attention's outputs, as burst_rt.checkpoint does. computed-again: "
            "each layer's input only. auto: for each strategy, the first of these that fits.",
        ),
        click.option(
            "--shard",
            type=click.Choice(SHARDS),
            help="What training shards over all ranks. none; zero1: the optimizer's states; zero2: "
            "gradients, too; fsdp: weights, too, as FSDP2 does. [default: fsdp]",
        ),
        click.option(
            "--context",
            type=click.IntRange(1),
            help="Ranks that share a sequence. The others have batches of their own, as a mesh of "
            "data x context has. [default: all]",
        ),
        click.option(
            "--tensor",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Neighbouring ranks that split each layer's weights and heads, beside a context: "
            "a mesh of context x tensor.",
        ),
        click.option(
            "--pipeline",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Stages that split the layers, beside a context: a mesh of pipeline x context. "
            "Training only.",
        ),
        click.option(
            "--micro-batches",
            type=click.IntRange(1, _MOST_MICRO_BATCHES),
            help="Micro-batches of a step of training. [default: 1; with --pipeline, its stages]",
        ),
        click.option(
            "--optimizer",
            type=click.Choice(tuple(OPTIMIZERS)),
            help="adamw: a copy of the weights and two moments in float32; adamw-bf16: two moments "
            "in bfloat16; adamw-8bit: two of 8 bits; sgd: nothing. [default: adamw]",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options of `questions`, as click gives them."""

    hardware: str
    model_text: str
    nodes: int | None
    seq_text: str
    batch: int
    phase: Phase
    mask: str
    layout: str
    kept: str
    link: str | None
    shard: Shard | None
    context: int | None
    tensor: int
    pipeline: int
    micro_batches: int | None
    optimizer: str | None
    as_json: bool

    def question(self, mask: str) -> Question:
        """What is to be computed, under a mask. Raises InputError for words that do not fit."""
        model, seq_len = _model(self.model_text), parse_tokens(self.seq_text)
        fitting_mask(mask, seq_len, self.batch)
        activations = _activations(self.kept, self.phase)
        if self.phase != "train":
            self._check_only_of_training()
        return Question(
            model, seq_len, self.phase, mask, self.batch, self.layout, activations,
            self.shard or "fsdp", self.context, self.tensor, self.pipeline,
            self.micro_batches or self.pipeline, self.optimizer or "adamw",
        )  # fmt: skip

    def _check_only_of_training(self) -> None:
        pipeline = self.pipeline if self.pipeline > 1 else None
        for option, given, does in (
            ("--shard", self.shard, "shards weights"),
            ("--pipeline", pipeline, "is forecast with stages"),
            ("--micro-batches", self.micro_batches, "has them"),
            ("--optimizer", self.optimizer, "has one"),
        ):
            if given is not None:
                raise InputError(
                    f"{option} {given}: only training {does}; leave it out, or use --phase train"
                )

    def machine(self, world: int) -> Hardware:
        """The machine, with as many ranks a node as --nodes says."""
        hardware = _linked(load_hardware(self.hardware), self.link)
        return _spread(hardware, world, self.nodes or _even(world, hardware, self.tensor))


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(_Asked):
    """What `simulate` is asked."""

    world: int
    strategy: str


@dataclass(frozen=True, kw_only=True)
class PlanOptions(_Asked):
    """What `plan` is asked."""

    worlds: tuple[int, ...]


def _model(text: str) -> Model:
    """A model by its name, by the path of its configuration, or by its sizes."""
    if text in MODELS or not os.path.exists(text):
        return parse_model(text)
    require_transformers("--model with a config.json")
    from burst_rt.launch.plan.configuration import read_config

    return read_config(Path(text), text)


def _activations(word: str, phase: Phase) -> Activations | None:
    """The choice of --activations; None for auto."""
    if word != "auto" and phase != "train":
        raise InputError(
            f"--activations {word}: only training keeps any; leave it out, or use --phase train"
        )
    return next((name for name in ACTIVATIONS if name.replace(" ", "-") == word), None)


def _linked(hardware: Hardware, rate: str | None) -> Hardware:
    """The machine with network cards of this rate."""
    if rate is None:
        return hardware
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([GM])bit", rate, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise InputError(f"--link: expected a rate such as 400Gbit or 800Mbit, got {rate[:40]!r}")
    if hardware.nics is None:
        raise InputError(
            f"--link: {hardware.name} has no network cards; add [nics] to its machine file"
        )
    bits = float(match[1]) * {"G": 1e9, "M": 1e6}[match[2].upper()]
    link = replace(hardware.nics.link, bytes_per_s=bits / 8)
    return replace(hardware, nics=replace(hardware.nics, link=link))


def _even(world: int, hardware: Hardware, tensor: int) -> int | None:
    """The fewest nodes that get equal numbers of ranks, and whole groups of so many neighbours.

    None where one node does, and where twice as many as are needed would not.
    """
    fewest = -(-world // hardware.node.ranks)
    even = [n for n in range(fewest, 2 * fewest + 1) if world % n == 0]
    whole = [n for n in even if world // n % tensor == 0]
    return next(iter(whole or even), None) if fewest > 1 else None


def _spread(hardware: Hardware, world: int, nodes: int | None) -> Hardware:
    if nodes is None:
        return hardware
    if world % nodes:
        raise InputError(f"--nodes: expected a divisor of --world {world}, got {nodes}")
    most = hardware.node.ranks
    if world > nodes * most:
        raise InputError(
            f"--nodes: a node of {hardware.name} has {most} devices, so --world {world} needs at "
            f"least {-(-world // most)} nodes, got {nodes}; for larger nodes, change `ranks` of "
            "[node] in a machine file of your own"
        )
    return replace(hardware, node=replace(hardware.node, ranks=world // nodes))
