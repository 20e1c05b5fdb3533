"""Activation checkpointing: attention's rings go round once a direction, all else is computed
again, and gradients are the same bits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import burst_rt
from burst_rt import Context, ContextLayout, SlidingWindow
from burst_rt.attention.autograd import forward_op
from burst_rt.errors import InputError

_HEADS, _DIM, _WINDOW = 4, 16, SlidingWindow(5)


class _Layer(torch.nn.Module):
    """A layer with two attentions, the first of which is weighed by its lse."""

    def __init__(self, strategy: str, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.strategy, self.dropout = strategy, dropout
        self.q, self.k, self.v, self.out = (torch.nn.Linear(_DIM, _DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, *, layout: ContextLayout, scale: float) -> torch.Tensor:
        y = x.tanh()
        q, k, v = (project(y).unflatten(-1, (_HEADS, -1)) for project in (self.q, self.k, self.v))
        attend = partial(
            burst_rt.burst_attention, layout=layout, strategy=self.strategy, scale=scale
        )
        out, lse = attend(q, k, v, causal=True, return_lse=True)
        gate = lse.transpose(1, 2).unsqueeze(-1).sigmoid().to(out.dtype)
        out = attend(out * gate, k, v, mask=_WINDOW)
        return x + functional.dropout(self.out(out.flatten(-2)), self.dropout)


_Run: TypeAlias = Callable[..., torch.Tensor]
_contexts = partial(create_selective_checkpoint_contexts, burst_rt.keep_attention)
# A layer, made to run in one of the ways to say it.
_WAYS: dict[str, Callable[[_Layer], _Run]] = {
    "checkpoint": lambda layer: partial(burst_rt.checkpoint, layer),
    "policy": lambda layer: partial(
        torch_checkpoint, layer, use_reentrant=False, context_fn=_contexts
    ),
    "wrapper": lambda layer: checkpoint_wrapper(layer, checkpoint_fn=burst_rt.checkpoint),
}


def _plain(layer: _Layer) -> _Run:
    return layer


def _layers(strategy: str, **options: Any) -> list[_Layer]:
    """Two layers, the same on every rank."""
    layers = [_Layer(strategy, **options) for _ in range(2)]
    # A generator of its own: ranks may be threads.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (each for layer in layers for each in layer.parameters()):
            parameter.normal_(0.0, 0.3, generator=generator)
    return layers


def _inputs(layout: ContextLayout) -> torch.Tensor:
    return layout.shard(torch.randn(2, 24, _DIM, generator=torch.Generator().manual_seed(1)))


def _loss(layout: ContextLayout, runs: Sequence[_Run], x: torch.Tensor) -> torch.Tensor:
    for run in runs:
        x = run(x, layout=layout, scale=0.3)
    return x.square().sum()


def _grads(layers: list[_Layer]) -> list[torch.Tensor | None]:
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


def _equal(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("strategy", "way", "trains"),
    [
        ("burst", "checkpoint", "all"),
        ("ring-kv", "policy", "out"),
        ("all-to-all", "wrapper", "v"),
        ("all-to-all", "checkpoint", "all"),
        ("hybrid:2", "policy", "all"),
        ("hybrid:2", "checkpoint", "x"),
    ],
)
def test_each_ring_goes_round_once_a_direction(strategy: str, way: str, trains: str) -> None:
    """Without gradients of q, k and v ("out": of the first layer) there is no backward at all."""

    def run(ctx: Context) -> None:
        layout, found = ctx.layout(24), []
        for wrap in (_plain, _WAYS[way]):
            layers = _layers(strategy)
            for name, parameter in (each for layer in layers for each in layer.named_parameters()):
                parameter.requires_grad_(trains == "all" or name.startswith(trains))
            x = _inputs(layout).requires_grad_(trains == "x")
            before = ctx.stats()
            loss = _loss(layout, [wrap(layer) for layer in layers], x)
            forward = ctx.stats().calls - before.calls
            loss.backward()
            after = ctx.stats()
            assert forward == 4
            assert after.calls - before.calls == 4 + (2 if trains == "out" else 4)
            grads = [loss.detach(), x.grad, *_grads(layers)]
            found.append((grads, after.bytes_sent - before.bytes_sent))
        (plain, plain_bytes), (again, again_bytes) = found
        assert _equal(plain, again), "bit for bit"
        assert plain_bytes == again_bytes > 0

    burst_rt.run_local(4, run)


@pytest.fixture
def layout() -> Iterator[ContextLayout]:
    """Of a world of one rank."""
    with burst_rt.init() as ctx:
        yield ctx.layout(24)


class _Count(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[object] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own protocol
        self.ops[func] += 1
        return func(*args, **(kwargs or {}))


def _mine(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.tanh.default:
        return CheckpointPolicy.MUST_SAVE
    return burst_rt.keep_attention(context, op, *args, **kwargs)


@pytest.mark.parametrize(("policy", "tanhs"), [(burst_rt.keep_attention, 2), (_mine, 0)])
def test_all_but_attention_is_computed_again_unless_a_policy_of_ones_own_keeps_it(
    layout: ContextLayout, policy: Any, tanhs: int
) -> None:
    layers = _layers("auto")
    contexts = partial(create_selective_checkpoint_contexts, policy)
    runs = [
        partial(torch_checkpoint, layer, use_reentrant=False, context_fn=contexts)
        for layer in layers
    ]
    loss = _loss(layout, runs, _inputs(layout).requires_grad_())
    with _Count() as count:
        loss.backward()
    assert count.ops[torch.ops.aten.tanh.default] == tanhs
    assert count.ops[torch.ops.aten.sigmoid.default] == 2
    assert count.ops[forward_op] == 0


def test_of_a_layers_activations_attentions_outputs_are_kept_alone(layout: ContextLayout) -> None:
    for wrap, expected in ((_plain, [False, False]), (_WAYS["checkpoint"], [True, False])):
        (layer, _) = _layers("auto")
        seen: list[StorageWeakRef] = []

        def see(x: torch.Tensor, seen: list[StorageWeakRef] = seen) -> None:
            seen.append(StorageWeakRef(x.untyped_storage()))

        layer.q.register_forward_hook(lambda module, given, q, see=see: see(q))
        layer.out.register_forward_pre_hook(lambda module, given, see=see: see(given[0]))
        loss = _loss(layout, [wrap(layer)], _inputs(layout))
        assert [reference.expired() for reference in seen] == expected, "q, attention's output"
        loss.backward()


def test_random_numbers_are_drawn_again_as_they_were(layout: ContextLayout) -> None:
    found = []
    for wrap in (_plain, _WAYS["checkpoint"]):
        layers = _layers("auto", dropout=0.5)
        torch.manual_seed(3)
        _loss(layout, [wrap(layer) for layer in layers], _inputs(layout)).backward()
        found.append(_grads(layers))
    assert _equal(*found)


def test_layers_may_share_weights_under_autocast(layout: ContextLayout) -> None:
    """Autocast would cast a weight for the second layer in the second computation alone."""
    found = []
    for wrap, remembers in ((_plain, False), (_WAYS["checkpoint"], True)):
        (layer, _) = _layers("auto")
        before = layout.runtime.stats().calls
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=remembers):
            loss = _loss(layout, [wrap(layer)] * 2, _inputs(layout))
        loss.backward()
        assert layout.runtime.stats().calls - before == 8
        found.append(_grads([layer]))
    assert _equal(*found)


def test_a_second_backward_is_refused(layout: ContextLayout) -> None:
    layers = _layers("auto")
    loss = _loss(layout, [_WAYS["checkpoint"](each) for each in layers], _inputs(layout))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        loss.backward()


def test_without_gradients_nothing_is_kept(layout: ContextLayout) -> None:
    layers = _layers("auto")
    with torch.no_grad():
        loss = _loss(layout, [_WAYS["checkpoint"](each) for each in layers], _inputs(layout))
    assert loss == _loss(layout, layers, _inputs(layout))
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_reentrant": True}, "use_reentrant=True cannot"),
        ({"context_fn": _contexts}, "context_fn cannot"),
        ({"debug": True}, "debug cannot"),
    ],
)
def test_what_leaves_no_room_for_the_policy_is_refused(options: dict[str, Any], said: str) -> None:
    """On every rank, though one rank alone is wrong; the next call works."""

    def run(ctx: Context) -> None:
        (layer, _), layout = _layers("auto"), ctx.layout(24)
        wrong = options if ctx.rank == 1 else {}
        for given in (wrong, {"use_reentrant": False}):
            with pytest.raises(InputError, match=said) if given is wrong else nullcontext():
                _loss(layout, [partial(burst_rt.checkpoint, layer, **given)], _inputs(layout))

    burst_rt.run_local(2, run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_around_the_checkpoint_no_ring_goes_round_twice(layout: ContextLayout) -> None:
    def step(x: torch.Tensor, runs: list[_Run]) -> torch.Tensor:
        return _loss(layout, runs, x)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=torch.__version__ >= "2.13", backend="aot_eager")
    found = []
    for function, wrap in ((step, _plain), (compiled, _WAYS["checkpoint"])):
        layers = _layers("auto")
        before = layout.runtime.stats().calls
        loss = function(_inputs(layout), [wrap(layer) for layer in layers])
        loss.backward()
        assert layout.runtime.stats().calls - before == 8
        found.append([loss.detach(), *_grads(layers)])
    torch.compiler.reset()
    assert _equal(*found)


def test_masks_of_checkpointed_calls_go_with_their_step(layout: ContextLayout) -> None:
    """Each was kept for compiled programs, until 4,096 others had come."""
    gone = []
    for step in range(3):
        table = torch.ones(layout.seq_len, layout.seq_len, dtype=torch.bool)
        table[:, step] = False
        mask = burst_rt.BlockSparse(table, 1)
        gone.append(weakref.ref(mask))
        x = torch.randn(1, layout.shard_len, 1, 16, requires_grad=True)
        attend = partial(burst_rt.burst_attention, layout=layout, mask=mask)
        burst_rt.checkpoint(lambda x, attend=attend: attend(x, x, x), x).sum().backward()
    assert layout.attention.held == {}
