"""Rotary embeddings that look at the largest position of a call.

"longrope" and "dynamic" choose their frequencies by the largest of the position_ids that they are
given (`transformers.modeling_rope_utils.dynamic_rope_update`). One rank's tokens may end before the
length at which the choice changes while another rank's end behind it.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from burst_rt.hf.shard import KEYWORD

__all__ = ["PositionHook", "frequencies_change_at", "hook_of", "hook_positions"]


_NAME = "_burst_rt_positions"  # name of a module's attribute


def hook_positions(model: torch.nn.Module) -> PositionHook:
    """Tells a model's rotary embeddings the largest position of all ranks, from now on."""
    hook = PositionHook()
    # Some wrappers (PEFT) call the model's `forward` itself, and so none of its hooks.
    # PEFT's own model inside may be called by itself, too, or be merged and go on alone.
    inside = getattr(model, "get_base_model", lambda: model)()
    for outer in {model, getattr(model, "base_model", model), inside}:
        outer.register_forward_pre_hook(hook.before_model, with_kwargs=True)
    for module in model.modules():
        setattr(module, _NAME, hook)
        if _kinds(getattr(module, "rope_type", None)):
            module.register_forward_pre_hook(hook.before_rotary, with_kwargs=True)
            module.register_forward_hook(hook.after_rotary)
    return hook


def hook_of(module: torch.nn.Module) -> PositionHook | None:
    """The hook of the model that a module is of; None where nobody has prepared the model."""
    hook: PositionHook | None = getattr(module, _NAME, None)
    return hook


def frequencies_change_at(model: torch.nn.Module) -> int | None:
    """The number of tokens beyond which a model's rotary embeddings take other frequencies; None
    for a model whose frequencies are the same at all lengths.

    Keys that were cached at a smaller length have the frequencies of that length.
    """
    lengths: list[int] = []
    rotary: Any
    for rotary in model.modules():
        if _kinds(getattr(rotary, "rope_type", None)):
            given: Any = getattr(rotary.config, "rope_parameters", None) or {}
            for each in (given, *(x for x in given.values() if isinstance(x, dict))):
                own = each.get("original_max_position_embeddings")
                is_long = each.get("rope_type") == "longrope" and own is not None
                if _looks(str(each.get("rope_type"))):
                    lengths.append(int(own if is_long else rotary.original_max_seq_len))
    return min(lengths, default=None)


class _CallInfo(Protocol):
    """How a call is cut: `shard.ShardInfo`, or `cache.StepInfo`."""

    told: set[object]

    def largest(self, position_ids: torch.Tensor) -> int: ...


class PositionHook:
    """Puts one more token, at the largest position of all, in front of a rotary embedding."""

    def __init__(self) -> None:
        # Weak: a call's info leads to a cache, whose memory must not live as long as the model.
        self._call: weakref.ref[_CallInfo] | None = None
        self.compared = ""  # with one process: "with loss", "without loss" or not yet
        self.checks = False  # whether every call's output is looked at
        self.balances = False  # whether a balancing loss of experts is of all ranks' tokens
        self.attends = False  # whether a layer asks transformers for its softmax attention
        self.mixes = False  # whether layers that mix tokens without attention do so over ranks

    def __getstate__(self) -> dict[str, Any]:
        # A model is pickled without the call that it was last in.
        return {**self.__dict__, "_call": None}

    def before_model(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        info = options.get(KEYWORD)
        self._call = None if info is None else weakref.ref(info)
        if info is not None:
            info.told.add(self)

    @property
    def _info(self) -> _CallInfo | None:
        return None if self._call is None else self._call()

    def before_rotary(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._info is None:
            return None
        if "position_ids" in options:
            return args, {**options, "position_ids": self._longer(options["position_ids"])}
        x, positions, *others = args
        return (x, self._longer(positions), *others), options

    def _longer(self, positions: torch.Tensor) -> torch.Tensor:
        info = self._info
        assert info is not None
        largest = info.largest(positions)
        return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), largest)], -1)

    def after_rotary(
        self, module: torch.nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        return None if self._info is None else tuple(x[..., :-1, :] for x in output)


def _kinds(rope_type: object) -> list[str]:
    """The length-dependent rope types. rope_type: one string, or one for each layer type."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return [kind for kind in kinds if isinstance(kind, str) and _looks(kind)]


def _looks(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
