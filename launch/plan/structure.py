"""What a model of transformers is made of: kinds of layers as plain numbers, and how many of each.

A layer's modules are told by their class and by their sizes: attention, recurrences, feed-forwards
and mixtures of experts; the rest are norms. Anything else is refused, as its cost is not known.
Which tokens a layer's attention sees comes from the layer or from `layer_types`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from burst_rt.errors import InputError
from burst_rt.launch.plan.recurrence_of import recurrence_of
from burst_rt.launch.plan.sublayers import Attention, FeedForward, LayerSizes, Product, Sublayer
from burst_rt.planning.masks import Causal, Chunked, Mask, SlidingWindow
from burst_rt.planning.recurrences import RecurrenceSizes

__all__ = ["inactive_weights", "kinds_in_words", "layers_of"]

_FEED_FORWARD = re.compile("(MLP|Mlp|MoE|Moe|MoeBlock)$")
_NESTED = re.compile("(Layer|Block)$")
# Names of the products out of a sublayer, and of parameters that are matrices of a product.
_OUT = re.compile(
    "(o_proj|out_proj|down_proj|w2|linear_out|output_linear|c_proj|dense|wo|fc2_latent_proj)$"
)
_MATRIX = re.compile("(weight|proj)$")
# Families whose `sliding_window` holds for all layers, without `layer_types`.
_ALL_WINDOWS = ("minimax", "ministral3", "mistral", "mixtral", "phi3", "starcoder2")


def layers_of(model: Any, config: Any, where: str) -> list[LayerSizes]:
    """The layers of a model, in order.

    model: on any device. Raises InputError, which names `where`, for a module that is not known.
    """
    reader = _Reader(config, where)
    return [reader.layer(layer, at) for at, layer in enumerate(_layers(model, config))]


def inactive_weights(model: nn.Module, config: Any) -> int:
    """Weights of experts to which one token does not go, over all layers."""
    resting = 0
    for module in model.modules():
        count = _num_experts(module)
        if count:
            weights = sum(weight.numel() for weight in module.parameters())
            resting += weights * max(0, count - _per_token(config)) // count
    return resting


def kinds_in_words(kinds: Mapping[LayerSizes, int]) -> str:
    """The kinds in words: "36 layers of gated delta rule and feed-forward, 12 of ..."."""
    counts: Counter[str] = Counter()
    for layer, count in kinds.items():
        counts[" and ".join(_words(sublayer) for sublayer in layer.sublayers)] += count
    (words, first), *others = counts.items()
    said = [f"{first} layer{'s' * (first > 1)} of {words}"]
    return ", ".join([*said, *(f"{count} of {words}" for words, count in others)])


def _words(sublayer: Sublayer) -> str:
    core = sublayer.core
    if isinstance(core, RecurrenceSizes):
        return {
            "linear": "linear recurrence",
            "delta": "delta rule",
            "scan": "selective scan",
            "convolution": "short convolution",
        }[core.rule]
    if isinstance(core, FeedForward):
        mixture = f"mixture ({core.per_token} of {core.num_experts} experts)"
        return mixture if core.num_experts else "feed-forward"
    latent = "attention" if core.head_dim == core.v_head_dim else "latent attention"
    if isinstance(core.window, SlidingWindow):
        return f"{latent} in a window of {core.window.left + 1:,}"
    return latent if core.window is None else f"{latent} in chunks"


def _layers(model: Any, config: Any) -> nn.ModuleList:
    count = config.num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists)


def _num_experts(module: nn.Module) -> int:
    """The number of experts whose weights a module has in one tensor; 0 for other modules."""
    count = getattr(module, "num_experts", 0)
    stacked = any(
        weight.ndim == 3 and weight.shape[0] == count for weight in module.parameters(recurse=False)
    )
    return int(count) if stacked else 0


def _per_token(config: Any) -> int:
    count = getattr(config, "num_experts_per_tok", None)
    if not isinstance(count, int) or count < 1:
        raise InputError(
            f"--model: num_experts_per_tok: expected the experts of a token, at least 1, got "
            f"{count!r}; add it to the configuration"
        )
    return count


@dataclass
class _Count:
    """Weights of a sublayer as they are counted."""

    dim: int
    per_token: int  # experts
    vectors: int = 0
    wide: int = 0
    narrow: int = 0
    into: list[int] = field(default_factory=lambda: [0, 0])  # all, active
    out: list[int] = field(default_factory=lambda: [0, 0])
    widths: set[int] = field(default_factory=set)
    num_experts: int = 0

    def add(self, module: nn.Module) -> None:
        """Adds all parameters of a module."""
        for path, owner in module.named_modules():
            experts = _num_experts(owner)
            self.num_experts = max(self.num_experts, experts)
            is_matrix = not isinstance(owner, nn.Conv1d)
            for name, weight in owner.named_parameters(recurse=False):
                if is_matrix and weight.ndim > 1 and _MATRIX.search(name):
                    known_by = path if isinstance(owner, nn.Linear) else name
                    self._matrix(known_by, weight, experts, _alternatives(module, path))
                else:
                    self.vectors += weight.numel()

    def _matrix(self, name: str, weight: Any, experts: int, alternatives: int) -> None:
        size = weight.numel()
        active = size // alternatives
        if experts:
            active = size * min(self.per_token, experts) // experts
        if _OUT.search(name):
            self.out[0] += size
            self.out[1] += active
            self.narrow += active // self.dim
            self.widths.add(size // self.dim // max(1, experts))
        else:
            self.into[0] += size
            self.into[1] += active
            self.wide += active // (self.dim if experts else weight.shape[-1])


def _alternatives(module: nn.Module, path: str) -> int:
    """How many adapters a list has of which a layer takes one (Zamba 2); 1 for other modules."""
    owner, found, _ = path.partition("adapter_list.")
    if not found:
        return 1
    adapters = module.get_submodule(f"{owner}adapter_list")
    return sum(any(True for _ in adapter.parameters()) for adapter in adapters.children())


class _Reader:
    def __init__(self, config: Any, where: str) -> None:
        self._config, self._where, self._dim = config, where, config.hidden_size

    def layer(self, module: nn.Module, at: int) -> LayerSizes:
        """A layer; at: its place among the layers."""
        counts: dict[type, _Count] = {}
        cores: dict[type, Attention | RecurrenceSizes] = {}
        vectors = sum(weight.numel() for weight in module.parameters(recurse=False))
        for child in self._parts(module):
            kind, core = self._core(child, at)
            if kind is None:
                vectors += sum(weight.numel() for weight in child.parameters())
                continue
            if core is not None and kind in cores:
                raise self._refuse(f"a layer with two {type(child).__name__}", "one")
            if core is not None:
                cores[kind] = core
            count = counts.setdefault(kind, _Count(self._dim, self._experts_a_token(child)))
            count.per_token = max(count.per_token, self._experts_a_token(child))
            count.add(child)
        if not counts:
            raise self._refuse(f"a layer {type(module).__name__} with norms at most", "sublayers")
        # Norms of a layer are mostly one for each sublayer.
        for at, count in enumerate(counts.values()):
            count.vectors += (vectors + at) // len(counts)
        order = (Attention, RecurrenceSizes, FeedForward)
        made = [_sublayer(kind, cores.get(kind), counts[kind]) for kind in order if kind in counts]
        return LayerSizes(self._dim, tuple(made))

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules of a layer that have weights, out of the modules that only join others."""
        for child in module.children():
            if not any(True for _ in child.parameters()):
                continue
            joins = _NESTED.search(type(child).__name__) and not self._known(child)
            yield from self._parts(child) if joins else [child]

    def _known(self, module: nn.Module) -> bool:
        name = type(module).__name__
        return bool(_FEED_FORWARD.search(name)) or recurrence_of(module) is not None

    def _core(
        self, module: nn.Module, at: int
    ) -> tuple[type | None, Attention | RecurrenceSizes | None]:
        """What kind of sublayer a module belongs to, and what mixes in it; None for a norm."""
        name = type(module).__name__
        recurrence = recurrence_of(module)
        if recurrence is not None:
            return RecurrenceSizes, recurrence
        if name.endswith("Attention"):
            return Attention, self._attention(module, at)
        if _FEED_FORWARD.search(name) or isinstance(module, nn.Linear):
            return FeedForward, None
        if all(weight.ndim == 1 for weight in module.parameters()):
            return None, None
        raise self._refuse(name, "attention, a feed-forward or a recurrence that is known")

    def _experts_a_token(self, module: nn.Module) -> int:
        has_experts = any(_num_experts(each) for each in module.modules())
        return _per_token(self._config) if has_experts else 0

    def _attention(self, module: Any, at: int) -> Attention:
        for name, child in module.named_children():
            plain = isinstance(child, nn.Linear) or name.endswith("adapter_list")
            if not plain and any(weight.ndim > 1 for weight in child.parameters()):
                raise self._refuse(f"{type(module).__name__}.{name}", "projections and norms only")
        num_heads = num_kv_heads = self._config.num_attention_heads
        if hasattr(module, "qk_head_dim"):  # MLA
            head_dim, v_head_dim = module.qk_head_dim, module.v_head_dim
        else:
            head_dim = v_head_dim = module.head_dim
            num_kv_heads = self._config.num_key_value_heads
        if num_heads % num_kv_heads:
            raise InputError(
                f"--model: {self._where}: num_key_value_heads: expected a divisor of "
                f"num_attention_heads, {num_heads}, got {num_kv_heads}"
            )
        return Attention(num_heads, num_kv_heads, head_dim, v_head_dim, self._window(module, at))

    def _window(self, module: Any, at: int) -> Mask | None:
        """What a layer's own mask allows."""
        config, types = self._config, getattr(self._config, "layer_types", None) or ()
        kind = types[at] if at < len(types) else None
        if kind == "chunked_attention":
            return Causal() & Chunked(config.attention_chunk_size)
        size: int | None = None
        if kind == "sliding_attention" or config.model_type in _ALL_WINDOWS:
            size = config.sliding_window
        elif "sliding_attention" not in types:  # Exaone 4's full layers know a size, too.
            size = getattr(module, "sliding_window", None)
        if kind not in (None, "full_attention", "sliding_attention", "hybrid"):
            raise self._refuse(f"layer_types[{at}] {kind!r}", "full, sliding or chunked attention")
        # transformers counts the query's own position.
        return None if size is None else SlidingWindow(size - 1)

    def _refuse(self, got: str, expected: str) -> InputError:
        return InputError(
            f"--model: {self._where}: model_type {self._config.model_type!r}: expected {expected}, "
            f"got {got}, whose cost is not known; give sizes: layers=...,dim=...,heads=...,ffn=..."
        )


def _sublayer(kind: type, core: Attention | RecurrenceSizes | None, count: _Count) -> Sublayer:
    if core is not None:
        prefix = "attention" if kind is Attention else "recurrence"
    else:
        prefix = "feed_forward"
    return Sublayer(
        core or FeedForward(tuple(sorted(count.widths)), count.num_experts, count.per_token),
        count.vectors,
        Product(f"{prefix}_in", *count.into),
        Product(f"{prefix}_out", *count.out),
        count.wide,
        count.narrow,
    )
