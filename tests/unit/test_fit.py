"""Rates from measured tasks: what is known comes out, noise or not, and never a negative number."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from burst_rt.planning.fit import Sample, fit_cards, fit_link, fit_rate, fit_rates
from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Link, Nics


def _tile(n: int, causal: bool = False) -> Cost:
    return Cost(n * n * 1000, n * 64, n * n * 1000 if causal else 0)


def test_a_known_rate_comes_out() -> None:
    found = fit_rate(
        Sample("forward", _tile(n), 1e-3 + _tile(n).flops / 1e11) for n in (64, 256, 1024, 4096)
    )
    assert found.launch_s == pytest.approx(1e-3)
    assert found.flops_per_s == pytest.approx(1e11)
    assert found.masked is None
    memory = fit_rate(
        Sample("add", Cost(0, n), 2e-6 + n / 5e9) for n in (1 << 12, 1 << 16, 1 << 20)
    )
    assert memory.launch_s == pytest.approx(2e-6)
    assert memory.bytes_per_s == pytest.approx(5e9)


def test_what_a_mask_costs_comes_out() -> None:
    samples = [
        Sample("forward", _tile(n, c), _tile(n).flops / (1e11 * (0.6 if c else 1.0)))
        for n in (64, 256, 1024)
        for c in (False, True)
    ]
    found = fit_rate(samples)
    assert found.masked == pytest.approx(0.6)
    assert all(found.seconds(s.cost) == pytest.approx(s.seconds) for s in samples)
    only_masked = fit_rate([s for s in samples if s.cost.masked_flops])
    assert all(
        only_masked.seconds(s.cost) == pytest.approx(s.seconds)
        for s in samples
        if s.cost.masked_flops
    )


def test_what_a_mask_costs_along_its_edge_comes_out() -> None:
    costs = [
        cost
        for n in (64, 256, 1024, 4096)
        for cost in (_tile(n), _tile(n, True)._replace(edge_flops=1000 * n * min(n, 512)))
    ]
    found = fit_rate(
        Sample("forward", cost, (cost.flops + 0.7 * cost.edge_flops) / 1e11) for cost in costs
    )
    assert found.edge == pytest.approx(0.7)
    assert found.masked is None
    assert all(
        found.seconds(cost) == pytest.approx((cost.flops + 0.7 * cost.edge_flops) / 1e11)
        for cost in costs
    )


@pytest.mark.parametrize("seed", range(50))
def test_rounding_adds_no_rate(seed: int) -> None:
    # Another CPU rounds otherwise: the last bits of what was measured decide nothing.
    rng = random.Random(seed)
    costs = [
        cost
        for n in (64, 256, 1024, 4096)
        for cost in (_tile(n), _tile(n, True)._replace(edge_flops=1000 * n * min(n, 512)))
    ]

    def last_bits() -> float:
        return 1 + rng.randrange(-4, 5) * 2**-52

    found = fit_rate(
        Sample("forward", cost, (cost.flops + 0.7 * cost.edge_flops) / 1e11 * last_bits())
        for cost in costs
    )
    assert found.launch_s == 0.0
    assert found.masked is None
    assert found.bytes_per_s is None


def test_noise_and_an_outlier_do_not_matter_much() -> None:
    rng = random.Random(0)
    samples = [
        Sample("forward", _tile(n), (5e-4 + _tile(n).flops / 1e11) * rng.uniform(0.95, 1.05))
        for n in (256, 512, 1024, 4096)
        for _ in range(5)
    ]
    found = fit_rate([*samples, Sample("forward", _tile(1024), 10.0)])
    assert found.flops_per_s == pytest.approx(1e11, rel=0.05)


def test_nothing_is_negative() -> None:
    # Larger tasks that take less time than the line through the smaller ones: no negative launch
    # comes of it.
    found = fit_rate(Sample("add", Cost(0, n), t) for n, t in ((100, 1.0), (200, 2.5), (400, 6.0)))
    assert found.launch_s == 0.0
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 0


def test_every_name_has_its_rate_and_the_rest_a_common_one() -> None:
    samples = [Sample("forward", _tile(n), _tile(n).flops / 1e11) for n in (64, 128)]
    samples += [Sample(name, Cost(0, n), n / 1e9) for name in ("add", "zero") for n in (1000, 4000)]
    found = fit_rates(samples)
    assert sorted(found) == ["add", "default", "forward", "zero"]
    assert found["default"].bytes_per_s == pytest.approx(1e9)


def test_a_link() -> None:
    found = fit_link({size: 3e-5 + size / 2e9 for size in (1 << 10, 1 << 16, 1 << 22)})
    assert found.latency_s == pytest.approx(3e-5)
    assert found.bytes_per_s == pytest.approx(2e9)


def test_a_link_whose_large_messages_took_no_longer_has_the_largest_ones_speed() -> None:
    found = fit_link({1 << 10: 9e-3, 1 << 16: 9e-3, 1 << 22: 8e-3})
    assert found.bytes_per_s == pytest.approx((1 << 22) / 8e-3)
    assert found.latency_s == 0.0


@pytest.mark.parametrize(
    ("num_ranks", "alone_per_s", "count", "per_s"),
    [
        (2, 25e6, 2, 25e6),  # a card each
        (2, 50e6, 1, 50e6),  # one for both
        (2, 20e6, 2, 25e6),  # measured while something else sent
        (2, 90e6, 1, 50e6),
        (8, 50e6, 4, 50e6),
        (8, 200e6, 1, 200e6),
        (1, 30e6, 1, 25e6),
    ],
)
def test_cards_from_a_rank_that_sends_alone(
    num_ranks: int, alone_per_s: float, count: int, per_s: float
) -> None:
    """Each rank has 25 MB/s while all send."""
    link = Link(1e-4, 25e6, 1.0, "full", work_byte_s=1e-9)
    assert fit_cards(link, alone_per_s, num_ranks) == Nics(count, replace(link, bytes_per_s=per_s))
