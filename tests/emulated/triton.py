"""Triton for emulated GPUs: kernels are launched as on a GPU, and run by Triton's interpreter.

Triton's own code decides which kernel a launch needs and what it gets: addresses and numbers. Here
a compiled kernel is what it was to be compiled for, its types and what it may take for granted; a
launch that does not keep to that is an error, where a GPU would read something else. Every load and
store is entered in the books. Kernels in Gluon, which the interpreter does not take, are run by
`gluon_standin`.
"""

from __future__ import annotations

import threading
from collections import Counter
from ctypes import c_char
from types import SimpleNamespace
from typing import Any

import gluon_standin
import numpy as np
import torch
import triton.compiler
import triton.language as tl
from interpreting import spare_work
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import _allocation, driver, interpreter
from triton.runtime.jit import JITFunction

from emulated.books import Span, place
from emulated.cuda import BOOKS, current, current_device, stream_of

__all__ = ["install", "launched"]

_ARCH = 90
# Bytes that a program's descriptors take.
_DESCRIPTORS_BYTES = 3 * 128
# Spans of one memory that are kept apart for a launch.
_MOST_SPANS = 8

launched: Counter[str] = Counter()  # how often each kernel was
# The interpreter keeps its current program in a global.
_one_at_a_time = threading.RLock()


