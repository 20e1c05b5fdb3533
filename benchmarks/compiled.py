"""Compiles kernels for chips that are not there, and reads registers, spills and loads in flight.

This serves tuning, and tests without a GPU: registers, spills and shared memory decide how many
blocks a multiprocessor can hold, and the instructions tell whether the tensor cores are used. It
says nothing about speed. `compile_all` is the way in. A child process (`python -m
benchmarks.compiled`) does the compiling, because Triton cannot compile in a process that
interprets kernels (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burst_rt.errors import DeviceError
from burst_rt.kernels.triton.configs import (
    CELLS,
    Config,
    Loads,
    block_width,
    default_config,
    takes_more,
)
from burst_rt.kernels.triton.launch import Meta, options_of

if TYPE_CHECKING:
    import triton

__all__ = ["Compiled", "Request", "compile_all"]

_SCALARS = {"scale": "fp32", "scale_log2": "fp32", "cap_scale": "fp32"}
# Pointers to tensors that are float32 whatever the inputs are.
_SUMS = {
    "p_acc",
    "p_m",
    "p_l",
    "p_lse",
    "p_dlse",
    "p_delta",
    "p_top",
    "p_sinks",
    "p_slopes",
    "p_acc_out",
    "p_m_out",
    "p_l_out",
}
# Pointers to tensors that are float32 where the kernel adds to them.
_GRADIENTS = {"p_dq", "p_dk", "p_dv"}
# Pointers to tables.
_TABLES = {
    "p_spans", "p_lines", "p_runs", "p_rows", "p_columns", "p_seen", "p_lasts", "p_counts",
}  # fmt: skip
# Patterns in SASS: products on the tensor cores of each generation; waits for HGMMA; loads by the
# copy engine; accesses to local memory, where registers spill to.
_INSTRUCTIONS = {
    "HMMA": r"\bHMMA\.",
    "HGMMA": r"\bHGMMA\.",
    "tcgen05": r"\bUTC\w*MMA\b",
    "DEPBAR": r"\bWARPGROUP\.DEPBAR\b",
    "TMA": r"\bUTMALDG\b",
    "LDL": r"\bLDL\b",
    "STL": r"\bSTL\b",
}
# An exponential, of which a cell has one; one more a row is for sums that are scaled anew.
_EXPONENTIAL = r"\bMUFU\.EX2\b"
_DEADLINE_S = 600.0


class Request(NamedTuple):
    """One kernel for one chip."""

    kind: str  # one of `configs.KINDS`
    arch: int  # one of `configs.ARCHES`
    head_dim: int
    masked: bool  # whether some blocks are seen in part only
    dtype: str = "bf16"  # "bf16", "fp16" or "fp32"
    config: Config | None = None  # None takes the table's
    ragged: bool = False  # whether for lengths that blocks do not divide
    width: int = 1  # WIDTH of `work.py`
    single: bool = True  # whether no line of work has more than one run of a kind
    v_head_dim: int = 0  # 0: head_dim
    scores: tuple[str, ...] = ()  # names among "softcap", "alibi_slopes", "sinks"
    loads: Loads | None = None  # replaces the configuration's own
    # Whether for the only tile of its call. Others load and store the running state, and add to
    # sums.
    only: bool = False


class Compiled(NamedTuple):
    """The resources that a kernel takes on its chip."""

    request: Request
    config: Config
    registers: int  # registers of one thread
    stack_bytes: int  # stack of one thread
    shared_bytes: int  # shared memory of one block
    # Number of instructions of each kind in the machine code. HMMA, HGMMA, tcgen05: products on the
    # tensor cores of sm_80, sm_90, sm_100. DEPBAR: waits for HGMMA. TMA: loads by the copy engine.
    # LDL, STL: loads from and stores to local memory (spills).
    instructions: dict[str, int]
    # Groups of loads by pointers that go on where a loop waits for a group; of several loops the
    # fewest. None: no loop waits for such loads.
    in_flight: int | None
    # Instructions of a warp for a block, in the loop that multiplies; of several loops, as of whole
    # and of cut blocks, the longest. None: no loop multiplies and takes exponentials.
    of_a_block: int | None

    @property
    def spills(self) -> int:
        """Number of loads and stores that move registers that did not fit."""
        return self.instructions["LDL"] + self.instructions["STL"]

    @property
    def serialized(self) -> bool:
        """Whether Hopper's products take turns: each is waited for before the next begins."""
        return 0 < self.instructions["HGMMA"] <= self.instructions["DEPBAR"]


