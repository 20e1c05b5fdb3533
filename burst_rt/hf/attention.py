"""The attention function and the mask function that transformers knows as "burst_rt"."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from burst_rt.attention.api import burst_attention
from burst_rt.batches import ShardedBatch
from burst_rt.errors import ConfigError, InputError
from burst_rt.hf.loss import wrong_router_loss
from burst_rt.hf.masks import MaskHandover, mask_of
from burst_rt.hf.prepare import is_prepared
from burst_rt.hf.rotary import PositionHook, hook_of
from burst_rt.hf.shard import KEYWORD, ShardInfo
from burst_rt.hf.step_info import StepInfo
from burst_rt.hf.temperature import rescale_queries
from burst_rt.planning.masks import Causal, Full, Mask, SlidingWindow
from burst_rt.runtime.refusing import refuse

__all__ = ["attend", "register"]

_NAME = "attn_implementation='burst_rt'"
_CACHE = "a cache made by burst_rt.hf.Cache(model, ctx, capacity=...)"
# Names of layer types, as in `layer_types` of a configuration, that look at other tokens by
# attention alone, or at none; and names of types that choose keys by one rank's scores.
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
_KNOWN = (*_ATTENDING, "moe", "mlp", "sparse", "dense")
# Names of types that `mixing` spreads over ranks, if it knows the model's layers.
_MIXING = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_CHOOSING = (
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
)


def register() -> None:
    """Makes "burst_rt" an attention implementation of transformers. Idempotent.

    Compiled models are cut there: masks cannot be made inside a compiled function.
    """
    AttentionInterface.register(KEYWORD, torch.compiler.disable(attend))
    AttentionMaskInterface.register(KEYWORD, torch.compiler.disable(_make_mask))


def _make_mask(
    *,
    mask_function: Any,
    attention_mask: MaskHandover | torch.Tensor | None = None,
    config: object = None,
    q_length: int = 0,
    q_offset: int = 0,
    kv_length: int = 0,
    **others: Any,
) -> MaskHandover:
    """The mask of a kind of layers, for whole sequences. Arguments: as transformers names them.

    attention_mask, the padding of one rank's tokens, is not used: `shard` has seen all tokens. A
    mask that was made before is returned as it is.
    Layers that choose keys are refused here, as they cut their mask before they attend.
    """
    choosing = [each for each in _layer_types(config) if each in _CHOOSING]
    if choosing:
        _refuse(_mixed(choosing), None)
    if isinstance(attention_mask, MaskHandover):
        return attention_mask
    try:
        mask = mask_of(mask_function)
    except (ConfigError, InputError) as error:
        refuse(_NAME, error)
    if mask != Full() and kv_length > q_offset + q_length:
        _refuse(f"a static cache or a prefix is not done; expected none, or {_CACHE}", None)
    return MaskHandover(mask_function, (others.get("batch_size", 1), 1, q_length, kv_length))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskHandover | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: object = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the ranks of a context; called by the layers of transformers.

    query, key, value: this rank's, `[batch, heads, tokens, head_dim]`, key and value with their own
    number of heads. Returns (out `[batch, tokens, heads, head_dim]`, None). Collective; blocks and
    raises as `burst_attention` does.

    Raises InputError, on every rank that waits for this one, for a call without what `shard` gives,
    with other positions, and for what is not done.
    """
    info = others.get(KEYWORD)
    reason = _unsupported_argument(dropout, position_bias, cache, attention_mask)
    if not isinstance(info, (ShardInfo, StepInfo)):
        reason = _UNMARKED
    elif reason is None:
        reason = _unsupported_layer(module, info, is_causal, others)
    if reason:
        if isinstance(info, ShardInfo):
            info.excused = True
        _refuse(reason, info)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # As for torch's own attention. Rotary embeddings have left q and k in float32.
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    assert isinstance(info, (ShardInfo, StepInfo))
    query = rescale_queries(module, query, info)
    if isinstance(info, StepInfo):
        try:
            structure = _structure(module, attention_mask, None, is_causal, sliding_window)
        except InputError as error:
            refuse(_NAME, error, info.ctx.runtime)
        layer, count, tokens = info.attending(), info.step.num_tokens, query.shape[2]
        if layer is None:
            _refuse(
                "expected layers that keep keys and values of their own, got one that does not "
                f"({type(module).__name__}): it may have those of another layer; generate on one "
                "process", info,
            )  # fmt: skip
        q, k, v = (x.transpose(1, 2)[:, :count] for x in (query, key, value))
        out = info.step.attend(
            layer, q, k, v,
            mask=structure, scale=scaling, softcap=softcap, sinks=s_aux,
        )  # fmt: skip
        # A rank without tokens runs one that nobody sees.
        return functional.pad(out, (0, 0, 0, 0, 0, tokens - count)), None
    info.attended = True
    queries, keys, shown = _sides(info, module)
    try:
        structure = _structure(module, attention_mask, queries, is_causal, sliding_window)
    except InputError as error:
        refuse(_NAME, error, info.ctx.runtime)
    out = burst_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        layout=queries.layout, kv_layout=keys.layout,
        mask=structure & shown,
        scale=scaling, softcap=softcap, sinks=s_aux,
    )  # fmt: skip
    return out, None


