"""A plain model under the real accelerate, over data x context, against one process."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from example_checks import EXAMPLES
from jobs import python_and_environment
from tolerances import LOSSES
from torch.nn import functional
from torch.utils.data import DataLoader

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "plain.md"
_PROGRAM = Path(__file__).with_name("programs") / "accelerated.py"


@cache
def _alone() -> tuple[list[float], list[float]]:
    """Losses of the steps, and of the evaluation's rows: torch alone, two micro-batches a step."""
    module = runpy.run_path(str(EXAMPLES / "accelerated.py"))
    torch.manual_seed(0)
    model = module["Model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    positions = torch.arange(module["TOKENS"])
    losses = []
    for _ in range(3):
        # Two processes of data take two rows each.
        for number, batch in enumerate(DataLoader(module["rows"](16), batch_size=4)):
            scores = model(batch["tokens"], positions)
            loss = functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    (batch,) = DataLoader(module["rows"](7), batch_size=7)
    with torch.no_grad():
        scores = model(batch["tokens"], positions)
    of_rows = functional.cross_entropy(scores.mT, batch["labels"], reduction="none")
    return losses, (of_rows.sum(1) / (module["TOKENS"] - 1)).tolist()


def _configuration(folder: Path) -> Path:
    (shown,) = re.findall(r"```yaml\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = folder / "fsdp2.yaml"
    path.write_text(shown, encoding="utf-8")
    return path


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2 and ParallelismConfig"])
def test_losses_are_those_of_one_process(tmp_path: Path, *, sharded: bool) -> None:
    options = ["--multi_gpu", "--num_processes", "4", "--num_machines", "1"]
    program = EXAMPLES / "accelerated.py"
    if sharded:
        options, program = ["--config_file", str(_configuration(tmp_path))], _PROGRAM
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options]
    done = subprocess.run(
        [*launch, "--main_process_port", "0", str(program), str(tmp_path / "found.json")],
        env=python_and_environment(None)[1],
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    losses, of_rows = _alone()
    assert losses[-1] < 0.8 * losses[0], "a training that learns little would hide errors"
    assert ("dp_shard" in found["mesh"]) == sharded
    assert found["losses"] == pytest.approx(losses, rel=LOSSES)
    assert found["of_rows"] == pytest.approx(of_rows, rel=LOSSES)