def compile_all(requests: Iterable[Request], *, timeout_s: float = _DEADLINE_S) -> list[Compiled]:
    """Compiles in a child process. Blocks until the child is done, at most `timeout_s`.

    A kernel takes seconds the first time; afterwards Triton's own cache has it. Raises DeviceError
    with the child's output where Triton fails or takes longer than `timeout_s`.
    """
    asked = list(requests)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The child finds the same burst_rt, however this process found it.
    # This package's own folder comes last: beside it are folders that must not be found by name.
    paths = [*filter(None, sys.path), str(Path(__file__).resolve().parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-P", "-m", "benchmarks.compiled"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"Triton did not compile {len(asked)} kernels within {timeout_s:g} s: {error.stderr!r}"
        ) from None
    if done.returncode:
        raise DeviceError(
            f"Triton could not compile the kernels ahead of time:\n{done.stdout}\n{done.stderr}"
        )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Compiled(request, Config(*config), *rest)
        for request, (config, *rest) in zip(asked, answers, strict=True)
    ]


def _main() -> None:
    """The child: reads requests as JSON, writes one line of JSON for each.

    Requests come on standard input; answers go to standard output.
    """
    for kind, arch, head_dim, masked, dtype, config, *rest in json.load(sys.stdin):
        request = Request(
            kind, arch, head_dim, masked, dtype, Config(*config) if config else None, *rest
        )
        print(json.dumps(list(_compile(request))[1:]), flush=True)