def _structure(
    module: torch.nn.Module,
    handed: object,
    batch: ShardedBatch | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask:
    """The mask of a layer apart from documents and padding. batch: its queries'; None: over a
    cache.
    """
    if isinstance(handed, MaskHandover):
        return handed.mask(batch)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    structure: Mask = Causal() if causal else Full()
    if sliding_window is not None:
        sides = (sliding_window - 1, 0 if causal else sliding_window - 1)
        structure &= SlidingWindow(*sides) if batch is None else batch.window(*sides)
    return structure


# Why a layer cannot attend that was not told how the batch is cut.
_UNMARKED = (
    f"expected the keyword {KEYWORD!r}, got none: this rank's tokens do not say which part of the "
    "sequence they are; call model(**burst_rt.hf.shard(batch, ctx)) with the whole batch, and a "
    f"model that hands keywords on to its layers; or generate with {_CACHE}"
)


def _unsupported_argument(
    dropout: float, position_bias: object, cache: object, attention_mask: object
) -> str | None:
    """The reason why a layer cannot attend with such arguments, in words."""
    if dropout:
        return (
            f"attention_dropout: expected 0, got {dropout}: attention is exact here; set "
            "model.config.attention_dropout = 0.0 (before the model is made) or call model.eval()"
        )
    if position_bias is not None:
        return "position_bias (T5's) is not done; expected none; use a model with rotary positions"
    if cache is not None:
        return "a paged cache is not done; expected none"
    if attention_mask is not None and not isinstance(attention_mask, MaskHandover):
        shape = tuple(getattr(attention_mask, "shape", ()))
        return (
            f"attention_mask: expected [batch, tokens] or none, got {type(attention_mask).__name__}"
            f" of shape {shape}: a matrix for each row would be one rank's alone"
        )
    return None


def _unsupported_layer(
    module: torch.nn.Module,
    info: ShardInfo | StepInfo,
    is_causal: bool | None,
    others: dict[str, Any],
) -> str | None:
    """The reason why this layer cannot attend over ranks, in words."""
    config = getattr(module, "config", None)
    if isinstance(info, StepInfo):
        causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
        if not causal or is_causal is False:
            return "attention to later tokens is not done with a cache; expected causal attention"
    if info.ctx.world_size == 1:
        return None
    if not is_prepared(module):
        return (
            f"{type(module).__module__}: expected a model that was prepared for ranks, got one "
            "that was not; call burst_rt.hf.prepare(model, ctx) once, before the model is wrapped"
        )
    hook = hook_of(module)
    if reason := _unsupported_model(hook, info, config, others):
        return reason
    positions = others.get("position_ids")
    if isinstance(info, StepInfo):
        return info.wrong_positions(positions)
    if hook not in info.told:
        return (
            f"expected a call of the model that was prepared, or of its base model, got one of a "
            f"part of it ({type(module).__name__}); call model(**burst_rt.hf.shard(batch, ctx))"
        )
    return _wrong_positions(info, positions)


def _unsupported_model(
    hook: PositionHook | None,
    info: ShardInfo | StepInfo,
    config: object,
    others: dict[str, Any],
) -> str | None:
    """The reason why a prepared model cannot run over ranks, in words."""
    balanced = hook is not None and hook.balances and not isinstance(info, StepInfo)
    if not balanced and (reason := wrong_router_loss(others, config)):
        return reason
    known = _KNOWN + _MIXING if hook is not None and hook.mixes else _KNOWN
    mixing = [each for each in _layer_types(config) if each not in known]
    return _mixed(mixing) if mixing else None


def _layer_types(config: object) -> list[str]:
    """The types of a model's layers, each once; none where its configuration names none."""
    return list(dict.fromkeys(getattr(config, "layer_types", None) or []))


def _mixed(layer_types: list[str]) -> str:
    return (
        f"layers of type {', '.join(layer_types)} mix tokens otherwise than by attention over the "
        f"ranks, and would see one rank's alone; expected {', '.join(_ATTENDING)}, or layers of a "
        "hybrid model that docs/transformers.md names; use a model of those"
    )


def _wrong_positions(info: ShardInfo, given: torch.Tensor | None) -> str | None:
    known = [info.batch, *([info.encoder] if info.encoder else [])]
    if given is None or any(given is each.position_ids for each in known):
        return None
    if any(given.shape[-1] == each.layout.shard_len and _equal(given, each) for each in known):
        return None
    return (
        f"position_ids: expected those of burst_rt.hf.shard, got others of shape "
        f"{tuple(given.shape)}; pass on all that shard returns, and give it decoder_input_ids too "
        "where the model is an encoder-decoder"
    )


def _equal(given: torch.Tensor, batch: ShardedBatch) -> bool:
    expected = batch.position_ids
    return given.shape[-1] == expected.shape[-1] and bool((given == expected).all())


def _sides(info: ShardInfo, module: torch.nn.Module) -> tuple[ShardedBatch, ShardedBatch, Mask]:
    """The batches to which a layer's queries and keys belong, and the mask of documents and
    padding.
    """
    if info.encoder is None:
        return info.batch, info.batch, info.batch.mask
    if not getattr(module.config, "is_decoder", False):
        return info.encoder, info.encoder, info.encoder.mask
    if "Cross" in type(module).__name__:
        return info.batch, info.encoder, info.unpadded
    return info.batch, info.batch, info.batch.mask


def _refuse(reason: str, info: object) -> NoReturn:
    runtime = info.ctx.runtime if isinstance(info, (ShardInfo, StepInfo)) else None
    refuse(_NAME, InputError(f"{_NAME}: {reason}"), runtime)
