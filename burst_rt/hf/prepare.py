"""Whether a model is over ranks what it is on one process; what it needs to be so.

Tokens may see each other in a model's layers by other ways than attention (state spaces,
convolutions) or through the model's own attention, and a model may count positions in its own way.
None of that shows where attention is called. So models that this project does not test are
compared, once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from burst_rt.attention.sharding import CELLS_OF_WIDTH, LayerCosts
from burst_rt.batches import IGNORED_LABEL
from burst_rt.context import Context, require_context
from burst_rt.errors import DeviceError, InputError
from burst_rt.hf.balancing import balance_over_ranks, require_balanced
from burst_rt.hf.blocks import give_token_types
from burst_rt.hf.lengths import Length, lengths_beyond, shorten_lengths
from burst_rt.hf.logits import leave_logits_unmade
from burst_rt.hf.masks import MaskIsRead
from burst_rt.hf.mixing import spread_mixing
from burst_rt.hf.release import KNOWN_RELEASES
from burst_rt.hf.rotary import hook_of, hook_positions
from burst_rt.hf.shard import KEYWORD, ShardInfo, require_attended, set_prepared, shard
from burst_rt.kernels import DTYPES
from burst_rt.runtime.refusing import refuse

__all__ = ["TESTED", "attends", "is_prepared", "prepare"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

# Folders of `transformers.models` whose models are compared with one process by a test, and all of
# whose losses are transformers' own.
TESTED = frozenset(
    {
        *("gemma2", "gemma3", "gemma4", "gpt_oss", "llama", "mistral", "mixtral", "molmo2"),
        *("paligemma", "phi3", "qwen3", "qwen3_moe", "t5gemma"),
    }
)
# The same of models some of whose layers mix tokens without attention, with one of the heads.
_HYBRIDS = frozenset(
    {
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h",
        "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "zamba2",
    }
)  # fmt: skip
# Suffixes of the heads' names.
_HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification")
_FOLDER = "transformers.models."
# Ranks compute what one process computes up to rounding: up to this part of the largest logit, by
# the type of the weights. The tokens of other ranks weigh far more.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOKENS_A_RANK = 8
# Length that replaces windows, chunks and the like.
_SHORT = 5
# Errors that a model raises if it cannot be called so.
_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
# Step from one token of the comparison to the next: any tokens that differ will do.
_STRIDE = 7919


def prepare(model: _Model, ctx: Context, *, loss: bool = True) -> _Model:
    """Makes a model ready for `shard`, and checks that it can be used over ranks; returns it.

    Call it once, before the model is wrapped (DDP, FSDP2). Calls of a model that was not prepared
    are refused. So is every later call that no layer attends in, or whose output is not one row for
    each of the rank's tokens. "longrope" and "dynamic" rotary scaling look at the largest position
    of all ranks from now on, the balancing loss of a mixture of experts counts all ranks' tokens,
    and models with images get the types of all tokens for their masks. Layers that mix tokens by
    recurrences and short convolutions do so over the ranks of every call that `shard` has cut
    (`mixing.py`), and as before in other calls.

    A model that no test compares (`TESTED`, and `_HYBRIDS` in releases of transformers that are
    known), or that has another head than the tested ones, or a forward that is not transformers',
    is compared with itself: it computes logits and loss of a short sequence over the ranks, and on
    each rank with attn_implementation="eager". For this its weights are on the context's device
    (those on the CPU meanwhile), and the call is collective; it blocks as `burst_attention` does.
    loss: False leaves the loss out, for models that compute it by themselves and are called without
    labels: `burst_rt.cross_entropy` makes the loss of all tokens of the logits.

    Raises InputError on every rank where the two differ by more than rounding, and where weights
    are elsewhere; DeviceError where the device has no room for them.
    """
    require_context(ctx, "hf.prepare")
    if not isinstance(model, torch.nn.Module):
        got = type(model).__name__
        error = InputError(f"hf.prepare: model: expected a model of transformers, got {got}")
        refuse("hf.prepare", error, ctx.runtime)
    balances = balance_over_ranks(model)  # the loss may be of more ranks than the context's
    mixes = spread_mixing(model, ctx)
    if loss:
        leave_logits_unmade(model)
    if ctx.world_size == 1:
        return model
    has_attention = attends(model)
    set_prepared(ctx, has_attention or not mixes, _costs_of(model))
    hook = hook_of(model)
    if hook is None:
        hook = hook_positions(model)
        give_token_types(model)
    hook.balances, hook.mixes, hook.attends = balances, mixes, has_attention
    tested = _is_tested(model)
    known = tested or hook.compared == "with loss"
    if not (known or (hook.compared and not loss)):
        hook.compared = "with loss" if loss else "without loss"
        try:
            _compare(model, ctx, loss)
        except InputError:
            hook.compared = ""
            raise
    if not hook.checks:
        hook.checks = True
        model.register_forward_hook(_check_call, with_kwargs=True)
    return model


def attends(model: torch.nn.Module) -> bool:
    """Whether any layer asks transformers for softmax attention, of whatever implementation."""
    forwards = {inspect.unwrap(type(module).forward) for module in model.modules()}
    return any("ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names for forward in forwards)


def _costs_of(model: Any) -> LayerCosts:
    """What layouts count a layer by, as far as the model's configuration says."""
    config = model.config.get_text_config()
    if config.is_heterogeneous:
        return LayerCosts()  # such a configuration raises where layers differ in what is asked for
    width, heads = (getattr(config, name, 0) for name in ("hidden_size", "num_attention_heads"))
    if not all(isinstance(size, int) and size for size in (width, heads)):
        return LayerCosts()  # a list, a size for each layer
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    return LayerCosts(
        heads=(heads, kv_heads) if heads % kv_heads == 0 else None,
        head_dim=head_dim,
        dtype=model.dtype if model.dtype in DTYPES else None,
        # As the default, where attention is as wide as the model.
        token_cells=CELLS_OF_WIDTH * width * width / (heads * head_dim),
    )


