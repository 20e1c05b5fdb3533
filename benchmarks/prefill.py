"""Time to first token by the graphs of a cache's prefill, beside published figures.

A prompt is dealt out to the ranks in blocks, as `KVCache` does, and a layer is simulated in two
parts that follow each other: everything but attention, and attention. The GPUs of a node may share
each layer (tensor parallelism: each has some heads, all tokens of its node, and two all-reduces a
layer). Then the GPUs that have the same heads in all nodes share the prompt; such rings are equal,
and each has its own network card.

The figures come from BurstAttention (arXiv 2403.09347: LLaMA-7B on 8 A100) and from "Context
Parallelism for Scalable Million-Token Inference" (arXiv 2411.01783, abstract: Llama 3 405B on 128
H100).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import click

from benchmarks.paper import FIRST_TOKEN_S, FITTED, STRATEGIES
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.launch.plan.layers import SpreadLayer
from burst_rt.launch.plan.models import MODELS, Model, parse_model
from burst_rt.planning.choose import choose
from burst_rt.planning.forecast import Forecast, of_choice
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Full, Mask
from burst_rt.planning.problem import Problem
from burst_rt.planning.ranking import fastest_strategy
from burst_rt.scheduler import Op, Task
from burst_rt.scheduler.simulator import Hardware, simulate
from burst_rt.serving.chunks import BatchRows, CachedMask, Dealt

__all__ = ["LLAMA_405B", "PUBLISHED_S", "Prefill", "Prompt", "command", "prefill"]

# "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
LLAMA_405B = "layers=126,dim=16384,heads=128,kv_heads=8,ffn=53248,vocab=128256"
# Seconds to the first token on 16 nodes of 8, by how the abstract writes the number of tokens.
PUBLISHED_S = {"128K": 3.8, "1M": 77.0}
# Numbers of tokens; the abstract does not say which of the two it means.
_TOKENS = {"128K": (128_000, 131_072), "1M": (1_000_000, 1_048_576)}
_NUM_GPUS, _GPUS_A_NODE = 128, 8
# "FLOPS utilization" for 1M tokens, in the abstract. The peak that it refers to follows.
_UTILIZATION = 0.63
# Share of the peak that attention reached at that time, at best: J. Shah et al.,
# "FlashAttention-3", arXiv 2407.08608, abstract. The machine file has the speed of this project's
# own kernels.
_ATTENTION = 0.75
_FEED_FORWARD = ("gate_up", "down")
# H100 data sheet: 3,958 TFLOP/s in FP8, 1,979 in BF16, both with sparsity.
_FP8_SPEED = 2
_BF16_BYTES = 2
_BLOCK = 128  # block of `KVCache`
_CAUSAL = Causal()
# Number of GPUs of the paper, and size of the chunks of a prompt that are compared with whole
# prompts.
_PAPER_GPUS, _CHUNK = 8, 16384


@dataclass(frozen=True)
class Prefill:
    """A simulated prompt; the embedding, the head and sampling are left out of its seconds."""

    linear_s: float  # matrix products, element-wise work and all-reduces
    attention_s: float
    exposed_s: float  # in attention_s, waiting for messages
    weight_bytes: int  # weights on one GPU

    @property
    def time_s(self) -> float:
        return self.linear_s + self.attention_s


@dataclass(frozen=True)
class Prompt:
    """A prompt on a number of GPUs, and how it is run.

    tensor_parallel: the GPUs that share each layer: 1, or all of a node. The others share the
        prompt.
    chunk: tokens that are run at once; None: all of them.
    fp8: whether the feed-forward's weights and products are in FP8.
    strategy: as `choose` takes it, or "auto": the fastest by forecast, chosen for each chunk.
    structure: what a token sees of the prompt, and of what is cached of it.
    """

    tokens: int
    world_size: int
    tensor_parallel: int = 1
    chunk: int | None = None
    fp8: bool = False
    strategy: str = "ring-kv"
    structure: Mask = _CAUSAL

    @property
    def num_shares(self) -> int:
        """Parts of the prompt. Raises InputError for sizes that the GPUs cannot share."""
        num_shares, rest = divmod(self.world_size, self.tensor_parallel)
        if rest or self.tokens < 1:
            raise InputError(
                f"expected at least 1 token, and ranks in groups of {self.tensor_parallel}, got "
                f"{self.tokens} tokens and {self.world_size} ranks; use a multiple of "
                f"{self.tensor_parallel} ranks"
            )
        return num_shares

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The first token of each chunk, and the number of its tokens."""
        size = self.chunk or self.tokens
        for first in range(0, self.tokens, size):
            yield first, min(size, self.tokens - first)


