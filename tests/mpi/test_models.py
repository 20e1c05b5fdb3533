"""Models of transformers over 1 to 4 ranks: logits, loss and every gradient are those of one
process with eager attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import run_job
from small_hybrids import truth_of_hybrid
from small_models import KINDS, Truth, truth
from small_models import NAMES as DECODERS

_PROGRAM = Path(__file__).parent / "programs" / "models.py"
_LARGEST = 1e-5  # of the largest value, in float32
# Other hybrids are in tests/unit/test_hf_hybrids.py. This one's layers are told by their masks.
_HYBRID = "Jamba"
NAMES = (*DECODERS, _HYBRID)
# By number of ranks: all models and kinds of batches, or a sample, in which each of them is.
_WORLDS = [
    pytest.param(2, True, id="2"),
    *(pytest.param(n, False, id=f"{n}, sample") for n in (1, 3, 4)),
    *(pytest.param(n, True, id=f"{n}", marks=pytest.mark.long) for n in (1, 3, 4)),
]
# What the program spreads in more ways.
_ALWAYS = {("Llama", "plain"), ("Llama", "packed"), ("GptOss", "packed"), (_HYBRID, "packed")}


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, str], Truth]:
    kinds = {name: KINDS if name != "T5Gemma" else KINDS[:3] for name in NAMES}
    return {
        (name, kind): truth_of_hybrid(name, kind) if name == _HYBRID else truth(name, kind)
        for name in NAMES
        for kind in kinds[name]
    }


def _is_in_sample(name: str, kind: str, num_ranks: int) -> bool:
    """With one rank a kind for each model; with 3 half of the cases, with 4 the other half."""
    place = NAMES.index(name) + KINDS.index(kind)
    return place % 4 == 0 if num_ranks == 1 else place % 2 == num_ranks % 2


@pytest.mark.parametrize(("num_ranks", "whole"), _WORLDS)
def test_models_are_those_of_one_process(
    truths: dict[tuple[str, str], Truth], tmp_path: Path, num_ranks: int, whole: bool
) -> None:
    cases = {case for case in truths if whole or _is_in_sample(*case, num_ranks)} | _ALWAYS
    chosen = {
        name: {kind: truths[name, kind] for kind in KINDS if (name, kind) in cases}
        for name in NAMES
    }
    assert all(chosen.values())
    torch.save(chosen, tmp_path / "truths.pt")
    results = tmp_path / "results.json"
    arguments = [str(tmp_path / "truths.pt"), str(results)]
    job = run_job(_PROGRAM, num_ranks, arguments, timeout_s=240, warm="models")
    assert job.exit_code == 0, job.text
    found = json.loads(results.read_text(encoding="utf-8"))
    assert len(found) >= len(cases) + 8
    wrong = {
        case: differences
        for case, differences in found.items()
        if not max(differences.values()) <= _LARGEST
    }
    assert not wrong
