"""Two builds side by side: the bits of drawn calls, the time of a tiny call and of an import.

    python tests/builds.py BEFORE [AFTER]

BEFORE, AFTER: a commit or a folder; AFTER is this work tree by default. Fails if one bit differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_CASES = 75  # some are refused: 60 and more give results
NUM_SERVED = 10
NUM_PAIRS = 20
CALLS = 2000  # number of tiny calls between two readings of the clock
FOLDERS = ("scheduler", "transport", "launch", "examples")
KINDS = ("contiguous", "zigzag", "striped", "balanced")
STRATEGIES = (
    "ring-kv", "burst", "ring-q", "bidirectional", "two-level:2", "direct", "all-to-all",
    "hybrid:2", "auto",
)  # fmt: skip


# What runs inside a build. The public API alone, so that it runs in any build.


def draw_case(seed: int) -> dict[str, Any]:
    """One call as plain data."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4])
    tokens = rng.randint(24, 150)
    return {
        "seed": seed,
        "world": rng.choice([1, 2, 2, 3, 4, 4]),
        "batch": rng.choice([1, 2]),
        "kv_heads": kv_heads,
        "heads": kv_heads * rng.choice([1, 2, 4]),
        "dims": rng.choice([(16, 16), (32, 32), (64, 64), (24, 16)]),
        "tokens": tokens,
        "keys": tokens if rng.random() < 0.8 else tokens + rng.randint(1, 60),
        "dtype": rng.choice(["float32", "float32", "bfloat16", "float64"]),
        "layout": rng.choice(KINDS),
        "strategy": rng.choice(STRATEGIES),
        "mask": rng.randrange(9),
        "softcap": rng.choice([None, None, 5.0]),
        "alibi": rng.random() < 0.25,
        "sinks": rng.random() < 0.25,
    }


def mask_of(case: dict[str, Any]) -> Any:
    import burst_rt as b

    tokens, keys = case["tokens"], case["keys"]
    rng = random.Random(case["seed"] + 1)
    ends = sorted(rng.sample(range(1, tokens), 3))
    lengths = [stop - start for start, stop in zip([0, *ends], [*ends, tokens], strict=True)]
    if tokens != keys and case["mask"] in (4, 5):
        return b.Causal()
    masks = [
        b.Full,
        b.Causal,
        b.Causal,
        lambda: b.Causal() & b.SlidingWindow(17, 0),
        lambda: b.Causal() & b.Documents(lengths),
        lambda: b.Documents(lengths) | b.First(3),
        lambda: b.Causal() & (b.SlidingWindow(9, 0) | b.First(4)),
        lambda: b.Prefix(min(20, keys)),
        lambda: b.Causal() & b.Chunked(32),
    ]  # fmt: skip
    return masks[case["mask"]]()