def is_prepared(layer: torch.nn.Module) -> bool:
    """Whether a layer is of a model that was prepared, or is being compared."""
    hook = hook_of(layer)
    return hook is not None and (hook.checks or bool(hook.compared))


def _is_tested(model: torch.nn.Module) -> bool:
    # `fully_shard` puts a class of its own before the model's.
    kind = next(x for x in type(model).__mro__ if not issubclass(x, FSDPModule))
    folder = kind.__module__.removeprefix(_FOLDER).partition(".")[0]
    # Libraries of faster losses replace transformers' forward by their own.
    forward = inspect.unwrap(model.forward).__module__
    # Some layers of hybrids are other code here than in transformers.
    known = transformers.__version__.startswith(KNOWN_RELEASES)
    return (
        kind.__module__.startswith(_FOLDER)
        and (
            (folder in TESTED and kind.__name__.endswith(_HEADS))
            or (folder in _HYBRIDS and kind.__name__.endswith("ForCausalLM") and known)
        )
        and forward.startswith("transformers.")
    )


def _check_call(
    module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any
) -> None:
    """Raises InputError, on every rank alike, for what is not of all ranks' tokens."""
    info = options.get(KEYWORD)
    # Tokens of this rank that the caller has chosen are their own affair.
    chosen = isinstance(options.get("logits_to_keep"), torch.Tensor)
    if isinstance(info, ShardInfo) and info.ctx.world_size > 1:
        require_attended(info)
        if not chosen:
            _check_output(module, info, output)
        require_balanced(module, info, options, output)


def _check_output(module: torch.nn.Module, info: ShardInfo, output: Any) -> None:
    given = [output] if isinstance(output, torch.Tensor) else output
    values = given.items() if isinstance(given, dict) else enumerate(given)
    tokens = info.batch.layout.shard_len
    meant = {tokens, info.encoder.layout.shard_len if info.encoder else tokens}
    for name, x in values:
        # Only hidden states, logits and the like are checked; other outputs are integers.
        if not isinstance(x, torch.Tensor) or x.ndim < 2 or not x.is_floating_point():
            continue
        if x.shape[1] not in meant:
            error = InputError(
                f"hf.prepare: {type(module).__name__}: expected an output for each of this rank's "
                f"{tokens} tokens, got one of shape {tuple(x.shape)}, {name!r}: of a head that "
                "pools a sequence, or by logits_to_keep, it would be of one rank's tokens alone; "
                "leave logits_to_keep out, make the model without the head "
                "(add_pooling_layer=False), or give each sequence one rank"
            )
            refuse("hf.prepare", error, info.ctx.runtime)


