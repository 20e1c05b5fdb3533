"""What a layer costs that mixes tokens by a state of fixed size, and not by softmax attention.

Pure: numbers only, for forecasts and for what a call says of itself. A run of consecutive tokens
maps the state S of each head, K x V numbers, to A S + B:

* "linear": A is a decay. Linear attention (Lightning attention, arXiv 2401.04658) and Mamba-2's
  state space (arXiv 2405.21060, section 6), in chunks of C tokens.
* "delta": A is a matrix. The gated delta rule (arXiv 2412.06464; its chunks: arXiv 2406.06484,
  section 3) and Kimi's delta attention (arXiv 2510.26692), in chunks of C tokens.
* "scan": A is a diagonal, and each channel is a head. Mamba (arXiv 2312.00752, algorithm 2: V is 1)
  and the RG-LRU (arXiv 2402.19427, equations 3 and 4: K and V are 1), token after token.
* "convolution": there is no state; a short convolution alone (LFM2).

Over ranks each run makes its map from state 0, states go from each run to the one at the positions
after it, and each run starts again from the state that came: one state for each neighbour, where
attention sends keys and values. The backward does the same with the gradient of the state, towards
earlier positions. A short convolution before the state also needs the `kernel` - 1 tokens before a
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from burst_rt.errors import InputError
from burst_rt.planning.segments import StageFlops

__all__ = ["RECURRENCE_KERNELS", "STATE_BYTES", "RecurrenceSizes", "Rule"]

Rule: TypeAlias = Literal["linear", "delta", "scan", "convolution"]
# The kernels that a job may insist on: torch's operators, and flash-linear-attention's.
RECURRENCE_KERNELS = ("torch", "fla")
# Bytes of one number of a state, which is float32 in all kernels that we know.
STATE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RecurrenceSizes:
    """The sizes of one such layer. Raises InputError for sizes that do not fit.

    Counts are for all heads. Floating-point operations count a product and its sum as two. The
    chunked forms compute whole C x C squares of scores, as kernels do, and no triangles.
    """

    rule: Rule
    num_heads: int  # states; channels under "scan" and "convolution"
    key_dim: int = 1  # K
    value_dim: int = 1  # V
    num_key_heads: int = 0  # heads of queries and keys, as `linear` shares them; 0: num_heads
    chunk: int = 64  # C
    channels: int = 0  # those that the short convolution takes
    kernel: int = 1  # tokens that the convolution sees; 1: there is none

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in get_args(Rule):
            raise InputError(
                f"RecurrenceSizes: rule must be one of {', '.join(get_args(Rule))}, got "
                f"{self.rule!r}"
            )
        if not self.num_key_heads:
            object.__setattr__(self, "num_key_heads", self.num_heads)
        if self.rule == "convolution" and not self.channels:
            object.__setattr__(self, "channels", self.num_heads)
        for name in ("num_heads", "key_dim", "value_dim", "num_key_heads", "chunk", "kernel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"RecurrenceSizes: {name} must be an integer of at least 1, got {value!r}"
                )
        if self.num_heads % self.num_key_heads:
            raise InputError(
                "RecurrenceSizes: num_key_heads must divide num_heads, got "
                f"{self.num_key_heads} and {self.num_heads}"
            )

    @property
    def has_state(self) -> bool:
        return self.rule != "convolution"

    @property
    def stage_flops(self) -> StageFlops:
        """Operations of the forward's stages with torch's operators (`burst_rt/recurrence`).

        They repeat queries and keys for each of the heads that share them.
        """
        heads, key, value, size = self.num_heads, self.key_dim, self.value_dim, self.chunk
        state = heads * key * value
        if self.rule == "convolution":
            return StageFlops(0, 0, 0, 0, 2 * self.kernel * heads)
        if self.rule == "scan":
            step = -(-4 * state // size)
            return StageFlops(6 * state, step, 2 * state, step, 2 * state)
        if self.rule == "linear":
            step = -(-2 * state // size)
            prepare = 2 * heads * size * (key + value) + 2 * state
            return StageFlops(prepare, step, 2 * state, step, 2 * state)
        matrix, width = 2 * heads * key * key, key + value
        prepare = heads * size * (7 * key + 3 * value) + 2 * heads * key * width
        step = matrix * value
        return StageFlops(prepare, matrix * width // size, step, step // size, 2 * state)

    @property
    def is_chunked(self) -> bool:
        return self.rule in ("linear", "delta")

    def forward_flops(self, tokens: int) -> int:
        """Operations of the forward from a known state.

        A token and head of "linear": Q K^T 2 C K (for each head of keys), its product with V 2 C V,
        Q S 2 K V, and K^T V 2 K V into the state. "delta": Q K^T, K K^T and W 2 C K each, U and the
        scores' product 2 C V each, Q S 2 K V, W S and the state's K^T V 2 K V each, and C^2 / 3 for
        the inverse of a unit triangle. "scan": 7 for each number of the state: the exponential and
        its argument, the input, decay and sum, output and sum.
        """
        return self._state_flops(tokens) + self._output_flops(tokens)

    def backward_flops(self, tokens: int) -> int:
        """Operations of the backward: two products for each of the forward, and the states again.

        Kernels keep no states of chunks for the backward (flash-linear-attention, mamba-ssm).
        """
        return 2 * self.forward_flops(tokens) + self._state_flops(tokens)

    def map_flops(self, tokens: int) -> int:
        """Operations of the pass that makes a run's map, in each direction, on several ranks.

        That is the state from 0; for "delta" also A, which is the state from the identity: K x K
        for K x V.
        """
        matrix = 4 * self.num_heads * self.key_dim**2 if self.rule == "delta" else 0
        return self._state_flops(tokens) + tokens * matrix

    def _state_flops(self, tokens: int) -> int:
        each = {"linear": 2, "delta": 4, "scan": 5, "convolution": 0}[self.rule]
        return tokens * each * self.num_heads * self.key_dim * self.value_dim

    def _output_flops(self, tokens: int) -> int:
        heads, key, value, chunk = self.num_heads, self.key_dim, self.value_dim, self.chunk
        if self.rule == "linear":
            scores = 2 * self.num_key_heads * key
            return tokens * (chunk * (scores + 2 * heads * value) + 2 * heads * key * value)
        if self.rule == "delta":
            inside = chunk * (6 * key + 4 * value) + chunk**2 // 3
            return tokens * heads * (inside + 2 * key * value)
        return tokens * 2 * heads * key * value if self.rule == "scan" else 0

    def moved_bytes(self, tokens: int, input_bytes: int) -> int:
        """Bytes that the forward reads and writes: queries, keys, values, output, and chunks'
        states.

        Under "scan": input, step and output of each channel, and two keys that all channels share.
        """
        if not self.has_state:
            return 0
        if self.rule == "scan":
            return tokens * (3 * self.num_heads + 2 * self.key_dim) * input_bytes
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return tokens * 2 * (keys + values) * input_bytes + 2 * self.chunk_state_bytes(tokens)

    def state_bytes(self, batch: int = 1) -> int:
        """Bytes of the states of all heads: what one run sends to the next, in each direction."""
        numbers = self.num_heads * self.key_dim * self.value_dim * self.has_state
        return batch * numbers * STATE_BYTES

    def chunk_state_bytes(self, tokens: int) -> int:
        """Bytes of the states at the beginnings of all chunks, which a call holds for a while."""
        return -(-tokens // self.chunk) * self.state_bytes() if self.is_chunked else 0

    def halo_bytes(self, input_bytes: int, batch: int = 1) -> int:
        """Bytes of the tokens before a run that the short convolution needs."""
        return batch * (self.kernel - 1) * self.channels * input_bytes
