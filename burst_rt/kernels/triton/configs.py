"""Block sizes, warps, stages and ways to load of every kernel, by chip, head size and input type.

Data, and which calls take them: neither torch nor triton. The numbers of 16-bit inputs on Hopper,
up to 128 channels, are the fastest on an H100 for bfloat16 at 64 and 128 channels, full and causal
(`burst-rt bench tune`; benchmarks/LOG.md). There the numbers with a producer are as fast as the
fastest within noise, full and causal. Under windows three stages of 128 x 128 were 13 % faster,
which `bench tune` finds; their results have not been proved under every mask yet. No GPU has timed
any other number. Those were found by compiling ahead of time for each chip (`python -m benchmarks
aot`): the largest blocks whose registers do not spill, and whose shared memory fits.
Some calls take more registers, and smaller blocks where these would spill (`takes_more`). Above 128
channels some spill all the same. With two stages Triton loads a block into the memory of the block
before it, once that is used up: where three fit, the loads of one block run while another is
multiplied. With a producer, three stages are three blocks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = [
    "ARCHES",
    "CELLS",
    "COMPRESSED",
    "KINDS",
    "Config",
    "Loads",
    "arch_of",
    "block_width",
    "default_config",
    "takes_more",
    "takes_producer",
]  # fmt: skip

# The kernels. "backward" is `backward_hopper.py` if its configuration has a producer; else it is
# "dq" and "dkdv", by their own configurations.
KINDS = ("forward", "dq", "dkdv", "delta", "decode", "combine", "backward")

# Values of a kernel's WIDTH other than the number of spans a row: see `work.py`.
COMPRESSED, CELLS = 0, -1

# Compute capability -> bytes of shared memory a block may have (CUDA C++ Programming Guide, table
# of technical specifications).
ARCHES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


# How blocks of the inputs are loaded. "pointers": every thread loads by its own pointers.
# "descriptors": the copy engine of Hopper and later chips loads, through tensor descriptors (TMA).
# "producer": so it does, and warps that do nothing else tell it to, as in `forward_hopper.py` and
# `backward_hopper.py`.
Loads = Literal["pointers", "descriptors", "producer"]


class Config(NamedTuple):
    """The block sizes of one kernel."""

    block_m: int  # queries in a block
    block_n: int  # keys in a block
    num_warps: int  # warps of a block, without a producer's
    num_stages: int  # how many stages deep loads run ahead
    loads: Loads = "pointers"

    @property
    def blocks(self) -> tuple[int, int]:
        """Queries and keys in a block."""
        return self.block_m, self.block_n

    def __str__(self) -> str:
        loads = "" if self.loads == "pointers" else f", {self.loads}"
        return (
            f"{self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} "
            f"stages{loads}"
        )


# 16-bit inputs: (kernel, chip) -> configurations for head sizes up to 64, 128, 256.
_HALF = {
    ("forward", 80): (Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(64, 32, 8, 2)),
    ("forward", 86): (Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(64, 32, 8, 1)),
    ("forward", 90): (
        Config(64, 128, 4, 2, "descriptors"),
        Config(128, 128, 8, 3),
        Config(64, 64, 8, 2),
    ),
    ("forward", 100): (Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 8, 2)),
    ("dq", 80): (Config(128, 64, 8, 3), Config(64, 64, 8, 3), Config(64, 32, 8, 1)),
    ("dq", 86): (Config(64, 64, 4, 3), Config(64, 32, 8, 3), Config(64, 32, 8, 1)),
    ("dq", 90): (Config(64, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 32, 8, 2)),
    ("dq", 100): (Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 8, 1)),
    ("dkdv", 80): (Config(32, 128, 8, 3), Config(64, 64, 8, 3), Config(32, 64, 8, 1)),
    ("dkdv", 86): (Config(32, 64, 4, 3), Config(32, 64, 8, 3), Config(32, 32, 8, 1)),
    ("dkdv", 90): (
        Config(128, 64, 4, 2, "descriptors"),
        Config(64, 64, 4, 2, "descriptors"),
        Config(32, 64, 8, 2),
    ),
    ("dkdv", 100): (Config(64, 128, 8, 3), Config(64, 128, 8, 3), Config(64, 64, 8, 1)),
}

# Replacements of these configurations for calls that take more; None: the same.
_SEVERAL: dict[tuple[str, int], tuple[Config | None, ...]] = {
    ("dq", 80): (Config(128, 32, 8, 2), Config(64, 32, 8, 3), None),
    ("forward", 90): (None, Config(128, 64, 8, 3), None),
    ("forward", 100): (None, Config(128, 32, 8, 3), None),
    ("dkdv", 90): (Config(64, 64, 4, 3, "descriptors"), None, None),
    ("dkdv", 100): (Config(64, 64, 8, 3), Config(64, 64, 8, 3), None),
}

# Hopper's forward with a producer, for all that `takes_producer`, by default; and of calls that
# take more. These two have run on a GPU under every kind of mask, over rings, and with sinks.
_PRODUCER = Config(128, 128, 8, 2, "producer")
_PRODUCER_SEVERAL = Config(128, 64, 8, 3, "producer")

# Hopper's backward in one pass, which has not run on a GPU yet, and that in two.
_ONE_PASS = Config(64, 128, 8, 2, "producer")
_TWO_PASSES = Config(64, 64, 4, 2)

# 32-bit inputs, multiplied on the ordinary cores at full precision: the same for every chip.
_SINGLE = {
    "forward": (Config(64, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 16, 8, 1)),
    "dq": (Config(32, 32, 4, 2), Config(32, 32, 8, 2), Config(32, 16, 8, 1)),
    "dkdv": (Config(32, 32, 8, 2), Config(32, 16, 8, 2), Config(16, 32, 8, 1)),
}

# A decode has few rows: 16, the least that a tensor core multiplies, for head sizes up to 64, 128,
# 256, by the size of an input in bytes.
_DECODE = {
    2: (Config(16, 128, 4, 3), Config(16, 64, 4, 3), Config(16, 32, 4, 2)),
    4: (Config(16, 32, 8, 2), Config(16, 32, 8, 2), Config(16, 16, 8, 2)),
}

# Sizes for Triton's interpreter: small and unequal, so that short tests cross every kind of edge.
_INTERPRETED = {
    "forward": Config(32, 16, 4, 1),
    "dq": Config(16, 32, 4, 1),
    "dkdv": Config(16, 32, 4, 1),
    "delta": Config(32, 1, 4, 1),
    "decode": Config(16, 16, 4, 1),
    "combine": Config(1, 1, 1, 1),
}
_INTERPRETED_SEVERAL = {"forward": Config(16, 16, 4, 1), "dq": Config(16, 16, 4, 1)}


def block_width(head_dim: int) -> int:
    """The columns of a block for a head size.

    A power of two, at least 16 (the least that a tensor core multiplies by).
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def arch_of(capability: tuple[int, int]) -> int:
    """The key of `ARCHES` for a compute capability.

    It is the same generation's, or a chip's with less shared memory.
    """
    major, minor = capability
    number = 10 * major + minor
    if major in (9, 10):
        return 10 * major
    return 80 if number == 80 else 86


