"""What a job that generates is told. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import TrainConfig, require_model

__all__ = ["GenerateOptions"]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `burst-rt generate`, which have its help."""

    checkpoint: Path | None
    model: Path | None
    prompt: str | None
    prompt_file: Path | None
    requests: Path | None
    chat: bool
    rows: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    dtype: str

    def source(self, begun: TrainConfig | None) -> TrainConfig:
        """The run's configuration (None: without a run), with the folder that is to be read.

        Raises ConfigError if a folder is given with a run that needs none, or cannot hold a model.
        """
        if self.model is not None and begun is not None and begun.model is None:
            raise ConfigError(
                f"--model: {self.checkpoint} holds a byte-level model of its own; leave --model "
                "out, or --checkpoint."
            )
        config = begun or TrainConfig()
        if self.model is not None:
            config = replace(config, model=str(self.model))
        if config.model is not None:
            require_model(Path(config.model))
        return config
