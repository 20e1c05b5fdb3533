"""The Triton kernels compiled for chips that are not here: sums stay in registers, blocks fit,
tensor cores are used.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from covering import sample_of

from benchmarks.aot import command
from benchmarks.compiled import Compiled, Request, compile_all
from burst_rt.errors import DeviceError
from burst_rt.kernels.triton.configs import ARCHES, CELLS, COMPRESSED, Config, default_config

# What multiplies 16-bit matrices on each chip: mma, wgmma, tcgen05.mma.
_PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "tcgen05"}
# How many a kernel has at least, one for each of its matrix products.
_NUM_PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
# What spills and was the fastest on an H100 all the same (benchmarks/LOG.md), by kernel, chip and
# head_dim.
_TIMED = {("dkdv", 90, 64): 52, ("dkdv", 90, 128): 20, ("forward", 90, 128): 6}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux")


_TOGETHER: list[Request] = []  # what one process compiles for all tests of this file


def _together(requests: Iterable[Request]) -> list[Request]:
    """The same requests, which are compiled with those of other tests: half of what a test costs is
    the start of a process that compiles.
    """
    noted = list(requests)
    _TOGETHER.extend(noted)
    return noted


@cache
def _compiled_together() -> dict[Request, Compiled]:
    # Compiling works where this process interprets.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Without Triton's cache a kernel takes seconds.
        return dict(zip(_TOGETHER, compile_all(_TOGETHER, timeout_s=1800), strict=True))


def _compile(requests: Iterable[Request]) -> list[Compiled]:
    """As `compile_all`."""
    wanted = list(requests)
    if set(wanted) <= set(_TOGETHER):
        return [_compiled_together()[request] for request in wanted]
    return compile_all(wanted)


def _sampled(
    requests: Iterable[Request], taken: Collection[Request] | None = None
) -> pytest.MarkDecorator:
    """A sample of some kernels in one test; the others are `long`."""
    sample: list[Request] = []
    others: list[Request] = []
    whole = list(requests)
    chosen = set(sample_of(whole) if taken is None else taken)
    for request in whole:
        (sample if request in chosen else others).append(request)
    return pytest.mark.parametrize(
        "requests",
        [
            pytest.param(_together(sample), id="a sample"),
            pytest.param(others, id="the others", marks=pytest.mark.long),
        ],
    )


@_sampled(
    Request(kind, arch, head_dim, masked)
    for kind in _NUM_PRODUCTS
    for arch in _PRODUCTS
    for head_dim in (64, 128)
    for masked in (False, True)
)
def test_the_table_for_16_bit_inputs(requests: list[Request]) -> None:
    for found in _compile(requests):
        arch = found.request.arch
        most = _TIMED.get(found.request[:3], 0)
        assert found.spills <= most, found
        assert (found.stack_bytes == 0) == (found.spills == 0), found
        assert 0 < found.registers <= 255, found
        assert 0 < found.shared_bytes <= ARCHES[arch], found
        assert found.instructions[_PRODUCTS[arch]] >= _NUM_PRODUCTS[found.request.kind], found
        assert not found.serialized, found
        assert found.in_flight or found.config.loads == "descriptors", found
        # Each cell has an exponential, so a warp has as many for a block as it has 32 cells.
        of_a_warp = found.config.block_m * found.config.block_n // (32 * found.config.num_warps)
        assert found.of_a_block is None or found.of_a_block > 3 * of_a_warp, found
        assert found.of_a_block is not None or (found.request.masked and arch == 100), found
        assert not any(
            found.instructions[name] for other, name in _PRODUCTS.items() if other != arch
        ), found


# Kernels whose blocks leave no room for a few registers: 256 channels, in masked loops.
# With softcap, slopes and sinks together; softcap alone and slopes alone were timed on an H100.
_SPILLS = {("dkdv", 256): 34, ("dkdv", 128): 152}


@_sampled(
    Request(kind, 90, head_dim, masked, only=True)
    for kind in _NUM_PRODUCTS
    for head_dim in (64, 128)
    for masked in (False, True)
)
def test_the_only_tile_of_a_call(requests: list[Request]) -> None:
    """It has no running state to load, and writes its gradients."""
    most = {("dkdv", 64): 58}
    for found in _compile(requests):
        kind, _, head_dim = found.request[:3]
        assert found.spills <= most.get((kind, head_dim), 0), found
        assert not found.serialized, found


_TURNS = _together(
    Request("dkdv", 90, 64, False, config=Config(64, 128, 8, num_stages), ragged=ragged)
    for num_stages in (2, 3)
    for ragged in (False, True)
)


def test_products_that_take_turns_and_loads_that_do_not_run_ahead_are_seen() -> None:
    """Sums that start from constants, in ptxas's eyes, and one buffer for all blocks."""
    found = _compile(_TURNS)
    assert [each.in_flight for each in found] == [0, 0, 4, 4]
    assert not any(each.serialized for each in found)
    counts = found[0].instructions
    assert 0 < counts["DEPBAR"] < counts["HGMMA"]
    assert found[0]._replace(instructions=counts | {"DEPBAR": counts["HGMMA"]}).serialized


