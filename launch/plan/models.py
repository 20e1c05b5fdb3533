"""Models by name or by sizes: kinds of layers as plain numbers, and how many of each.

The numbers of models by name are those of their published configurations; `configuration.py` reads
the same from a config.json. A test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import LayerShape
from burst_rt.launch.plan.sublayers import Attention, FeedForward, LayerSizes, Product, Sublayer
from burst_rt.planning.masks import SlidingWindow
from burst_rt.planning.recurrences import RecurrenceSizes

__all__ = ["MODELS", "Model", "parse_model", "sizes_of"]


@dataclass(frozen=True)
class Model:
    """A decoder."""

    name: str
    layers: tuple[tuple[int, LayerShape | LayerSizes], ...]  # how many of each kind
    # Weights that no layer has: embedding and head. Less than none, where layers share theirs.
    outside: int
    inactive: int = 0  # weights of experts to which one token does not go
    about: str = ""  # what its configuration says, in one line

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.layers)

    @property
    def num_weights(self) -> int:
        """The weights of all layers, of the embedding and of the head."""
        weights = (count * sizes_of(layer).num_weights for count, layer in self.layers)
        return sum(weights) + self.outside

    @property
    def layer(self) -> LayerShape:
        """The layer of a Llama-like model, whose layers are all alike. Raises InputError."""
        (_, layer), *others = self.layers
        if others or not isinstance(layer, LayerShape):
            raise InputError(f"{self.name}: expected a model by its sizes")
        return layer


def sizes_of(layer: LayerShape | LayerSizes) -> LayerSizes:
    """A layer of any model as such."""
    return layer if isinstance(layer, LayerSizes) else layer.sizes


def _llama(name: str, num_layers: int, layer: LayerShape, vocab_size: int) -> Model:
    """A Llama-like decoder; embedding and head have a matrix each."""
    return Model(name, ((num_layers, layer),), 2 * vocab_size * layer.dim)


def _attention(
    dim: int, heads: tuple[int, int, int], vectors: int = 0, window: SlidingWindow | None = None
) -> Sublayer:
    """heads: of queries, of keys and values, and their width. vectors: beside the norm's."""
    num_heads, num_kv_heads, head_dim = heads
    wide, narrow = (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim
    core = Attention(num_heads, num_kv_heads, head_dim, head_dim, window)
    return _sublayer(core, dim + vectors, dim * wide, dim * narrow, wide, narrow)


def _sublayer(
    core: Attention | RecurrenceSizes, vectors: int, into: int, out: int, wide: int, narrow: int
) -> Sublayer:
    name = "attention" if isinstance(core, Attention) else "recurrence"
    products = (Product(f"{name}_in", into, into), Product(f"{name}_out", out, out))
    return Sublayer(core, vectors, *products, wide, narrow)


def _feed_forward(
    dim: int, width: int, experts: int = 0, per_token: int = 0, shared: int = 0
) -> Sublayer:
    """A SwiGLU, or a mixture of them. width: of one. shared: experts that all tokens go to."""
    router, all_of, taken = experts, experts + shared or 1, per_token + shared or 1
    into = Product(
        "feed_forward_in",
        dim * (2 * width * all_of + router),
        dim * (2 * width * taken + router),
    )
    out = Product("feed_forward_out", dim * width * all_of, dim * width * taken)
    core = FeedForward((width,), experts, per_token)
    return Sublayer(core, dim, into, out, 2 * width * taken + router, width * taken)


def _mixed(
    name: str, kinds: Iterable[tuple[int, tuple[Sublayer, Sublayer]]], dim: int, vocab: int
) -> Model:
    """A decoder with several kinds of layers; embedding, head and the last norm are outside."""
    layers = tuple((count, LayerSizes(dim, sublayers)) for count, sublayers in kinds)
    resting = sum(count * _resting(sizes) for count, sizes in layers)
    return Model(name, layers, 2 * vocab * dim + dim, resting)


def _resting(layer: LayerSizes) -> int:
    """Weights of experts to which one token does not go."""
    feed_forward = layer.sublayers[-1]
    products = (feed_forward.into, feed_forward.out)
    resting = sum(product.weights - product.active for product in products)
    core = feed_forward.core
    assert isinstance(core, FeedForward)
    if not core.num_experts:
        return 0
    # Beside the norm, and the router's bias.
    biases = max(0, feed_forward.vectors - layer.dim - core.num_experts)
    return resting + biases * (core.num_experts - core.per_token) // core.num_experts


def _gpt_oss(name: str, num_layers: int, experts: int) -> Model:
    """gpt-oss: every other layer has a window; products have biases, heads have sinks."""
    dim, width, heads = 2880, 2880, (64, 8, 64)
    wide = (heads[0] + 2 * heads[1]) * heads[2]
    mixture = _feed_forward(dim, width, experts, 4)
    mixture = replace(mixture, vectors=mixture.vectors + experts * (2 * width + dim) + experts)
    kinds = [
        (num_layers // 2, (_attention(dim, heads, wide + dim + heads[0], window), mixture))
        for window in (SlidingWindow(127), None)
    ]
    return _mixed(name, kinds, dim, 201088)


def _qwen3(
    name: str, num_layers: int, dim: int, heads: tuple[int, int], feed_forward: Sublayer
) -> Model:
    """Qwen3: norms of queries and keys; heads of 128."""
    attention = _attention(dim, (*heads, 128), 2 * 128)
    return _mixed(name, [(num_layers, (attention, feed_forward))], dim, 151936)


def _qwen3_5_9b() -> Model:
    """Qwen3.5: three layers of a gated delta rule, then one of gated attention."""
    dim, key_heads, heads, width = 4096, 16, 32, 128
    channels = (2 * key_heads + heads) * width
    wide = channels + heads * width + 2 * heads  # with the output's gate, and two numbers a head
    rule = RecurrenceSizes(
        rule="delta", num_heads=heads, key_dim=width, value_dim=width, num_key_heads=key_heads,
        chunk=64, channels=channels, kernel=4,
    )  # fmt: skip
    vectors = dim + 4 * channels + 2 * heads + width
    recurrence = _sublayer(rule, vectors, dim * wide, heads * width * dim, wide, heads * width)
    gated = (2 * 16 + 2 * 4) * 256
    attention = _sublayer(
        Attention(16, 4, 256, 256), dim + 2 * 256, dim * gated, 16 * 256 * dim, gated, 16 * 256
    )
    feed_forward = _feed_forward(dim, 12288)
    kinds = [(24, (recurrence, feed_forward)), (8, (attention, feed_forward))]
    return _mixed("qwen3.5-9b", kinds, dim, 248320)


def _deepseek_v3() -> Model:
    """DeepSeek-V3: latent attention; three dense layers, then mixtures. Without the layer that
    predicts a second token.
    """
    dim, heads, queries, latent, rope = 7168, 128, 1536, 512, 64
    wide = queries + heads * 192 + latent + rope + heads * 256
    into = dim * (queries + latent + rope) + queries * heads * 192 + latent * heads * 256
    core = Attention(heads, heads, 192, 128)
    vectors = dim + queries + latent
    attention = _sublayer(core, vectors, into, heads * 128 * dim, wide, heads * 128)
    kinds = [
        (3, (attention, _feed_forward(dim, 18432))),
        (58, (attention, _feed_forward(dim, 2048, 256, 8, 1))),
    ]
    return _mixed("deepseek-v3", kinds, dim, 129280)


# Llama 1: H. Touvron et al., arXiv 2302.13971, table 2; widths of the feed-forward from the
# published checkpoints. Llama 3: A. Dubey et al., arXiv 2407.21783, table 3. Mixtral: A. Jiang et
# al., arXiv 2401.04088, table 1. DeepSeek-V3: arXiv 2412.19437, section 4.2. The others: the
# config.json of openai/gpt-oss-20b and -120b, Qwen/Qwen3-8B, -32B, -30B-A3B and -235B-A22B; of
# Qwen3.5 9B, the defaults of transformers' Qwen3_5TextConfig.
_NAMED = (
    _llama("llama-7b", 32, LayerShape(4096, 32, 32, 128, 11008), 32000),
    _llama("llama-13b", 40, LayerShape(5120, 40, 40, 128, 13824), 32000),
    _llama("llama-3-8b", 32, LayerShape(4096, 32, 8, 128, 14336), 128256),
    _llama("llama-3-70b", 80, LayerShape(8192, 64, 8, 128, 28672), 128256),
    _llama("llama-3-405b", 126, LayerShape(16384, 128, 8, 128, 53248), 128256),
    _qwen3("qwen3-8b", 36, 4096, (32, 8), _feed_forward(4096, 12288)),
    _qwen3("qwen3-32b", 64, 5120, (64, 8), _feed_forward(5120, 25600)),
    _qwen3("qwen3-30b-a3b", 48, 2048, (32, 4), _feed_forward(2048, 768, 128, 8)),
    _qwen3("qwen3-235b-a22b", 94, 4096, (64, 4), _feed_forward(4096, 1536, 128, 8)),
    _qwen3_5_9b(),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    _mixed(
        "mixtral-8x7b",
        [(32, (_attention(4096, (32, 8, 128)), _feed_forward(4096, 14336, 8, 2)))],
        4096,
        32000,
    ),
    _deepseek_v3(),
)
MODELS = {model.name: model for model in _NAMED}
# Names of the sizes by which a model may be given, and of the sizes that may be left out.
_SIZES = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab")
_OPTIONAL = ("kv_heads", "head_dim", "vocab")


def parse_model(text: str) -> Model:
    """A model by its name in MODELS, or by its sizes.

    Sizes look like "layers=32,dim=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,vocab=128256".
    kv_heads, head_dim and vocab may be left out, and are then heads, dim / heads and 32000. Raises
    InputError that names the size at fault.
    """
    if text in MODELS:
        return MODELS[text]
    if "=" not in text:
        raise InputError(
            f"--model: expected one of {sorted(MODELS)} or sizes such as "
            f"'layers=32,dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256', got {text!r}, which "
            "is no path of a config.json or of its folder either"
        )
    given: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in _SIZES:
            raise InputError(f"--model: expected sizes from {', '.join(_SIZES)}, got {name!r}")
        if not re.fullmatch("[1-9][0-9]{0,11}", value):
            raise InputError(
                f"--model: {name}: expected a whole number from 1 to 999,999,999,999, written out, "
                f"got {value[:40]!r}"
            )
        if name in given:
            raise InputError(f"--model: {name}: expected it once, got it again as {value!r}")
        given[name] = int(value)
    missing = [name for name in _SIZES if name not in given and name not in _OPTIONAL]
    if missing:
        raise InputError(f"--model: {', '.join(missing)} missing in {text!r}; add it")
    heads = given["heads"]
    if "head_dim" not in given and given["dim"] % heads:
        raise InputError(
            f"--model: head_dim: expected dim / heads to be a whole number, got {given['dim']} / "
            f"{heads}; give head_dim"
        )
    shape = LayerShape(
        given["dim"],
        heads,
        given.get("kv_heads", heads),
        given.get("head_dim", given["dim"] // heads),
        given["ffn"],
    )
    return _llama(text, given["layers"], shape, given.get("vocab", 32000))
