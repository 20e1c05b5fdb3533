"""FlashAttention-4: Tri Dao's kernels in CuTe for Hopper and Blackwell GPUs, from its own package.

The backward takes lse, and as a gradient of lse whatever is taken from rowsum(dO * O): with O = 0
and -delta it gets delta as it is. So it needs no stand-in for O, and has float16, too. It adds up
in a fixed order, unless bits need not repeat: any order is faster.

Windows and documents are arguments of its calls, so one call computes a whole tile under a window,
or packed rows of documents.

Called as torch calls it (torch.nn.attention's "FA4"): by two functions of `flash_attn.cute` whose
names begin with an underscore, because the public one does not take lse. A version whose functions
have other parameters is refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from burst_rt.kernels.base import QKV, Gradients, Places, State, Tile, Upstream, Work
from burst_rt.kernels.vendor import PartOfTile, VendorKernel, calls_of_pieces
from burst_rt.planning.masks import Mask, Piece, Shape
from burst_rt.planning.worklist import Integers, ascends, column_spans

__all__ = ["Flash4Kernel", "whole_tile"]

_PACKAGE, _MODULE = "flash-attn-4", "flash_attn.cute.interface"
# Head dimensions of q and of v: those of latent attention, and all that are taken.
_LATENT = (192, 128)
_WIDTHS = {_LATENT, *((dim, dim) for dim in range(8, 257, 8))}
# Memory and the grid of a call grow with the longest document times their number; this is the
# largest ratio to all tokens.
_MOST_PADDED = 16
# Ranks may be threads, and CuTe's compiler does not expect that.
_one_at_a_time = threading.RLock()
# What is passed by name.
_FORWARD = frozenset(
    ("softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q",
     "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "return_lse", "out", "lse")
)  # fmt: skip
_BACKWARD = _FORWARD - {"return_lse", "out", "lse"} | {"deterministic", "dlse", "dq", "dk", "dv"}


class _Interface(NamedTuple):
    """The two functions of the package. Any: it has no types."""

    forward: Any
    backward: Any


class Flash4Kernel(VendorKernel):
    """FlashAttention-4, if its package is installed (`flash-attn-4`); Hopper and Blackwell GPUs.

    One head_dim for q, k and v, a multiple of 8: on Hopper up to 256, on Blackwell up to 128, and
    256 in the forward. Or 192 and 128 of v; in Hopper's backward, not where query heads share keys.
    (The package takes other pairs, of which some do not compile, and some do not fit into shared
    memory.) All masks with spans. No softcap: its tanh is an approximation there.
    """

    name = "flash-4"

    def calls(
        self, pieces: tuple[Piece, ...], mask: Mask, places: Places | None
    ) -> Sequence[PartOfTile]:
        """See `VendorKernel.calls`."""
        whole = None if places is None else whole_tile(mask, places)
        return _calls_of(pieces) if whole is None else (whole,)

    def _repeats(self, work: Work) -> bool:
        return work.forward or work.deterministic

    def _other_inputs(self, work: Work) -> str | None:
        if work.scores.softcap or work.scores.alibi_slopes:
            return (
                f"the {self.name} kernel has no exact softcap and no ALiBi, and {work.scores} were "
                "asked"
            )
        if work.head_dims not in _WIDTHS:
            return (
                f"the {self.name} kernel takes one head_dim for q, k and v that is a multiple of "
                "8, at most 256, or 192 and 128 of v, got {} and {} of v".format(*work.head_dims)
            )
        masked = any(piece.shape is Shape.MASKED for pieces in work.tiles for piece in pieces)
        if masked and (work.places is None or whole_tile(work.mask, work.places) is None):
            return (
                f"the {self.name} kernel computes windows, documents, rectangles, triangles and "
                f"bands, and {work.mask!r} cuts this call's tiles into other shapes"
            )
        generation = self._generation(work.device)
        if generation not in (9, 10, 11):
            return (
                f"the {self.name} kernel takes GPUs of compute capability 9 to 11, got {generation}"
            )
        if generation == 9 and not work.forward and work.grouped and work.head_dims == _LATENT:
            return (
                f"the {self.name} kernel's backward takes one head_dim for q, k and v where query "
                "heads share keys, got {} and {} of v".format(*work.head_dims)
            )
        wide = (_LATENT, (256, 256)) if work.forward else (_LATENT,)
        if generation > 9 and max(work.head_dims) > 128 and work.head_dims not in wide:
            return (
                f"the {self.name} kernel takes a head_dim of at most 128 on this GPU, or 256 in "
                f"the forward, got {work.head_dim}"
            )
        return None

    def _generation(self, device: torch.device) -> int:
        """The first number of a GPU's compute capability."""
        return torch.cuda.get_device_capability(device)[0]

    def _missing(self, device: torch.device) -> str | None:
        interface = _interface()
        return f"the {self.name} kernel {interface}" if isinstance(interface, str) else None

    def _call_forward(
        self, qkv: QKV, call: PartOfTile, tile: Tile, into: State | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, options = qkv.q, _options(qkv, call, tile)
        if into is not None and into.out.is_contiguous() and into.lse.is_contiguous():
            out, lse = into.out, into.lse
        else:
            out = q.new_empty((*q.shape[:3], qkv.v.shape[3]))
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        rows = _lse_of(lse, call)
        _call(
            "forward", *_tokens(call, *qkv), return_lse=True, out=_tokens(call, out)[0], lse=rows,
            **options,
        )  # fmt: skip
        return out, _lse_as(rows, lse)

    def _call_backward(
        self, qkv: QKV, upstream: Upstream, call: PartOfTile, tile: Tile, into: Gradients | None
    ) -> Sequence[torch.Tensor]:
        dout, lse, delta, _ = upstream
        grads = [
            x if x is not None and x.is_contiguous() else like.new_empty(like.shape)
            for x, like in zip(into or (None,) * 3, qkv, strict=True)
        ]
        # No memory: every row is the same one.
        out = dout.new_zeros(dout.shape[3]).expand(dout.shape)
        names = zip(("dq", "dk", "dv"), _tokens(call, *grads), strict=True)
        _call(
            "backward", *_tokens(call, *qkv, out, dout), _lse_of(lse, call),
            dlse=-_lse_of(delta, call), deterministic=tile.in_order, **_options(qkv, call, tile),
            **dict(names),
        )  # fmt: skip
        return grads


@functools.lru_cache(maxsize=64)
def whole_tile(mask: Mask, places: Places) -> PartOfTile | None:
    """The one call that computes a tile, if there is one: under a window, of documents, or both.

    Every row must see one span of keys. Documents are squares along the diagonal that follow each
    other and do not see each other. The call has the columns that are seen: in a ring, others may
    not have arrived. places: the positions of the tile's rows and columns.
    """
    if not mask.has_spans or not ascends(places[1]):
        return None
    spans = column_spans(mask, *places)
    firsts, ends = spans.bounds[:, 0, 0], spans.bounds[:, 1, 0]  # `[batch or 1, rows]`
    if spans.width > 1 or (firsts >= ends).any():
        return None
    first, end = int(firsts.min()), int(ends.max())
    firsts, ends = firsts - first, ends - first
    rows, columns = firsts.shape[1], end - first
    starts, stops = np.zeros_like(firsts), np.full_like(ends, columns)
    if rows == columns:
        starts, stops = _documents(firsts, ends)
    at = np.arange(rows) + columns - rows
    bounded, cut = firsts > starts, ends < stops
    left = int((at - firsts)[bounded].max()) if bounded.any() else None
    right = int((ends - 1 - at)[cut].max()) if cut.any() else None
    if min(left or 0, right or 0) < 0:
        return None
    if left is not None and (firsts != np.maximum(starts, at - left)).any():
        return None
    if right is not None and (ends != np.minimum(stops, at + right + 1)).any():
        return None
    where = tuple(tuple(np.unique(row).tolist()) for row in stops)
    if max(map(len, where)) == 1:
        where = ()
    elif (stops - starts).max() * max(map(len, where)) > _MOST_PADDED * rows:
        return None
    return PartOfTile(slice(0, rows), slice(first, end), left, right, where)


def _documents(firsts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Where the document of each row begins, and where it ends."""
    rows = firsts.shape[1]
    at = np.arange(rows + 1)
    # A document begins where no row before sees anything further on, and no row from there on sees
    # anything before.
    seen = np.maximum.accumulate(np.pad(ends, ((0, 0), (1, 0))), axis=1)
    back = np.minimum.accumulate(firsts[:, ::-1], axis=1)[:, ::-1]
    begins = (seen <= at) & (np.pad(back, ((0, 0), (0, 1)), constant_values=rows) >= at)
    starts = np.maximum.accumulate(np.where(begins, at, 0), axis=1)[:, :-1]
    later = np.minimum.accumulate(np.where(begins, at, rows)[:, ::-1], axis=1)[:, ::-1]
    return starts, later[:, 1:]


def _calls_of(pieces: tuple[Piece, ...]) -> list[PartOfTile]:
    """A call for each piece, or more."""
    calls: list[PartOfTile] = []
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        if piece.shape is Shape.UPPER:
            calls.append(PartOfTile(rows, columns, left=0))
        elif piece.shape is Shape.BAND:
            reach = columns.stop - columns.start - (rows.stop - rows.start)
            calls.append(PartOfTile(rows, columns, left=reach, right=0))
        else:
            calls += calls_of_pieces((piece,))
    return calls


def _options(qkv: QKV, call: PartOfTile, tile: Tile) -> dict[str, Any]:
    """The arguments that both directions of a call take by name."""
    # A causal call without a bound on its left is said so: it has kernels of its own.
    causal = (call.left, call.right) == (None, 0)
    options: dict[str, Any] = {
        "softmax_scale": tile.scale,
        "causal": causal,
        "window_size_left": call.left,
        "window_size_right": None if causal else call.right,
    }
    if call.ends:
        bounds, longest = _documents_of(qkv.q, call.ends, tile)
        options |= {
            "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }  # fmt: skip
    return options


def _documents_of(
    q: torch.Tensor, ends: tuple[tuple[int, ...], ...], tile: Tile
) -> tuple[torch.Tensor, int]:
    """Where documents begin and end in all batch rows, one after the other; the longest's length.

    Kept with the plan.
    """
    batch, tokens = q.shape[:2]
    kept, key = tile.kept, ("documents", batch)
    documents: tuple[torch.Tensor, int] | None = None if kept is None else kept.entries.get(key)
    if documents is None:
        of_rows = ends if len(ends) == batch else ends * batch
        every = [0] + [n * tokens + end for n, row in enumerate(of_rows) for end in row]
        bounds = torch.tensor(every, dtype=torch.int32, device="cpu")
        if q.is_cuda:
            # From pinned memory, which torch keeps until the copy is done, the host need not wait.
            bounds = bounds.pin_memory().to(q.device, non_blocking=True)
        documents = bounds, max(b - a for a, b in pairwise(every))
        if kept is not None:
            kept.entries[key] = documents
    return documents


def _tokens(call: PartOfTile, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors as a call takes them: `[batch * tokens, heads, d]` where it has documents."""
    return [x.flatten(0, 1) if call.ends else x for x in tensors]


def _lse_of(lse: torch.Tensor, call: PartOfTile) -> torch.Tensor:
    """lse or delta as a call takes it: `[heads, batch * tokens]` where it has documents."""
    return lse.transpose(0, 1).flatten(1).contiguous() if call.ends else lse


def _lse_as(rows: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """lse `[batch, heads, tokens]`, of what a call has written."""
    if rows.data_ptr() != lse.data_ptr():
        batch, heads, tokens = lse.shape
        lse.copy_(rows.view(heads, batch, tokens).transpose(0, 1))
    return lse


def _call(direction: str, *tensors: torch.Tensor, **options: Any) -> None:
    """Calls a function of the package. Raises RuntimeError for whatever it raises."""
    interface = _interface()
    assert not isinstance(interface, str)
    try:
        with _one_at_a_time:
            getattr(interface, direction)(*tensors, **options)
    except RuntimeError:  # running out of memory among them
        raise
    except Exception as error:
        raise RuntimeError(f"{_PACKAGE}: {type(error).__name__}: {error}") from error


@functools.cache
def _interface() -> _Interface | str:
    """The package's functions, or why there are none."""
    try:
        name = f"{_PACKAGE} {version(_PACKAGE)}"
    except PackageNotFoundError:
        return f"needs the package {_PACKAGE}, which is not installed"
    try:
        module = importlib.import_module(_MODULE)
        interface = _Interface(module._flash_attn_fwd, module._flash_attn_bwd)
    except Exception as error:  # noqa: BLE001  (whatever the packages that it imports raise)
        return f"could not import {name}: {type(error).__name__}: {error}"
    for function, wanted in zip(interface, (_FORWARD, _BACKWARD), strict=True):
        lacking = wanted - inspect.signature(function).parameters.keys()
        if lacking:
            return f"takes no {name}, whose {function.__name__} has no {sorted(lacking)}"
    return interface
