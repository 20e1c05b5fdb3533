"""The decoder: seeded weights, causality, positions that mean what they say, and how its weights
are moved.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from forked import with_torch
from torch import Tensor
from torch.nn import functional

import burst_rt
from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import ModelConfig, TrainConfig, mesh_shape
from burst_rt.launch.train.model import (
    AdamW,
    Attend,
    AveragedGradients,
    Decoder,
    learning_rate,
)

_CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2)
_TOKENS = 37


def _attend_by(positions: Tensor) -> Attend:
    """Causal attention of one process over tokens that stand in any order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sees = positions[None, :] <= positions[:, None]
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=sees, enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend


def _scores(decoder: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = decoder(tokens, positions, _attend_by(positions))
    return scores


def _bytes(seed: int = 0) -> Tensor:
    return torch.randint(256, (2, _TOKENS), generator=torch.Generator().manual_seed(seed))


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = Decoder(_CONFIG, seed=5)
    torch.manual_seed(2)
    again, other = Decoder(_CONFIG, seed=5), Decoder(_CONFIG, seed=6)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.head.weight, other.head.weight)


def test_untrained_scores_are_near_guessing_and_of_the_right_shape() -> None:
    tokens = _bytes()
    scores = _scores(Decoder(_CONFIG, seed=0), tokens, torch.arange(_TOKENS))
    assert scores.shape == (2, _TOKENS, 256)
    loss = functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    assert abs(loss.item() - math.log(256)) < 1.0


def test_a_byte_changes_no_score_before_it() -> None:
    decoder, tokens, positions = Decoder(_CONFIG, seed=0), _bytes(), torch.arange(_TOKENS)
    before = _scores(decoder, tokens, positions)
    tokens[:, 20] = (tokens[:, 20] + 1) % 256
    after = _scores(decoder, tokens, positions)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_tokens_may_stand_in_any_order_if_their_positions_say_so() -> None:
    decoder, tokens, positions = Decoder(_CONFIG, seed=0), _bytes(), torch.arange(_TOKENS)
    order = torch.randperm(_TOKENS, generator=torch.Generator().manual_seed(3))
    whole = _scores(decoder, tokens, positions)
    shuffled = _scores(decoder, tokens[:, order], positions[order])
    torch.testing.assert_close(shuffled, whole[:, order], rtol=1e-4, atol=1e-5)


def test_positions_count_only_by_their_distance() -> None:
    decoder, tokens, positions = Decoder(_CONFIG, seed=0), _bytes(), torch.arange(_TOKENS)
    near = _scores(decoder, tokens, positions)
    # A million away: the angles must not lose their last digits.
    torch.testing.assert_close(
        _scores(decoder, tokens, positions + 2**20), near, rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(_scores(decoder, tokens, 2 * positions), near, atol=1e-3)


def test_the_number_of_parameters_is_what_the_architecture_says() -> None:
    dim, hidden, kv = 32, 96, 16
    block = 2 * dim * dim + 2 * dim * kv + 3 * dim * hidden + 2 * dim
    weights = Decoder(_CONFIG, seed=0).parameters()
    assert sum(weight.numel() for weight in weights) == 2 * block + 2 * 256 * dim + dim


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 30},
        {"heads": 3, "kv_heads": 3},
        {"kv_heads": 3},
        {"layers": 0},
        {"dim": 12, "heads": 4, "kv_heads": 4},
        {"kv_heads": -1},
    ],
)
def test_an_impossible_model_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(_CONFIG, **changes).validate()


@pytest.mark.parametrize(
    ("changes", "world_size", "named"),
    [
        ({"context_parallel": 3}, 4, "--context-parallel"),
        ({"context_parallel": 0}, 4, "--context-parallel"),
        ({"context_parallel": 2, "batch": 3}, 4, "--batch"),
        ({"steps": 0}, 1, "--steps"),
        ({"seq_len": -1}, 1, "--seq-len"),
        ({"warmup": -1}, 1, "--warmup"),
        ({"lr": math.nan}, 1, "--lr"),
        ({"clip": 0.0}, 1, "--clip"),
        ({"dtype": "float16"}, 1, "--dtype"),
        ({"layout": "diagonal"}, 1, "--layout"),
        ({"strategy": "teleport"}, 1, "--strategy"),
    ],
)
def test_an_impossible_run_is_refused_by_the_name_of_the_option(
    changes: dict[str, object], world_size: int, named: str
) -> None:
    config = TrainConfig(**changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{named}"):
        config.validate(world_size)


def test_the_mesh_divides_the_world() -> None:
    assert mesh_shape(6, None) == (1, 6)
    assert mesh_shape(6, 2) == (3, 2)
    assert mesh_shape(1, 1) == (1, 1)


def test_gradients_gather_in_one_buffer() -> None:
    decoder, tokens, positions = Decoder(_CONFIG, seed=0), _bytes(), torch.arange(_TOKENS)
    plain = Decoder(_CONFIG, seed=0)
    gradients = AveragedGradients(decoder)
    flat = gradients.flat
    for model in (decoder, plain):
        scores = model(tokens, positions, _attend_by(positions))
        functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert torch.equal(flat, expected)

    for limit in (0.25, 1.0):
        torch.nn.utils.clip_grads_with_norm_(decoder.parameters(), limit, flat.norm())
        assert flat.norm().item() == pytest.approx(0.25, rel=1e-4), "a norm below the limit stays"
    gradients.zero()
    assert all(p.grad is not None and not p.grad.any() for p in decoder.parameters())


def test_the_learning_rate_climbs_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=4, steps=20) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[20] == pytest.approx(0.1)
    assert learning_rate(0, peak=1.0, warmup=0, steps=1) == 1.0


