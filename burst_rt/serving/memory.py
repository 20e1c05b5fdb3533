"""The memory of a cache: one rank's keys and values of all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from burst_rt.drivers import is_out_of_memory
from burst_rt.errors import DeviceError
from burst_rt.job.control_groups import free_host_bytes
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.runtime.runtime import Runtime
from burst_rt.serving.chunks import BatchRows, Dealt

__all__ = ["KVMemory", "KVShape", "Layer"]


class Layer(NamedTuple):
    """One layer's shard: k `[batch, columns, kv_heads, head_dim]`, v with its own head_dim.

    In memory the columns come first, so that those that are filled are one stretch.
    """

    k: torch.Tensor
    v: torch.Tensor


class KVShape(NamedTuple):
    """What a column of a shard is made of."""

    num_layers: int
    batch: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of all layers."""
        channels = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return self.num_layers * self.batch * channels * self.dtype.itemsize


class KVMemory:
    """One rank's shard of the keys and values of a cache. It has no memory until `adopt`.

    dealt: which rank has which token. Local, all of it.
    """

    def __init__(self, runtime: Runtime, shape: KVShape, dealt: Dealt) -> None:
        self._runtime, self.shape = runtime, shape
        self.dealt, self.rank = dealt, runtime.rank
        self.layers: list[Layer] = []
        self.capacity = 0  # tokens of each sequence, over all ranks
        self.written = 0  # the most tokens that a row may have had, forgotten ones included

    @property
    def nbytes(self) -> int:
        """Bytes that the shard takes."""
        return self._num_columns(self.capacity) * self.shape.column_bytes

    def allocate(self, capacity: int) -> list[Layer] | DeviceError:
        """Memory for `capacity` tokens of each sequence, with what is cached in it.

        Returns the error where there is not enough: one that is raised here would hold what was
        taken so far.
        """
        shape, device = self.shape, self._runtime.device
        new: list[Layer] = []
        try:
            # A later step outside inference mode could not write to tensors made inside it.
            with torch.inference_mode(False), torch.no_grad():
                for _ in range(shape.num_layers):
                    sizes = (self._num_columns(capacity), shape.batch, shape.num_kv_heads)
                    # Zeros: kernels load whole blocks, and must find numbers there.
                    k, v = (
                        torch.zeros(*sizes, channels, dtype=shape.dtype, device=device)
                        for channels in (shape.head_dim, shape.v_head_dim)
                    )
                    fresh = Layer(k.transpose(0, 1), v.transpose(0, 1))
                    if self.layers:
                        for old, x in zip(self.layers[len(new)], fresh, strict=True):
                            x[:, : old.shape[1]].copy_(old)
                    new.append(fresh)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return self._too_large(capacity)
        return new

    def adopt(self, layers: list[Layer], capacity: int) -> None:
        """Goes on with the memory that `allocate` gave, and gives back what there was."""
        self.layers, self.capacity = layers, capacity

    def begin(self, rows: BatchRows) -> None:
        """A step begins: its tokens may be written."""
        self.written = max(self.written, *rows.after)

    def cleared(self, rows: BatchRows) -> None:
        """A step has ended in which `clear` was called for all layers."""
        self.written = max(rows.after)

    def lacks(self, capacity: int) -> DeviceError | None:
        """Why the ranks of this host cannot all take memory for so many tokens, or None.

        A GPU says so itself. A host gives out more memory than it has. Control groups are taken to
        hold all ranks of the host.
        """
        if self._runtime.device.type != "cpu":
            return None
        ranks, free = self._runtime.machine.ranks_here, free_host_bytes()
        need = ranks * self._num_columns(capacity) * self.shape.column_bytes
        if need <= free:
            return None
        return self._too_large(
            capacity, f"; {ranks} ranks of this host need {need:,}, and {free:,} are free"
        )

    def reorder(self, rows: list[int], tokens: int) -> None:
        """Row i becomes what row `rows[i]` was, of the first tokens of a sequence."""
        index = torch.tensor(rows, device=self._runtime.device)
        used = self._num_columns(tokens)
        with torch.no_grad():
            for layer in self.layers:
                for x in layer:
                    x[:, :used].copy_(x[:, :used].index_select(0, index))

    def copy(self, row: int, source: KVMemory, source_row: int, tokens: int) -> None:
        """A row becomes the first tokens of another memory's row. Both are dealt alike."""
        used = self.dealt.count(tokens, self.rank)
        with torch.no_grad():
            for layer, other in zip(self.layers, source.layers, strict=True):
                for x, y in zip(layer, other, strict=True):
                    x[row, :used].copy_(y[source_row, :used])
        self.written = max(self.written, tokens)

    def clear(self, layer: int, rows: BatchRows) -> None:
        """Zeros in the place of tokens that were forgotten, behind those of a step.

        They may be NaN; kernels load whole blocks, and what is hidden is multiplied by 0.
        """
        alike, last = len(rows) == 1, self.dealt.count(self.written, self.rank)
        for row, after in enumerate(rows.after):
            for x in self.layers[layer] if after < self.written else ():
                x[slice(None) if alike else row, self.dealt.count(after, self.rank) : last] = 0

    def _too_large(self, capacity: int, beside: str = "") -> DeviceError:
        runtime, shape, columns = self._runtime, self.shape, self._num_columns(capacity)
        return DeviceError(
            f"KVCache: out of memory on {runtime.device}: capacity {capacity:,} takes "
            f"{columns * shape.column_bytes:,} bytes on this rank ({columns:,} tokens x "
            f"{shape.batch} sequences x {shape.num_layers} layers x {shape.num_kv_heads} kv heads "
            f"x ({shape.head_dim} + {shape.v_head_dim}) x {shape.dtype.itemsize} bytes){beside}. "
            "Use more ranks, a smaller capacity or batch, or a smaller dtype",
            rank=runtime.rank,
        )

    def _num_columns(self, tokens: int) -> int:
        """Columns for so many tokens of a sequence, in whole blocks of kernels."""
        own = max(self.dealt.count(tokens, rank) for rank in range(self.dealt.world_size))
        return -(-own // ROWS_TOGETHER) * ROWS_TOGETHER
