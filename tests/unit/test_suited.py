"""Which layout suits a problem: forecast no slower than a plain one; else even, with few bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import first_of
from graphs import Window
from mixes import check_fastest_layout, mix, packed_problem

from burst_rt import Causal, Documents, Full, Mask, PrefixTree, SlidingWindow
from burst_rt.planning.chooser import fastest_layout
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.recurrent_layers import scan_seconds, scans_of
from burst_rt.scheduler.simulator import Hardware, Rate

_H100 = load_hardware("h100-sxm")


@pytest.mark.parametrize("seed", first_of(range(8), 4))
def test_the_fastest_layout_is_no_slower_than_a_plain_one(seed: int) -> None:
    """`make test-all` tries 200 mixes."""
    check_fastest_layout(mix(seed, longest=16384, largest=8))


def test_where_heads_are_spread_no_layout_is_better() -> None:
    mask = Causal() & Documents([200] * 40 + [8576] + [100] * 80)
    # Arithmetic takes so long that transfers are hidden.
    tiles, free = Rate(launch_s=0.0, flops_per_s=1e10), Rate(launch_s=0.0)
    rates = {"forward": tiles, "backward": tiles, "default": free}
    slow = replace(_H100, device=replace(_H100.device, rates=rates))
    # Four ranks cannot share two kv heads.
    spread, ring = (
        fastest_layout(packed_problem(4, 24576, mask, kv_heads), slow, ranks_per_node=4)[1]
        for kv_heads in (4, 2)
    )
    assert max(spread.values()) < 1.01 * min(spread.values())
    assert max(ring.values()) > 1.3 * min(ring.values())


def test_without_a_machine_the_layout_is_even_and_sends_little() -> None:
    def kind(mask: Mask) -> str:
        taken, seconds = fastest_layout(packed_problem(4, 4096, mask, 8), None, ranks_per_node=1)
        assert seconds == {}
        return taken.q_layout.kind

    assert kind(Full()) == "zigzag"
    assert kind(Causal()) == "zigzag"
    # All are even, and contiguous shards need few of their neighbours' rows.
    assert kind(SlidingWindow(128)) == "contiguous"
    assert kind(Causal() & Documents([1024] * 4)) == "contiguous"
    assert kind(Causal() & Documents([64] * 32 + [2048])) == "balanced"
    # Its cells are not known, and count as even.
    assert kind(Window()) == "contiguous"


def test_recurrent_layers_count() -> None:
    """States of many layers go from run to run: contiguous shards have the fewest runs, so what
    attention wins by even cells is lost at some number of such layers.
    """
    sizes = RecurrenceSizes(
        rule="delta", num_heads=32, key_dim=128, value_dim=128, channels=12288, kernel=4
    )
    given = packed_problem(8, 8192, Causal(), 8)

    def taken(number: int, hardware: Hardware | None) -> tuple[str, dict[str, float]]:
        suited, seconds = fastest_layout(
            given, hardware, ranks_per_node=8, recurrences=(sizes,) * number
        )
        return suited.q_layout.kind, seconds

    alone, seconds = taken(0, _H100)
    assert alone != "contiguous"
    assert "striped" in seconds
    _, more = taken(3, _H100)
    assert "striped" not in more
    assert all(more[kind] > seconds[kind] for kind in more)
    many, most = taken(60, _H100)
    assert many == "contiguous" == min(most, key=most.__getitem__)
    # Without a machine, striped layouts are left out.
    assert taken(1, None)[0] == "zigzag"
    scans = list(scans_of(sizes, given.q_layout, 1))
    assert [scan.forward for scan in scans] == [True, False] * 2
    assert [scan.state_bytes for scan in scans] == [3 * 12288 * 4] * 2 + [32 * 128 * 128 * 4] * 2


def test_recurrent_layers_follow_a_tree() -> None:
    """The second answer waits for the question, and not for the first answer."""
    tree = PrefixTree([4096, 2048, 2048], [-1, 0, 0])
    given = packed_problem(8, 8192, Causal() & tree, 8)
    sizes = RecurrenceSizes(rule="delta", num_heads=32, key_dim=128, value_dim=128)
    _, alone = fastest_layout(given, _H100, ranks_per_node=8)
    _, seconds = fastest_layout(given, _H100, ranks_per_node=8, recurrences=(sizes,))
    layout = make_layout("contiguous", 8192, 8)
    along, row = (scans_of(sizes, layout, 1, branches) for branches in (tree.branches, {}))
    for scan, linear in zip(along, row, strict=True):
        assert scan.wire_bytes() == linear.wire_bytes()
        mine = scan_seconds(scan, _H100)
        assert mine < scan_seconds(linear, _H100)
        alone["contiguous"] += mine
    assert seconds["contiguous"] == pytest.approx(alone["contiguous"])