@torch.no_grad()
def _compare(model: Any, ctx: Context, loss: bool) -> None:
    """Raises InputError on every rank where ranks do not compute what one process computes."""
    name, modes = type(model).__name__, {module: module.training for module in model.modules()}
    # FSDP2 may keep its shards elsewhere.
    device_types = {p.device.type for p in model.parameters() if not isinstance(p, DTensor)}
    on_host = device_types == {"cpu"} and ctx.device.type != "cpu"
    if device_types - {ctx.device.type} and not on_host:
        error = InputError(
            f"hf.prepare: {name}: expected weights on {ctx.device}, where a short sequence is to "
            f"be computed, got some on {', '.join(sorted(device_types))}; call "
            "model.to(ctx.device) before"
        )
        refuse("hf.prepare", error, ctx.runtime)
    model.eval()
    try:
        if on_host:
            model.to(ctx.device)
        rounding = max(
            _check_logits(model, batch, kind, ctx) for kind, batch in _batches(model, ctx).items()
        )
        off = _largest(_loss_off(model, ctx), ctx) if loss else 0.0
        if not off <= rounding:
            raise InputError(
                f"hf.prepare: {name} computes its loss by itself: expected the mean over all "
                f"ranks' tokens, got one that is off by {off:.1e}; call burst_rt.hf.prepare(model, "
                "ctx, loss=False), and burst_rt.cross_entropy with the logits"
            )
    except MaskIsRead as error:
        raise InputError(
            f"hf.prepare: {name} cannot take its attention from burst_rt: {error}"
        ) from error
    except InputError:  # every rank sees it, so every rank raises
        raise
    except torch.OutOfMemoryError as error:
        no_room = DeviceError(
            f"hf.prepare: {name}: {ctx.device} has no room for the model, which is to compute a "
            "short sequence there because no test has compared it; use a tested model, or a device "
            "with more memory"
        )
        no_room.__cause__ = error
        refuse("hf.prepare", no_room, ctx.runtime)
    except _ERRORS as error:
        wrong = InputError(
            f"hf.prepare: {name} cannot take its attention from burst_rt: expected a model whose "
            f"layers ask transformers for it, got {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no more is known'}; use one such as "
            "Llama, Qwen, Mistral or Gemma"
        )
        refuse("hf.prepare", wrong, ctx.runtime)
    finally:
        for module, training in modes.items():
            module.training = training
        if on_host:
            model.to("cpu")


def _largest(x: float, ctx: Context) -> float:
    """The largest of all ranks' numbers, NaN if any is. Collective."""
    return torch.tensor(ctx.all_gather(x), dtype=torch.float64, device="cpu").max().item()


def _rounding(model: Any, computed_in: torch.dtype) -> float:
    """The tolerated difference between ranks and one process, relative to the largest logit.

    Quantised weights are integers; what is computed of them is of the other weights' type. FSDP2
    may keep weights of one type and compute in another.
    """
    dtypes = {computed_in, *(p.dtype for p in model.parameters())} & _ROUNDING.keys()
    return max((_ROUNDING[dtype] for dtype in dtypes), default=_ROUNDING[torch.float32])


