"""Layouts of whole documents: what is cut, how even ranks are, and results that do not change."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import gradients, make_batch, make_model, truth
from spec import reference, relative_error

import burst_rt
import burst_rt.hf
from burst_rt import Causal, Context, Documents, burst_attention
from burst_rt.errors import InputError
from burst_rt.planning.balance import load_of
from burst_rt.planning.chooser import whole_layout
from burst_rt.planning.layouts import Layout, make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.problem import Problem
from burst_rt.planning.whole import deal_whole

pytestmark = pytest.mark.usefixtures("no_parts_left")

_SMALL = 1e-5


def _drawn(seed: int, most: int) -> list[int]:
    """Lengths of documents, of which some are much longer than others."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    drawn = np.clip(rng.lognormal(np.log(most / 10), 1.3, count), 1, most)
    return [int(length) for length in drawn]


def _owners(runs: tuple[tuple[range, ...], ...], tokens: int) -> np.ndarray[Any, Any]:
    """The rank of each token, each of which has one."""
    owners = np.full(tokens, -1)
    for rank, own in enumerate(runs):
        assert list(own) == sorted(own, key=lambda run: run.start)
        for run in own:
            assert (owners[run.start : run.stop] == -1).all()
            owners[run.start : run.stop] = rank
    assert (owners >= 0).all()
    return owners


def _cut(lengths: list[int], owners: np.ndarray[Any, Any]) -> list[int]:
    """The lengths of documents that several ranks have."""
    ends = np.cumsum(lengths)[:-1]
    return [len(part) for part in np.split(owners, ends) if len(set(part.tolist())) > 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 17, 64])
def test_ranks_are_even_where_documents_allow_it(world_size: int) -> None:
    for seed in range(30):
        lengths = _drawn(seed, 4000)
        mask, tokens = Causal() & Documents(lengths), sum(lengths)
        if tokens < 200 * world_size:
            continue
        load = load_of(mask, tokens, tokens)
        for token_cells, tolerance in ((0.0, 0.05), (3000.0, 0.05), (3000.0, 0.5)):
            runs = deal_whole(load, world_size, token_cells, tolerance)
            owners = _owners(runs, tokens)
            weights = np.bincount(owners, load.rows + max(1.0, token_cells), world_size)
            # Parts are cut in steps, and their cells are even to some percent.
            assert weights.max() <= weights.mean() * (1 + tolerance + 0.05), (seed, token_cells)
            assert weights.min() > 0


def test_only_documents_are_cut_that_must_be() -> None:
    def cut(lengths: list[int], world_size: int, tolerance: float = 0.05) -> list[int]:
        tokens = sum(lengths)
        load = load_of(Causal() & Documents(lengths), tokens, tokens)
        return _cut(lengths, _owners(deal_whole(load, world_size, 0.0, tolerance), tokens))

    assert cut([100] * 8, 4) == []
    assert cut([100] * 9, 4) == [100, 100, 100]  # a ninth over all, at the price of three
    assert cut([100] * 9, 4, tolerance=0.4) == []
    assert cut([1000, *[10] * 200], 2) == [1000]  # by attention it is most of the work
    assert cut([1000, 1000, *[10] * 200], 2) == []
    assert cut([500, 700, 300, 200, 640], 2) == []
    assert cut([3, 3, 3], 3) == []


def test_a_tree_is_a_unit_and_so_is_a_row_that_only_some_rows_cut() -> None:
    tree = burst_rt.PrefixTree([40, 10, 20, 30, 5, 6], [-1, 0, 0, -1, 3, 3])
    layout = make_layout("whole", 111, 2, Causal() & tree, 0.0, 0.9)
    assert _cut([70, 41], _owners(layout.runs, 111)) == []
    rows = Causal() & Documents([[50, 30, 20], [20, 60, 20]])
    layout = make_layout("whole", 100, 2, rows, 0.0, 0.9)
    assert set(_cut([80, 20], _owners(layout.runs, 100))) <= {80}


