"""torch's tensors and operators of the device "cuda", in the host's memory.

A tensor gets from the host to a device and back as DLPack does it: same memory, another device.
torch calls `_on_device` for every operator that has no kernel for the device, which is nearly all.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch

from emulated.books import Span, place
from emulated.cuda import BOOKS, Stream, current, index_of, library

__all__ = ["host_of", "install", "span_of"]

_ATEN = torch.ops.aten
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_HOST, _CUDA = 1, 2  # DLDeviceType of dlpack.h
# Operators that copy between devices, that take indices of the host, and that the host waits for.
_COPIES = {"copy_", "_to_copy"}
_TAKE_INDICES = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
_WAIT = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}


class _Struct(ctypes.Structure):
    """The head of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _as_of(x: torch.Tensor, device: int, index: int, owner: bool = False) -> torch.Tensor:
    capsule = torch._C._to_dlpack(x)
    address = _pointer(capsule, b"dltensor")
    struct = _Struct.from_address(address)
    struct.device, struct.index = device, index
    if owner and x.untyped_storage().nbytes():
        library.emulated_own(ctypes.c_void_p(address), ctypes.c_int64(current(index).cuda_stream))
        _note_ends()
        storage = x.untyped_storage()
        BOOKS.begin(storage.data_ptr(), storage.nbytes(), current(index).key)
    return torch._C._from_dlpack(capsule)


def host_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a device as one of the host."""
    # DLPack knows nothing of torch's lazy signs.
    if x.is_conj():
        return host_of(x.conj()).conj()
    if x.is_neg():
        return torch._neg_view(host_of(torch._neg_view(x)))
    return _as_of(x, _HOST, 0)


# Memory that was given back, in the order in which it was, and how far streams have to come first:
# a message may be on its way to it.
_given_back: deque[tuple[list[tuple[Stream, int]], int, int]] = deque()


def _note_ends() -> None:
    """Enters what has been given back since, and frees what no stream has work with any more."""
    with BOOKS.lock:
        found = (ctypes.c_int64 * 5)()
        while library.emulated_given_back(found):
            address, device, stream, deleter, tensor = found
            BOOKS.end(address, (device, stream))
            before = [(each, each.num_put) for each in Stream.by_key.values() if each.is_waiting]
            _given_back.append((before, deleter, tensor))
        while _given_back and all(each.num_done >= put for each, put in _given_back[0][0]):
            _, deleter, tensor = _given_back.popleft()
            library.emulated_free(ctypes.c_void_p(deleter), ctypes.c_void_p(tensor))


def span_of(x: torch.Tensor) -> Span:
    """The bytes from a tensor's first number to its last."""
    first = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Span(x.untyped_storage().data_ptr(), first, first + (last + 1) * x.element_size())


