"""The examples of sparse attention: outputs and gradients are those of one process, and the
programs run.
"""

from __future__ import annotations

import re
import runpy

import pytest
import torch
from example_checks import CHECKS, EXAMPLES
from tolerances import ERROR

import burst_rt
from burst_rt.kernels.triton.kernel import _MIN_HEAD_DIM

_NAMES = ("linformer", "performer", "downsampled")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, world: int) -> None:
    assert max(burst_rt.run_local(world, CHECKS[name], timeout_s=60)) <= ERROR[torch.float64]


@pytest.mark.parametrize("name", _NAMES)
def test_the_program_says_what_it_sent(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(ctx: burst_rt.Context) -> None:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()

    burst_rt.run_local(3, main, timeout_s=60)
    (line,) = capsys.readouterr().out.splitlines()
    sent = re.fullmatch(r"out \(.*, 64\), 2\d{6} bytes of k and v, sent \[(\d+), (\d+)\]", line)
    assert sent is not None, line
    assert 0 < sum(map(int, sent.groups())) < 2_000_000


@pytest.mark.parametrize("name", _NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120


def test_small_models_have_heads_that_gpus_take() -> None:
    heads = [runpy.run_path(str(EXAMPLES / "accelerated.py"))["DIM"] // 4]
    for path in EXAMPLES.glob("*.py"):
        config = r"hidden_size=(\d+).*?num_attention_heads=(\d+)"
        for width, number in re.findall(config, path.read_text(encoding="utf-8"), re.DOTALL):
            heads.append(int(width) // int(number))
    assert len(heads) >= 3
    assert min(heads) >= _MIN_HEAD_DIM
