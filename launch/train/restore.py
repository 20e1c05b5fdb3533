"""A checkpoint that rank 0 reads and every rank receives. For: resuming and evaluating where only
one node sees the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from burst_rt.context import Context
from burst_rt.launch.train.agreement import on_first, share_bytes, share_tensors
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest, copy_tensors, find_checkpoint

__all__ = ["SharedCheckpoint", "read_shared"]


@dataclass(frozen=True)
class SharedCheckpoint:
    """Where it was found and what it says, on every rank; its tensors on rank 0 (`local`), until
    `fill` hands them out.
    """

    folder: Path
    manifest: Manifest
    local: Checkpoint | None

    def fill(
        self,
        context: Context,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Overwrite `weights`, and `optimizer` where given, on every rank. Collective; raises
        ConfigError when they do not fit.
        """
        on_first(context, lambda: self._copy(weights, optimizer))
        share_tensors(context, [*weights.values(), *(optimizer or {}).values()])

    def _copy(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        assert self.local is not None
        copy_tensors(self.local.weights, weights)
        if optimizer is not None:
            copy_tensors(self.local.optimizer, optimizer)


def read_shared(context: Context, path: Path) -> SharedCheckpoint:
    """Read the checkpoint that `path` means: itself, or the newest of the run it names.

    Collective. Raises ConfigError on every rank when there is none, or rank 0 cannot read it.
    """
    found = on_first(context, lambda: find_checkpoint(path))
    described = json.dumps([str(found[0]), found[1].manifest.to_json()]).encode() if found else None
    folder, manifest = json.loads(share_bytes(context, described))
    return SharedCheckpoint(Path(folder), Manifest.from_json(manifest), found[1] if found else None)
