"""What a job that serves is told. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import require_model

__all__ = ["ServeOptions"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `burst-rt serve`, which have its help."""

    model: Path
    served_name: str | None
    host: str
    port: int
    rows: int
    capacity: int
    chunk: int
    queue: int
    request_timeout: float
    connections: int
    body_mib: int
    api_key_file: Path | None
    dtype: str

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_name or self.model.name

    def keys(self) -> tuple[str, ...]:
        """The keys of which a client needs one. Raises ConfigError."""
        if self.api_key_file is None:
            return ()
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {error}; give a file that can be read.") from error
        if not lines:
            raise ConfigError(
                f"--api-key-file: {self.api_key_file} is empty; write a key on each line."
            )
        return tuple(lines)

    def check(self) -> None:
        """Raises ConfigError for what can be seen to be wrong without ranks."""
        require_model(self.model)
        self.keys()