def takes_more(width: int, *, single: bool) -> bool:
    """Whether a call takes more registers than one under a causal mask.

    So do lines of work with several runs of a kind, as under windows, cells and compressed spans.
    width, single: WIDTH and SINGLE of `work.py`.
    """
    return not single or width in (COMPRESSED, CELLS)


def takes_producer(
    kind: str,
    arch: int | None,
    head_dims: tuple[int, int],
    input_bytes: int,
    *,
    width: int = 1,
    plain: bool = True,
) -> bool:
    """Whether a call can have a producer: the one place that decides between the two forwards, and
    between a backward in one pass and one in two.

    kind, arch, input_bytes: as for `default_config`. head_dims: of q and k, and of v. width: WIDTH
    of `work.py`. plain: whether there is no softcap and no ALiBi, and the copy engine can read the
    inputs. All else goes to `forward.py`, `dq.py` and `dkdv.py`.
    """
    return (
        kind in ("forward", "backward")
        and arch == 90
        # At 64 channels the other forward is faster.
        and head_dims == (128, 128)
        and input_bytes == 2
        and width not in (COMPRESSED, CELLS)
        and (kind == "forward" or width == 1)
        and plain
    )


def default_config(
    kind: str,
    arch: int | None,
    head_dim: int,
    input_bytes: int,
    *,
    several: bool = False,
    producer: bool = False,
) -> Config:
    """The configuration of a kernel on a chip.

    kind: one of KINDS. arch: a key of ARCHES, or None for Triton's interpreter. input_bytes: size
    of one element of the inputs. several: for what `takes_more`. producer: with one, for what
    `takes_producer`.
    """
    if kind == "backward":
        return _ONE_PASS if producer else _TWO_PASSES
    if producer:
        return _PRODUCER_SEVERAL if several else _PRODUCER
    if arch is None:
        own = _INTERPRETED[kind]
        return _INTERPRETED_SEVERAL.get(kind, own) if several else own
    if kind == "delta":
        return Config(min(128, 8192 // block_width(head_dim)), 1, 4, 1)
    if kind == "combine":
        return Config(1, 1, 1, 1)
    size = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    if kind == "decode":
        return _DECODE[input_bytes][size]
    if input_bytes == 4:
        return _SINGLE[kind][size]
    other = _SEVERAL[kind, arch][size] if several and (kind, arch) in _SEVERAL else None
    return other or _HALF[kind, arch][size]
