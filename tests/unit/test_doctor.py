"""What the doctor advises where something is missing: for a GPU that may be the driver, a package
or a library.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from burst_rt.errors import ConfigError
from burst_rt.launch import checks, doctor
from burst_rt.launch.asking import ALONE, ProbeAnswer, ask_command, ask_python
from burst_rt.launch.checks import Finding
from burst_rt.transport.torch_nccl import makes_wait


def _findings(
    monkeypatch: pytest.MonkeyPatch, errors: dict[str, str], *, cuda: str = ""
) -> dict[str, Finding]:
    """GPU findings where a probe that mentions a word of `errors` fails so; cuda: the devices that
    torch sees.
    """

    def ask(source: str, *, deadline_s: float = 0.0) -> ProbeAnswer:
        error = next((said for word, said in errors.items() if word in source), "")
        return (
            ProbeAnswer(error=error)
            if error
            else ProbeAnswer(cuda if "torch.cuda" in source else "1.2.3")
        )

    monkeypatch.setattr(checks, "ask_python", ask)
    return {finding.name: finding for finding in checks.check(_machine(), checks.GPU_CHECKS)}


def _machine() -> checks.Inspection:
    """A machine without mpirun."""
    machine = checks.Inspection()
    machine.launcher = ConfigError("no mpirun")
    machine.findings = {name: Finding(name, "missing", "") for name in checks.JOBS.values()}
    return machine


@pytest.mark.parametrize(
    ("error", "found", "advice"),
    [
        (
            "ModuleNotFoundError: No module named 'pynvml'",
            "the Python package is missing",
            "pip install '.[cuda13]'",
        ),
        (
            "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found",
            "the driver is missing",
            "NVIDIA's driver",
        ),
        (
            "pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded",
            "the driver is missing",
            "NVIDIA's driver",
        ),
    ],
)
def test_of_nvml_it_says_whether_driver_or_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, error: str, found: str, advice: str
) -> None:
    nvml = _findings(monkeypatch, {"pynvml": error})["NVML"]
    assert nvml.found == f"{found}: {error}"
    assert advice in nvml.advice
    assert nvml.advice.endswith("; for GPUs only")
    assert ("pip install" in nvml.advice) == ("package" in found)


def test_of_nccl_it_says_that_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = _findings(
        monkeypatch,
        {"nccl": "ImportError: libnccl.so.2: cannot open shared object file"},
        cuda="NVIDIA H100",
    )["NCCL"]
    assert (nccl.state, nccl.found.partition(":")[0]) == (
        "warning",
        "its library, or the right version, is missing",
    )
    assert "for GPUs only" not in nccl.advice


def test_of_torchs_nccl_it_says_what_makes_each_message_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"torch_nccl": "2.29.7; TORCH_NCCL_BLOCKING_WAIT is set"}
    monkeypatch.setattr(
        checks,
        "ask_python",
        lambda source, **_: ProbeAnswer(next((answers[x] for x in answers if x in source), "1.2")),
    )
    findings = {x.name: x for x in checks.check(_machine(), checks.GPU_CHECKS)}
    assert findings["torch's NCCL"].state == "warning"
    assert findings["torch's NCCL"].advice.startswith("unset it")


@pytest.mark.parametrize("value", ["", "0", "1", "True", "false"])
def test_a_variable_that_has_torchs_groups_wait_is_known(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", value)
    assert makes_wait() == ("NCCL_BLOCKING_WAIT" if value in ("1", "True") else "")


@pytest.mark.parametrize(
    ("torch", "extra"), [("CUDA 12.8", "[cuda12]'"), ("CUDA 13.0", "[cuda13]'"), ("", "[cuda12]')")]
)
def test_what_is_advised_fits_torchs_cuda(torch: str, extra: str) -> None:
    machine = _machine()
    machine.findings["torch"] = Finding("torch", "ok", f"2.13.0, 2 threads, {torch}")
    assert checks._extra(machine).endswith(extra)


def test_two_wheels_of_nccl_that_overwrite_each_other_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [SimpleNamespace(metadata={"Name": name}) for name in checks._NCCL_WHEELS]
    monkeypatch.setattr(checks, "distributions", lambda: both)
    nccl = _findings(monkeypatch, {}, cuda="NVIDIA H100")["NCCL"]
    assert nccl.state == "warning"
    assert "nvidia-nccl-cu12 and nvidia-nccl-cu13 have written the same file" in nccl.found


def test_no_advice_names_a_distribution_that_no_index_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks,
        "ask_python",
        lambda source, **_: ProbeAnswer(error="ModuleNotFoundError: No module named 'x'"),
    )
    mpi = {name: checks.CHECKS[name] for name in ("MPI library", "mpirun")}
    advice = [finding.advice for finding in checks.check(_machine(), mpi | checks.GPU_CHECKS)]
    assert sum("pip install '.[" in words for words in advice) == 5
    assert not any("burst-rt[" in words for words in advice)


_WAYS = ("MPI library", "mpirun", "2 ranks by mpirun", "2 ranks by torchrun")


def test_a_machine_without_mpi_is_told_of_burst_rt_run() -> None:
    states = zip(_WAYS, ("missing", "missing", "missing", "ok"), strict=True)
    findings = doctor._ways([Finding(name, state, name) for name, state in states])
    findings.append(Finding("burst-rt run", "ok", "by torchrun, as there is no mpirun"))
    said = doctor._summary(findings)
    assert said.startswith("A CPU job can run here, without MPI: burst-rt train -n 2, or torchrun")


@pytest.mark.parametrize(
    ("states", "expected", "says"),
    [
        ("ok ok ok ok", "ok ok ok ok", "can run here: burst-rt train -n 2, or torchrun "),
        ("ok ok ok missing", "ok ok ok warning", "can run here: burst-rt train -n 2"),
        (
            "missing missing missing ok",
            "warning warning warning ok",
            "can run here, by torchrun only: torchrun --nproc-per-node 2 -m burst_rt.launch.train",
        ),
        (
            "ok missing missing missing",
            "ok missing missing missing",
            "cannot run yet: see mpirun, 2 ranks by mpirun, 2 ranks by torchrun",
        ),
    ],
)
def test_one_launcher_that_works_is_enough(states: str, expected: str, says: str) -> None:
    findings = [Finding(*line) for line in zip(_WAYS, states.split(), _WAYS, strict=True)]
    found = doctor._ways(findings)
    assert [finding.state for finding in found] == expected.split()
    assert doctor._summary(found).startswith(f"A CPU job {says}")


def test_what_a_library_writes_is_no_answer() -> None:
    """UCX has its log on standard output, and its last line may come after the reason."""
    log = "os.write(1, b'[1.0] [host:1:0] ucp_context.c:2463 UCX INFO Version\\n')\n"
    assert ask_python(f"{log}print('said')\n{log}").text == "said"
    assert ask_python(f"{log}print('said', file=sys.stderr)\n{log}sys.exit(3)").error == "said"
    # A process that crashes takes no line with it.
    crashing = [sys.executable, "-P", "-c", f"{ALONE}print('said')\nos._exit(0)"]
    assert ask_command(crashing, deadline_s=20).text == "said"
