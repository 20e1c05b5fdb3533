"""Prefix trees: rows, masks and models are those of the sequences one by one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small_hybrids import HYBRIDS, make_hybrid, token_by_token
from small_models import gradients, make_model
from spec import reference, relative_error

import burst_rt
import burst_rt.hf
from burst_rt import Causal, Context, Mask, PrefixTree, TreeRow, burst_attention, tree_row
from burst_rt.errors import ContractMismatch, InputError

pytestmark = pytest.mark.usefixtures("no_parts_left")

_SMALL = 1e-5


class Drawn(NamedTuple):
    sequences: list[list[int]]
    labels: list[list[int]] | None
    weights: list[float] | None
    shared: list[int] | None

    def row(self) -> TreeRow:
        return tree_row(self.sequences, self.labels, weights=self.weights, shared=self.shared)


def _drawn(seed: int, most: int = 30, words: int = 3) -> Drawn:
    """Sequences of few words, which begin alike often; some are equal or begin others."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, words, rng.integers(1, most)).tolist() for _ in range(3)]
    sequences = []
    for _ in range(rng.integers(1, 9)):
        stem = stems[rng.integers(3)]
        tail = rng.integers(0, words, rng.integers(0, most // 2)).tolist()
        sequences.append(stem[: rng.integers(1, len(stem) + 1)] + tail)
    labels = weights = shared = None
    if rng.integers(2):
        labels = [[x if rng.integers(3) else -100 for x in each] for each in sequences]
    if rng.integers(2):
        weights = rng.uniform(0.5, 2, len(sequences)).tolist()
    if rng.integers(2):
        shared = [int(rng.integers(0, len(each) + 1)) for each in sequences]
    return Drawn(sequences, labels, weights, shared)


def test_the_row_of_a_worked_example() -> None:
    row = tree_row([[1, 2, 3, 4], [1, 2, 3, 5], [9, 9], [1, 2, 3, 4, 6]])
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 6, 3, 5, 9, 9]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1]]
    assert row.shift_labels.tolist() == [[2, 3, 4, 6, -100, 5, -100, 9, -100]]
    assert row.loss_weights.tolist() == [[3, 3, 2, 1, 0, 1, 0, 1, 0]]
    assert row.tree == PrefixTree([2, 3, 2, 2], [-1, 0, 0, -1])
    assert [at.tolist() for at in row.places] == [
        [0, 1, 2, 3],
        [0, 1, 5, 6],
        [7, 8],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize("seed", range(200))
def test_paths_are_the_sequences(seed: int) -> None:
    drawn = _drawn(seed)
    row, weighed = drawn.row(), 0.0
    mask, tokens = Causal() & row.tree, row.input_ids.shape[1]
    everywhere = torch.arange(tokens)
    seen = mask.allows(everywhere[:, None], everywhere[None, :])
    for i, (sequence, at) in enumerate(zip(drawn.sequences, row.places, strict=True)):
        assert row.input_ids[0, at].tolist() == sequence
        assert row.position_ids[0, at].tolist() == list(range(len(sequence)))
        for number, place in enumerate(at.tolist()):
            assert seen[place].nonzero()[:, 0].tolist() == sorted(at[: number + 1].tolist())
        labels = sequence if drawn.labels is None else drawn.labels[i]
        labelled = [n for n in range(1, len(labels)) if labels[n] != -100]
        assert [row.shift_labels[0, at[n - 1]].item() for n in labelled] == [
            labels[n] for n in labelled
        ]
        weighed += len(labelled) * (1.0 if drawn.weights is None else drawn.weights[i])
        if drawn.shared is not None:
            others = [set(x.tolist()) for n, x in enumerate(row.places) if n != i]
            assert not any(set(at[drawn.shared[i] :].tolist()) & other for other in others)
    assert row.loss_weights.sum().item() == pytest.approx(weighed, rel=1e-5)
    assert sorted({place for at in row.places for place in at.tolist()}) == list(range(tokens))
    places = row.tree.path_positions(np.arange(tokens))
    assert np.array_equal(places, row.position_ids[0].numpy())


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_attention_is_that_of_each_sequence(seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        row = _drawn(seed, most=60).row()
        world = int(rng.integers(1, 5))
        if row.input_ids.shape[1] >= world:
            _check_attention(row, world, rng)


def _check_attention(row: TreeRow, world: int, rng: np.random.Generator) -> None:
    tokens = row.input_ids.shape[1]
    kind = rng.choice(["zigzag", "balanced", "contiguous", "striped", "whole"])
    strategy = rng.choice(["auto", "ring-kv", "burst", "direct", "bidirectional"])
    window = int(rng.integers(0, 20)) if rng.integers(3) == 0 else None
    tree = row.tree if window is None else row.tree.window(window)
    mask = Causal() & tree
    softcap = 5.0 if rng.integers(3) == 0 else None
    q, k, v, dout = (
        torch.from_numpy(rng.standard_normal((1, tokens, heads, 16))).float()
        for heads in (4, 2, 2, 4)
    )
    sinks = torch.from_numpy(rng.standard_normal(4)).float() if rng.integers(3) == 0 else None

    def run(ctx: Context) -> list[torch.Tensor]:
        layout = ctx.layout(tokens, kind, mask=mask if kind in ("balanced", "whole") else None)
        parts = [layout.shard(x).requires_grad_() for x in (q, k, v)]
        out = burst_attention(
            *parts, layout=layout, mask=mask, strategy=strategy, softcap=softcap, sinks=sinks
        )
        assert isinstance(out, torch.Tensor)
        out.backward(layout.shard(dout))
        return [layout.unshard(x) for x in (out.detach(), *(part.grad for part in parts))]  # type: ignore[arg-type]

    found = burst_rt.run_local(world, run)[0]
    truth = [torch.zeros(x.shape, dtype=torch.float64) for x in (dout, q, k, v)]
    done: set[int] = set()
    for at in row.places:
        new = torch.tensor([place not in done for place in at.tolist()])
        done |= set(at.tolist())
        # The output of a token that several share counts once.
        own = dout[:, at] * new[:, None, None]
        inside: Mask = Causal() if window is None else burst_rt.SlidingWindow(window)
        alone = reference(
            q[:, at], k[:, at], v[:, at], own, mask=inside, softcap=softcap, sinks=sinks
        )
        truth[0][:, at[new]] = alone.out[:, new]
        for whole, part in zip(truth[1:], (alone.dq, alone.dk, alone.dv), strict=True):
            assert part is not None
            whole[:, at] += part
    for mine, true in zip(found, truth, strict=True):
        if true.any():
            assert relative_error(mine, true) < _SMALL
        else:  # no query sees two keys, so scores have no gradient
            assert float(mine.norm()) < _SMALL * float(truth[-1].norm())


def _models() -> list[Any]:
    cases = [("Llama", 3), ("Gemma3", 2), ("GptOss", 4), ("Llama4", 3), ("Gemma2", 1)]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in cases]


def _sequences() -> Drawn:
    """Two questions, with three answers and two, and a sequence of its own."""
    generator = torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(3, 64, (count,), generator=generator).tolist()

    first, second = words(24), words(11)
    sequences = [first + words(n) for n in (9, 20, 1)] + [second + words(n) for n in (30, 5)]
    sequences.append(words(13))
    labels = [[-100] * 6 + each[6:] for each in sequences]
    return Drawn(sequences, labels, [1.0, 0.5, 2.0, 1.0, 1.5, 1.0], None)


def _one_by_one(model: Any, drawn: Drawn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of one process, sequence after sequence, and each one's logits."""
    total, count, found = torch.zeros(()), 0.0, []
    assert drawn.labels is not None
    assert drawn.weights is not None
    for sequence, labels, weight in zip(drawn.sequences, drawn.labels, drawn.weights, strict=True):
        logits = model(input_ids=torch.tensor([sequence])).logits[0]
        targets = torch.tensor(labels[1:])
        losses = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="sum")
        found.append(logits.detach())
        total, count = total + weight * losses, count + weight * int((targets != -100).sum())
    return total / count, found


@pytest.mark.parametrize(("name", "num_ranks"), _models())
def test_models_are_those_of_sequences_one_by_one(name: str, num_ranks: int) -> None:
    """Windows and chunks go along the paths, and so do positions; logits, loss, gradients."""
    model = make_model(name)
    model.config.output_router_logits = False  # the shares of experts are of other tokens
    _check_model(model, _sequences(), num_ranks)


def _check_model(
    model: Any, drawn: Drawn, num_ranks: int, alone: AbstractContextManager[None] | None = None
) -> None:
    """alone: what one process is run in."""
    row, truth = drawn.row(), deepcopy(model)
    with alone or nullcontext():
        expected, logits = _one_by_one(truth, drawn)
        expected.backward()

    def run(ctx: Context) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(row.batch(), ctx)
        output = mine(**part)
        output.loss.backward()
        burst_rt.average_gradients(mine.parameters(), group=ctx)
        whole = part["burst_rt"].batch.layout.unshard(output.logits.detach())
        return output.loss.item(), gradients(mine), whole[0]

    for loss, grads, whole in burst_rt.run_local(num_ranks, run, timeout_s=60):
        assert loss == pytest.approx(expected.item(), rel=_SMALL)
        for at, true in zip(row.places, logits, strict=True):
            assert relative_error(whole[at], true) < _SMALL
        assert grads.keys() == gradients(truth).keys()
        least = 1e-2 * max(float(x.abs().max()) for x in gradients(truth).values())
        for label, true in gradients(truth).items():
            largest = max(float(true.abs().max()), least)
            assert float((grads[label] - true).abs().max()) < _SMALL * largest, label


def _hybrids() -> list[Any]:
    """Two worlds of a few models, another of each; all others are long."""
    few = {(name, 1 + at % 3) for at, name in enumerate(HYBRIDS)}
    few |= {(name, n) for name in ("Qwen3Next", "Bamba", "Lfm2", "Jamba") for n in (2, 3)}
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.long)
        for case in ((name, n) for name in HYBRIDS for n in (1, 2, 3))
    ]


