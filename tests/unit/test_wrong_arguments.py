"""Whatever a public function is given, its error is typed: none of torch's, none of Python's."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from wrong_arguments import WRONG, GoodCall, OwnError, good_calls

import burst_rt
from burst_rt import Context, recurrence, telemetry
from burst_rt.errors import BurstError, ConfigError, DeviceError, InputError

# Public names that are not called with a user's arguments, and why.
_NOT_CALLED = {
    "Call": "made by make_call",
    "Context": "made by init",
    "ContextLayout": "made by Context.layout",
    "Explanation": "made by explain",
    "BurstAttentionFunction": "called by burst_attention, with a checked call",
    "LayerCosts": "a record; shard_batch checks it",
    "LocalRank": "a record of run_local",
    "Mask": "a base class",
    "Pipeline": "made by Context.pipeline",
    "Relation": "constants",
    "ShardedBatch": "made by shard_batch",
    "Spans": "what masks answer; calls check it",
    "Stats": "made by Context.stats",
    "Step": "made by KVCache.step",
    "TreeRow": "made by tree_row",
    "init": "test_any_argument_of_init",
    "keep_attention": "torch calls it",
    "run_local": "test_any_argument_of_run_local",
    "errors": "a module",
    "telemetry": "a module",
    "Causal": "takes nothing",
    "Full": "takes nothing",
    "recurrence.RecurrenceExplanation": "made by explain_recurrence",
    "recurrence.RecurrencePlan": "made by explain_recurrence",
    "telemetry.TokenMeter": "takes a cache",
    "telemetry.report": "does nothing without telemetry; test_telemetry_hub has wrong ones",
}


@pytest.fixture(scope="module")
def ctx() -> Iterator[Context]:
    with burst_rt.init(device="cpu") as context:
        yield context


def _named(ctx: Context) -> dict[str, GoodCall]:
    return {f"{call.of} {call.about}".strip(): call for call in good_calls(ctx)}


with burst_rt.init(device="cpu") as _context:
    _NAMES = list(_named(_context))


def test_all_public_names_are_called() -> None:
    public = set(burst_rt.__all__)
    for room in (recurrence, telemetry):
        public |= {f"{room.__name__.removeprefix('burst_rt.')}.{name}" for name in room.__all__}
    called = {name.split(" ", maxsplit=1)[0] for name in _NAMES} | {"BurstAttention"}
    assert public - called == set(_NOT_CALLED)


@pytest.mark.parametrize("name", _NAMES)
def test_any_argument(ctx: Context, name: str) -> None:
    call = _named(ctx)[name]
    call.function(**call.arguments)
    raw: dict[str, list[str]] = defaultdict(list)
    refused = 0
    for argument in call.arguments:
        for kind, wrong in WRONG.items():
            try:
                call.function(**(call.arguments | {argument: wrong()}))
            except BurstError as error:
                # A cache of any size may be asked for; the memory for it is not there.
                documented = (InputError, DeviceError) if "KVCache" in name else InputError
                if not isinstance(error, documented) or not str(error):
                    raw[f"{argument}: {error!r}"].append(kind)
                refused += 1
            except OwnError:
                pass
            except Exception as error:  # noqa: BLE001  (whatever it is, it is told below)
                if not _is_own(argument, kind):
                    raw[f"{argument}: {type(error).__name__}: {error}"].append(kind)
            assert ctx.runtime.broken is None or argument == "op", (argument, kind)
            ctx.runtime.broken = None
    assert not raw, dict(raw)
    assert refused > len(WRONG) / 3


def _is_own(argument: str, kind: str) -> bool:
    """Whether an error is that of a callable, which was called as documented."""
    called = {"function", "forward", "backward", "fn", "op"}
    return argument in called and kind in ("a class", "a module", "a function of none")


@pytest.mark.parametrize("argument", [
    "comm", "device", "timeout_s", "stall_s", "group", "join_s", "transport", "kernel",
    "recurrence_kernel", "partials", "check_finite", "telemetry",
])  # fmt: skip
def test_any_argument_of_init(argument: str) -> None:
    assert argument in inspect.signature(burst_rt.init).parameters
    refused = 0
    for wrong in WRONG.values():
        given = {"device": "cpu"} | {argument: wrong()}
        try:
            burst_rt.init(**given).close()
        except BurstError as error:
            refused += isinstance(error, InputError | ConfigError)
    assert refused > len(WRONG) / 2


@pytest.mark.parametrize("argument", ["world_size", "fn"])
def test_any_argument_of_run_local(argument: str) -> None:
    refused = 0
    for kind, wrong in WRONG.items():
        given: dict[str, Any] = {"world_size": 1, "fn": lambda ctx: None, "device": "cpu"} | {
            argument: wrong()
        }
        try:
            burst_rt.run_local(**given)
        except InputError:
            refused += 1
        except OwnError:
            pass
        except TypeError:
            if not _is_own(argument, kind):
                raise
    assert refused > len(WRONG) / 2


def test_complex_logits_are_refused(ctx: Context) -> None:
    logits = torch.zeros(1, 3, 5, dtype=torch.complex64)
    labels = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=r"logits: expected dense floating-point .*complex64"):
        burst_rt.cross_entropy(logits, labels, group=ctx)


def test_what_is_missing_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        burst_rt.run_local(2)  # type: ignore[call-arg]
