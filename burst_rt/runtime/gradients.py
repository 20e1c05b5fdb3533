"""The mean of all ranks' gradients, for models without a wrapper such as DDP or FSDP2."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NoReturn

import torch
import torch.distributed as dist

from burst_rt.errors import ContractMismatch, InputError
from burst_rt.runtime.device_sums import piece_bytes
from burst_rt.runtime.sums import (
    RanksOrGroup,
    SummingRanks,
    differs,
    ranks_of,
    refuse_in,
    sum_in_place,
)

__all__ = ["average_gradients"]

_NAME = "average_gradients"
# Number of a parameter's first values that ranks compare, and maximum relative difference of their
# sums: differences by rounding between machines are smaller, and differences between models are
# larger.
_COMPARED, _NEAR = 64, 1e-4


@torch.no_grad()
def average_gradients(
    parameters: Iterable[torch.nn.Parameter], *, group: RanksOrGroup | None = None
) -> None:
    """Gives every rank the mean of all ranks' gradients, in place, as DDP and FSDP2 would.

    For models in no wrapper. parameters: the same list on every rank, with dense gradients. Their
    values must be the same on every rank too: make the model from one seed, or broadcast it. A
    parameter that has no gradient on any rank keeps none. One that has a gradient on some ranks
    only counts as 0 on the others. group: as in `mean_over_ranks`, and the same as there.

    Ranks compare shapes, dtypes and each parameter's first 64 values, up to rounding. So they find
    other orders and other models, unless these values are equal.

    Collective: one all-reduce for each 64 MiB of gradients of a dtype (4 MiB a rank, if that is
    more), which a tensor of float32 holds meanwhile; one of four numbers a parameter; and over a
    process group one of two numbers. Gradients of float32 or float64 that lie in memory one behind
    the other, as views of one tensor, are not copied. Blocks as `mean_over_ranks` does, and raises
    InputError as there. Raises ContractMismatch on every rank where parameters differ.
    """
    ranks = ranks_of(group, _NAME)
    wanted = _wanted(parameters, group)
    size = ranks.size() if isinstance(ranks, dist.ProcessGroup) else ranks.world_size
    used = _have_gradients(wanted, ranks, size)
    for _, same in groupby(sorted(used, key=_kind), key=_kind):
        members = list(same)
        everywhere = all(used[parameter] for parameter in members)
        dtype = _grad_dtype(members[0])
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
        grads = [parameter.grad for parameter in members if parameter.grad is not None]
        one = _one_tensor(grads, dtype) if everywhere else None
        if one is not None:
            # In pieces, so that what the sum takes beside it is bounded.
            for piece in one.split(max(1, piece_bytes(size) // one.itemsize)):
                sum_in_place(piece, ranks)
            one /= size
        else:
            _average_in_pieces(grads, torch.promote_types(dtype, torch.float32), ranks, size)


def _average_in_pieces(
    grads: list[torch.Tensor],
    dtype: torch.dtype,
    ranks: dist.ProcessGroup | SummingRanks,
    size: int,
) -> None:
    """By copies to a tensor of `dtype`, float32 or float64, as large as a piece."""
    flats = [grad.flatten() for grad in grads]
    room = max(1, min(sum(map(len, flats)), piece_bytes(size) // dtype.itemsize))
    piece = torch.empty(room, dtype=dtype, device=grads[0].device)
    for parts in _pieces(flats, room):
        places = piece.split([*map(len, parts), room - sum(map(len, parts))])
        for place, part in zip(places, parts, strict=False):
            place.copy_(part)
        places[-1].zero_()  # what the last parts leave free
        sum_in_place(piece, ranks)
        piece /= size
        for place, part in zip(places, parts, strict=False):
            part.copy_(place)
    for grad, flat in zip(grads, flats, strict=True):
        if not grad.is_contiguous():  # then the flat one is a copy
            grad.copy_(flat.view_as(grad))


def _pieces(flats: Iterable[torch.Tensor], room: int) -> Iterator[list[torch.Tensor]]:
    """Parts of the tensors that fill `room` elements together; the last may be fewer."""
    parts, free = list[torch.Tensor](), room
    for flat in flats:
        for part in (flat[:free], *flat[free:].split(room)):
            parts += [part] if len(part) else []
            free -= len(part)
            if not free:
                yield parts
                parts, free = [], room
    if parts:
        yield parts


def _wanted(parameters: object, group: RanksOrGroup | None) -> list[torch.Tensor]:
    """The parameters that require grad. Raises InputError for anything else than parameters."""

    def refuse(reason: str) -> NoReturn:
        refuse_in(group, _NAME, InputError(f"{_NAME}: {reason}"))

    no_list = (torch.Tensor, torch.nn.Module, Mapping, str)
    if isinstance(parameters, no_list) or not isinstance(parameters, Iterable):
        refuse(
            "parameters must be several parameters, such as model.parameters(), got "
            f"{type(parameters).__name__}; for one, give [parameter]"
        )
    wanted = []
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor) or hasattr(parameter, "device_mesh"):
            refuse(
                "parameters must be those of a model in no wrapper, such as model.parameters(), "
                f"got {type(parameter).__name__} at place {number}"
            )
        if not parameter.requires_grad:
            continue
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            refuse(
                f"the gradient of parameter {number} of shape {tuple(parameter.shape)} must be "
                "dense, got a sparse one; give torch.nn.Embedding(sparse=False)"
            )
        wanted.append(parameter)
    return wanted


def _have_gradients(
    wanted: list[torch.Tensor], ranks: dist.ProcessGroup | SummingRanks, size: int
) -> dict[torch.Tensor, bool]:
    """The parameters that have a gradient on some rank, and whether on every rank those of its
    kind are one tensor.

    Raises ContractMismatch on every rank where the parameters are not the same on all ranks.
    """
    by_kind: dict[str, list[torch.Tensor]] = defaultdict(list)
    for p in wanted:
        by_kind[_kind(p)] += [] if p.grad is None else [p.grad]
    dtypes = {_kind(p): _grad_dtype(p) for p in wanted}
    whole = {kind: _one_tensor(by_kind[kind], dtype) is not None for kind, dtype in dtypes.items()}
    one = [p.grad is not None and whole[_kind(p)] for p in wanted]
    if size == 1:
        return {p: is_one for p, is_one in zip(wanted, one, strict=True) if p.grad is not None}
    said = [_in_words(p) for p in wanted]
    digest = zlib.crc32("; ".join(said).encode())
    device = wanted[0].device if wanted else _device_of(ranks)
    if isinstance(ranks, dist.ProcessGroup) and bool(differs(digest, ranks, device)):
        raise ContractMismatch(
            f"{_NAME}: the ranks gave other numbers of parameters, or other shapes or dtypes; this "
            f"one {_few(said)}; give the same list on every rank, in the same order"
        )
    if not wanted and isinstance(ranks, dist.ProcessGroup):
        return {}
    have = [[p.grad is not None for p in wanted], one]
    sums = _sums_of_first(wanted, device)
    counts = torch.tensor(have, dtype=torch.float64, device="cpu").to(device)
    found = torch.cat([counts, torch.stack([sums, sums.square()])])
    sum_in_place(found, ranks, {"parameters": f"{_few(said)} (digest {digest:08x})"})
    given, ones, total, squares = (found / size).tolist()
    for number, (mean, square) in enumerate(zip(total, squares, strict=True)):
        if square - mean * mean > _NEAR**2 * square:
            raise ContractMismatch(
                f"{_NAME}: parameter {number}, {said[number]}, has other values on some "
                "ranks than on others; give the same parameters in the same order on every rank, "
                "and make the model from one seed, or broadcast it"
            )
    return {p: ones[i] == 1.0 for i, p in enumerate(wanted) if given[i]}


def _kind(parameter: torch.Tensor) -> str:
    """The same on every rank, whether or not the parameter has a gradient there."""
    return f"{_grad_dtype(parameter)} {parameter.device}"


def _grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; not every torch knows another than the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _in_words(parameter: torch.Tensor) -> str:
    dtype, of_grad = parameter.dtype, _grad_dtype(parameter)
    grads = "" if of_grad == dtype else f", gradients of {of_grad}"
    return f"{dtype} {tuple(parameter.shape)}{grads}".replace("torch.", "")


def _device_of(ranks: dist.ProcessGroup | SummingRanks) -> torch.device:
    """Where a rank without parameters meets the others: NCCL reduces on GPUs only."""
    nccl = isinstance(ranks, dist.ProcessGroup) and dist.get_backend(ranks) == "nccl"
    return torch.device("cuda" if nccl else "cpu")


def _sums_of_first(parameters: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the magnitudes of each parameter's first values, float64."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for number, p in enumerate(parameters):
        kinds[min(p.numel(), _COMPARED), p.dtype, p.device].append(number)
    sums = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for numbers in kinds.values():
        first = torch.stack([_first_values(parameters[n].detach()) for n in numbers])
        sums[torch.tensor(numbers, device=device)] = first.abs().double().sum(1).to(device)
    return sums


def _first_values(p: torch.Tensor) -> torch.Tensor:
    """Without a copy of the rest: a transposed parameter is read row by row."""
    while p.ndim > 1 and p.numel() >= 2 * _COMPARED:
        row = p[0]
        if row.numel() < _COMPARED:
            p = p[: -(-_COMPARED // row.numel())]
            break
        p = row
    return p.flatten()[:_COMPARED]


def _few(said: Sequence[str]) -> str:
    """Parameters in few words."""
    more = f" and {len(said) - 6} more" if len(said) > 6 else ""
    return f"{len(said)}: {'; '.join(said[:6])}{more}"


def _one_tensor(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """The memory of tensors of a dtype that lie one behind the other, if it is a type of sums; else
    None.
    """
    if not parts or dtype.itemsize < 4 or any(part.dtype != dtype for part in parts):
        return None
    first, at = parts[0], parts[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        follows = part.storage_offset() == at and part.untyped_storage().data_ptr() == memory
        if not follows or not part.is_contiguous():
            return None
        at += part.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))