@pytest.mark.parametrize(("name", "num_ranks"), _hybrids())
def test_hybrids_are_those_of_sequences_one_by_one(name: str, num_ranks: int) -> None:
    """States and convolutions go along the paths, past turns that are shorter than a convolution's
    memory.
    """
    model = make_hybrid(name)
    model.config.output_router_logits = False
    _check_model(model, _turns(), num_ranks, token_by_token(name))


def _turns() -> Drawn:
    """Conversations that part and go on, some by a token or two, and a sequence of its own."""
    generator = torch.Generator().manual_seed(5)

    def words(count: int) -> list[int]:
        return torch.randint(3, 64, (count,), generator=generator).tolist()

    stem, turn = words(17), words(2)
    deep = stem + turn + words(1)
    sequences = [deep + words(n) for n in (12, 1, 2)] + [stem + turn + words(n) for n in (25, 3)]
    sequences += [stem + words(9), words(14)]
    labels = [[-100] * 3 + each[3:] for each in sequences]
    return Drawn(sequences, labels, [1.0, 0.5, 2.0, 1.0, 1.5, 1.0, 0.7], None)


def test_a_model_of_ones_own() -> None:
    """`shard_batch`, `cross_entropy` with weights, and micro-batches by `num_labels`."""
    drawn = _sequences()
    row = drawn.row()
    torch.manual_seed(0)
    table = torch.randn(64, 32) / 4
    assert drawn.weights is not None

    def logits_of(x: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x = x + positions[..., None].sin()
        q = k = v = x.unflatten(2, (2, 16))
        mixed: torch.Tensor = x + attend(q, k, v).flatten(2)
        return mixed @ table.T

    def run(ctx: Context) -> float:
        part = burst_rt.shard_batch(row.batch(), ctx)
        assert part.layout.kind == "balanced"
        assert part.mask == row.tree

        def attend(*qkv: torch.Tensor) -> Any:
            return burst_attention(*qkv, layout=part.layout, mask=Causal() & part.mask)

        logits = logits_of(table[part.input_ids], part.position_ids, attend)
        assert part.shift_labels is not None
        options: dict[str, Any] = {"weights": part.loss_weights, "group": ctx}
        loss = burst_rt.cross_entropy(logits, part.shift_labels, **options)
        half = burst_rt.cross_entropy(
            logits, part.shift_labels, count=2 * part.num_labels, **options
        )
        assert half.item() == pytest.approx(loss.item() / 2)
        return loss.item()

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return reference(q, k, v, torch.zeros_like(q), mask=Causal()).out.float()

    class Model:
        def __call__(self, input_ids: torch.Tensor) -> Any:
            positions = torch.arange(input_ids.shape[1])[None]
            logits = logits_of(table[input_ids], positions, alone)
            return type("Output", (), {"logits": logits})

    expected = _one_by_one(Model(), drawn)[0].item()
    assert burst_rt.run_local(3, run) == [pytest.approx(expected, rel=_SMALL)] * 3


def test_numbers_of_tokens_are_spread() -> None:
    """Advantages of answers, each for all tokens of an answer; the question has none."""
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 4, 5, 8]]
    row = tree_row(sequences, shared=[3, 3, 3])
    given = [
        [0.0] * 3 + [a] * (len(each) - 3) for a, each in zip((1, -1, 2), sequences, strict=True)
    ]
    spread = row.spread(given)[0]
    for at, numbers in zip(row.places, given, strict=True):
        assert spread[at].tolist() == numbers
    with pytest.raises(InputError, match=r"sequence 2.*those of sequences before.*shared"):
        tree_row(sequences).spread(given)
    with pytest.raises(InputError, match="those of 3 sequences"):
        row.spread(given[:2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sequences": []}, "sequences: expected at least one"),
        ({"sequences": [[1.5]]}, r"sequences\[0\]: expected a vector of integers"),
        ({"sequences": [[1, 2], []]}, r"sequences\[1\]"),
        ({"sequences": [[1, 2]], "labels": [[1, 3]]}, r"labels\[0\]: expected the 2 tokens"),
        ({"sequences": [[1, 2]], "weights": [1, 2]}, "weights: expected one for each of 1"),
        ({"sequences": [[1, 2]], "weights": ["2"]}, r"weights\[0\]: expected a finite number"),
        ({"sequences": [[1, 2]], "shared": [-1]}, r"shared\[0\]: .*, at least 0; got -1"),
        ({"sequences": [[[1], [1, 2]]]}, r"sequences\[0\]: expected a vector of integers"),
    ],
)
def test_bad_rows_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tree_row(**options)


def test_bad_batches_are_refused_on_every_rank() -> None:
    row = tree_row([[1, 2, 3, 4], [1, 2, 3, 5, 6]])
    batch, padded = row.batch(), torch.ones_like(row.input_ids)
    other = tree_row([[1, 2, 3, 4], [1, 2, 3, 5, 6]], shared=[1, 1])
    wrong = [
        ({**batch, "prefix_tree": Causal()}, "a burst_rt.PrefixTree"),
        ({**batch, "prefix_tree": other.tree}, "one of 7 tokens"),
        ({**batch, "labels": row.input_ids}, "expected shift_labels"),
        ({**batch, "attention_mask": padded}, "attention_mask: expected none beside"),
    ]

    def run(ctx: Context) -> None:
        for given, said in wrong:
            with pytest.raises(InputError, match=said):
                burst_rt.shard_batch(given, ctx)
        with pytest.raises(ContractMismatch, match="the same batch"):
            burst_rt.shard_batch((row if ctx.rank else other).batch(), ctx)

    burst_rt.run_local(2, run)
