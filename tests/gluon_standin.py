"""A stand-in for a Hopper GPU: runs the package's kernels in Gluon on CPU tensors.

Triton's interpreter does not take Gluon. Here a module with such kernels is loaded once more, with
this file's functions in place of Gluon's (`load`). Each role of a program is a thread, and several
programs run at once, which begin in the order of their numbers, as on a GPU.

What a GPU may do later is done as late as it may be: a copy into shared memory when somebody waits
for a barrier, a product of a warpgroup when it is waited for. Until then there is NaN. So whoever
reads without a wait, or gives a buffer back too early, gets wrong numbers. Roles that wait for each
other for ever are told, and so are products that read what no fence has made visible, addresses
outside of a tensor's memory, and barriers at which too many arrive.

Layouts are not looked at: the compiler checks them (tests/unit/test_aot.py). A role is one thread,
so nothing shows that a barrier between its warps is missing, nor whether memory is in order between
programs, as by an atomic addition that releases what comes before it. A GPU shows the rest
(tests/gpu/test_hopper.py).
"""

from __future__ import annotations

import builtins
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from burst_rt.kernels import triton as package

__all__ = ["HopperError", "Pointer", "block", "load", "note_access", "run_grid"]

_PACKAGE = package.__name__
# Its modules that have device functions, and are loaded again where one of them imports another.
_DEVICE_MODULES = ("work", "producer", "turns", "forward_hopper", "backward_hopper")
_MOST_PROGRAMS = 4  # that run at once
_DEADLINE_S = 60.0  # until a role has waited for ever

_here = threading.local()  # program: the thread's `_Program`; products: those under way


class HopperError(AssertionError):
    """A kernel did what a GPU does not allow, or does not end."""


class _Any:
    """A layout, or a part of one."""

    def __call__(self, *_: object, **__: object) -> _Any:
        return self

    def __getattr__(self, name: str) -> _Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_LAYOUT = _Any()


class _Block(torch.Tensor):
    """A tensor in registers, or a number."""

    @property
    def type(self) -> Any:  # as Gluon's tensors have it
        return SimpleNamespace(layout=_LAYOUT)


def block(x: Any, dtype: torch.dtype | None = None) -> _Block:
    """As a tensor in registers."""
    return torch.as_tensor(x, dtype=dtype).as_subclass(_Block)


