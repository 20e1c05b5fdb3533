"""A machine as the simulator sees it: how long a task takes on a device, and what messages share on
their way.

Read from TOML. Four machines are shipped (`scheduler/hardware/*.toml`), with the vendor's nominal
figures; any other is a file of one's own, which `Hardware.to_toml` writes. Beside every nominal
rate stands its `efficiency`, the fraction of it that real work reaches: measuring a machine changes
that number, the nominal one stays what the data sheet says.

What a rank's transfers pass, each a resource that all transfers on it share in equal parts:

    to a rank of its node     its link out, the switch (both, if they differ), the other's link in
    to another node           its way to the host out, its switch, its NIC out;
                              there NIC in, switch, way in
    to or from its own host   its way to the host, its switch
    from host to host         in a node the host's memory; between nodes the two NICs
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from burst_rt.errors import ConfigError, InputError
from burst_rt.scheduler.graph import Cost, Task

__all__ = [
    "Device",
    "Duplex",
    "Hardware",
    "Link",
    "Nics",
    "Node",
    "Rate",
    "Switch",
    "load_hardware",
    "parse_hardware",
]

# full: each direction has its own bytes_per_s; half: both share it.
Duplex: TypeAlias = Literal["full", "half"]


@dataclass(frozen=True)
class Rate:
    """How long an operation takes: launch_s + (flops / flops_per_s + bytes / bytes_per_s) /
    efficiency seconds.

    None: its flops, or its bytes, take no time of their own. masked: operations under a mask go at
    this fraction of the rate of others (None: as fast). edge: each operation along a mask's edge
    takes as long as this many more (None: no more).
    """

    launch_s: float
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    efficiency: float = 1.0
    masked: float | None = None
    edge: float | None = None

    def seconds(self, cost: Cost) -> float:
        """Seconds a task of this cost takes."""
        flops = (
            cost.flops
            + (cost.masked_flops * (1 / self.masked - 1) if self.masked else 0.0)
            + cost.edge_flops * (self.edge or 0.0)
        )
        arithmetic = flops / self.flops_per_s if self.flops_per_s else 0.0
        memory = cost.size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.launch_s + (arithmetic + memory) / self.efficiency


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    rates: by the operation's name ("forward" and "backward" are tiles of attention, "linear" matrix
    products). Others with arithmetic to do go at "linear" too, where there is such a rate; all else
    goes at "default". Where a program has a kernel of its own, "forward-untiled" goes before
    "forward".
    """

    memory_bytes: int
    rates: Mapping[str, Rate]

    def seconds(self, task: Task, kernel: str | None = None) -> float:
        """Seconds the device takes for a task that has it to itself. kernel: the one that belongs
        to the program, if one does.
        """
        name = "" if task.op is None else task.op.name
        names = (f"{name}-{kernel}", name, *(["linear"] if task.cost.flops else []), "default")
        return next(self.rates[name] for name in names if name in self.rates).seconds(task.cost)


@dataclass(frozen=True)
class Link:
    """A way for messages: each takes latency_s, then its bytes at its share of bytes_per_s *
    efficiency (of one direction).
    """

    latency_s: float
    bytes_per_s: float
    efficiency: float
    duplex: Duplex


@dataclass(frozen=True)
class Switch:
    """What groups of `ranks` neighbouring ranks share (a PCIe root or switch): bytes_per_s *
    efficiency for all transfers through it.
    """

    ranks: int
    bytes_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Node:
    """One host: its ranks and what lies between them.

    link: a rank's way to the others of its node. host_link: its way to the host's memory and the
    NICs; None: the same as `link`. host_memory: what messages between two host memories of the node
    share; None: they take `link`. cores: compute tasks of the node's ranks share this many, one
    each at most; None: every rank has a device of its own.
    """

    ranks: int
    link: Link
    cores: int | None = None
    switch: Switch | None = None
    host_link: Link | None = None
    host_memory: Link | None = None


@dataclass(frozen=True)
class Nics:
    """The network cards of a node, `count` of them, dealt out to its ranks in neighbouring
    groups.
    """

    count: int
    link: Link