_WIDE = _together(
    request
    for kind in _NUM_PRODUCTS
    for request in (
        Request(kind, 90, 192, True, v_head_dim=128),
        Request(kind, 90, 256, True, v_head_dim=256),
        Request(kind, 90, 128, True, scores=("softcap", "alibi_slopes", "sinks")),
    )
)


def test_wide_heads_and_scores() -> None:
    """256 channels; MLA's 192 and 128; softcap, slopes and sinks together."""
    for found in _compile(_WIDE):
        kind, _, head_dim = found.request[:3]
        assert found.spills <= _SPILLS.get((kind, head_dim), 0), found
        assert 0 < found.shared_bytes <= ARCHES[90], found
        assert found.instructions["HGMMA"] >= _NUM_PRODUCTS[kind], found


# Every variant, for chips that take turns; the other pairs of a variant and a chip are `long`.
_DECODE = [
    [
        *(
            Request("decode", arch, head_dim, True, dtype, scores=scores)
            for dtype in ("bf16", "fp32")
            for head_dim, scores in ((64, ()), (128, ("softcap",)), (256, ()))
        ),
        Request("decode", arch, 192, True, v_head_dim=128),
        Request("combine", arch, 128, True),
    ]
    for arch in _PRODUCTS
]


@_sampled(
    itertools.chain(*_DECODE),
    [variants[i % len(_DECODE)] for i, variants in enumerate(zip(*_DECODE, strict=True))],
)
def test_decode(requests: list[Request]) -> None:
    """Few rows: the tensor cores' 16 rows on every chip, with sums in registers."""
    for found in _compile(requests):
        assert found.spills == 0, found
        assert 0 < found.registers <= 255, found
        assert found.shared_bytes <= ARCHES[found.request.arch], found
        if found.request.kind == "decode" and found.request.dtype == "bf16":
            assert found.instructions["HMMA"] >= 2, found


_COPIED = _together(
    Request(
        kind,
        arch,
        128,
        kind != "dkdv",
        config=default_config(kind, arch, 128, 2)._replace(loads="descriptors"),
    )
    for arch in (90, 100)
    for kind in _NUM_PRODUCTS
)


def test_loads_by_the_copy_engine() -> None:
    """Tensor descriptors on Hopper and Blackwell."""
    for found in _compile(_COPIED):
        assert found.instructions["TMA"] >= _NUM_PRODUCTS[found.request.kind]
        assert found.shared_bytes <= ARCHES[found.request.arch]
        assert found.spills == 0


_RAGGED = _together(
    Request(kind, 90, head_dim, True, ragged=True, only=True)
    for kind in ("forward", "dq", "dkdv", "delta")
    for head_dim in (80, 128)
)


def test_lengths_that_blocks_do_not_divide() -> None:
    """In a call of one tile; and a head size that is no power of two: other code, which must
    compile, and fit, too.
    """
    for found in _compile(_RAGGED):
        assert found.shared_bytes <= ARCHES[90]
        most = {**_TIMED, ("dkdv", 90, 128): 22}.get(found.request[:3], 0)
        assert found.spills <= most or found.request.head_dim == 80, found


@_sampled(
    Request(
        "forward", 90, 128, masked, dtype, width=width, single=single, scores=scores,
        loads="producer", only=only,
    )
    for masked, width, single in (
        (False, 1, True), (True, 1, True), (True, 1, False), (True, 2, False), (True, 2, True)
    )
    for only in (False, True)
    for dtype in ("bf16", "fp16")
    for scores in (((), ("sinks",)) if only else ((),))
)  # fmt: skip
def test_a_producer(requests: list[Request]) -> None:
    """Hopper's forward whose warps have roles: what each takes fits, whichever Triton this is.

    Triton makes it of Gluon, whose functions change from version to version.
    """
    for found in _compile(requests):
        # Masks take registers, those with several spans a row the most.
        most = 0 if not found.request.masked else 2 if found.request.width == 1 else 40
        assert found.spills <= most, found
        # Three warpgroups share the registers of a processor, 504 for a thread of each.
        assert found.registers == 168, found
        assert 0 < found.shared_bytes <= ARCHES[90], found
        # Two consumers, each with both products before, in and behind the loop.
        assert found.instructions["HGMMA"] >= 2 * 2 * _NUM_PRODUCTS["forward"], found
        assert found.instructions["TMA"] >= 4, found  # two halves of queries, keys, values
        assert not found.serialized, found


