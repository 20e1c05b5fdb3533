"""`generate` of transformers' models over 1 to 4 ranks: tokens, greedy and sampled, and the logits
that they were chosen by are those of one process with eager attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import run_job
from small_generation import DECODERS, PROMPT, cases, truth

_PROGRAM = Path(__file__).parent / "programs" / "generate.py"
_LARGEST = 1e-5  # of the largest value, in float32
_BLOCK = 8


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truths") / "truths.pt"
    found = {name: {case: truth(name, case) for case in cases(name)} for name in DECODERS}
    torch.save(found, path)
    return path


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_generated_text_is_that_of_one_process(
    truths: Path, tmp_path: Path, num_ranks: int
) -> None:
    results = tmp_path / "results.json"
    job = run_job(_PROGRAM, num_ranks, [str(truths), str(results)], timeout_s=240, warm="models")
    assert job.exit_code == 0, job.text
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found.pop("a rank's tokens") <= -(-PROMPT // num_ranks) + _BLOCK * (num_ranks > 1)
    assert len(found) == sum(map(len, map(cases, DECODERS))) + 1 + (num_ranks > 1)
    assert not {case: off for case, off in found.items() if not off <= _LARGEST}
