"""flash-linear-attention's kernels as kernels of recurrences, interpreted on a CPU.

The interpreter takes bfloat16 for integers (`findings/triton_interprets_bfloat16.sh`), so the
inputs are float32, which shows what is computed, and float16, which shows roundings.
"""

from __future__ import annotations

import builtins
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fla_calls import KINDS, fitting, run, worse_than_its_own
from recurrences import Drawn, errors, truth
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

import burst_rt
from burst_rt import Context, recurrence
from burst_rt.errors import InputError
from burst_rt.kernels import speed
from burst_rt.planning.segments import Way
from burst_rt.recurrence import fla, kernels
from burst_rt.recurrence.base import RecurrenceWork, SegmentGrads, SegmentTensors
from burst_rt.recurrence.matrix import DeltaRule, LinearAttention
from burst_rt.recurrence.memory import LiveBytes

# The kernels overflow where they throw the result away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _range(*bounds: Any) -> Iterator[Any]:
    """A compiled kernel's numbers of a loop are tensors; the interpreter's are Python's."""
    for i in builtins.range(*(int(bound) for bound in bounds)):
        yield interpreter._implicit_cvt(i)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is remembered that the library's results have been compared."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "seconds_in_turn", speed.seconds_in_turn)


@pytest.fixture(autouse=True)
def _fla_on_a_cpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(speed, "_known", {})
    # Results are compared, but the interpreter's speed is nobody's.
    monkeypatch.setattr(kernels, "seconds_in_turn", lambda _, runs: dict.fromkeys(runs, 1.0))
    monkeypatch.setattr(kernels, "_TIMED", 70)
    monkeypatch.setattr(kernels, "_COMPARED", 70)
    monkeypatch.setattr(fla, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(fla, "_DTYPES", (torch.float32, torch.float16))
    # Block sizes are not timed: the first ones are taken.
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: 0.0)
    for module in ("chunk_h", "chunk_delta_h"):
        with warnings.catch_warnings(action="ignore"):  # there is no GPU
            library = import_module(f"fla.ops.common.{module}")
        monkeypatch.setattr(library, "range", _range, raising=False)


