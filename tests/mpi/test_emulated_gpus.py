"""Jobs whose ranks have emulated GPUs (`emulated`): programs of the guide, commands and whole
worlds mix no devices, read nothing too early, and give the results that they give on CPUs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import Job, Launcher, run_command, run_job
from small_hybrids import truth_of_hybrid
from small_models import truth
from standin import emulated_gpus
from tolerances import ERROR

from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a torch built for CUDA has no room for emulated GPUs"
)

_PROGRAMS = Path(__file__).parent / "programs"
# Devices do nothing now and then: what does not wait for them is too early.
_LAG = {"EMULATED_LAG_S": "0.002"}


@pytest.fixture(scope="module", autouse=True)
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Pythons that start from here on have four GPUs."""
    former = dict(os.environ)
    os.environ.update(emulated_gpus(tmp_path_factory.mktemp("emulated"), 4) | _LAG)
    yield
    os.environ.clear()
    os.environ.update(former)


def _run(name: str, num_ranks: int, *args: str, by: Launcher = "burst-rt run") -> Job:
    job = run_job(_PROGRAMS / name, num_ranks, args, by=by, warm="torch")
    assert job.exit_code == 0, job.text
    return job


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are Triton's, run by its interpreter."""
    monkeypatch.setenv("EMULATED_TRITON", "1")


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's kernels refuse is refused."""
    monkeypatch.setenv("EMULATED_REFUSES", "1")


_OF_LAUNCHES = ("addresses", "specialized", "tables")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("what", ["devices", "order", "memory", "driver", *_OF_LAUNCHES])
def test_what_a_gpu_would_get_wrong_is_an_error(what: str) -> None:
    job = run_job(_PROGRAMS / "emulated_faults.py", 1, [what], warm="torch")
    assert job.exit_code == 0, job.text
    assert job.out.split() == ["seen", "fine"], job.text


_PAGES = ("index", "masks", "recurrences", "serving", "pipelines", "watching", "plain")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("by", "pages"), [("burst-rt run", _PAGES), ("torchrun", ("serving",))])
def test_the_guide(by: Launcher, pages: tuple[str, ...]) -> None:
    """Over CuPy's NCCL under `burst-rt run`, over torch's under torchrun."""
    job = _run("emulated_pages.py", 2, *pages, by=by)
    assert job.out.count("emulated page") == 2 * len(pages), job.text


@pytest.mark.parametrize(("transport", "num_ranks"), [("nccl", 3), ("staged", 4), ("mpi", 2)])
def test_attention(transport: str, num_ranks: int, tmp_path: Path) -> None:
    _run("attention_world.py", num_ranks, str(tmp_path / "outcome.json"), transport)
    found = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))
    worst = max(error for of_case in found["errors"].values() for error, _ in of_case.values())
    assert worst <= ERROR[torch.bfloat16]
    for name, of_case in found["errors"].items():
        if name not in ("bf16", "fp16"):
            assert max(error for error, _ in of_case.values()) <= ERROR[torch.float32], name
    assert all(predicted == sent for predicted, sent in found["bytes"].values())
    assert found["repeats"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_launches_of_triton(num_ranks: int, tmp_path: Path) -> None:
    """Calls that come again start what was kept; a rank alone has no driver between."""
    _run("emulated_kernels.py", num_ranks, str(tmp_path / "outcome.json"))
    found = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))
    limits = dict.fromkeys(("bf16", "packed", "roles"), ERROR[torch.bfloat16])
    limits["fp16"] = ERROR[torch.float16]
    kernels = {"forward", "forward_hopper", "dkdv", "dq", "delta", "decode"}
    assert {f"{name}_kernel" for name in kernels} <= found["decode"]["launches"].keys()
    assert len(found) == 11
    for name, of_case in found.items():
        limit = limits.get(name, ERROR[torch.float32])
        assert all(error <= limit for error in of_case["errors"].values()), (name, of_case)
    for name in ("bf16", "fp16", "window", "packed", "roles"):
        (_, kept), *_, (own_way, kept_again) = found[name]["launches"]
        assert kept == 0, (name, found[name])
        assert kept_again > 0, (name, found[name])
        assert own_way <= 1, (name, found[name])  # where an address is no multiple of 16


_RECORDED = """
import torch, burst_rt
with burst_rt.init() as ctx:
    layout = ctx.layout(512)
    shape = 1, layout.shard_len, 4, 64
    x = torch.randn(shape, device=ctx.device, requires_grad=True)
    for _ in range(5):
        burst_rt.burst_attention(x, x, x, causal=True, layout=layout).sum().backward()
"""


def test_a_record_has_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones end on the devices after the program has left its context."""
    path, program = tmp_path / "run.record", tmp_path / "recorded.py"
    program.write_text(_RECORDED, encoding="utf-8")
    monkeypatch.setenv("BURST_RT_RECORD", str(path))
    job = run_job(program, 2, cwd=tmp_path, warm="torch")
    assert job.exit_code == 0, job.text
    model = replay(Record(path))
    calls = model.timeline(0.0).calls
    for rank in model.snapshot().ranks:
        own = [call for call in calls if call.rank == rank.rank]
        assert [call.kind for call in own] == 5 * ["forward", "backward"]
        assert {"compute", "network"} <= {span.lane for call in own for span in call.spans}
        assert rank.dropped == 0


def test_the_host_waits_for_no_gpu_in_calls_that_come_again() -> None:
    job = _run("emulated_waits.py", 4)
    for rank in range(4):
        assert f"rank {rank}, turn 1: []" in job.out, job.text


def test_recurrences(tmp_path: Path) -> None:
    _run("recurrence_world.py", 3, str(tmp_path / "outcome.json"), "nccl")
    found = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))
    assert max(found["errors"].values()) <= ERROR[torch.float32]


def test_calls_from_two_streams() -> None:
    """The slots of one are free for the other once nothing reads them any more."""
    job = _run("emulated_streams.py", 2)
    assert job.out.count("done") == 2 * 5, job.text


def test_models_of_transformers_and_fsdp2(tmp_path: Path) -> None:
    cases = {"Llama": ("plain", "packed"), "GptOss": ("packed",), "Gemma3Images": ("left",)}
    truths = {name: {kind: truth(name, kind) for kind in kinds} for name, kinds in cases.items()}
    truths["Jamba"] = {"packed": truth_of_hybrid("Jamba", "packed")}
    torch.save(truths, tmp_path / "truths.pt")
    _run("models.py", 3, str(tmp_path / "truths.pt"), str(tmp_path / "results.json"))
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {"Llama packed fully_sharded", "Jamba packed DistributedDataParallel"} <= found.keys()
    assert max(max(differences.values()) for differences in found.values()) <= 1e-5


@pytest.mark.usefixtures("strict")
def test_the_first_commands_of_the_guide_for_gpus(tmp_path: Path) -> None:
    bench = ["bench", "attention", "-n", "2", "--part", "error", "--max-tokens", "256"]
    job = run_command(bench, cwd=tmp_path, warm="torch")
    assert job.exit_code == 0, job.text
    assert job.out.count("the same") >= 20, job.text
    assert "differ" not in job.out, job.text
    job = run_command(
        ["train", "-n", "2", "--steps", "6", "--seq-len", "512"], cwd=tmp_path, warm="torch"
    )
    assert job.exit_code == 0, job.text
    assert "on cuda:0" in job.out, job.text
    first, last = re.findall(r"step +[16]/6 +loss ([\d.]+)", job.out)
    assert float(last) < float(first)
