"""The machine file that a job plans with: the one `burst-rt calibrate` wrote for this user, or the one that the environment names.

BURST_RT_HARDWARE: a shipped machine's name ("h100-sxm"), the path of a file, or "none". Rank 0's choice holds for all ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

from burst_rt.errors import ConfigError, InputError
from burst_rt.scheduler.hardware import Hardware, load_hardware

__all__ = ["HARDWARE_VARIABLE", "calibrated_path", "find_hardware"]

HARDWARE_VARIABLE = "BURST_RT_HARDWARE"


def calibrated_path(device_type: str) -> Path:
    """Where `burst-rt calibrate` keeps what it measured on devices of this type ("cpu", "cuda")."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burst_rt" / f"hardware-{device_type}.toml"


def find_hardware(device_type: str) -> Hardware | None:
    """The machine to plan with, or None. Raises ConfigError for a file that is wrong, or named and not there."""
    named = os.environ.get(HARDWARE_VARIABLE)
    if named == "none":
        return None
    path = calibrated_path(device_type)
    if not named and not path.is_file():
        return None
    try:
        return load_hardware(named or path)
    except InputError as error:
        raise ConfigError(f"{HARDWARE_VARIABLE}={named}: {error.message}") from error