def prefill(model: Model, prompt: Prompt, hardware: Hardware) -> Prefill:
    """Simulates a layer in BF16, chunk after chunk, and multiplies by the layers.

    Raises InputError for sizes that the GPUs cannot share, and ConfigError for other machines.
    """
    shape, num_shares, tensor_parallel = model.layer, prompt.num_shares, prompt.tensor_parallel
    ring = hardware if tensor_parallel == 1 else _one_gpu_a_node(hardware, tensor_parallel)
    linear_s = attention_s = exposed_s = 0.0
    for first, new in prompt.chunks():
        linear_s += _linear_s(model, -(-new // num_shares), hardware, tensor_parallel, prompt.fp8)
        rows = BatchRows((first,), (new,), (0,), prompt.tokens)
        problem = CachedMask(prompt.structure, Dealt(_BLOCK, num_shares), rows).problem(
            batch=1, num_heads=shape.num_heads // tensor_parallel,
            num_kv_heads=shape.num_kv_heads // tensor_parallel, head_dim=shape.head_dim,
            input_bytes=_BF16_BYTES, sum_bytes=4,
        )  # fmt: skip
        attention = _attention(problem, prompt.strategy, ring, num_shares)
        attention_s += attention.time_s
        exposed_s += attention.exposed_s
    weights = shape.num_weights(*_FEED_FORWARD) * (1 if prompt.fp8 else _BF16_BYTES)
    weights += shape.num_weights("qkv", "out") * _BF16_BYTES
    vocabulary = model.outside * _BF16_BYTES
    num = model.num_layers
    return Prefill(
        num * linear_s,
        num * attention_s,
        num * exposed_s,
        (num * weights + vocabulary) // tensor_parallel,
    )


def _attention(problem: Problem, strategy: str, ring: Hardware, num_shares: int) -> Forecast:
    """The forecast of one layer's attention."""
    ranks_per_node = ring.node.ranks if num_shares % ring.node.ranks == 0 else 1
    if strategy == "auto":
        choice = fastest_strategy(problem, ring, forward=True, ranks_per_node=ranks_per_node)
    else:
        choice = choose(problem, strategy, forward=True, ranks_per_node=ranks_per_node)
    return of_choice(choice, ring)


def _linear_s(
    model: Model, tokens: int, hardware: Hardware, tensor_parallel: int, fp8: bool
) -> float:
    """Seconds of a layer except attention, for a number of tokens on a number of GPUs."""
    layer = SpreadLayer(
        model.layer, tokens, tensor_parallel, "tensor-parallel", input_bytes=_BF16_BYTES
    )

    def seconds(task: Task) -> float:
        op = task.op
        halved = fp8 and isinstance(op, Op) and op.name == "linear" and op.args[0] in _FEED_FORWARD
        if halved:
            task = replace(task, cost=task.cost._replace(flops=task.cost.flops // _FP8_SPEED))
        return hardware.device.seconds(task)

    schedules = layer.schedules(forward=True, attention=False)
    return simulate(schedules, hardware, seconds=seconds).end_s


def _one_gpu_a_node(hardware: Hardware, tensor_parallel: int) -> Hardware:
    """The same machine as one ring sees it: in each node one GPU and its network card."""
    nics, node = hardware.nics, hardware.node
    if nics is None or nics.count < node.ranks or tensor_parallel != node.ranks:
        raise ConfigError(
            f"{hardware.name}: expected each layer on all {node.ranks} ranks of a node, and a "
            f"network card for each of them, got {tensor_parallel} ranks and "
            f"{0 if nics is None else nics.count} cards; use a machine file that has them"
        )
    return replace(hardware, node=replace(node, ranks=1), nics=replace(nics, count=1))


def with_peak(hardware: Hardware, flops_per_s: float) -> Hardware:
    """The machine with another peak of arithmetic; what kernels reach of it stays."""
    return _with_rates(hardware, ("forward", "linear"), flops_per_s=flops_per_s)


def _with_rates(hardware: Hardware, names: Sequence[str], **changes: float) -> Hardware:
    rates = dict(hardware.device.rates)
    for name in names:
        rates[name] = replace(rates[name], **changes)
    return replace(hardware, device=replace(hardware.device, rates=rates))


def published_peak(model: Model, num_gpus: int) -> float:
    """The FLOP/s of a GPU of which the abstract's 77 s for 1,000,000 tokens are 63 %."""
    tokens, shape = _TOKENS["1M"][0], model.layer
    products = 2 * tokens * shape.num_weights("qkv", "out", *_FEED_FORWARD)
    attention = 2 * tokens**2 * shape.num_heads * shape.head_dim  # causal: half of all cells
    flops = model.num_layers * (products + attention)
    return flops / (num_gpus * PUBLISHED_S["1M"] * _UTILIZATION)


@click.command()
@OUT
def command(out: Path | None) -> None:
    """First tokens of LLaMA-7B and of Llama 3 405B, simulated, next to published figures."""
    _llama_7b(out)
    _llama_405b(out)


def _llama_7b(out: Path | None) -> None:
    model, hardware = MODELS["llama-7b"], load_hardware("a100-pcie")
    burst = STRATEGIES.index("burst")
    rows: list[dict[str, Cell]] = []
    for tokens, published in FIRST_TOKEN_S.items():
        prompt = Prompt(tokens, _PAPER_GPUS)
        every = prefill(model, replace(prompt, structure=Full()), hardware)
        whole = {
            name: prefill(model, replace(prompt, strategy=name), hardware)
            for name in ("ring-kv", "ring-q", "auto")
        }
        chunked = prefill(model, replace(prompt, strategy="auto", chunk=_CHUNK), hardware)
        row: dict[str, Cell] = {
            "tokens": tokens,
            "row": "fitted" if tokens in FITTED else "forecast",
            "burst, paper s": published[burst],
            "all scores s": every.time_s,
            "error %": 100 * (every.time_s / published[burst] - 1),
        }
        row |= {f"causal, {name} s": found.time_s for name, found in whole.items()}
        rows.append({**row, "auto, in chunks s": chunked.time_s})
    publish(
        "time to first token in seconds, LLaMA-7B on 8 A100-PCIe, against arXiv 2403.09347",
        rows,
        out,
        "simulated on a100-pcie by a cache's prefill; the paper's rings compute all scores, so do "
        f"those of the columns before causal (ring-kv); chunks: of {_CHUNK:,} tokens",
    )


def _llama_405b(out: Path | None) -> None:
    model = parse_model(LLAMA_405B)
    hardware = _with_rates(load_hardware("h100-sxm"), ("forward",), efficiency=_ATTENTION)
    peak = published_peak(model, _NUM_GPUS)
    machines = {"h100-sxm": hardware, "published peak": with_peak(hardware, peak)}
    rows: list[dict[str, Cell]] = []
    weights: dict[str, float] = {}
    for name in PUBLISHED_S:
        for number in _TOKENS[name]:
            for rates, precision in product(machines, ("FP8", "BF16")):
                fp8 = precision == "FP8"
                prompt = Prompt(number, _NUM_GPUS, _GPUS_A_NODE, fp8=fp8)
                found = prefill(model, prompt, machines[rates])
                weights[precision] = found.weight_bytes / 1e9
                rows.append(
                    {
                        "tokens": number, "rates": rates, "feed-forward": precision,
                        "linear s": found.linear_s, "attention s": found.attention_s,
                        "exposed s": found.exposed_s, "first token s": found.time_s,
                        "published s": PUBLISHED_S[name],
                        "error %": 100 * (found.time_s / PUBLISHED_S[name] - 1),
                    }
                )  # fmt: skip
    publish(
        "time to first token in seconds, Llama 3 405B on 16 nodes of 8 H100, against arXiv "
        "2411.01783",
        rows,
        out,
        "simulated; tensor parallelism in nodes, ring-kv between them; attention at "
        f"FlashAttention-3's {_ATTENTION:.0%} of the peak; published peak: "
        f"{peak / 1e12:.0f} TFLOP/s in BF16, of which the abstract's 77 s for 1,000,000 tokens are "
        f"63 %. Weights of a GPU: {weights['FP8']:.0f} GB with the feed-forward in FP8, "
        f"{weights['BF16']:.0f} GB without",
    )
