"""Models of transformers over 1 to 4 ranks: logits, loss and every gradient are those of one
process with eager attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import run_job
from small_models import KINDS, NAMES, truth

_PROGRAM = Path(__file__).parent / "programs" / "models.py"
_LARGEST = 1e-5  # of the largest value, in float32


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truths") / "truths.pt"
    kinds = {name: KINDS if name != "T5Gemma" else KINDS[:3] for name in NAMES}
    torch.save({name: {kind: truth(name, kind) for kind in kinds[name]} for name in NAMES}, path)
    return path


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_models_are_those_of_one_process(truths: Path, tmp_path: Path, num_ranks: int) -> None:
    results = tmp_path / "results.json"
    job = run_job(_PROGRAM, num_ranks, [str(truths), str(results)], timeout_s=240, warm="models")
    assert job.exit_code == 0, job.text
    found = json.loads(results.read_text(encoding="utf-8"))
    assert len(found) >= 4 * len(NAMES) - 1 + 8
    wrong = {
        case: differences
        for case, differences in found.items()
        if not max(differences.values()) <= _LARGEST
    }
    assert not wrong
