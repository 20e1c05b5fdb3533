"""What one rank reads for all, or all ranks read alike: a checkpoint, a folder of transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest, copy_tensors, find_checkpoint
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.world import same_everywhere

if TYPE_CHECKING:
    from burst_rt.launch.train.pretrained import ModelFolder

__all__ = ["SharedCheckpoint", "open_same_folder", "read_shared"]


@dataclass(frozen=True)
class SharedCheckpoint:
    """A checkpoint that rank 0 has read, so that only one node need see its files."""

    folder: Path
    manifest: Manifest
    # The tensors, on rank 0 alone, until `fill` hands them out.
    local: Checkpoint | None

    def fill(
        self,
        world: Context,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Overwrite `weights`, and `optimizer` where given, on every rank. Collective; raises
        ConfigError on every rank when they do not fit.
        """

        def copy() -> None:
            assert self.local is not None
            copy_tensors(self.local.weights, weights)
            if optimizer is not None:
                copy_tensors(self.local.optimizer, optimizer)

        world.first(copy)
        for tensor in (*weights.values(), *(optimizer or {}).values()):
            # The sum of rank 0's values and zeros is rank 0's values.
            if world.rank != 0:
                tensor.zero_()
            world.all_reduce(tensor)


def read_shared(world: Context, path: Path) -> SharedCheckpoint:
    """Read the checkpoint that `path` means: itself, or the newest of the run it names.

    Collective. Raises ConfigError on every rank when there is none, or rank 0 cannot read it.
    """
    local: list[Checkpoint] = []

    def read() -> tuple[bytes, str]:
        folder, checkpoint = find_checkpoint(path)
        local.append(checkpoint)
        # As JSON, like the file: paths among the options need not be Unicode.
        return os.fsencode(folder), json.dumps(asdict(checkpoint.manifest))

    folder, text = world.first(read)
    manifest = Manifest.from_json(json.loads(text))
    return SharedCheckpoint(Path(os.fsdecode(folder)), manifest, local[0] if local else None)


def open_same_folder(
    world: Context, config: TrainConfig, shared: SharedCheckpoint | None
) -> ModelFolder | None:
    """The folder of `config`'s model, the same on every rank and as the checkpoint knows it; None
    for the byte-level model. Collective.
    """
    if config.model is None:
        return None
    folder = Path(config.model)

    def look() -> ModelFolder:
        # transformers takes seconds to load.
        from burst_rt.launch.train.pretrained import open_folder

        return open_folder(folder, config.seq_len)

    source = world.together(look)
    for what, value in (
        ("configuration", source.fingerprint),
        ("weights", source.weights_fingerprint if world.world_size > 1 else ""),
    ):
        same_everywhere(world, f"the {what} of the model that --model names", value)
    if shared is not None and shared.manifest.source != source.fingerprint:
        raise ConfigError(
            f"--model: {folder}/config.json is not that of the model that {shared.folder} was "
            "trained from; point --model at the same model."
        )
    return source