def test_only_matrices_decay() -> None:
    decoder = Decoder(_CONFIG, seed=0)
    AveragedGradients(decoder)
    optimizer = AdamW(decoder, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    optimizer.step(0.1, before.keys() - {"head.weight"})
    before["head.weight"] /= 0.95  # which no gradient has reached
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), before[name] * (0.95 if parameter.dim() >= 2 else 1.0)
        )


def test_weights_move_as_torchs_own_optimizer_moves_them() -> None:
    """Bit for bit; also after a resume in the middle."""
    ours, theirs = (Decoder(_CONFIG, seed=0) for _ in range(2))
    optimizer = AdamW(ours, weight_decay=0.5)
    groups = [
        {"params": [x for x in theirs.parameters() if (x.dim() >= 2) == decays], "weight_decay": d}
        for decays, d in ((True, 0.5), (False, 0.0))
    ]
    expected = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            moments = optimizer.moments
            optimizer = AdamW(ours, weight_decay=0.5)
            for name, moment in moments.items():
                optimizer.moments[name].copy_(moment)
            assert optimizer.resume(step) == dict(ours.named_parameters()).keys()
        for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
            x.grad = torch.randn(x.shape, generator=generator)
            y.grad = x.grad.clone()
        lr = 0.1 / (step + 1)
        for group in expected.param_groups:
            group["lr"] = lr
        optimizer.step(lr, dict(ours.named_parameters()).keys())
        expected.step()
        for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(x, y)


def test_training_does_not_load_torchs_compiler() -> None:
    """It takes a second of every rank's start."""
    source = """
import sys
import torch
from burst_rt.launch.train.config import ModelConfig
from burst_rt.launch.train.model import AdamW, Decoder, AveragedGradients
decoder = Decoder(ModelConfig(layers=1, dim=8, heads=1, kv_heads=1), seed=0)
AveragedGradients(decoder)
torch.nn.utils.clip_grads_with_norm_(decoder.parameters(), 1.0, torch.tensor(2.0))
AdamW(decoder, weight_decay=0.1).step(0.1, {"head.weight"})
sys.exit("torch._dynamo" in sys.modules)
"""
    assert with_torch().run(source).returncode == 0


def test_weights_that_no_gradient_reaches_stay() -> None:
    """A vision tower in a training on text; torch's own optimizer leaves them alone, too."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.first, self.tower, self.frozen = (
                torch.nn.Parameter(torch.ones(2, 2), requires_grad=number < 3)
                for number in range(4)
            )

    def run(ctx: burst_rt.Context) -> set[str]:
        model = Model()
        gradients, optimizer = AveragedGradients(model), AdamW(model, weight_decay=0.5)
        for step in range(2):
            gradients.zero()
            loss = model.shared.sum() + model.frozen.sum()
            if ctx.rank == step == 0:
                loss = loss + model.first.sum()
            loss.backward()
            gradients.average(ctx)
            optimizer.step(0.1, gradients.trained)
        assert model.first.grad is not None
        assert not model.first.grad.any(), "its gradient of the first step has gone"
        for untouched in (model.tower, model.frozen):
            assert torch.equal(untouched, torch.ones(2, 2))
        return gradients.trained

    assert burst_rt.run_local(2, run) == [{"shared", "first"}] * 2


def test_a_resumed_run_knows_which_weights_have_moved() -> None:
    decoder = Decoder(_CONFIG, seed=0)
    optimizer = AdamW(decoder, weight_decay=0.5)
    assert optimizer.resume(0) == set()
    optimizer.moments["exp_avg_sq.head.weight"][0, 0] = 1e-12
    assert optimizer.resume(3) == {"head.weight"}