class _Touched:
    """What a launch reads, or what it writes."""

    def __init__(self) -> None:
        self._elements: dict[tuple[int, int], Any] = {}  # by base and size: whether each one is

    def clear(self) -> None:
        """Begins again."""
        self._elements.clear()

    def note(self, pointers: Any, mask: Any, size: int) -> None:
        """Notes elements of a memory: those whose mask is set."""
        at, mask = np.broadcast_arrays(pointers, mask)
        if not mask.all():
            at = at[mask.astype(bool)]
        if at.size:
            first, end = int(at.min()), int(at.max()) + size
            base = BOOKS.span(first, end - first).base
            with BOOKS.lock:
                if (base, size) not in self._elements:
                    self._elements[base, size] = np.zeros(BOOKS.size(base) // size + 2, dtype=bool)
            self._elements[base, size][(at - np.uint64(base)) // np.uint64(size) + np.uint64(1)] = 1

    def spans(self) -> list[Span]:
        """The bytes, of each memory in few spans."""
        spans = list[Span]()
        for (base, size), elements in self._elements.items():
            begins, ends = np.flatnonzero(np.diff(elements)).reshape(-1, 2).T * size + base
            if len(begins) > _MOST_SPANS:
                begins, ends = begins[:1], ends[-1:]
            spans += [Span(base, int(a), int(b)) for a, b in zip(begins, ends, strict=True)]
        return spans


_reads, _writes = _Touched(), _Touched()


class _Memory:
    """How the interpreter reads and writes memory."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        _reads.note(pointers, mask, np.dtype(dtype).itemsize)
        return self._plain.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        _writes.note(pointers, mask, values.itemsize)
        return self._plain.store(pointers, values, mask)

    def atomic_rmw(self, op: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        _writes.note(pointers, mask, values.itemsize)
        return self._plain.atomic_rmw(op, pointers, values, mask, order)

    def atomic_cas(self, pointers: Any, old: Any, new: Any, order: Any) -> Any:
        _writes.note(pointers, True, new.itemsize)
        return self._plain.atomic_cas(pointers, old, new, order)


def _to_float(x: Any) -> Any:
    """bfloat16, which numpy has not and which is kept as bits, as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(x: Any) -> Any:
    """Bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _mend_interpreter() -> None:
    """Has it convert and multiply 16-bit numbers as a GPU does, and note what memory it touches."""
    spare_work(interpreter)
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle

    def wide(x: Any) -> Any:
        return _to_float(x.data) if x.dtype.scalar == tl.bfloat16 else x.data

    def cast(source: Any, wanted: Any) -> Any:
        wanted = wanted.scalar
        if wanted == tl.bfloat16:
            bits = source.data if source.dtype.scalar == wanted else _to_bfloat16(wide(source))
            return handle(bits, wanted)
        return handle(wide(source).astype(interpreter._get_np_dtype(wanted)), wanted)

    def dot(a: Any, b: Any, c: Any, *_: Any) -> Any:
        product = np.matmul(wide(a), wide(b), dtype=c.data.dtype)
        return handle(product + c.data, c.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast, dot
    interpreter._interpreter = _Memory(interpreter._interpreter)


class _Launcher:
    """Starts a kernel, as it is compiled, on a grid."""

    def __init__(self, source: Any) -> None:
        self._function, self._name = source.fn, source.name
        self._types, self._constants, self._attrs = source.signature, source.constants, source.attrs
        # Whether it takes memory for tensor descriptors.
        self.described = any(getattr(x, "DESCRIBED", False) for x in self._constants.values())

    def __call__(self, x: int, y: int, z: int, handle: int, *arguments: Any) -> None:
        # function, metadata of two kinds, hooks of two kinds
        arguments = arguments[5:]
        names = self._function.arg_names
        if len(arguments) != len(names):
            raise TypeError(f"{self._name} takes {len(names)} arguments, got {len(arguments)}")
        stream = stream_of(current_device(), handle)
        stream.finish()
        launched[self._name] += 1
        with _one_at_a_time:
            values = {
                name: self._value(index, name, argument)
                for index, (name, argument) in enumerate(zip(names, arguments, strict=True))
            }
            scratch = _scratch(x * y * z * _DESCRIPTORS_BYTES, handle) if self.described else None
            _reads.clear()
            _writes.clear()
            _run(self._function, (x, y, z), values)
            reads, writes = _reads.spans(), _writes.spans()
            if scratch is not None:
                address, size = scratch.data_ptr(), scratch.nbytes
                writes.append(BOOKS.span(address, size))
        BOOKS.use(stream.key, reads, writes, f"{self._name} at {place()}")

    def _value(self, index: int, name: str, argument: Any) -> Any:
        """What the kernel sees of an argument."""
        kind = self._types[name]
        if kind == "constexpr":
            value = self._constants[index,]
            if argument != value:
                raise ValueError(f"{self._name} is for {name} = {value}, got {argument}")
            if self._function.params[index].is_constexpr or not isinstance(value, int):
                return value
            kind = "i32"
        assert isinstance(kind, str), kind
        number = argument.data_ptr() if hasattr(argument, "data_ptr") else argument
        for attribute, factor in self._attrs.get((index,), ()):
            if attribute == "tt.divisibility" and number % factor:
                raise ValueError(f"{self._name} is for {name} % {factor} = 0, got {number}")
        if self._function.is_gluon():
            return _of_gluon(kind, number)
        if kind.startswith("fp"):
            return float(np.float32(number))
        of = tl.str_to_ty(kind, None)
        numpy_type = np.uint64 if kind.startswith("*") else interpreter._get_np_dtype(of)
        return tl.tensor(interpreter.TensorHandle(np.array([number], dtype=numpy_type), of), of)


_TYPES = {
    "*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32, "*i32": torch.int32
}  # fmt: skip


def _of_gluon(kind: str, number: Any) -> Any:
    """An argument as the stand-in of Gluon has it."""
    if not kind.startswith("*"):
        return number if kind.startswith("fp") else gluon_standin.block(number, torch.int64)
    base = BOOKS.span(number, 1).base
    size, dtype = BOOKS.size(base), _TYPES[kind]
    count, place = size // dtype.itemsize, (number - base) // dtype.itemsize
    whole = torch.frombuffer((c_char * size).from_address(base), dtype=dtype, count=count)
    return gluon_standin.Pointer(whole, gluon_standin.block(place))


def _note_access(memory: Any, places: Any, asked: Any, writes: bool) -> None:
    size = memory.itemsize
    at = memory.data_ptr() + places.numpy().astype(np.int64) * size
    (_writes if writes else _reads).note(at.astype(np.uint64), asked.numpy(), size)


def _run_gluon(function: Any, grid: tuple[int, int, int], values: Any) -> None:
    module = gluon_standin.load()[function.fn.__module__.rpartition(".")[2]]
    kernel = getattr(module, function.fn.__name__)
    gluon_standin.run_grid(grid[0], lambda: kernel(**values))


def _run(function: Any, grid: tuple[int, int, int], values: Any) -> None:
    if function.is_gluon():
        _run_gluon(function, grid, values)
        return
    builder = interpreter.interpreter_builder
    fn = _interpreted(function).rewrite()
    interpreter._patch_lang(function.fn)
    builder.set_grid_dim(*grid)
    for index in np.ndindex(*grid):
        builder.set_grid_idx(*index)
        fn(**values)


_functions: dict[Any, Any] = {}


def _interpreted(function: Any) -> Any:
    if function.fn not in _functions:
        _functions[function.fn] = interpreter.InterpretedFunction(function.fn)
    return _functions[function.fn]


def _scratch(size: int, handle: int) -> Any:
    return _allocation._allocator.get()(size, 128, handle)


class _Compiled(CompiledKernel):  # type: ignore[misc]
    def __init__(self, source: Any) -> None:
        self.src, self.name, self.hash = source, source.name, source.name
        self.module = self.function = self.packed_metadata = None
        self._run = _Launcher(source)
        scratch = _DESCRIPTORS_BYTES if self._run.described else 0
        self.metadata = SimpleNamespace(name=source.name, global_scratch_size=scratch)

    def _init_handles(self) -> None:
        pass


def _compile(source: Any, target: Any = None, options: Any = None, **_: Any) -> _Compiled:
    """In the place of triton.compiler.compile."""
    return _Compiled(source)


def install(_: object) -> None:
    """Gives Triton the driver of emulated GPUs."""
    _mend_interpreter()
    gluon_standin.note_access = _note_access
    triton.compiler.compile = _compile
    JITFunction.__call__ = lambda function, *args, **kwargs: _interpreted(function)(*args, **kwargs)
    properties = {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}
    driver.set_active(
        SimpleNamespace(
            get_current_device=current_device,
            get_current_stream=lambda device: current(device).cuda_stream,
            get_current_target=lambda: GPUTarget("cuda", _ARCH, 32),
            get_active_torch_device=lambda: f"cuda:{current_device()}",
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )
    )
