"""Logits that are not made unless something reads them: the loss of a sharded call does not.

A model of transformers gives its hidden states to a linear layer, its head, scales what comes back
perhaps, caps it, and hands it to the loss. In a call with labels that `shard` has cut, the head
returns `Unmade` logits instead: a tensor of the same shape, type and graph that notes what would
be done to it. The loss computes by these notes, some tokens at a time (`burst_rt.linear_loss`).
Any other operation makes the logits, as they would have been, and goes on with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from burst_rt.errors import InputError
from burst_rt.hf.shard import KEYWORD
from burst_rt.linear_loss import computed_in, sum_of_losses
from burst_rt.loss_kernels import Entropy
from burst_rt.losses import plain_labels
from burst_rt.runtime.sums import RanksOrGroup

__all__ = ["Unmade", "leave_logits_unmade", "sum_of_losses"]

_NAME = "_burst_rt_unmade"  # name of a model's attribute
_OPS = torch.ops.aten
_FACTORS = (_OPS.mul.Tensor, _OPS.div.Tensor)
# Copies and views of all: the same numbers again.
_SAME = (_OPS.detach.default, _OPS.alias.default, _OPS.clone.default)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(eq=False, kw_only=True)
class _Notes:
    """What the logits are made of, and what was done to them since."""

    inputs: tuple[torch.Tensor, ...]  # hidden, weight and perhaps bias, in autograd's graph
    data: tuple[torch.Tensor, ...]  # the same, outside it
    versions: list[int]
    dtype: torch.dtype  # that the product has
    operations: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()
    made: torch.Tensor | None = None

    def make(self) -> torch.Tensor:
        """The logits, by the operations that were noted, in their order."""
        if self.made is None:
            self.require_unchanged()
            with torch.no_grad(), torch.autocast(self.data[0].device.type, enabled=False):
                made = functional.linear(*(x.to(self.dtype) for x in self.data))
                for function, args, options in self.operations:
                    made = function(made, *args, **options)
            self.made = made
        return self.made

    def require_unchanged(self) -> None:
        """Raises InputError where the logits would be others by now."""
        kept = [not x.numel() or x.untyped_storage().nbytes() > 0 for x in self.data]
        if not all(kept) or self.versions != _versions(self.data):
            why = "has changed its weights" if all(kept) else "keeps its weights sharded"
            raise InputError(
                "logits: expected to be read before the model's weights change, and under FSDP "
                f"within the model's forward, as they are made when they are read; this model {why}"
                " by now; read output.logits earlier, or call the model without labels and give "
                "its logits to burst_rt.cross_entropy"
            )

    def entropy(self) -> Entropy | None:
        """What the operations come to: a scale, and one softcap at most; None for anything else."""
        factors, capped = [1.0, 1.0], 0
        for function, args, _ in self.operations:
            if function is _OPS.tanh.default:
                capped += 1
            elif function in _FACTORS:
                at = min(capped, 1)
                by = function is _OPS.mul.Tensor
                factors[at] = factors[at] * args[0] if by else factors[at] / args[0]
        before, after = factors
        usable = capped <= 1 and after > 0 and math.isfinite(before) and math.isfinite(after)
        softcap = after if capped else None
        return Entropy(dtype=self.dtype, scale=before * after, softcap=softcap) if usable else None


def _versions(tensors: tuple[torch.Tensor, ...]) -> list[int]:
    return [-1 if x.is_inference() else x._version for x in tensors]


class Unmade(torch.Tensor):
    """Logits `[..., classes]` that are made when an operation reads them."""

    notes: _Notes

    @staticmethod
    def of(notes: _Notes, dtype: torch.dtype) -> Unmade:
        hidden, weight = notes.data[:2]
        made: Unmade = torch.Tensor._make_wrapper_subclass(
            Unmade, (*hidden.shape[:-1], len(weight)), dtype=dtype, device=hidden.device
        )
        made.notes = notes
        return made

    # Autograd differentiates the operations, as it does all others; their numbers come from here.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares none
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Unmade) and first.notes.made is None:
            noted = first._noted(func, args[1:], kwargs)
            if noted is not None:
                return noted
        given = tree_map_only(Unmade, lambda x: x.notes.make(), (args, kwargs))
        result = func(*given[0], **given[1])
        # What is changed in place is returned itself.
        return first if isinstance(first, Unmade) and result is first.notes.made else result

    def _noted(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Unmade | None:
        """The result of an operation that is only noted; None for one that reads numbers."""
        if func in _SAME:
            same = func is not _OPS.clone.default
            return Unmade.of(self.notes if same else replace(self.notes), self.dtype)
        dtype = self.dtype
        if func is _OPS._to_copy.default:
            dtype = options.get("dtype") or dtype
            if args or not dtype.is_floating_point or set(options) - {"dtype"}:
                return None
        elif func in _FACTORS:
            if options or len(args) != 1 or type(args[0]) not in (int, float) or not args[0]:
                return None
        elif func is not _OPS.tanh.default:
            return None
        operations = (*self.notes.operations, (func, args, options))
        return Unmade.of(replace(self.notes, operations=operations), dtype)

    def sum_of_losses(
        self, labels: torch.Tensor, counted: torch.Tensor, group: RanksOrGroup, ignore_index: int
    ) -> torch.Tensor | None:
        """See `linear_loss.sum_of_losses`; None where the logits were made, or must be."""
        entropy, (hidden, weight, *bias) = self.notes.entropy(), self.notes.inputs
        if self.notes.made is not None or entropy is None or labels.shape != hidden.shape[:-1]:
            return None
        self.notes.require_unchanged()
        plain = plain_labels(labels, len(weight), group, ignore_index, "cross_entropy")
        return sum_of_losses(hidden, weight, bias[0] if bias else None, plain, counted, entropy)

    # These look at memory, past all operations.

    def numpy(self, *args: Any, **options: Any) -> Any:
        return self.notes.make().numpy(*args, **options)

    def __array__(self, *args: Any) -> Any:
        return self.notes.make().__array__(*args)

    def tolist(self) -> Any:
        return self.notes.make().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.requires_grad:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return self.notes.make().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.notes.make().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "not made" if self.notes.made is None else "made"
        return f"Unmade({tuple(self.shape)}, {self.dtype}, {state})"


class _Head(torch.autograd.Function):
    """`apply(hidden, weight[, bias])` -> their linear product, `Unmade`."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        data = tuple(x.detach() for x in inputs)
        ctx.save_for_backward(*inputs[:2])
        ctx.dtype = computed_in(data[0])
        notes = _Notes(inputs=inputs, data=data, versions=_versions(data), dtype=ctx.dtype)
        return Unmade.of(notes, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """For what was done with the logits beside the loss."""
        hidden, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        needs = ctx.needs_input_grad
        grads = [
            (grad @ weight.to(ctx.dtype)).to(hidden.dtype) if needs[0] else None,
            (rows.T @ hidden.flatten(0, -2).to(ctx.dtype)).to(weight.dtype) if needs[1] else None,
            rows.sum(0) if needs[2:] == (True,) else None,
        ]
        return tuple(grads[: len(needs)])


def leave_logits_unmade(model: torch.nn.Module) -> None:
    """Lets the head of a model return unmade logits, in calls with labels that `shard` has cut.

    A head is a `torch.nn.Linear` with a plain weight and without hooks; others stay as they are,
    and so do compiled models. Idempotent, and local.
    """
    if not hasattr(model, _NAME) and hasattr(model, "get_output_embeddings"):
        setattr(model, _NAME, True)
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, always_call=True)


def _before(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if options.get(KEYWORD) is None or options.get("labels") is None:
        return
    head = model.get_output_embeddings()
    # `fully_shard` and adapters make other classes of a head, and offloading another forward.
    plain = type(head) is torch.nn.Linear and "forward" not in vars(head)
    if plain and not any(getattr(head, name) for name in _HOOKS):
        head.forward = MethodType(_forward, head)


def _after(model: Any, args: Any, output: Any) -> None:
    head = None if torch.compiler.is_compiling() else model.get_output_embeddings()
    if getattr(getattr(head, "forward", None), "__func__", None) is _forward:
        vars(head).pop("forward", None)


def _forward(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    inputs = [x for x in (hidden, head.weight, head.bias) if x is not None]
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in inputs)
    alike = len({(x.device, x.dtype) for x in inputs}) == 1 or computed_in(hidden) != hidden.dtype
    if torch.compiler.is_compiling() or not (plain and alike and hidden.is_floating_point()):
        return functional.linear(hidden, head.weight, head.bias)
    unmade: torch.Tensor = _Head.apply(*inputs)  # type: ignore[no-untyped-call]
    return unmade
