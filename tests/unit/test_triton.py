"""The Triton kernel without a GPU: what it refuses, when it is taken, the tables that it keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from forked import with_torch

from burst_rt import BlockSparse, Causal, Full, Mask, SlidingWindow
from burst_rt.errors import InputError
from burst_rt.kernels import KERNELS, Tile, Work, pick
from burst_rt.kernels.triton import tables
from burst_rt.kernels.triton.configs import (
    ARCHES,
    CELLS,
    COMPRESSED,
    arch_of,
    block_width,
    default_config,
    takes_producer,
)
from burst_rt.kernels.triton.configs import KINDS as KERNEL_KINDS
from burst_rt.planning.layouts import make_layout


@dataclass(frozen=True)
class _Odd(Mask):
    """Keys at odd positions; without spans."""

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # ints or tensors
        return kv_position % 2 == 1


def test_importing_the_kernels_does_not_import_triton() -> None:
    source = (
        "import sys, burst_rt.kernels, burst_rt.kernels.triton.configs; print('triton' in "
        "sys.modules)"
    )
    done = with_torch().run(source)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cpu, cuda, kernel = torch.device("cpu"), torch.device("cuda", 1), KERNELS["triton"]
    for mask in (Causal(), Causal() & SlidingWindow(9)):
        assert kernel.refuses(Work(cuda, torch.bfloat16, 64, mask)) is None
    for device, dtype, head_dim, mask, why in (
        (
            cpu,
            torch.bfloat16,
            64,
            Full(),
            r"takes CUDA tensors \(CPU tensors only where TRITON_INTERPRET=1 is set\), got cpu",
        ),
        (cuda, torch.float64, 64, Full(), "float32, bfloat16 and float16, got torch.float64"),
        (cuda, torch.float16, 15, Full(), "a head_dim of 16 to 256, got 15"),
        (cuda, torch.float16, 257, Full(), "a head_dim of 16 to 256, got 257"),
    ):
        reason = kernel.refuses(Work(device, dtype, head_dim, mask))
        assert reason is not None
        assert re.search(why, reason)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for mask in (Full(), _Odd()):
        assert kernel.refuses(Work(cpu, torch.float32, 33, mask)) is None
    reason = kernel.refuses(Work(cuda, torch.float32, 33, Full()))
    assert reason is not None
    assert "takes CPU tensors (TRITON_INTERPRET=1 is set), got cuda:1" in reason


def test_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    several = Work(cuda, torch.bfloat16, 128, Causal(), ring_size=2)
    assert pick(several).kernel.name == "triton"
    assert pick(several, "triton").reason == "asked for by name"
    with pytest.raises(
        InputError, match=r"no tile kernel for torch\.float64 on cuda: the triton kernel takes"
    ):
        pick(Work(cuda, torch.float64, 128, Causal()))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick(Work(torch.device("cpu"), torch.bfloat16, 128, Causal())).kernel.name == "cpu"


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> tables._Tables:
    """No table is kept at first."""
    kept = tables._Tables()
    monkeypatch.setattr(tables, "_tables", kept)
    return kept


def _tile(mask: Mask, length: int = 64) -> Tile:
    return Tile((), (range(length),), (range(length),), mask, 1.0, lambda: None)


def test_tables_are_made_once(no_tables: tables._Tables) -> None:
    cpu = torch.device("cpu")
    spans = tables.spans_of_tile(_tile(SlidingWindow(9)), cpu)
    lists = tables.lists_of(_tile(SlidingWindow(9)), (16, 32), cpu, by_columns=False)
    assert tables.spans_of_tile(_tile(SlidingWindow(9)), cpu) is spans
    same = tables.lists_of(_tile(SlidingWindow(9)), (16, 32), cpu, by_columns=False)
    assert same is lists
    assert len(no_tables.items()) == 2
    other = tables.lists_of(_tile(SlidingWindow(9)), (16, 32), cpu, by_columns=True)
    assert other is not lists
    assert lists.lines.dtype == lists.runs.dtype == spans.bounds.dtype == torch.int32
    # Kernels are compiled for addresses that are multiples of 16 bytes.
    assert (lists.runs.data_ptr() - lists.lines.data_ptr()) % 16 == 0
    assert lists.lines.numel() == 4 * 4


@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize(
    "mask",
    [
        Causal() & BlockSparse(np.random.default_rng(0).random((8, 8)) < 0.3, 64),
        # Whether the two spans of a row touch depends on where the row stands.
        Causal() | BlockSparse(np.eye(64, k=1, dtype=bool), 8),
    ],
)
def test_the_tiles_of_a_striped_layout_share_tables(
    mask: Mask, first: int, no_tables: tables._Tables
) -> None:
    """And as many bytes are announced as are kept, whichever tile comes first."""
    cpu, cut = torch.device("cpu"), tables.CutOfTile((16, 16), False, (16, 16))
    runs = make_layout("striped", 512, 8).runs
    places = list(product(runs, runs))
    for rows, columns in places[::first]:
        tile = tables.same_tables(Tile((), rows, columns, mask, 1.0, lambda: None))
        tables.lists_for(tile, cut, tables.spans_of_tile(tile, cpu).width, cpu)
    kept = [table.size_bytes for _, table in no_tables.items()]
    # Of tiles with and without a diagonal; of each, the spans and the lists.
    assert len(kept) == 4
    assert tables.bytes_of_tables(mask, places, [cut], positions=False) == sum(kept)
    with_positions = tables.bytes_of_tables(mask, places, [cut], positions=True)
    assert with_positions == sum(kept) + 4 * 2 * 64 * len(places)


def test_tables_are_bounded(no_tables: tables._Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_BYTES", 1100)
    cpu = torch.device("cpu")
    first = tables.spans_of_tile(_tile(SlidingWindow(1)), cpu)  # of 512 bytes
    tables.spans_of_tile(_tile(SlidingWindow(2)), cpu)
    assert tables.spans_of_tile(_tile(SlidingWindow(1)), cpu) is first
    tables.spans_of_tile(_tile(SlidingWindow(3)), cpu)  # the second has not been used for longest
    kept = [key[1] for key, _ in no_tables.items()]  # type: ignore[index]
    assert kept == [SlidingWindow(1), SlidingWindow(3)]
    tables.spans_of_tile(_tile(Causal(), 1000), cpu)
    ((key, large),) = no_tables.items()
    for _ in range(2):  # as where two threads made the same one
        no_tables.keep(key, large)
    tables.spans_of_tile(_tile(SlidingWindow(1)), cpu)
    tables.spans_of_tile(_tile(SlidingWindow(2)), cpu)
    assert len(no_tables.items()) == 2


def test_another_stream_waits_for_the_copy(
    no_tables: tables._Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables copied on one stream: kernels of another wait, and keep the memory."""
    told: list[object] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number

        def wait_event(self, event: object) -> None:
            told.append((self.cuda_stream, event))

    class Memory:
        nbytes = 4

        def record_stream(self, stream: Stream) -> None:
            told.append(("kept for", stream.cuda_stream))

    current = [7]
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream(current[0]))
    uploaded = tables._Uploaded([], Memory(), "copied", 7)  # type: ignore[arg-type]  # doubles
    kept = tables._Kept("the table", uploaded)
    for number in (7, 8, 7):
        current[0] = number
        assert tables._kept("key", torch.device("cuda", 0), lambda: kept) == "the table"
    assert told == [(8, "copied"), ("kept for", 8)]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"head_dims": (64, 64)}, False),
        ({"width": 4}, True),
        ({"kind": "dq"}, False),
        ({"arch": 100}, False),
        ({"arch": 86}, False),
        ({"arch": None}, False),  # the interpreter
        ({"head_dims": (128, 64)}, False),
        ({"head_dims": (96, 96)}, False),
        ({"input_bytes": 4}, False),
        ({"width": CELLS}, False),
        ({"width": COMPRESSED}, False),
        ({"plain": False}, False),
        ({"kind": "backward"}, True),
        ({"kind": "backward", "width": 2}, False),
        ({"kind": "backward", "arch": 100}, False),
    ],
)
def test_which_calls_can_have_a_producer(changes: dict[str, Any], taken: bool) -> None:
    call: dict[str, Any] = {
        "kind": "forward", "arch": 90, "head_dims": (128, 128), "input_bytes": 2,
    }  # fmt: skip
    assert takes_producer(**(call | changes)) is taken


def test_there_is_a_configuration_for_everything() -> None:
    for head_dim in range(16, 257):
        assert block_width(head_dim) in (16, 32, 64, 128, 256)
        assert block_width(head_dim) >= head_dim > block_width(head_dim) // 2 or head_dim == 16
        for kind in KERNEL_KINDS:
            for arch in (None, *ARCHES):
                for input_bytes in (2, 4):
                    config = default_config(kind, arch, head_dim, input_bytes)
                    # The kernel addresses at most 256 rows of a block in 32 bits; blocks are powers
                    # of two.
                    assert all(0 < size <= 256 and size & (size - 1) == 0 for size in config[:2])
    assert [arch_of(c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))] == [
        80,
        86,
        86,
        90,
        100,
        100,
        86,
    ]
