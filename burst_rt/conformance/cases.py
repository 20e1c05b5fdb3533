"""The cases: small attention calls and tiny models, each evaluated and trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["AttentionCase", "ModelCase", "NotOffered", "all_cases"]


class NotOffered(Exception):
    """Raised by an adapter: its library has no argument for what the case asks."""


@dataclass(frozen=True)
class AttentionCase:
    """One call of self-attention on `[batch, length, heads, head_dim]`, float32, as on every rank.

    A query sees a key if all of these allow it. causal: keys up to its own position. window: the
    last so many keys, its own included; needs causal. documents: the keys of its own document; the
    lengths of documents, which add up to `length`. prefix: the first so many keys are seen by every
    query, besides what causal allows. padding: for each row of the batch, how many tokens at its
    end are padding, which no token sees; results at padding do not count.

    kv_heads: query head h uses key head h // (heads / kv_heads). sinks: the score of one more key
    of each head, whose value is 0. softcap: c makes c * tanh(s / c) of a scaled score s. scale:
    None is 1 / sqrt(head_dim). train: gradients are asked for.
    """

    name: str
    length: int = 48
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    prefix: int = 0
    padding: tuple[int, ...] = ()
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    train: bool = False


@dataclass(frozen=True)
class ModelCase:
    """A tiny causal model of transformers on one batch: logits, loss, and in training gradients.

    architecture: a row of `models.ARCHITECTURES`. batch: "plain" (two rows), "odd" (two rows whose
    length has no divisor), "right" and "left" (two rows, one with padding), "packed" (one row of
    documents by position_ids). train: gradients are asked for; otherwise the model is in evaluation
    mode, without gradients.
    """

    name: str
    architecture: str
    batch: str
    train: bool = False


_MASKS: dict[str, dict[str, object]] = {
    "full": {"causal": False, "batch": 2},
    "causal": {"batch": 2},
    "window": {"window": 9, "batch": 2},
    "documents": {"documents": (7, 20, 1, 20)},
    "prefix": {"prefix": 11},
    "padding": {"batch": 2, "padding": (0, 13)},
    "padding-full": {"batch": 2, "padding": (0, 13), "causal": False},
}
_ODD = {"length": 47, "documents": (7, 20, 1, 19)}
_WITH: dict[str, dict[str, object]] = {
    "": {},
    "+sinks": {"sinks": True},
    "+softcap": {"softcap": 1.5},
    "+odd": {"length": _ODD["length"]},
}
_MORE: dict[str, dict[str, object]] = {
    "causal+grouped": {"kv_heads": 2, "batch": 2},
    "causal+scale": {"scale": 0.3, "batch": 2},
    "causal+head64": {"head_dim": 64, "batch": 2},
    "documents+window": {"documents": (7, 20, 1, 20), "window": 9},
    "documents+grouped": {"documents": (7, 20, 1, 20), "kv_heads": 2},
    "window+sinks+grouped": {"window": 9, "sinks": True, "kv_heads": 2},
    "window+softcap+odd": {"window": 9, "softcap": 1.5, "length": 47},
}
_ARCHITECTURES = ("Llama", "Qwen2-window", "Gemma2-softcap", "GptOss-sinks", "Qwen3Next-hybrid")
_BATCHES = ("plain", "odd", "right", "left", "packed")


def all_cases() -> Iterator[AttentionCase | ModelCase]:
    """All cases: attention first, each evaluated, then trained."""
    rows = {
        mask + more: {**options, **extra}
        for mask, options in _MASKS.items()
        for more, extra in _WITH.items()
    }
    for name, options in {**rows, **_MORE}.items():
        if options.get("documents") and options.get("length") == _ODD["length"]:
            options = {**options, **_ODD}
        yield from _both(AttentionCase(f"attention/{name}", **options))  # type: ignore[arg-type]
    for architecture in _ARCHITECTURES:
        for batch in _BATCHES:
            yield from _both(ModelCase(f"model/{architecture}/{batch}", architecture, batch))


def _both(case: AttentionCase | ModelCase) -> Iterator[AttentionCase | ModelCase]:
    yield replace(case, name=f"{case.name}/eval")
    yield replace(case, name=f"{case.name}/train", train=True)