def _compile(request: Request) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    config = request.config or default_config(
        request.kind,
        request.arch,
        max(request.head_dim, request.v_head_dim),
        4 if request.dtype == "fp32" else 2,
        several=takes_more(request.width, single=request.single),
        producer=request.loads == "producer",
    )
    config = config._replace(loads=request.loads or config.loads)
    constants = _constants(request, config)
    meta = Meta(**{name: constants[name] for name in Meta._fields})
    options = options_of(config.num_warps, num_stages=config.num_stages)
    if config.loads == "producer":
        from triton.experimental.gluon._runtime import GluonASTSource as Source

        kernel, meta, num_warps = _with_producer(request.kind, meta)
        constants["STAGES"] = config.num_stages
        options = options_of(num_warps)
    else:
        from triton.compiler import ASTSource as Source

        kernel = _kernel(request.kind)
    constants["META"] = meta
    signature = {name: _type_of(name, request.dtype, constants) for name in kernel.arg_names}
    # The attributes on which Triton specialises in a call with usual lengths and strides.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.startswith(("p_", "stride_"))
    }
    source = Source(
        fn=kernel,
        signature=signature,
        constexprs={name: constants[name] for name in kernel.arg_names if name in constants},
        attrs=aligned,
    )
    target = GPUTarget("cuda", request.arch, 32)
    built = triton.compile(source, target=target, options=options)
    registers, stack_bytes, counts, loops = _read(built.asm["cubin"], request)
    # Exponentials of a warp for a block. What jumps over a block's cells has fewer.
    least = config.block_m * config.block_n // (32 * config.num_warps)
    of_a_block = [size * least // exps for size, exps in loops if exps >= least]
    # Kernels without a producer have a loop for whole blocks, and one for cut blocks.
    if request.masked and config.loads != "producer" and len(of_a_block) < 2:
        of_a_block = []
    return Compiled(
        request, config, registers, stack_bytes, built.metadata.shared, counts,
        _in_flight(built.asm["ttgir"]), max(of_a_block, default=None),
    )  # fmt: skip


def _read(cubin: bytes, request: Request) -> tuple[int, int, dict[str, int], list[tuple[int, int]]]:
    """Registers and stack of one thread, `Compiled.instructions`, and the loops that multiply, from
    the machine code. A loop is the numbers of its instructions and of its exponentials.

    Triton's cache keeps them, by the code itself and what is looked for: to take a kernel apart
    again costs a third of a second, most of it the start of nvdisasm.
    """
    from triton.runtime.cache import get_cache_manager

    looked_for = json.dumps([_INSTRUCTIONS, _EXPONENTIAL, "shortest"]).encode()
    asked = hashlib.sha256(cubin + looked_for).hexdigest()
    kept, name = get_cache_manager(asked), "instructions.json"
    path = kept.get_file(name)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            used = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", file))
            sass = _cuobjdump("--dump-sass", file)
        if used is None:
            raise DeviceError(f"cuobjdump reports no resource usage for {request}")
        counts = {x: len(re.findall(pattern, sass)) for x, pattern in _INSTRUCTIONS.items()}
        found = [int(used[1]), int(used[2]), counts, _loops(sass)]
        path = kept.put(json.dumps(found), name, binary=False)
    registers, stack_bytes, counts, loops = json.loads(Path(path).read_text(encoding="utf-8"))
    return registers, stack_bytes, counts, loops


def _loops(sass: str) -> list[tuple[int, int]]:
    """The innermost loops that multiply on tensor cores and take exponentials: see `_read`."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    place = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    products = "|".join(_INSTRUCTIONS[name] for name in ("HMMA", "HGMMA", "tcgen05"))
    found: list[range] = []
    for end, (_, instruction) in enumerate(lines):
        back = re.search(r"\bBRA\S* (?:\S+, )?(0x[0-9a-f]+)", instruction)
        start = place.get(int(back[1], 16), end) if back else end
        body = [text for _, text in lines[start:end]]
        if all(any(re.search(x, text) for text in body) for x in (products, _EXPONENTIAL)):
            found.append(range(start, end + 1))
    # A wait that has gone on from behind the loop jumps back into it, too: the shortest are loops.
    inner: list[range] = []
    for loop in sorted(found, key=len):
        if all(loop[-1] < other[0] or other[-1] < loop[0] for other in inner):
            inner.append(loop)
    return [
        (len(loop), sum(bool(re.search(_EXPONENTIAL, lines[i][1])) for i in loop)) for loop in inner
    ]


def _in_flight(ttgir: str) -> int | None:
    """See `Compiled.in_flight`. ttgir: Triton's code before it becomes LLVM's."""
    found: list[int] = []
    depth, loops = 0, list[int]()  # the depths of loops around this line
    for line in ttgir.splitlines():
        wait = re.search(r"ttg\.async_wait\b.*\bnum = (\d+)", line)
        if wait and loops:
            found.append(int(wait[1]))
        if re.search(r"\bscf\.(for|while)\b", line):
            loops.append(depth)
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1]:
            loops.pop()
    return min(found, default=None)


def _kernel(kind: str) -> triton.runtime.JITFunction:
    from burst_rt.kernels.triton.decode import combine_kernel, decode_kernel
    from burst_rt.kernels.triton.delta import delta_kernel
    from burst_rt.kernels.triton.dkdv import dkdv_kernel
    from burst_rt.kernels.triton.dq import dq_kernel
    from burst_rt.kernels.triton.forward import forward_kernel

    return {
        "forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel, "delta": delta_kernel,
        "decode": decode_kernel, "combine": combine_kernel,
    }[kind]  # fmt: skip


def _with_producer(kind: str, meta: Meta) -> tuple[Any, Meta, int]:
    """The kernel in Gluon, its constants, and the warps that it is started with."""
    if kind == "backward":
        from burst_rt.kernels.triton import backward_hopper as backward

        return (
            backward.backward_hopper_kernel, backward.meta_of_backward(meta), backward.NUM_WARPS
        )  # fmt: skip
    from burst_rt.kernels.triton import forward_hopper as forward

    return forward.forward_hopper_kernel, forward.meta_of_hopper(meta), forward.NUM_WARPS


def _constants(request: Request, config: Config) -> dict[str, Any]:  # ints and bools
    ends, even = request.only, not request.ragged
    v_head_dim = request.v_head_dim or request.head_dim
    return {
        "HEAD_DIM": request.head_dim, "BLOCK_D": block_width(request.head_dim),
        "V_HEAD_DIM": v_head_dim, "BLOCK_DV": block_width(v_head_dim),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "MASKED": request.masked, "WIDTH": request.width, "SINGLE": request.single,
        "FIRST": ends, "LAST": ends, "SINKS": "sinks" in request.scores,
        "SOFTCAP": "softcap" in request.scores, "ALIBI": "alibi_slopes" in request.scores,
        "EVEN_M": even, "EVEN_N": even,
        "NEED_DK": True, "NEED_DV": True,
        # Cells of masks without spans are done in parts, which add up.
        "ADDS": not ends or request.width == CELLS,
        # A backward in one pass writes sums.
        "WIDE": not ends or request.width == CELLS or request.kind == "backward",
        "HAS_DLSE": True, "DESCRIBED": config.loads == "descriptors", "INTERPRET": False,
    }  # fmt: skip


def _type_of(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name == "p_spans" and constants["WIDTH"] == CELLS:
        return "*i8"
    if name.startswith("p_"):
        wide = name in _SUMS or (name in _GRADIENTS and constants["WIDE"])
        return "*i32" if name in _TABLES else "*fp32" if wide else f"*{dtype}"
    return _SCALARS.get(name, "i32")


def _cuobjdump(option: str, cubin: Path) -> str:
    """The output of triton's own cuobjdump, which knows all chips that triton knows."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    return subprocess.run(
        [str(tool), option, str(cubin)], capture_output=True, text=True, timeout=60, check=True
    ).stdout


if __name__ == "__main__":
    _main()
