"""The machine file that a job plans with.

`burst-rt calibrate` writes a file for this user. The environment variable BURST_RT_HARDWARE may
name another: a shipped machine ("h100-sxm"), the path of a file, or "none". Without either, GPUs
that a shipped file describes are known by their name. Rank 0's choice holds for all ranks.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from burst_rt.errors import ConfigError, InputError
from burst_rt.planning.machines import load_hardware
from burst_rt.remembered import cache_folder

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "HARDWARE_VARIABLE", "calibrated_path", "find_hardware", "fit_to_job", "plan_with",
    "shipped_machine",
]  # fmt: skip

HARDWARE_VARIABLE = "BURST_RT_HARDWARE"
# The shipped machines, by a word of their GPU's name as the driver tells it.
_GPUS = {
    "A100": "a100-sxm", "H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm",
    "GB200": "gb200-nvl72", "MI300X": "mi300x",
}  # fmt: skip
# GPUs with one of these words are linked in another way, or are parts of a GPU.
_OTHERS = {"PCIE", "NVL", "MIG"}
_MEMORY = "80GB"  # as the names of some say


def calibrated_path(device_type: str) -> Path:
    """The file that `burst-rt calibrate` writes for devices of this type ("cpu", "cuda")."""
    return cache_folder() / f"hardware-{device_type}.toml"


def plan_with(path: Path) -> None:
    """Has this process plan with a file, if it is there and the environment names none."""
    if path.is_file():
        os.environ.setdefault(HARDWARE_VARIABLE, str(path))


def shipped_machine(gpu: str) -> Hardware | None:
    """The shipped machine with GPUs of a name ("NVIDIA H100 80GB HBM3"), or None.

    The network between nodes is the vendor's reference for this machine: yours may be slower.
    """
    words = set(re.split("[ -]", gpu.upper()))
    for word in words & _GPUS.keys():
        sizes = {word for word in words if re.fullmatch(r"\d+GB", word)}
        if not words & _OTHERS and sizes <= {_MEMORY}:
            machine = load_hardware(_GPUS[word])
            return replace(machine, name=f"{machine.name}, by the name of the GPU")
    return None


def find_hardware(device_type: str, gpu: str = "") -> Hardware | None:
    """The machine to plan with, or None where none is known or BURST_RT_HARDWARE=none.

    gpu: the name of this rank's GPU, if it has one. Raises ConfigError for a file that is wrong or
    cannot be read, or that is named and not there.
    """
    named = os.environ.get(HARDWARE_VARIABLE)
    if named == "none":
        return None
    path = named or calibrated_path(device_type)
    try:
        return load_hardware(path) if named or Path(path).is_file() else shipped_machine(gpu)
    except InputError as error:
        raise ConfigError(
            f"{HARDWARE_VARIABLE}={named}: {error.message}" if named else error.message
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the machine file {path} cannot be read: {error}; set {HARDWARE_VARIABLE}=none to "
            "plan without a machine file"
        ) from error


def fit_to_job(
    hardware: Hardware, ranks_per_node: int, world_size: int, hosts_per_node: int = 1
) -> Hardware | None:
    """The machine of a file, with as many ranks on a node as the job has.

    hosts_per_node: more than 1 where NVLink joins several. If the file's node is one of them, the
    node has the network cards of all. None where the job has several nodes, and the file does not
    describe the network between nodes.
    """
    if ranks_per_node < world_size and hardware.nics is None:
        return None
    nics = hardware.nics
    if (
        nics is not None
        and hosts_per_node > 1
        and hardware.node.ranks * hosts_per_node <= ranks_per_node
    ):
        nics = replace(nics, count=nics.count * hosts_per_node)
    return replace(hardware, nics=nics, node=replace(hardware.node, ranks=ranks_per_node))