def _wrong(case: Drawn) -> dict[str, float]:
    """Results that are more than roundings of float32 away from the spec's.

    Sums of decays are float32: errors are 10 times those of torch's operators where decays are
    near 0 (measured 6e-5).
    """
    found = errors(run(case, torch.float32, "cpu"), truth(case))
    return {name: e for name, e in found.items() if not e < 1e-4}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_drawn_calls_against_the_spec(
    kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of one token and across ranks, rows that differ, states, shared heads."""
    monkeypatch.setenv("BURST_RT_POISON", "1")
    for seed in seeds:
        case = fitting(seed, kind)
        wrong = _wrong(case)
        assert not wrong, (case.about, wrong)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_roundings_are_those_of_the_library(kind: str) -> None:
    """In 16 bits the errors are at most 1.5 times those of its own call on the whole sequence."""
    cases = (fitting(seed, kind, 3, torch.float16) for seed in range(100))
    case = next(x for x in cases if x.batch == 1 and x.documents and x.seq_len in (65, 127))
    wrong = worse_than_its_own(case, torch.float16, "cpu")
    assert not wrong, (case.about, wrong)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_segments_are_folded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank makes the map of its segment while it waits, in both directions."""

    def ways(segments: Any, *_: Any, **__: Any) -> tuple[Way, ...]:
        return (Way.RELAYED, *[Way.FOLDED] * (len(segments) - 2), Way.RELAYED)

    monkeypatch.setattr("burst_rt.recurrence.call.ways_of", ways)
    cases = (fitting(seed, kind, 3) for seed in range(500))
    case = next(
        x for x in cases if x.seq_len == 64 and x.layout == "contiguous" and x.batch == 1
        and x.state is not None and x.documents is None and x.returns_state
    )  # fmt: skip
    wrong = _wrong(case)
    assert not wrong, (case.about, wrong)


def _explained(ctx: Context, function: Any = recurrence.gated_delta_rule, **changes: Any) -> str:
    layout = ctx.layout(40)
    q, k, v = (torch.ones(1, layout.shard_len, 1, 16).half().requires_grad_() for _ in range(3))
    g, beta = torch.zeros(1, layout.shard_len, 1), torch.ones(1, layout.shard_len, 1).half()
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | changes
    return str(recurrence.explain_recurrence(function, **given, layout=layout))


@pytest.mark.usefixtures("nothing_remembered")
def test_auto_times_the_kernels_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = burst_rt.run_local(1, _explained)[0]
    both = r"kernel torch: the fastest of torch \d+\.\d+ ms, fla \d+\.\d+ ms for 70 tokens "
    assert re.search(both + r"\(measured now\)", said)  # the interpreter is slow
    assert said.count("kernel torch: ") == 2  # forward and backward
    speed._known.clear()
    said = burst_rt.run_local(1, _explained)[0]
    assert re.search(both + r"\(remembered for this chip\)", said)
    speed._known.clear()
    monkeypatch.setattr(speed, "recall", lambda *_: None)
    monkeypatch.setattr(kernels, "_measured", lambda *_: {"torch": 2.0, "fla": 1.0})
    said = burst_rt.run_local(1, _explained)[0]
    assert "kernel fla: the fastest of fla 1000.000 ms, torch 2000.000 ms for 70 tokens" in said


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.parametrize("broken", ["scale", "signature", "missing"])
def test_a_library_that_computes_something_else_is_not_taken(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inner functions are no public interface: other releases may have others."""
    true = fla._function

    def function(path: str) -> Any:
        if not path.endswith("chunk_fwd_o"):
            return true(path)
        if broken == "missing":
            return true(path + "_of_old")
        if broken == "signature":
            return lambda *, q, k, v, g, scale: None
        return lambda **given: true(path)(**given | {"scale": 2 * given["scale"]})

    monkeypatch.setattr(fla, "_function", function)
    why = {
        "scale": r"its out is 100% off that of torch's operators",
        "signature": r"TypeError: .*unexpected keyword argument 'h'",
        "missing": r"AttributeError: .*has no attribute 'chunk_fwd_o_of_old'",
    }[broken]
    said = burst_rt.run_local(1, _explained)[0]
    assert re.search(rf"kernel torch: the fastest of torch .*; fla failed: {why}", said)

    def refused(ctx: Context) -> None:
        with pytest.raises(InputError, match=f"'fla' was asked for, but {why}"):
            _explained(ctx)

    burst_rt.run_local(1, refused, recurrence_kernel="fla")


def test_calls_that_it_cannot_do_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(1, 40, 1, 24)

    def told(ctx: Context) -> None:
        assert (
            "kernel torch: the only kernel here that can compute this call; the fla kernel "
            "takes K and V that are multiples of 16, and K up to 256, got 16 and 24"
            in _explained(ctx, v=ones.half())
        )
        assert "got torch.float16, torch.float32" in _explained(ctx, q=ones[..., :16])
        with monkeypatch.context() as patch:
            patch.setattr(fla, "find_spec", lambda _: None)
            assert (
                "the only kernel here that can compute this call; flash-linear-attention is not "
                "installed (pip install fla-core)" in _explained(ctx)
            )
        x = torch.ones(1, 40, 8).half()
        said = recurrence.explain_recurrence(
            recurrence.linear_recurrence, x, -x, layout=ctx.layout(40)
        )
        assert "kernel torch: the only kernel of this recurrence" in str(said)

    burst_rt.run_local(1, told)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_memory_is_about_what_the_library_takes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's functions allocate what they give to kernels, which here are not started."""
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)
    shapes = {"q": (2, 64), "k": (2, 64), "v": (4, 32), "g": (4,), "beta": (4,)}
    if "channel" in kind:
        shapes["g"] = (4, 64)
    if "linear" in kind:
        del shapes["beta"]
    types = {name: torch.half if name in "qkv" else torch.float32 for name in shapes}
    tokens = tuple(torch.zeros(2, 192, *shapes[name], dtype=types[name]) for name in shapes)
    rule = DeltaRule(normalised=True) if "rule" in kind else LinearAttention()
    described = tuple((shapes[name], types[name]) for name in shapes)
    work = RecurrenceWork(rule, described, torch.half, torch.device("cpu"))
    problem = SegmentTensors(tokens, (), None, torch.float32)
    state, last = torch.zeros(2, *rule.state_shape(tokens, ()))
    maker, out = fla.FlaStages(rule), torch.empty_like(tokens[2])
    sums = SegmentGrads((None,) * len(tokens), ())
    for forward, stages in (
        (True, maker.forward(problem, out)),
        (False, maker.backward(problem, state, out, sums)),
    ):
        with torch.no_grad(), LiveBytes((*tokens, state, last, out)) as living:
            stages.prepare()
            stages.advance(state, last)
            stages.emit()
        said = fla.stage_bytes(work, 384, forward=forward)
        assert 0.8 * said < living.peak < 1.2 * said, (forward, said, living.peak)
