"""The training script of the guide, as it stands on the page: on any number of ranks its losses are
those of one process without burst_rt.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Launcher, run_job
from tolerances import LOSSES
from torch.nn import functional

_PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def _alone(program: Path) -> list[float]:
    """The losses of the script's model on the script's batch, with torch's own attention."""
    head, found, _ = program.read_text(encoding="utf-8").partition("with burst_rt.init()")
    assert found
    names: dict[str, Any] = {"__file__": str(program), "__name__": "mine"}
    exec(compile(head, str(program), "exec"), names)
    batch = {name: x[0] for name, x in names["batch"].items()}
    documents = (batch["position_ids"] == 0).cumsum(0)
    shown = (documents[:, None] == documents).tril()

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2)

    torch.manual_seed(0)
    model = names["Mine"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        scores = model(batch["input_ids"][None], batch["position_ids"][None], attend)
        loss = functional.cross_entropy(scores[0, :-1], batch["labels"][1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "by", "loop"),
    [(3, "burst-rt run", ""), (2, "torchrun", ""), (3, "burst-rt run", "micro-batches")],
)
def test_the_losses_are_those_of_one_process(
    num_ranks: int, by: Launcher, loop: str, tmp_path: Path
) -> None:
    script, *others = re.findall(
        r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    if loop:
        # With "every document is a micro-batch" in place of the loop that is the script's end.
        (other,) = (each for each in others if "micro_batches" in each)
        script = script[: script.index("    for step in range(20):")] + other
    program = tmp_path / "mine.py"
    program.write_text(script, encoding="utf-8")
    expected = _alone(program)
    assert expected[-1] < 0.5 * expected[0], "a training that learns little would hide errors"
    job = run_job(program, num_ranks, by=by, warm="torch")
    assert job.exit_code == 0, job.text
    losses = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", job.out, re.MULTILINE)]
    assert losses == pytest.approx(expected, rel=LOSSES, abs=1e-4)  # four digits are printed


_HOW = _PAGE.with_name("how.md")
_RING_CHECK = """
dist.init_process_group("gloo")
torch.manual_seed(0)
q, k, v = torch.randn(3, 12, 8, dtype=torch.float64)
mine = [x.chunk(dist.get_world_size())[dist.get_rank()] for x in (q, k, v)]
out, lse = ring_attention(*mine)
scores = q @ k.T / 8**0.5
whole = scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
for found, expected in zip((out, lse), whole):
    expected = expected.chunk(dist.get_world_size())[dist.get_rank()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
print(f"rank {dist.get_rank()} is right")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_ring_in_plain_torch_is_exact(num_ranks: int, tmp_path: Path) -> None:
    ring, *_ = re.findall(r"```python\n(.*?)```", _HOW.read_text(encoding="utf-8"), re.DOTALL)
    program = tmp_path / "ring.py"
    program.write_text(ring + _RING_CHECK, encoding="utf-8")
    job = run_job(program, num_ranks, by="torchrun", warm="torch")
    assert job.exit_code == 0, job.text
    assert sorted(job.out.split("\n")[:-1]) == [f"rank {i} is right" for i in range(num_ranks)]