class _Call:
    """A call of an operator of a device: its arguments as the host's, and what it does."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.op, self.name = op, op._schema.name.removeprefix("aten::")
        self.device: torch.device | None = None  # of its tensors
        self.wanted: torch.device | None = None  # of its results
        self.reads: list[Span] = []
        self.writes: list[Span] = []
        self.written: list[torch.Tensor] = []  # its arguments that it writes to, as they came
        self.grows = False
        self._of_host: list[torch.Tensor] = []
        self._by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_storage: dict[int, torch.Tensor] = {}
        self._as_given: dict[int, torch.Tensor] = {}  # the host's, by the ids of what came
        schema = op._schema.arguments
        by_name = {argument.name: argument for argument in schema}
        self.args = [self._argument(x, a) for x, a in zip(args, schema, strict=False)]
        self.kwargs = {name: self._argument(x, by_name[name]) for name, x in kwargs.items()}
        if self.device is not None and self.name not in _COPIES | _TAKE_INDICES:
            self._require(all(not x.ndim for x in self._of_host), torch.device("cpu"))

    def _require(self, fits: bool, other: torch.device) -> None:
        if not fits:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.device} and {other}! (of {self.name})"
            )

    def _argument(self, x: Any, argument: Any) -> Any:
        if argument.name == "pin_memory":
            return False
        if argument.name == "device" and x is not None:
            self.wanted = torch.device(x)
            return torch.device("cpu")
        if isinstance(x, int | float) and str(argument.type) == "Tensor":
            # As which torch passes numbers to such operators.
            x = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        writes = bool(argument.alias_info and argument.alias_info.is_write)
        return self._on_host(x, writes, writes and argument.kwarg_only)

    def _on_host(self, x: Any, writes: bool, is_out: bool) -> Any:
        if isinstance(x, list | tuple):
            return [self._on_host(item, writes, is_out) for item in x]
        if not isinstance(x, torch.Tensor):
            return x
        if writes:
            self.written.append(x)
        if x.device.type != "cuda":
            self._of_host.append(x)
            self._as_given[id(x)] = x
            return x
        self.device = self.device or x.device
        self._require(x.device == self.device or self.name in _COPIES, x.device)
        if x.numel():
            (self.writes if writes else self.reads).append(span_of(x))
        # A place for results that has no numbers yet may grow.
        grows = is_out and not x.numel()
        self.grows |= grows
        of_host = torch.empty(0, dtype=x.dtype) if grows else host_of(x.detach())
        self._by_id[id(of_host)] = of_host, x
        self._as_given[id(x)] = of_host
        self._by_storage[of_host.untyped_storage()._cdata] = x
        return of_host

    @property
    def index(self) -> int:
        """The index of the device that does the work."""
        if self.wanted is not None and self.wanted.type == "cuda":
            return index_of(self.wanted)
        return index_of(self.device)

    def now(self) -> Any:
        """The results."""
        return self.op(*self.args, **self.kwargs)

    def put(self, stream: Stream) -> Any:
        """The results, whose numbers come once the stream has come so far."""
        if self.written:
            stream.put(self.now)
            num_results = len(self.op._schema.returns)
            # What is written to is what is returned.
            of_host = [self._as_given[id(x)] for x in self.written[:num_results]]
            return of_host[0] if num_results == 1 else tuple(of_host) or None
        try:
            results = self.now()  # for the shapes
        except (IndexError, RuntimeError):  # by numbers that are not there yet
            stream.finish()
            return self.now()

        def numbers() -> None:
            for old, new in zip(_flat(results), _flat(self.now()), strict=True):
                if old.untyped_storage()._cdata not in self._by_storage:
                    old.copy_(new)

        stream.put(numbers)
        return results

    def back(self, result: Any) -> Any:
        """The results, as of the device."""
        if isinstance(result, list | tuple):
            return type(result)(self.back(item) for item in result)
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in self._by_id:
            of_host, x = self._by_id[id(result)]
            if of_host.shape != x.shape:
                self._rebind(x, of_host)
            return x
        viewed = self._by_storage.get(result.untyped_storage()._cdata)
        if viewed is not None:
            offset = viewed.storage_offset() + result.storage_offset()
            return _ATEN.as_strided.default.redispatch(
                _CPU_KERNEL, viewed, result.shape, result.stride(), offset
            )
        made = _as_of(result, _CUDA, self.index, owner=True)
        if made.numel() and not self.name.startswith(("empty", "new_empty")):
            self.writes.append(span_of(made))
        return made

    def _rebind(self, x: torch.Tensor, of_host: torch.Tensor) -> None:
        made = _as_of(of_host, _CUDA, self.index, owner=True)
        _ATEN.set_.source_Storage_storage_offset.redispatch(
            _CPU_KERNEL, x, made.untyped_storage(), 0, made.shape, made.stride()
        )
        if made.numel():
            self.writes.append(span_of(made))

    def waits(self) -> str:
        """Why the host waits for this call; "" if it does not."""
        if self.name in _WAIT:
            return str(self.name)
        if self.name in _TAKE_INDICES and any(
            x.dtype == torch.bool for x in self.args[1] if x is not None
        ):
            return f"{self.name} by booleans"
        if self.name in _COPIES and self._of_host:
            told = self.args[2] if len(self.args) > 2 else self.kwargs.get("non_blocking", False)
            if not (told and all(x.is_pinned() for x in self._of_host)):
                return "copy between host and device"
        return ""

    @property
    def is_between_devices(self) -> bool:
        """Whether it copies from one device to another; neither is the host."""
        return self.name in _COPIES and not self._of_host

    @property
    def is_view(self) -> bool:
        """Whether nothing is read or written."""
        results = self.op._schema.returns
        return bool(results) and all(r.alias_info and not r.alias_info.is_write for r in results)


def _flat(results: Any) -> list[torch.Tensor]:
    results = results if isinstance(results, list | tuple) else [results]
    return [x for x in results if isinstance(x, torch.Tensor)]


def _on_device(op: Any, *args: Any, **kwargs: Any) -> Any:
    call = _Call(op, args, kwargs)
    stream = current(call.index)
    why = call.waits()
    # For a copy between devices torch has their current streams wait for each other.
    between = [current(x.device.index) for x in args[:2]] if call.is_between_devices else []
    for other in between:
        stream.wait_stream(other)
    works = not call.is_view and bool(call.reads or call.written)
    if why or call.grows:
        stream.finish()
        works = False  # what other threads have put there since does not concern this call
    elif works:
        stream.lag()
    result = call.back(call.put(stream) if works and stream.is_waiting else call.now())
    if not call.is_view:
        BOOKS.use(stream.key, call.reads, call.writes, f"{call.name} at {place()}")
    for other in between:
        other.wait_stream(stream)
    _note_ends()
    if why:
        stream.wait_here(why)
    return result


def _resize(storage: Any, size: int) -> Any:
    if storage.device.type != "cuda":
        return _plain_resize(storage, size)
    stream = current(storage.device.index)
    library.emulated_resize(
        ctypes.c_void_p(storage._cdata), ctypes.c_int64(size), ctypes.c_int64(stream.cuda_stream)
    )
    _note_ends()
    if size:
        BOOKS.begin(storage.data_ptr(), size, stream.key)
    return storage


_plain_resize: Any = torch.UntypedStorage.resize_


def _record_stream(x: torch.Tensor, stream: Any) -> None:
    BOOKS.keep(x.untyped_storage().data_ptr(), stream.key)


def _by_kernel_of_the_host(name: str) -> Any:
    """The host's kernel itself, for operators that only make another view."""
    op = getattr(_ATEN, name.partition(".")[0])
    overload = getattr(op, name.partition(".")[2] or "default")
    return lambda *args, **kwargs: overload.redispatch(_CPU_KERNEL, *args, **kwargs)


def _as_any_other(name: str) -> Any:
    return lambda *args, **kwargs: _on_device(getattr(_ATEN, name).default, *args, **kwargs)


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Gives torch the operators."""
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(_on_device, "CUDA")
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend((anything, aten))  # an operator ends with its library
    for name in (
        "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
        "set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor",
    ):  # fmt: skip
        aten.impl(name, _by_kernel_of_the_host(name), "CUDA")
    # torch has something else for these, which asks for CUDA's kernels.
    for name in ("copy_", "convolution", "convolution_backward"):
        aten.impl(name, _as_any_other(name), "CUDA")
    # The host's takes no integers, and models of transformers give it some on a GPU.
    aten.impl("histc", lambda x, *args: _on_device(_ATEN.histc.default, x.float(), *args), "CUDA")
    aten.impl("_fused_sdp_choice", lambda *_, **__: 0, "CUDA")  # torch's operators
    tensor: Any = torch.Tensor
    tensor.record_stream = _record_stream
    storage: Any = torch.UntypedStorage
    storage.resize_ = _resize
