"""Small inputs of cases that go wrong: found, written, and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from burst_rt.conformance.cases import AttentionCase, ModelCase

__all__ = ["read_input", "smallest", "write_input"]

Tensors = dict[str, torch.Tensor]
Case = AttentionCase | ModelCase


def smallest(case: AttentionCase, is_wrong: Callable[[AttentionCase], bool]) -> AttentionCase:
    """A smaller case that is wrong as well, by one step after the other; or the case itself."""
    while True:
        for smaller in _smaller(case):
            if is_wrong(smaller):
                case = smaller
                break
        else:
            return case


def _smaller(case: AttentionCase) -> Iterator[AttentionCase]:
    if case.batch > 1:
        yield replace(case, batch=1, padding=case.padding[-1:])
    if case.kv_heads > 1:
        yield replace(case, heads=case.heads // case.kv_heads, kv_heads=1)
    if case.head_dim > 8:
        yield replace(case, head_dim=8)
    half = case.length // 2
    if half >= 4:
        yield replace(
            case,
            length=half,
            documents=(half // 2, half - half // 2) if case.documents else (),
            prefix=case.prefix // 2,
            padding=tuple(count // 2 for count in case.padding),
            window=case.window and max(case.window // 2, 1),
        )


def write_input(path: Path, case: Case, inputs: Tensors, truth: Tensors) -> None:
    """Writes a .npz: the case as JSON (`case`), its inputs, and the truth (`truth.NAME`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: x.detach().numpy() for name, x in inputs.items()}
    arrays |= {f"truth.{name}": x.detach().numpy() for name, x in truth.items()}
    kind = type(case).__name__
    np.savez(path, case=json.dumps({"kind": kind, **asdict(case)}), **arrays)  # type: ignore[arg-type]


def read_input(path: Path) -> tuple[Case, Tensors]:
    """The case of a file that `write_input` has written, and its inputs."""
    with np.load(path) as arrays:
        fields = json.loads(str(arrays["case"]))
        inputs = {
            name: torch.from_numpy(arrays[name])
            for name in arrays.files
            if name != "case" and not name.startswith("truth.")
        }
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    kind = AttentionCase if fields.pop("kind") == "AttentionCase" else ModelCase
    return kind(**fields), inputs