@_sampled(
    Request("backward", 90, 128, masked, dtype, loads="producer", only=only)
    for masked in (False, True)
    for only in (False, True)
    for dtype in ("bf16", "fp16")
)
def test_a_backward_in_one_pass(requests: list[Request]) -> None:
    """Hopper's backward whose warps have roles: consumers spill nothing, and products overlap."""
    for found in _compile(requests):
        # Two registers of the adder.
        assert found.spills <= 4, found
        assert found.registers == 168, found
        assert 0 < found.shared_bytes <= ARCHES[90], found
        # A block has 2,048 cells for each scheduler: products take 2,560 clocks, these far fewer.
        assert found.of_a_block is not None
        assert found.of_a_block <= (620 if found.request.masked else 440), found
        # By 16 channels, of 128 or of 64 queries: s, dp, dq; dk, dv; and the first scores.
        assert found.instructions["HGMMA"] == 8 * 3 + 4 * 2 + 8, found
        assert found.instructions["TMA"] >= 6, found  # k, v, and the halves of q and dout
        assert not found.serialized, found


# Compressed spans on Blackwell: a kernel to which ptxas (of triton 3.7) gives 128 registers.
_SPILLS_OF_SEVERAL = {("forward", 100, 64, COMPRESSED): 80}
# Timed on an H100 under windows and blocks.
_SPILLS_OF_SEVERAL |= {
    ("dkdv", 90, 128, width): spills
    for width, spills in ((1, 4), (2, 14), (4, 31), (COMPRESSED, 204))
}


@_sampled(
    Request(kind, arch, head_dim, True, width=width, single=single)
    for kind in _NUM_PRODUCTS
    for arch in _PRODUCTS
    for width in (1, 2, 4, COMPRESSED)
    for head_dim in (64, 128)
    for single in ((False, True) if width == COMPRESSED else (False,))
)
def test_several_runs_and_spans(requests: list[Request]) -> None:
    """Lines of work with several runs of blocks, as under windows, and several spans a row."""
    for found in _compile(requests):
        kind, arch, head_dim = found.request[:3]
        most = _SPILLS_OF_SEVERAL.get((kind, arch, head_dim, found.request.width), 0)
        assert found.spills <= most, found
        assert found.shared_bytes <= ARCHES[arch]
        assert not found.serialized


@_sampled(
    Request(kind, arch, head_dim, True, ragged=True, width=CELLS, single=single, only=True)
    for kind in _NUM_PRODUCTS
    for arch, head_dim in ((90, 64), (90, 128), (80, 128), (100, 128))
    for single in (False, True)
)
def test_cells_in_place_of_spans(requests: list[Request]) -> None:
    """For masks without spans: code that compiles and fits."""
    most = {("dkdv", 90, 128): 38, ("dkdv", 80, 128): 12, ("dq", 100, 128): 82}
    for found in _compile(requests):
        assert found.shared_bytes <= ARCHES[found.request.arch], found
        assert found.spills <= most.get(found.request[:3], 0), found


_SPILLING = _together([Request("dq", 80, 64, False, config=Config(64, 64, 1, 1))])


def test_spills_are_seen() -> None:
    """Far too large a block for one warp."""
    (found,) = _compile(_SPILLING)
    assert found.config == Config(64, 64, 1, 1)
    assert found.spills > 0
    assert found.stack_bytes > 0


def test_what_triton_cannot_compile_is_said() -> None:
    with pytest.raises(DeviceError, match="power of 2"):
        compile_all([Request("delta", 90, 64, False, config=Config(48, 1, 4, 1))])


# What the command below asks for. Any other request would be compiled by a process of its own.
_OF_THE_COMMAND = _together(
    Request(kind, 90, 16, masked)
    for kind, *masks in (
        ("forward", False, True), ("dq", False, True), ("dkdv", False, True), ("delta", False),
        ("decode", False), ("combine", False),
    )
    for masked in masks
)  # fmt: skip


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.aot.compile_all", _compile)
    done = CliRunner().invoke(
        command,
        ["--arch", "90", "--head-dim", "16", "--out", str(tmp_path / "aot.json")],
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "aot.json").read_text())["kernels compiled ahead of time, bf16"]
    assert [row["kernel"] for row in rows] == [
        "forward",
        "forward",
        "dq",
        "dq",
        "dkdv",
        "dkdv",
        "delta",
        "decode",
        "combine",
    ]
    assert all("HGMMA" in row["tensor cores"] for row in rows[:6])
    assert [row["tensor cores"] for row in rows[6:]] == ["none", "32 HMMA", "none"]