def results_of(case: dict[str, Any]) -> list[str]:
    """A digest of every rank's results, or the name of the error."""
    import torch

    import burst_rt

    made = torch.Generator().manual_seed(case["seed"])
    dtype = getattr(torch, case["dtype"])
    batch, heads, (head_dim, v_dim) = case["batch"], case["heads"], case["dims"]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

    q = tensor(batch, case["tokens"], heads, head_dim)
    k = tensor(batch, case["keys"], case["kv_heads"], head_dim)
    v = tensor(batch, case["keys"], case["kv_heads"], v_dim)
    grads = tensor(batch, case["tokens"], heads, v_dim)
    slopes = torch.rand(heads, generator=made) if case["alibi"] else None
    sink = torch.randn(heads, generator=made) if case["sinks"] else None

    def rank_main(ctx: Any) -> str:
        mask = mask_of(case)
        kind = case["layout"]
        balanced = {"mask": mask} if kind == "balanced" else {}
        layout = ctx.layout(case["tokens"], kind=kind, **balanced)
        kv_layout = layout
        if case["keys"] != case["tokens"]:
            kv_layout = ctx.layout(case["keys"], kind="zigzag" if balanced else kind)
        inputs = [
            layout.shard(q).requires_grad_(),
            kv_layout.shard(k).requires_grad_(),
            kv_layout.shard(v).requires_grad_(),
        ]
        learned = None if sink is None else sink.clone().requires_grad_()
        out, lse = burst_rt.burst_attention(
            *inputs, layout=layout, kv_layout=kv_layout, mask=mask, softcap=case["softcap"],
            alibi_slopes=slopes, sinks=learned, strategy=case["strategy"], return_lse=True,
        )  # fmt: skip
        finite = torch.where(lse.isfinite(), lse, 0.0)
        ((out * layout.shard(grads)).sum() + finite.sum()).backward()
        digest = hashlib.sha256()
        for result in (
            out,
            lse,
            *(x.grad for x in inputs),
            learned.grad if learned is not None else None,
        ):
            if result is not None:
                digest.update(result.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    try:
        return burst_rt.run_local(
            case["world"], rank_main, kernel="cpu", device="cpu", telemetry=False
        )
    except burst_rt.errors.BurstError as error:
        return [type(error).__name__]


def served_results_of(seed: int) -> list[str]:
    """A digest of every rank's results: a prompt in two chunks, then five tokens."""
    import torch

    import burst_rt

    rng = random.Random(f"served {seed}")
    kv_heads, batch = rng.choice([1, 2]), rng.choice([1, 2])
    chunks = [rng.randint(17, 90), rng.randint(1, 60), 1, 1, 3]
    made = torch.Generator().manual_seed(seed)
    heads = (2 * kv_heads, kv_heads, kv_heads)
    tokens = [[torch.randn(batch, n, h, 32, generator=made) for h in heads] for n in chunks]

    def rank_main(ctx: Any) -> str:
        cache = burst_rt.KVCache(
            ctx, num_layers=1, batch=batch, num_kv_heads=kv_heads, head_dim=32, capacity=256,
            dtype=torch.float32,
        )  # fmt: skip
        digest = hashlib.sha256()
        for chunk in tokens:
            step = cache.step(chunk[0].shape[1])
            out = step.attend(0, *(step.cut(x) for x in chunk))
            step.commit()
            digest.update(out.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    world = rng.choice([1, 2, 3, 4])
    return burst_rt.run_local(world, rank_main, kernel="cpu", device="cpu", telemetry=False)


def print_results() -> None:
    import torch

    torch.set_num_threads(1)
    for seed in range(NUM_CASES):
        print(json.dumps(results_of(draw_case(seed))), flush=True)
    for seed in range(NUM_SERVED):
        print(json.dumps(served_results_of(seed)), flush=True)


def time_tiny_calls() -> None:
    """Answers each line of stdin with the seconds of a forward and of a forward and backward."""
    import torch

    import burst_rt

    torch.set_num_threads(1)
    ctx = burst_rt.init(device="cpu", kernel="cpu", telemetry=False)
    layout = ctx.layout(16)
    q, k, v = (torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(3))
    grads = torch.ones(1, 16, 2, 16)

    def forward() -> None:
        with torch.no_grad():
            burst_rt.burst_attention(q, k, v, causal=True, layout=layout)

    def both() -> None:
        burst_rt.burst_attention(q, k, v, causal=True, layout=layout).backward(grads)

    def seconds_of(call: Any, number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - start) / number

    seconds_of(forward, 200), seconds_of(both, 200)
    for _ in sys.stdin:
        times = seconds_of(forward, CALLS), seconds_of(both, CALLS // 2)
        print(json.dumps(times), flush=True)
    ctx.close()


_IMPORT = """
import time, torch
start = time.perf_counter()
import burst_rt
burst_rt.burst_attention
print(time.perf_counter() - start)
"""


# What compares two builds.


def made_importable(tree: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH in which `tree` is the package burst_rt, without a copy."""
    package = folder / "burst_rt"
    package.mkdir(parents=True)
    for path in (tree / "burst_rt").iterdir():
        (package / path.name).symlink_to(path)
    for name in FOLDERS:
        (package / name).symlink_to(tree / name)
    return folder


def tree_of(build: str, folder: Path) -> Path:
    """The files of a commit, unpacked into `folder`; or the folder that `build` names."""
    if (Path(build) / "burst_rt").is_dir():
        return Path(build).resolve()
    folder.mkdir()
    archive = subprocess.run(["git", "archive", build], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def start(path: Path, *argv: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "BURST_RT_HARDWARE": "none"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(
        [sys.executable, *argv], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=path,
    )  # fmt: skip


def output_of(path: Path, *argv: str) -> str:
    process = start(path, *argv)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{argv} failed with {process.returncode} in {path.name}")
    return output


@contextmanager
def tiny_callers(paths: list[Path]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [start(path, __file__, "--tiny") for path in paths]
    try:
        yield processes
    finally:
        for process in processes:
            process.communicate()


def answer(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    forward, both = json.loads(process.stdout.readline())
    return forward, both


def compare_bits(paths: list[Path]) -> int:
    before, after = (output_of(path, __file__, "--bits").splitlines() for path in paths)
    different = [
        draw_case(seed) if seed < NUM_CASES else f"served {seed - NUM_CASES}"
        for seed, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    ]
    refused = sum("Error" in line or "Mismatch" in line for line in after)
    equal = len(after) - len(different)
    print(f"bits: {equal} of {len(after)} cases equal, {refused} of them refused alike")
    for case in different:
        print("  differs:", case)
    return len(different)


def compare_tiny_calls(paths: list[Path], pairs: int) -> None:
    """Prints ratios within pairs. Processes are new every five pairs: memory places are luck."""
    readings: list[list[tuple[float, float]]] = []
    while len(readings) < pairs:
        with tiny_callers(paths) as processes:
            for _ in range(min(5, pairs - len(readings))):
                order = (0, 1) if len(readings) % 2 else (1, 0)
                times = {side: answer(processes[side]) for side in order}
                readings.append([times[0], times[1]])
    for index, name in enumerate(("forward", "forward + backward")):
        ratios = [new[index] / old[index] for old, new in readings]
        middles = [
            statistics.median(pair[side][index] for pair in readings) * 1e6 for side in (0, 1)
        ]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        print(
            f"tiny call, {name}: {middles[0]:.1f} us before, {middles[1]:.1f} us after; "
            f"ratio {middle:.3f} (quartiles {lower:.3f} to {upper:.3f}) in {pairs} pairs"
        )


def compare_starts(paths: list[Path], pairs: int) -> None:
    for name, argv in (
        ("import burst_rt after torch", ("-c", _IMPORT)),
        ("burst-rt plan --help", ("-m", "burst_rt.launch.main", "plan", "--help")),
    ):
        times: tuple[list[float], list[float]] = ([], [])
        for pair in range(pairs + 1):  # the first fills caches of byte code
            for side in (0, 1) if pair % 2 else (1, 0):
                began = time.perf_counter()
                text = output_of(paths[side], *argv)
                took = float(text) if argv[0] == "-c" else time.perf_counter() - began
                if pair:
                    times[side].append(took)
        before, after = (statistics.median(side) * 1e3 for side in times)
        ratio = statistics.median(new / old for old, new in zip(*times, strict=True))
        print(f"{name}: {before:.0f} ms before, {after:.0f} ms after; ratio {ratio:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?", default=str(ROOT))
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of tiny calls; 0: bits alone")
    parser.add_argument("--bits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bits or options.tiny:
        print_results() if options.bits else time_tiny_calls()
        return 0
    if options.before is None:
        parser.error("name the build before: a commit or a folder")
    with tempfile.TemporaryDirectory() as scratch:
        paths = []
        for side, build in (("before", options.before), ("after", options.after)):
            tree = tree_of(build, Path(scratch, f"{side}-files"))
            paths.append(made_importable(tree, Path(scratch, side)))
        different = compare_bits(paths)
        if options.pairs:
            compare_tiny_calls(paths, options.pairs)
            compare_starts(paths, min(options.pairs, 10))
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
