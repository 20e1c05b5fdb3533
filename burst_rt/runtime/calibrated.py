"""The machine file that a job plans with.

`burst-rt calibrate` writes a file for this user. The environment variable BURST_RT_HARDWARE may
name another: a shipped machine ("h100-sxm"), the path of a file, or "none". Rank 0's choice holds
for all ranks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from burst_rt.errors import ConfigError, InputError
from burst_rt.planning.machines import load_hardware
from burst_rt.remembered import cache_folder

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["HARDWARE_VARIABLE", "calibrated_path", "find_hardware", "fit_to_job", "plan_with"]

HARDWARE_VARIABLE = "BURST_RT_HARDWARE"


def calibrated_path(device_type: str) -> Path:
    """The file that `burst-rt calibrate` writes for devices of this type ("cpu", "cuda")."""
    return cache_folder() / f"hardware-{device_type}.toml"


def plan_with(path: Path) -> None:
    """Has this process plan with a file, if it is there and the environment names none."""
    if path.is_file():
        os.environ.setdefault(HARDWARE_VARIABLE, str(path))


def find_hardware(device_type: str) -> Hardware | None:
    """The machine to plan with, or None where nothing was calibrated or BURST_RT_HARDWARE=none.

    Raises ConfigError for a file that is wrong or cannot be read, or that is named and not there.
    """
    named = os.environ.get(HARDWARE_VARIABLE)
    if named == "none":
        return None
    path = named or calibrated_path(device_type)
    try:
        return load_hardware(path) if named or Path(path).is_file() else None
    except InputError as error:
        raise ConfigError(
            f"{HARDWARE_VARIABLE}={named}: {error.message}" if named else error.message
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the machine file {path} cannot be read: {error}; set {HARDWARE_VARIABLE}=none to "
            "plan without a machine file"
        ) from error


def fit_to_job(hardware: Hardware, ranks_per_node: int, world_size: int) -> Hardware | None:
    """The machine of a file, with as many ranks on a host as the job has.

    None where the job has several hosts, and the file does not describe the network between hosts.
    """
    if ranks_per_node < world_size and hardware.nics is None:
        return None
    return replace(hardware, node=replace(hardware.node, ranks=ranks_per_node))