@dataclass(frozen=True)
class Hardware:
    """A machine: equal nodes of equal devices. nics: None for a machine of one node."""

    name: str
    device: Device
    node: Node
    nics: Nics | None = None

    def to_toml(self) -> str:
        """The machine as TOML text; `load_hardware` reads the same machine from it."""
        return "\n".join(_lines(self, ""))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The shipped machine of that name ("a100-pcie", "a100-sxm", "h100-sxm", "h200-sxm"), or the
    one in the TOML file at that path.

    The beginning of a name is enough where no other begins so ("h100"). Raises InputError for an
    unknown name or a file that is not there, ConfigError for a file that does not say what it has
    to.
    """
    path = Path(name_or_path)
    shipped = {
        file.name.removesuffix(".toml"): file
        for file in resources.files(__package__).joinpath("hardware").iterdir()
    }
    meant = (
        [name for name in shipped if name.startswith(str(name_or_path))]
        if str(name_or_path)
        else []
    )
    if len(meant) == 1:
        return parse_hardware(shipped[meant[0]].read_text(encoding="utf-8"), f"{meant[0]}.toml")
    if not path.is_file():
        raise InputError(
            f"hardware: expected one of {sorted(shipped)} or the path of a TOML file, got "
            f"{str(name_or_path)!r}"
        )
    return parse_hardware(path.read_text(encoding="utf-8"), str(path))


def parse_hardware(text: str, where: str) -> Hardware:
    """The machine in a TOML text; `where` names it in errors. Raises ConfigError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"hardware file {where}: expected TOML, got {error}; see the shipped files for an "
            "example"
        ) from error
    return _table(Hardware, table, where, "")


_T = TypeVar("_T")


def _table(cls: type[_T], table: object, where: str, at: str) -> _T:
    """Reads a table into the dataclass `cls`, field by field. `at`: the table's own name in the
    file.
    """
    if not isinstance(table, Mapping):
        raise _wrong(where, at, "a table", table)
    hints = get_type_hints(cls)
    assert is_dataclass(cls)
    known = {field.name: field for field in fields(cls)}
    for name in table:
        if name not in known:
            raise ConfigError(
                f"hardware file {where}: unknown field {_join(at, name)!r}; expected "
                f"{sorted(known)}; remove it or correct its name"
            )
    values = {}
    for name, field in known.items():
        kinds = get_args(hints[name]) if get_origin(hints[name]) is UnionType else (hints[name],)
        if name in table:
            values[name] = _value(kinds[0], table[name], where, _join(at, name))
        elif field.default is MISSING:
            raise ConfigError(
                f"hardware file {where}: {_join(at, name)!r} is missing; expected "
                f"{_say(kinds[0])}, got nothing; add it"
            )
    return cls(**values)


# What a field may hold is one of the types above; a union of all of them would say less than their
# names do.
def _value(kind: type[object], value: object, where: str, at: str) -> object:
    if is_dataclass(kind):
        return _table(kind, value, where, at)
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping) or "default" not in value:
            raise _wrong(where, at, "tables, one of them 'default'", value)
        return {
            name: _table(get_args(kind)[1], of, where, _join(at, name))
            for name, of in value.items()
        }
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(where, at, _say(kind), value)
        return value
    if kind is str:
        if not isinstance(value, str) or not value:
            raise _wrong(where, at, _say(kind), value)
        return value
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        raise _wrong(where, at, _say(kind), value)
    # A latency or a launch may be too short to matter; all else of nothing is a mistake.
    may_be_zero = at.endswith(("latency_s", "launch_s"))
    if value < 0 or (value == 0 and not may_be_zero):
        raise _wrong(where, at, "at least 0" if may_be_zero else "more than 0", value)
    return kind(value)  # type: ignore[call-arg]  # int or float


def _wrong(where: str, at: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"hardware file {where}: {at}: expected {expected}, got {got!r}; correct it there"
    )


def _say(kind: type[object]) -> str:
    if is_dataclass(kind):
        return f"a table of {[field.name for field in fields(kind)]}"
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    return {int: "an integer", float: "a number"}.get(kind, "a string that is not empty")


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _lines(table: object, at: str) -> list[str]:
    if isinstance(table, Mapping):
        items = list(table.items())
    else:
        assert is_dataclass(table)
        items = [(field.name, getattr(table, field.name)) for field in fields(table)]
    plain, nested = [], []
    for key, value in items:
        name = (
            key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)
        )
        if is_dataclass(value):
            nested += ["", f"[{_join(at, name)}]", *_lines(value, _join(at, name))]
        elif isinstance(value, Mapping):
            nested += _lines(value, _join(at, name))
        elif value is not None:
            plain.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return [*plain, *nested] if at else [*plain, *nested, ""]
