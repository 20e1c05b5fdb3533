"""The NVLink domain of a GPU: the GPUs that it reaches over NVLink, on other hosts too.

On machines like NVL72 one NVLink network joins several hosts. NVML tells its number as the GPU's
fabric (nvmlDeviceGetGpuFabricInfoV of NVIDIA's NVML API reference). NCCL goes by the same number,
and also asks whether the driver can share memory between hosts, which is not asked here.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

__all__ = ["nvlink_domain"]

# NVML may hang. A rank does without the domain then.
_PATIENCE_S = 5.0


def nvlink_domain(uuid: str) -> str:
    """The domain of a GPU; "" where NVLink ends at its host, or nobody knows.

    uuid: torch's, without "GPU-". Blocks at most 5 s.
    """
    domains: list[str] = []
    thread = threading.Thread(
        target=lambda: domains.append(_domain(uuid)), name="burst_rt nvlink", daemon=True
    )
    thread.start()
    thread.join(_PATIENCE_S)
    return "".join(domains)


def _domain(uuid: str) -> str:
    try:
        import pynvml as nvml
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        fabric: Any = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric))
    # An older pynvml lacks a name, an older driver a function; a rank does without the domain.
    except Exception:  # noqa: BLE001  (whatever else NVML may do)
        return ""
    cluster = bytes(fabric.clusterUuid)
    joined = (fabric.state, fabric.status) == (
        nvml.NVML_GPU_FABRIC_STATE_COMPLETED,
        nvml.NVML_SUCCESS,
    )
    # Where NVLink joins the GPUs of one host only, the cluster has no number.
    return f"{cluster.hex()}.{fabric.cliqueId}" if joined and any(cluster) else ""