class Pointer:
    """Elements of a tensor's memory, by their places in it."""

    def __init__(self, memory: torch.Tensor, places: Any) -> None:
        self.memory, self.places = memory, places
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.places + places)

    __radd__ = __add__

    def inside(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The places, 0 where the mask is not set, and the mask."""
        places = torch.as_tensor(self.places)
        asked = torch.ones_like(places, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        places, asked = torch.broadcast_tensors(places, asked)
        places = places.masked_fill(~asked, 0)
        if ((places < 0) | (places >= self.memory.numel())).any():
            raise HopperError(f"an address outside of {self.memory.numel()} elements")
        return places.as_subclass(torch.Tensor), asked.as_subclass(torch.Tensor)


class _Root:
    """Shared memory as it was allocated."""

    def __init__(self) -> None:
        self.fenced = True  # whether products see what was stored last


class _Shared:
    """A view of shared memory."""

    def __init__(self, memory: torch.Tensor, root: _Root) -> None:
        self.memory, self.root, self.layout = memory, root, _LAYOUT

    @property
    def shape(self) -> list[int]:
        return list(self.memory.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, number: Any) -> _Shared:
        assert 0 <= int(number) < len(self.memory)
        return _Shared(self.memory[int(number)], self.root)

    def slice(self, start: Any, length: int, dim: int = 0) -> _Shared:
        return _Shared(self.memory.narrow(dim, int(start), length), self.root)

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.memory.permute(*order), self.root)

    def reshape(self, shape: Sequence[int]) -> _Shared:
        return _Shared(self.memory.view(*shape), self.root)

    def load(self, layout: Any) -> _Block:
        return block(self.memory.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        assert value.shape == self.memory.shape
        self.memory.copy_(value)
        self.root.fenced = False


class _Barrier:
    """An mbarrier of the PTX ISA."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise HopperError("more have arrived at a barrier than it waits for")
        self.pending -= count
        self._end_phase()

    def come(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class _Program:
    """A program of a grid: its barriers, the copies under way, and the roles that wait."""

    def __init__(self, number: int, draw: random.Random, failed: Sequence[BaseException]) -> None:
        """failed: the errors of the grid's programs."""
        self.number, self._draw, self._failed_beside = number, draw, failed
        self._barriers: dict[int, _Barrier] = {}
        self._copies: dict[_Barrier, list[Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._roles, self._waiting = 1, 0
        self._failed: BaseException | None = None
        self._began_s = time.monotonic()
        self.roots: list[_Root] = []

    def make_barrier(self, at: _Shared, count: int) -> None:
        self._barriers[at.memory.data_ptr()] = _Barrier(count)

    def barrier(self, at: _Shared) -> _Barrier:
        assert at.memory.numel() == 1
        return self._barriers[at.memory.data_ptr()]

    def arrive(self, at: _Shared, count: int, num_bytes: int = 0) -> None:
        with self._changed:
            self.barrier(at).bytes += num_bytes
            self.barrier(at).arrive(count)
            self._wake()

    def copy(self, at: _Shared, num_bytes: int, copy: Callable[[], None]) -> None:
        barrier = self.barrier(at)

        def run() -> None:
            copy()
            barrier.come(num_bytes)

        with self._changed:
            self._copies.setdefault(barrier, []).append(run)
            self._wake()

    def wait(self, at: _Shared, phase: int) -> None:
        """Waits for the end of a phase; meanwhile what this barrier counts comes, in any order."""
        barrier = self.barrier(at)
        with self._changed:
            while barrier.phase == phase:
                self.raise_if_failed()
                copies = self._copies.get(barrier)
                if copies:
                    copies.pop(self._draw.randrange(len(copies)))()
                    self._wake()
                    continue
                self._waiting += 1
                self._end_if_all_wait()
                self.raise_if_failed()
                self._changed.wait(_DEADLINE_S)
                self.end_if_late()

    def run(self, roles: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        """Runs functions, each in a thread, until they have ended."""
        self._roles = len(roles)
        threads = [threading.Thread(target=self._run, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._roles = 1
        self.raise_if_failed()

    def end_if_late(self) -> None:
        if self._failed_beside:
            raise HopperError("another program has failed")
        if time.monotonic() > self._began_s + _DEADLINE_S:
            raise HopperError("a program does not end")

    def raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self, function: Any, arguments: tuple[Any, ...]) -> None:
        _here.program, _here.products = self, []
        try:
            function(*arguments)
            assert not _here.products, "products that nobody waited for"
        except BaseException as error:  # noqa: BLE001  (the program raises it)
            self._failed = self._failed or error
        with self._changed:
            self._roles -= 1
            self._end_if_all_wait()
            self._wake()

    def _wake(self) -> None:
        self._waiting = 0
        self._changed.notify_all()

    def _end_if_all_wait(self) -> None:
        if 0 < self._roles <= self._waiting:
            self._failed = self._failed or HopperError("all roles wait for each other")
            self._wake()


class _Product:
    """A product of a warpgroup that is under way."""

    def __init__(self, finish: Callable[[], _Block]) -> None:
        self._finish = finish
        self.value: Any = None  # until it is there
        self.type = SimpleNamespace(layout=_LAYOUT)

    def finish(self) -> None:
        self.value = self._finish()


def _operand(x: Any) -> Callable[[], torch.Tensor]:
    """What a product reads: registers as they are now, shared memory as it will be."""
    if not isinstance(x, _Shared):
        now = x.clone()
        return lambda: now
    if not x.root.fenced:
        raise HopperError("a product reads what was stored, and no fence has made visible")
    return lambda: x.memory


def _warpgroup_mma(a: Any, b: _Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    assert is_async
    left, right = _operand(a), _operand(b)
    assert left().dtype == right().dtype
    first = acc.clone() if isinstance(acc, _Block) else acc

    def finish() -> _Block:
        product = left().float() @ right().float()
        if not use_acc:
            return block(product)
        return block((first.value if isinstance(first, _Product) else first) + product)

    product = _Product(finish)
    _here.products.append(product)
    return product


def _warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    while len(_here.products) > num_outstanding:
        _here.products.pop(0).finish()
    values = tuple(x.value if isinstance(x, _Product) else x for x in deps)
    if any(value is None for value in values):
        raise HopperError("a result is used whose product is still under way")
    return values[0] if len(values) == 1 else values


def _fence() -> None:
    for root in _here.program.roots:
        root.fenced = True


class _Descriptor:
    """What the copy engine knows of a matrix."""

    def __init__(
        self, pointer: Pointer, shape: Any, strides: Any, block: Sequence[int], layout: Any
    ) -> None:
        self.pointer, self.layout = pointer, layout
        self.shape, self.strides = [int(x) for x in shape], [int(x) for x in strides]
        num_bytes = torch.Size(block).numel() * pointer.memory.itemsize
        self.block_type = SimpleNamespace(shape=list(block), nbytes=num_bytes)

    def read(self, corner: Sequence[int]) -> torch.Tensor:
        """A block; 0 where it is outside of the matrix."""
        places, inside = torch.as_tensor(int(self.pointer.places)), torch.tensor(True)
        for axis, (first, size) in enumerate(zip(corner, self.block_type.shape, strict=True)):
            at = torch.arange(first, first + size)
            at = at.view([-1 if i == axis else 1 for i in range(len(corner))])
            places = places + at * self.strides[axis]
            inside = inside & (at < self.shape[axis])
        return _load(Pointer(self.pointer.memory, places), inside, 0.0).as_subclass(torch.Tensor)


def _copy_to_shared(
    descriptor: _Descriptor, corner: Sequence[Any], barrier: _Shared, into: _Shared
) -> None:
    assert into.shape == descriptor.block_type.shape, (into.shape, descriptor.block_type.shape)
    at = [int(x) for x in corner]
    into.memory.fill_(torch.nan)
    _here.program.copy(
        barrier, descriptor.block_type.nbytes, lambda: into.memory.copy_(descriptor.read(at))
    )


def note_access(memory: torch.Tensor, places: Any, asked: Any, writes: bool) -> None:
    """Is told of every access, for whoever replaces it. asked: which of the places are meant."""


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> _Block:
    places, asked = pointer.inside(mask)
    note_access(pointer.memory, places, asked, False)
    values = pointer.memory[places.long()].clone()  # one element would be a view
    return block(values if mask is None else torch.where(asked, values, _like(values, other)))


def _like(values: torch.Tensor, other: Any) -> torch.Tensor:
    if other is None:
        return values
    return torch.as_tensor(other).to(values.dtype).as_subclass(torch.Tensor)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    places, asked = pointer.inside(mask)
    note_access(pointer.memory, places, asked, True)
    values = torch.as_tensor(value).to(pointer.memory.dtype).as_subclass(torch.Tensor)
    values, places, asked = torch.broadcast_tensors(values, places, asked)
    pointer.memory[places[asked].long()] = values[asked]


_adding = threading.Lock()


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: str) -> _Block:
    _here.program.raise_if_failed()
    if isinstance(value, int) and not value:  # it waits for others
        _here.program.end_if_late()
        time.sleep(1e-4)
    with _adding:
        before = _load(pointer, mask, 0)
        _store(pointer, before + value, mask)
    return before


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> _Shared:
    memory = torch.zeros(*shape, dtype=dtype)
    if dtype.is_floating_point:
        memory.fill_(torch.nan)
    root = _Root()
    _here.program.roots.append(root)
    return _Shared(memory, root)


class _Function:
    """A device function, or a kernel."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
            run_grid(grid[0], lambda: self.fn(*map(_argument, args), **constants))

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        memory = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
        return Pointer(memory, block(x.storage_offset()))
    return block(x, torch.int64) if isinstance(x, int) else x


_draws = itertools.count()


def run_grid(size: int, kernel: Callable[[], None]) -> None:
    """Runs a kernel's programs, several at once."""
    draw = random.Random(next(_draws))
    numbers, failed = iter(range(size)), list[BaseException]()
    taking = threading.Lock()

    def run() -> None:
        while not failed:
            with taking:
                number = next(numbers, None)
            if number is None:
                return
            _here.program, _here.products = (
                _Program(number, random.Random(draw.random()), failed),
                [],
            )
            try:
                kernel()
            except BaseException as error:  # noqa: BLE001  (the launch raises it)
                failed.append(error)

    threads = [
        threading.Thread(target=run, daemon=True) for _ in range(draw.randint(1, _MOST_PROGRAMS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _jit(fn: Any = None, **_: object) -> Any:
    return _Function(fn) if fn is not None else _Function


def _init(at: _Shared, count: int) -> None:
    _here.program.make_barrier(at, count)


def _wait(at: _Shared, phase: Any, pred: Any = True) -> None:
    if pred:
        _here.program.wait(at, int(phase))


def _ranges(*bounds: Any) -> Iterator[int]:
    return iter(range(*map(int, bounds)))


_language = SimpleNamespace(
    NVMMADistributedLayout=_LAYOUT, SliceLayout=_LAYOUT, DotOperandLayout=_LAYOUT,
    BlockedLayout=_LAYOUT, SwizzledSharedLayout=_LAYOUT, NVMMASharedLayout=_LAYOUT,
    constexpr=lambda x: x, static_assert=lambda ok: None, static_range=_ranges, range=_ranges,
    int32=torch.int32, int64=torch.int64, float32=torch.float32,
    program_id=lambda axis: block(_here.program.number),
    cdiv=lambda a, b: -(-a // b),
    arange=lambda start, stop, layout=None: block(torch.arange(start, stop, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),
    expand_dims=lambda x, axis: x.unsqueeze(axis), convert_layout=lambda x, layout: x,
    where=torch.where, maximum=torch.maximum, exp2=torch.exp2, log2=torch.log2,
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
    load=_load, store=_store, atomic_add=_atomic_add,
    allocate_shared_memory=_allocate,
    warp_specialize=lambda roles, warps, registers: _here.program.run(roles),
)  # fmt: skip
_hopper = SimpleNamespace(
    fence_async_shared=_fence, warpgroup_mma=_warpgroup_mma, warpgroup_mma_wait=_warpgroup_mma_wait,
    mbarrier=SimpleNamespace(
        MBarrierLayout=_LAYOUT, init=_init, wait=_wait,
        arrive=lambda at, *, count=1: _here.program.arrive(at, count),
        expect=lambda at, num_bytes: _here.program.arrive(at, 1, num_bytes),
    ),
    tma=SimpleNamespace(
        make_tensor_descriptor=_Descriptor, async_copy_global_to_shared=_copy_to_shared
    ),
)  # fmt: skip
_gluon = SimpleNamespace(jit=_jit, language=_language)
_triton = SimpleNamespace(jit=_jit, language=_language, cdiv=lambda a, b: -(-a // b))
_MODULES = {
    "triton": _triton, "triton.language": _triton,
    "triton.experimental": SimpleNamespace(gluon=_gluon), "triton.experimental.gluon": _gluon,
    "triton.experimental.gluon.language.nvidia.hopper": _hopper,
}  # fmt: skip


class _Modules(dict[str, ModuleType]):
    """The package's modules with device functions, loaded when they are asked for."""

    def __init__(self, broken: Mapping[str, tuple[str, str]]) -> None:
        super().__init__()
        self._broken = broken

    def __missing__(self, name: str) -> ModuleType:
        path = Path(package.__file__).parent / f"{name}.py"
        source = path.read_text(encoding="utf-8")
        if name in self._broken:
            old, new = self._broken[name]
            assert old in source
            source = source.replace(old, new)
        module = self[name] = ModuleType(f"{__name__}.{name}")
        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": self._import}
        exec(compile(source, path, "exec"), module.__dict__)
        return module

    def _import(self, name: str, *args: Any) -> Any:
        known = _MODULES.get(name)
        if known is not None:
            return known
        first, _, last = name.rpartition(".")
        if first == _PACKAGE and last in _DEVICE_MODULES:
            return self[last]
        names = args[2] if len(args) > 2 else None
        if name == _PACKAGE and names and set(names) <= set(_DEVICE_MODULES):
            return SimpleNamespace(**{word: self[word] for word in names})
        return builtins.__import__(name, *args)


_whole = _Modules({})


def load(broken: Mapping[str, tuple[str, str]] | None = None) -> Mapping[str, ModuleType]:
    """The package's modules with kernels in Gluon, by the last part of their names.

    Their launchers take what they take on a GPU, on a CPU, and return None. broken: what to replace
    in the source of a module, and by what.
    """
    return _Modules(broken) if broken else _whole