def _batches(model: Any, ctx: Context) -> dict[str, dict[str, torch.Tensor]]:
    """Short rows of each kind that a model may count in its own way.

    Some models count positions by the padding, and some by the padding token, too. Both packed
    documents are longer than `_SHORT`, by which some models choose frequencies for all of a call,
    and the second one begins at no multiple of it. Encoder-decoders have none.
    """
    count = _TOKENS_A_RANK * ctx.world_size
    tokens = torch.arange(2 * count, device="cpu").view(2, count) * _STRIDE
    tokens = tokens % model.get_input_embeddings().num_embeddings
    padding_token = getattr(model.config.get_text_config(), "pad_token_id", None)
    tokens[tokens == padding_token] = 1
    shown = torch.ones_like(tokens)
    shown[1, : count // 3] = 0
    padded = {"input_ids": tokens, "attention_mask": shown}
    if model.config.is_encoder_decoder:
        return {"padded rows": {**padded, "decoder_input_ids": tokens}}
    first = _first_document(ctx)
    positions = torch.cat(
        [torch.arange(first, device="cpu"), torch.arange(count - first, device="cpu")]
    )[None]
    packed = {"input_ids": tokens[:1], "position_ids": positions}
    return {"padded rows": padded, "packed rows": packed}


def _first_document(ctx: Context) -> int:
    """How many tokens the first, and shorter, packed document has."""
    length = _TOKENS_A_RANK * ctx.world_size // 2 - 1
    return length + 2 if length % _SHORT == 0 else length


def _check_logits(model: Any, batch: dict[str, torch.Tensor], kind: str, ctx: Context) -> float:
    """Raises InputError on every rank if the ranks' logits differ from one process's.

    It compares on both sides of each length of the model's configuration. Collective. Returns the
    tolerated difference.
    """
    lengths = lengths_beyond(model, _first_document(ctx))
    whole = _alone(model, batch, ctx)
    rounding, where = _rounding(model, whole.dtype), ""
    off = _largest(_logits_off(model, batch, whole, ctx), ctx)
    if off <= rounding and lengths:
        off = _off_beyond(model, batch, lengths, ctx)
        if not off <= rounding:
            each = [x for x in lengths if not _off_beyond(model, batch, [x], ctx) <= rounding]
            where = ", beyond its " + " and ".join(f"{name} ({n})" for name, n in each or lengths)
    if not off <= rounding:
        raise InputError(
            f"hf.prepare: {type(model).__name__} over {ctx.world_size} ranks is not what it is on "
            f"one process, in {kind}{where}: expected logits that differ by rounding, got "
            f"{off:.1e} of the largest. Its tokens see each other by other ways than "
            "transformers' attention, or it counts positions in its own way; give each sequence "
            "one rank"
        )
    return rounding


def _off_beyond(
    model: Any, batch: dict[str, torch.Tensor], lengths: Sequence[Length], ctx: Context
) -> float:
    """The difference of the logits from one process's with these lengths shortened. Collective.

    0, with a warning, where one process cannot compute them.
    """
    with shorten_lengths(model, lengths, _SHORT):
        try:
            whole = _alone(model, batch, ctx)
        except torch.OutOfMemoryError:
            raise  # on this rank alone, perhaps
        except _ERRORS as error:
            names = ", ".join(name for name, _ in lengths)
            warnings.warn(
                f"hf.prepare: {type(model).__name__} was not compared beyond its {names}: one "
                f"process fails where they are {_SHORT} ({error})",
                stacklevel=5,
            )
            return 0.0
        return _largest(_logits_off(model, batch, whole, ctx), ctx)


def _logits_off(
    model: Any, batch: dict[str, torch.Tensor], whole: torch.Tensor, ctx: Context
) -> float:
    """The difference of this rank's logits from one process's, relative to the largest."""
    keywords = _cut(batch, ctx)
    layout = keywords[KEYWORD].batch.layout
    output = model(**keywords)
    _check_output(model, keywords[KEYWORD], output)
    off = (_of_tokens(output) - layout.shard(whole))[..., None].abs().flatten(2).amax(2)
    if "attention_mask" in batch and not model.config.is_encoder_decoder:
        off = off * layout.shard(batch["attention_mask"]).to(off.device)
    return float(off.max() / whole.abs().max())


def _loss_off(model: Any, ctx: Context) -> float:
    """The difference of the loss from one process's, relative to it. 0 for models without a loss of
    tokens.
    """
    batch = _batches(model, ctx)["padded rows"]
    tokens = batch["input_ids"]
    logits = _alone(model, batch, ctx)
    of_tokens = logits.ndim == 3 and logits.shape[:2] == tokens.shape
    if not of_tokens or "labels" not in inspect.signature(model.forward).parameters:
        return 0.0
    # Ranks have different numbers of labels, and padding predicts nothing.
    batch["labels"] = tokens % logits.shape[-1]
    batch["labels"][:, : tokens.shape[1] // 3 + 1] = IGNORED_LABEL
    batch["labels"][batch["attention_mask"] == 0] = IGNORED_LABEL
    expected = float(_on_one_process(model, batch, ctx).loss)
    return abs(float(model(**_cut(batch, ctx)).loss) / expected - 1)


def _cut(batch: dict[str, torch.Tensor], ctx: Context) -> dict[str, Any]:
    keywords = shard(batch, ctx)
    keywords[KEYWORD].excused = True  # the comparison finds out what ranks get wrong
    return keywords


def _alone(model: Any, batch: dict[str, torch.Tensor], ctx: Context) -> torch.Tensor:
    """The logits of one process for a batch; each packed document is computed by itself."""
    if "position_ids" not in batch:
        return _of_tokens(_on_one_process(model, batch, ctx))
    begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], batch["position_ids"].shape[1]]
    documents = [
        {name: x[:, begin:end] for name, x in batch.items()}
        for begin, end in zip(begins, ends, strict=True)
    ]
    return torch.cat([_of_tokens(_on_one_process(model, each, ctx)) for each in documents], 1)


def _of_tokens(output: Any) -> torch.Tensor:
    """Logits, behind a balancing loss perhaps; or what a model without a head gives first."""
    logits = output.get("logits") if isinstance(output, dict) else None
    first: torch.Tensor = output[0] if logits is None else logits
    return first


def _on_one_process(model: Any, batch: dict[str, torch.Tensor], ctx: Context) -> Any:
    """The output of a model for a batch, computed as in one process."""
    model.set_attn_implementation("eager")
    try:
        output = model(**{name: x.to(ctx.device) for name, x in batch.items()})
    finally:
        model.set_attn_implementation(KEYWORD)
    if (got := model.config._attn_implementation) != KEYWORD:
        raise ValueError(f"it keeps attn_implementation={got!r}")
    return output
