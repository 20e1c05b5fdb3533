"""Time to first token where nodes share a prompt and the GPUs of a node share each layer.

Tensor parallelism splits a layer inside a node: each GPU has some heads, all tokens of its node,
and two all-reduces a layer. Context parallelism splits the prompt over the nodes: the GPUs that
have the same heads in all nodes are a ring. So a layer is simulated in two parts that follow each
other: everything but attention on one node, and attention on one such ring, whose ranks are nodes
of their own. Rings are alike, and each has its own network card.

Beside it stand the figures of "Context Parallelism for Scalable Million-Token Inference" (arXiv
2411.01783, abstract): Llama 3 405B on 128 H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from burst_rt.baselines.layers import SpreadLayer
from burst_rt.errors import ConfigError
from burst_rt.launch.bench.report import Cell, publish
from burst_rt.launch.plan.model import Model, parse_model
from burst_rt.planning.forecast import of_choice
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import choose
from burst_rt.scheduler import Op, Task
from burst_rt.scheduler.simulator import Hardware, simulate

__all__ = ["LLAMA_405B", "PUBLISHED_S", "Prefill", "main", "prefill"]

# "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
LLAMA_405B = "layers=126,dim=16384,heads=128,kv_heads=8,ffn=53248,vocab=128256"
# Seconds to the first token on 16 nodes of 8, by how the abstract writes the number of tokens.
PUBLISHED_S = {"128K": 3.8, "1M": 77.0}
# The abstract does not say which of the two it means.
_TOKENS = {"128K": (128_000, 131_072), "1M": (1_000_000, 1_048_576)}
_NUM_NODES = 16
# Of 1M tokens, in the abstract: "FLOPS utilization". So the peak that is meant follows.
_UTILIZATION = 0.63
_FEED_FORWARD = ("gate_up", "down")
# H100 data sheet: 3,958 TFLOP/s in FP8, 1,979 in BF16, both with sparsity.
_FP8_SPEED = 2
_BF16_BYTES = 2


@dataclass(frozen=True)
class Prefill:
    """A simulated prompt; the embedding, the head and sampling are left out of its seconds."""

    linear_s: float  # matrix products, element-wise work and all-reduces
    attention_s: float
    exposed_s: float  # in attention_s, waiting for messages
    weight_bytes: int  # of one GPU

    @property
    def time_s(self) -> float:
        return self.linear_s + self.attention_s


def prefill(
    model: Model,
    tokens: int,
    hardware: Hardware,
    *,
    num_nodes: int,
    fp8: bool,
    strategy: str = "ring-kv",
) -> Prefill:
    """Simulates a layer on nodes of `hardware`, causal, in BF16, and multiplies by the layers.

    fp8: whether the feed-forward's weights and products are in FP8.

    Raises InputError for sizes that the GPUs cannot share.
    """
    shape, per_node = model.layer, hardware.node.ranks
    layer = SpreadLayer(
        shape, -(-tokens // num_nodes), per_node, "tensor-parallel", input_bytes=_BF16_BYTES
    )

    def seconds(task: Task) -> float:
        op = task.op
        halved = fp8 and isinstance(op, Op) and op.name == "linear" and op.args[0] in _FEED_FORWARD
        if halved:
            task = replace(task, cost=task.cost._replace(flops=task.cost.flops // _FP8_SPEED))
        return hardware.device.seconds(task)

    linear = simulate(layer.schedules(forward=True, attention=False), hardware, seconds=seconds)
    layout = make_layout("zigzag", tokens, num_nodes)
    problem = Problem(
        q_layout=layout, kv_layout=layout, mask=Causal(), batch=1,
        num_heads=shape.num_heads // per_node, num_kv_heads=shape.num_kv_heads // per_node,
        head_dim=shape.head_dim, input_bytes=_BF16_BYTES, sum_bytes=4,
        needs_grad=(False, False, False),
    )  # fmt: skip
    attention = of_choice(
        choose(problem, strategy, forward=True, ranks_per_node=1), _one_gpu_a_node(hardware)
    )
    weights = shape.num_weights(*_FEED_FORWARD) * (1 if fp8 else _BF16_BYTES)
    weights += shape.num_weights("qkv", "out") * _BF16_BYTES
    vocabulary = 2 * model.vocab_size * shape.dim * _BF16_BYTES
    num = model.num_layers
    return Prefill(
        num * linear.end_s,
        num * attention.time_s,
        num * attention.exposed_s,
        (num * weights + vocabulary) // per_node,
    )


def _one_gpu_a_node(hardware: Hardware) -> Hardware:
    """The same machine as one ring sees it: in each node one GPU and its network card."""
    nics, node = hardware.nics, hardware.node
    if nics is None or nics.count < node.ranks:
        raise ConfigError(
            f"{hardware.name}: expected a network card for each of a node's {node.ranks} ranks, "
            f"got {0 if nics is None else nics.count}; use a machine file that has them"
        )
    return replace(hardware, node=replace(node, ranks=1), nics=replace(nics, count=1))


def with_peak(hardware: Hardware, flops_per_s: float) -> Hardware:
    """The machine with another peak of arithmetic; what kernels reach of it stays."""
    rates = dict(hardware.device.rates)
    for name in ("forward", "linear"):
        rates[name] = replace(rates[name], flops_per_s=flops_per_s)
    return replace(hardware, device=replace(hardware.device, rates=rates))


def published_peak(model: Model, num_gpus: int) -> float:
    """The FLOP/s of a GPU of which the abstract's 77 s for 1,000,000 tokens are 63 %."""
    tokens, shape = _TOKENS["1M"][0], model.layer
    products = 2 * tokens * shape.num_weights("qkv", "out", *_FEED_FORWARD)
    attention = 2 * tokens**2 * shape.num_heads * shape.head_dim  # causal: half of all cells
    flops = model.num_layers * (products + attention)
    return flops / (num_gpus * PUBLISHED_S["1M"] * _UTILIZATION)


def main(out: Path | None, tokens: Sequence[str] = tuple(PUBLISHED_S)) -> None:
    """Prints the table of Llama 3 405B on 128 H100, and adds it to `out` if given."""
    model, hardware = parse_model(LLAMA_405B), load_hardware("h100-sxm")
    peak = published_peak(model, _NUM_NODES * hardware.node.ranks)
    machines = {"h100-sxm": hardware, "published peak": with_peak(hardware, peak)}
    rows: list[dict[str, Cell]] = []
    weights: dict[str, float] = {}
    for name in tokens:
        for number in _TOKENS[name]:
            for rates, precision in product(machines, ("FP8", "BF16")):
                fp8 = precision == "FP8"
                found = prefill(model, number, machines[rates], num_nodes=_NUM_NODES, fp8=fp8)
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
        "simulated; tensor parallelism in nodes, ring-kv between them; published peak: "
        f"{peak / 1e12:.0f} TFLOP/s in BF16, of which the abstract's 77 s for 1,000,000 tokens are "
        f"63 %. Weights of a GPU: {weights['FP8']:.0f} GB with the feed-forward in FP8, "
        f"{weights['BF16']:.0f} GB without",
    )
