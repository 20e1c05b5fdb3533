"""burst_rt's attention beside other parallelism, with the real libraries: the losses are those of
one process.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jobs import run_job
from small_training import STEPS, MakeOptimizer, adamw, alone, sgd
from tolerances import LOSSES

_TESTS = Path(__file__).parents[1]
_PROGRAM = _TESTS / "mpi" / "programs" / "beside.py"
_PAGE = _TESTS.parent / "docs" / "beside.md"
_WITH_SGD = ("fsdp2", "micro_batches", "hsdp", "ddp", "tensor_parallel", "pipeline")


def _losses(folder: Path, num_ranks: int, *names: str) -> dict[str, list[float]]:
    job = run_job(_PROGRAM, num_ranks, [str(folder), *names], by="torchrun", warm="models")
    assert job.exit_code == 0, job.text
    found: dict[str, list[float]] = json.loads((folder / "losses.json").read_text())
    return found


def _check(losses: list[float], make_optimizer: MakeOptimizer) -> None:
    expected = alone(make_optimizer)
    assert expected[-1] < 0.5 * expected[0], "a training that learns little would hide errors"
    assert losses == pytest.approx(expected, rel=LOSSES)
    assert len(losses) == STEPS


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    found = _losses(tmp_path, 4, *_WITH_SGD, "zero", "arguments")
    for name in _WITH_SGD:
        _check(found[name], sgd)
    # The second half on half the ranks, from what the four have saved.
    _check(found["zero"] + _losses(tmp_path, 2, "zero")["zero"], adamw)


def test_the_page_shows_the_lines_that_are_tested() -> None:
    shown = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    tested = [
        _without_indents(path.read_text(encoding="utf-8"))
        for path in (_PROGRAM, _TESTS / "small_training.py")
    ]
    assert len(shown) >= len(_WITH_SGD)
    for lines in shown:
        assert any(_without_indents(lines) in text for text in tested), lines


def _without_indents(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