@pytest.mark.parametrize("seed", range(40))
def test_attention_is_that_of_one_process(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = _drawn(seed, 150)
    tokens, world_size = sum(lengths), int(rng.integers(1, 6))
    mask = Causal() & Documents(lengths)
    if rng.integers(3) == 0:
        mask &= burst_rt.SlidingWindow(int(rng.integers(1, 30)))
    strategy = rng.choice(["auto", "ring-kv", "burst", "direct", "bidirectional", "two-level"])
    token_cells = float(rng.choice([0, 50, 1e6]))
    q, k, v, dout = (
        torch.from_numpy(rng.standard_normal((1, tokens, heads, 16))).float()
        for heads in (4, 2, 2, 4)
    )

    def run(ctx: Context) -> list[torch.Tensor]:
        layout = ctx.layout(tokens, "whole", mask=mask, token_cells=token_cells)
        parts = [layout.shard(x).requires_grad_() for x in (q, k, v)]
        out = burst_attention(*parts, layout=layout, mask=mask, strategy=strategy)
        assert isinstance(out, torch.Tensor)
        out.backward(layout.shard(dout))
        return [layout.unshard(x) for x in (out.detach(), *(part.grad for part in parts))]  # type: ignore[arg-type]

    expected = reference(q, k, v, dout, mask=mask)
    for found in burst_rt.run_local(world_size, run):
        true_ones = (expected.out, expected.dq, expected.dk, expected.dv)
        for mine, true in zip(found, true_ones, strict=True):
            assert true is not None
            assert relative_error(mine, true) < _SMALL


def test_nothing_is_sent_where_documents_fit() -> None:
    lengths = [300, 200, 100, 400]
    mask = Causal() & Documents(lengths)

    def run(ctx: Context) -> int:
        layout = ctx.layout(1000, "whole", mask=mask, token_cells=1e6)
        q = torch.randn(1, layout.shard_len, 2, 16, requires_grad=True)
        before = ctx.runtime.transport.bytes_sent
        burst_attention(q, q, q, layout=layout, mask=mask).sum().backward()
        return ctx.runtime.transport.bytes_sent - before

    sent = burst_rt.run_local(2, run)
    assert max(sent) < 2000  # contracts alone; a document's keys would be 25 KB


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "Mixtral"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_models_are_those_of_one_process(name: str, num_ranks: int) -> None:
    expected, model = truth(name, "packed"), make_model(name)

    def run(ctx: Context) -> tuple[float, dict[str, torch.Tensor], list[int]]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(make_batch(name, "packed"), ctx, "whole")
        loss = mine(**part).loss
        loss.backward()
        burst_rt.average_gradients(mine.parameters(), group=ctx)
        layout: Layout = part["burst_rt"].batch.layout.map
        assert layout.kind == "whole"
        return loss.item(), gradients(mine), list(map(layout.shard_len, range(num_ranks)))

    for loss, grads, lengths in burst_rt.run_local(num_ranks, run, timeout_s=60):
        assert num_ranks == 3 or len(set(lengths)) > 1
        assert loss == pytest.approx(expected["loss"], rel=_SMALL)
        least = 1e-2 * max(float(x.abs().max()) for x in expected["gradients"].values())
        for label, true in expected["gradients"].items():
            largest = max(float(true.abs().max()), least)
            assert float((grads[label] - true).abs().max()) < _SMALL * largest, label


def _problem(lengths: list[int], world_size: int) -> Problem:
    tokens = sum(lengths)
    plain = make_layout("zigzag", tokens, world_size)
    return Problem(
        q_layout=plain, kv_layout=plain, mask=Causal() & Documents(lengths), batch=1, num_heads=32,
        num_kv_heads=8, head_dim=128, input_bytes=2, sum_bytes=4, needs_grad=(True,) * 3,
    )  # fmt: skip


def test_more_is_cut_where_the_network_is_faster() -> None:
    """Three equal documents on two ranks: one of them is cut where its keys travel in time."""
    fast = load_hardware("h100-sxm")
    link = replace(fast.node.link, bytes_per_s=fast.node.link.bytes_per_s / 3000)
    slow = replace(fast, node=replace(fast.node, link=link))
    problem = _problem([8192] * 3, 2)

    def cuts(hardware: Any) -> list[int]:
        layout = whole_layout(problem, hardware, ranks_per_node=8, token_cells=0.0)
        return _cut([8192] * 3, _owners(layout.runs, 3 * 8192))

    assert cuts(fast) == [8192]
    assert cuts(slow) == []
    assert cuts(None) == [8192]


def test_wrong_prices_are_refused() -> None:
    with burst_rt.init(device="cpu") as ctx:
        for kind, price in (("whole", -1), ("whole", True), ("zigzag", 3.0), ("whole", np.inf)):
            with pytest.raises(
                InputError, match=r"token_cells(: expected float| is a number of at least 0)"
            ):
                ctx.layout(8, kind, mask=Causal(), token_cells=price)
        with pytest.raises(InputError, match="kind 'whole' needs mask"):
            ctx.layout(8, "whole")


def test_a_batch_says_what_its_layers_cost() -> None:
    """By the price of tokens a long document is cut or not; other layouts refuse a price."""
    positions = torch.cat([torch.arange(n) for n in (400, 100, 100, 100, 100)])
    batch = {"input_ids": torch.zeros(1, 800, dtype=torch.int64), "position_ids": positions}

    def run(ctx: Context) -> list[list[int]]:
        found = []
        prices = [burst_rt.LayerCosts(token_cells=cells) for cells in (0.0, 1e6)]
        for costs in prices:
            layout = burst_rt.shard_batch(batch, ctx, "whole", costs=costs).layout.map
            found.append(sorted(map(layout.shard_len, range(2))))
        for other in ("balanced", ctx.layout(800)):
            with pytest.raises(InputError, match=r"costs: expected None|token_cells is a number"):
                burst_rt.shard_batch(batch, ctx, other, costs=prices[0])
        return found

    for cut, whole in burst_rt.run_local(2, run):
        assert cut[0] < 300  # more than half of all cells are the long document's
        assert whole == [400, 400]
