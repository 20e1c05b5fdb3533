"""Checks of a recurrence's arguments, on this rank alone. Nothing here is collective."""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.attention.sharding import ContextLayout, positions_on
from burst_rt.errors import InputError
from burst_rt.kernels import DTYPES
from burst_rt.planning.masks import Documents, PrefixTree

__all__ = ["Given", "begins_of", "check_heads", "check_sizes", "scale_of"]

Tensor = torch.Tensor
_FLOATS = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class Given(NamedTuple):
    """What every function takes besides its tensors."""

    layout: ContextLayout | None
    documents: Documents | PrefixTree | Tensor | None
    initial_state: Tensor | None  # as `Recurrence.state_shape` has it
    return_state: bool


def begins_of(name: str, given: Given, tokens: Tensor) -> Tensor | None:
    """Where documents begin among this rank's tokens, bool `[batch or 1, tokens]`; None without
    documents, and in a tree, whose segments begin where its paths do.

    tokens: a tensor of this rank's, `[batch, tokens, ...]`, on the call's device. Raises
    InputError for documents or a tree that do not fit.
    """
    layout, documents = given.layout, given.documents
    if isinstance(documents, PrefixTree):
        if misfit := _misfit(documents, given):
            raise InputError(f"{name}: {misfit}")
        return None
    if documents is None:
        return None
    batch, count = tokens.shape[:2]
    if isinstance(documents, Documents):
        length = count if layout is None else layout.seq_len
        misfit = documents.refuses(length, length, batch)
        if misfit is not None or documents.mover is not None:
            raise InputError(
                f"{name}: documents must be those of the whole sequence, "
                f"{misfit or 'without q_lengths'}"
            )
        places = torch.arange(count, device="cpu")
        if layout is not None:
            places = positions_on(torch.device("cpu"), layout.map, layout.runtime.rank)
        positions = places.numpy()
        begins = torch.from_numpy(documents.begins(positions) == positions)
        return begins.to(tokens.device)
    shapes = [(1, count), (batch, count)]
    if (
        isinstance(documents, Tensor)
        and documents.dtype == torch.bool
        and tuple(documents.shape) in shapes
    ):
        return documents.to(tokens.device)
    got = (
        f"{tuple(documents.shape)} of {documents.dtype}"
        if isinstance(documents, Tensor)
        else type(documents).__name__
    )
    raise InputError(
        f"{name}: documents must be burst_rt.Documents, a bool tensor [batch or 1, this rank's "
        f"{count} tokens] that is true where a document begins, or a PrefixTree, got {got}"
    )


def _misfit(tree: PrefixTree, given: Given) -> str | None:
    """Why a call cannot follow a tree, or None."""
    layout = given.layout
    if layout is None:
        return "layout: expected one beside a PrefixTree, got None; take Context.layout(tokens)"
    if given.initial_state is not None:
        return "initial_state: expected None beside a PrefixTree, whose paths begin from 0, got one"
    if given.return_state:
        return "return_state: expected False beside a PrefixTree, which has many last states"
    if tree is not tree.unlimited:
        return (
            "documents: expected a PrefixTree without a window or chunks, which are attention's, "
            f"got {tree!r}; take its .unlimited"
        )
    reason = tree.refuses(layout.seq_len, layout.seq_len, 1)
    return None if reason is None else f"documents: expected the whole row's PrefixTree; {reason}"


def check_sizes(
    name: str,
    layout: ContextLayout | None,
    tensors: dict[str, tuple[Tensor, str]],
    known: dict[str, int] | None = None,
) -> dict[str, int]:
    """Checks tensors against shapes in letters, such as "b t h k"; returns what letters are.

    known: letters from before. "t" is this rank's tokens. layout: None where the call is local; the
    tensors are then on the device of the first one. Raises InputError.
    """
    if not (layout is None or isinstance(layout, ContextLayout)):
        raise InputError(
            f"{name}: layout must come from Context.layout, or be None where this rank has all "
            f"tokens, got {type(layout).__name__}"
        )
    first = next(iter(tensors.values()))[0]
    device = getattr(first, "device", None) if layout is None else layout.runtime.device
    sizes = ({} if layout is None else {"t": layout.shard_len}) | (known or {})
    for argument, (x, letters) in tensors.items():
        where, axes = f"{name}: {argument}", letters.split()
        _check_kind(where, x, device)
        expected, got = [sizes.get(letter) for letter in axes], tuple(x.shape)
        fits = len(got) == len(axes) and all(
            n == want or (want is None and n > 0) for want, n in zip(expected, got, strict=True)
        )
        if not fits:
            words = ", ".join(
                _LETTERS[letter] + ("" if n is None else f" {n}")
                for letter, n in zip(axes, expected, strict=True)
            )
            raise InputError(f"{where} must be [{words}], got {got}")
        sizes |= dict(zip(axes, got, strict=True))
    return sizes


def _check_kind(where: str, x: object, device: torch.device | None) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{where} must be a torch.Tensor, got {type(x).__name__}")
    if x.device != device or x.layout != torch.strided or x.dtype not in DTYPES:
        raise InputError(
            f"{where} must be a dense tensor of {_FLOATS} on {device}, as the others and the "
            f"context, got {x.layout}, {x.dtype} on {x.device}"
        )


_LETTERS = {
    "b": "batch", "t": "this rank's tokens", "h": "heads", "q": "key heads", "k": "K", "v": "V",
    "c": "channels", "d": "channels", "n": "N", "m": "K - 1",
}  # fmt: skip


def check_heads(name: str, sizes: dict[str, int]) -> None:
    """Raises InputError where heads do not share key heads evenly."""
    if sizes["h"] % sizes["q"]:
        raise InputError(
            f"{name}: the number of heads must be a multiple of the number of key heads (groups), "
            f"got {sizes['h']} and {sizes['q']}"
        )


def scale_of(name: str, scale: float | None, key_dim: int) -> float:
    """The scale of results. Raises InputError for what is no finite number."""
    if scale is None:
        return float(key_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) < torch.inf:
        raise InputError(f"{name}: scale must be a finite number, got {scale!r}")
    return float(scale)
