"""The balancing loss of a mixture of experts, over the tokens of all ranks.

transformers' `load_balancing_loss_func` (Switch Transformers, https://arxiv.org/abs/2101.03961,
equations 4 to 6) multiplies two means over all tokens: how often each expert is chosen, and how
probable its router makes it. The product of two ranks' means is not the mean of their products, so
the ranks add up the sums first. Router logits say of which call they are: the models of
transformers hand them to the loss as they are, and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_rt.errors import InputError
from burst_rt.hf.shard import KEYWORD, ShardInfo
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.sums import add_over_ranks

__all__ = ["balance_over_ranks", "require_balanced"]

_FUNCTION = "load_balancing_loss_func"
# Its arguments. Functions of this name with others (Doge, Switch Transformers) compute other sums.
_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
# Whose function TRL takes for every model.
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"
_NAME = "_burst_rt_info"  # an attribute of router logits, and of the functions that read it


def balance_over_ranks(model: torch.nn.Module) -> bool:
    """Makes the model's balancing loss one of all ranks' tokens, where a call is sharded.

    Returns whether there is such a loss. Idempotent, and local.
    """
    names = {type(module).__module__ for module in model.modules()}
    known = [name for name in names if _is_known(_function_in(name))]
    if not known:
        return False
    importlib.import_module(_MIXTRAL)
    for name in {*known, _MIXTRAL}:
        function = _function_in(name)
        if not hasattr(function, _NAME):
            setattr(sys.modules[name], _FUNCTION, _sharded(function))
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not hasattr(module, _NAME):
            module.register_forward_hook(_mark, with_kwargs=True)
            setattr(module, _NAME, True)
    return True


def _function_in(name: str) -> Any:
    return getattr(sys.modules.get(name), _FUNCTION, None)


def _is_known(function: Any) -> bool:
    return callable(function) and tuple(inspect.signature(function).parameters) == _ARGUMENTS


@torch.compiler.disable  # type: ignore[untyped-decorator]  # an attribute of a traced tensor is lost
def _mark(
    module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any
) -> None:
    """Says of router logits how the call is cut that they are of."""
    info = options.get(KEYWORD)
    logits = output.get("router_logits") if isinstance(output, Mapping) else None
    if isinstance(info, ShardInfo) and isinstance(logits, tuple):
        for x in logits:
            setattr(x, _NAME, weakref.ref(info))


def _sharded(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def balancing_loss(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        marked = isinstance(gate_logits, tuple) and getattr(gate_logits[0], _NAME, None)
        info = marked() if marked else None
        if info is None:
            return original(gate_logits, num_experts, top_k, attention_mask)
        return _over_ranks(gate_logits, num_experts, top_k, attention_mask, info)

    setattr(balancing_loss, _NAME, True)
    disabled: Callable[..., Any] = torch.compiler.disable(balancing_loss)  # ranks meet
    return disabled


def _over_ranks(
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None,
    info: ShardInfo,
) -> torch.Tensor:
    """num_experts * sum(chosen * probability) / tokens**2, of sums over all layers and ranks.

    gate_logits: of each layer `[tokens, experts]`; attention_mask: the weights of the tokens.
    """
    device, tokens = gate_logits[0].device, len(gate_logits[0])
    weights = torch.ones(tokens, device=device)
    if attention_mask is not None:
        weights = attention_mask.reshape(-1).to(weights)
    sums = torch.zeros(2, num_experts, dtype=torch.float64, device=device)
    for logits in gate_logits:
        probabilities = torch.softmax(logits.to(device), -1)
        chosen = probabilities.topk(top_k, -1).indices
        counts = torch.zeros(num_experts, device=device)
        counts.scatter_add_(0, chosen.reshape(-1), weights.repeat_interleave(top_k))
        probability = (probabilities.float() * weights[:, None]).sum(0)
        sums = sums + torch.stack([counts, probability])
    total = weights.double().sum() * len(gate_logits)
    group = info.group if info.balanced_in is None else info.balanced_in
    added = add_over_ranks(
        torch.cat([sums.flatten(), total[None]]), group=group, name="balancing loss"
    )
    chosen, probability = added[:-1].view(2, num_experts)
    info.balanced = True
    loss: torch.Tensor = num_experts * (chosen * probability).sum() / added[-1] ** 2
    return (info.balanced_share * loss).float()


def require_balanced(
    module: torch.nn.Module, info: ShardInfo, options: Mapping[str, Any], output: Any
) -> None:
    """Raises InputError, on every rank that waits for this one, for a balancing loss of one rank's
    tokens: from a forward that has a function of its own.
    """
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    asked = options.get("output_router_logits")
    if asked is None:
        asked = getattr(text, "output_router_logits", False)
    values = output if isinstance(output, Mapping) else {"loss": output}
    lost = any(values.get(name) is not None for name in ("loss", "aux_loss"))
    if asked and lost and not info.balanced:
        error = InputError(
            f"output_router_logits: {type(module).__name__}: expected a model that asks "
            f"transformers' {_FUNCTION} for its balancing loss, got one that computes it by "
            "itself, of one rank's tokens; set model.config.output_router_logits = False, or take "
            "off what replaces the model's forward"
        )
        refuse("hf", error, info.ctx.runtime)
