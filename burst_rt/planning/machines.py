"""Machine files: a `Hardware` as TOML, read and written.

Seven machines are shipped (`burst_rt/planning/machines/*.toml`) with the vendors' nominal figures.
Any other is a file of the user's own, which `burst-rt calibrate` writes. A field of a file has the
name of the field of the dataclasses in `burst_rt.scheduler.simulator.hardware` that it sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_origin, get_type_hints

from burst_rt.errors import ConfigError, InputError

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["load_hardware", "parse_hardware", "to_toml"]


def to_toml(hardware: Hardware) -> str:
    """The machine as TOML text; `parse_hardware` reads the same machine from it."""

    def given(items: list[tuple[str, object]]) -> dict[str, object]:
        # TOML has no None; a field that is not there is read as None.
        return {name: value for name, value in items if value is not None}

    import tomli_w  # here, as below

    return tomli_w.dumps(asdict(hardware, dict_factory=given))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The shipped machine of that name, or the machine in the TOML file at that path.

    Shipped are "a100-pcie", "a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72" and
    "mi300x". The beginning of a name is
    enough where only one name begins so ("h100"). Raises InputError for an unknown name or a
    missing file, ConfigError for a file with a missing, unknown or wrong field.
    """
    path = Path(name_or_path)
    shipped = {
        file.name.removesuffix(".toml"): file
        for file in resources.files(__package__).joinpath("machines").iterdir()
    }
    meant = (
        [name for name in shipped if name.startswith(str(name_or_path))]
        if str(name_or_path)
        else []
    )
    if len(meant) == 1:
        return parse_hardware(shipped[meant[0]].read_text(encoding="utf-8"), f"{meant[0]}.toml")
    try:
        if path.is_file():
            return parse_hardware(path.read_text(encoding="utf-8-sig"), str(path))
        reason = "it is no file" if path.exists() else "there is no such file"
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
    raise InputError(
        f"hardware: expected one of {sorted(shipped)} or the path of a TOML file, got "
        f"{str(name_or_path)[:200]!r}; {reason}"
    )


def parse_hardware(text: str, where: str) -> Hardware:
    """The machine in a TOML text; `where` names the text in errors.

    Raises ConfigError for a missing, unknown or wrong field, and for text that is not TOML.
    """
    # Here: most jobs have no machine file, and do without a parser and the simulator.
    import tomllib

    from burst_rt.scheduler.simulator import Hardware

    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of too many digits are a ValueError
        raise ConfigError(
            f"hardware file {where}: expected TOML, got {error}; see the shipped files for an "
            "example"
        ) from error
    return _table(Hardware, table, where, "")


_T = TypeVar("_T")
# Maximum figure of a machine; its inverse is the minimum. So forecasts stay finite.
_MOST = 1e30


def _table(cls: type[_T], table: object, where: str, at: str) -> _T:
    """Reads a table into the dataclass `cls`, field by field.

    `at` is the table's own name in the file.
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


# The return type is object: a field holds one of the types above, and a union of them all would say
# less than their names do.
def _value(kind: type[object], value: object, where: str, at: str) -> object:
    """Reads a value of a field. Every kind of field has its own rule for what is right."""
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
        right = value in get_args(kind)
    elif kind is str:
        right = isinstance(value, str) and bool(value)
    else:
        return _number(kind, value, where, at)
    if not right:
        raise _wrong(where, at, _say(kind), value)
    return value


def _number(kind: type[object], value: object, where: str, at: str) -> object:
    """Reads a number, as what its field's name says that it is."""
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise _wrong(where, at, _say(kind), value)
    # A latency or a launch may be too short to matter. Zero in any other field is a mistake.
    may_be_zero = at.endswith(("latency_s", "launch_s"))
    share = at.endswith(("efficiency", "masked"))
    rules = (
        (-_MOST <= value <= _MOST, f"{_say(kind)} of at most {_MOST:g}"),  # nor nan
        (value >= 0 if may_be_zero else value > 0, "at least 0" if may_be_zero else "more than 0"),
        (value == 0 or value >= 1 / _MOST, f"at least {1 / _MOST:g}"),
        (not share or value <= 1, "at most 1, the share of a rate that is reached"),
    )
    for holds, expected in rules:
        if not holds:
            raise _wrong(where, at, expected, value)
    return kind(value)  # type: ignore[call-arg]  # int or float


def _wrong(where: str, at: str, expected: str, got: object) -> ConfigError:
    # Python writes no integer of thousands of digits.
    said = "more" if isinstance(got, int) and abs(got) > _MOST else repr(got)
    return ConfigError(
        f"hardware file {where}: {at}: expected {expected}, got {said}; correct it there"
    )


def _say(kind: type[object]) -> str:
    if is_dataclass(kind):
        return f"a table of {[field.name for field in fields(kind)]}"
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    return {int: "an integer", float: "a number"}.get(kind, "a string that is not empty")


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
