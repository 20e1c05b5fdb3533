"""Whether a model is over ranks what it is on one process; what it needs to be so.

A model's layers may see each other's tokens by other ways than attention (state spaces,
convolutions), through an attention of their own, or count positions in a way of their own. None of
that shows where attention is called. So models that this project does not test are compared, once.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from burst_rt.context import Context
from burst_rt.errors import InputError
from burst_rt.hf.rotary import watch_positions
from burst_rt.hf.shard import KEYWORD, shard
from burst_rt.runtime.refusing import refuse

__all__ = ["TESTED", "is_prepared", "prepare"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

# Folders of `transformers.models` whose models are compared with one process by a test.
TESTED = frozenset(
    {
        "gemma2", "gemma3", "gpt_oss", "llama", "mistral", "mixtral", "modernbert", "phi3", "qwen3",
        "t5gemma",
    }
)  # fmt: skip
_FOLDER = "transformers.models."
_MARK = "_burst_rt_prepared"
# Ranks compute what one process computes up to rounding: up to this part of the largest logit, by
# the bits of a type's mantissa. The tokens of other ranks weigh far more.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TOKENS_A_RANK = 8
# From one token of the comparison to the next: any that differ will do.
_STRIDE = 7919


def prepare(model: _Model, ctx: Context) -> _Model:
    """Makes a model ready for `shard`, and checks that it can be used over ranks; returns it.

    Needed once, before the model is wrapped (DDP, FSDP2), for models that are not in `TESTED`, and
    for "longrope" and "dynamic" rotary scaling where the ranks' largest positions fall on both
    sides of the original length. A call that needs it and has not got it is refused.

    Models that are not in `TESTED` compute the logits of a short sequence over the ranks, and on
    each rank with attn_implementation="eager". Collective then; blocks as `burst_attention` does.
    Raises InputError on every rank where the two differ by more than rounding.
    """
    watch_positions(model)
    for module in model.modules():
        setattr(module, _MARK, True)
    if ctx.world_size > 1 and not _is_tested(type(model).__module__):
        try:
            _compare(model, ctx)
        except InputError:
            for module in model.modules():
                delattr(module, _MARK)
            raise
    return model


def is_prepared(layer: torch.nn.Module) -> bool:
    """Whether a layer is of a model that is tested, or has been compared."""
    return _is_tested(type(layer).__module__) or hasattr(layer, _MARK)


def _is_tested(module: str) -> bool:
    return module.removeprefix(_FOLDER).partition(".")[0] in TESTED and module.startswith(_FOLDER)


@torch.no_grad()
def _compare(model: Any, ctx: Context) -> None:
    name, training = type(model).__name__, model.training
    embeddings = model.get_input_embeddings()
    num_tokens = _TOKENS_A_RANK * ctx.world_size
    tokens = torch.arange(num_tokens)[None] * _STRIDE % embeddings.num_embeddings
    batch = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens
    model.eval()
    try:
        part = shard(batch, ctx)
        model.set_attn_implementation("eager")
        whole = model(**{key: x.to(ctx.device) for key, x in batch.items()})[0]
        model.set_attn_implementation(KEYWORD)
        if model.config._attn_implementation != KEYWORD:
            raise ValueError(f"it keeps attn_implementation={model.config._attn_implementation!r}")
        mine = model(**part)[0]
        expected = part[KEYWORD].batch.layout.shard(whole)
        off = ((mine - expected).abs().max() / whole.abs().max()).item()
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        wrong = InputError(
            f"hf.prepare: {name} cannot take its attention from burst_rt: expected a model whose "
            f"layers ask transformers for it, got {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no more is known'}; use one such as "
            "Llama, Qwen, Mistral or Gemma"
        )
        refuse("hf.prepare", wrong, ctx.runtime)
    finally:
        model.train(training)
    worst = torch.zeros(ctx.world_size, dtype=torch.float64)
    worst[ctx.rank] = off
    worst = ctx.all_reduce(worst).max()
    if not worst <= _ROUNDING[mine.dtype]:  # as every rank sees
        raise InputError(
            f"hf.prepare: {name} over {ctx.world_size} ranks is not what it is on one process: "
            f"expected logits that differ by rounding, got {worst.item():.1e} of the largest. Its "
            "tokens see each other by other ways than transformers' attention, or it counts "
            "positions in its own way; give each sequence one rank"
        )
