"""A step of a cache: one forward of a model, whose layers attend one after the other.

The ranks have agreed on the step (`KVCache.step`); its layers attend without another word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from burst_rt.attention.options import check_factors
from burst_rt.attention.planner import Plan, PlanKey
from burst_rt.attention.run import plain_math, run_forward
from burst_rt.attention.state import AttentionState
from burst_rt.attention.tensor_check import check_scores, check_values
from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels import DTYPES, QKV, ScoreOptions, sum_dtype
from burst_rt.kernels.decode import SeenColumns
from burst_rt.planning.masks import Mask, Positions
from burst_rt.planning.masks.positions import is_count
from burst_rt.planning.problem import ScoreFlags
from burst_rt.planning.strategies import check_name
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.runtime.reductions import all_reduce
from burst_rt.serving.chunks import BatchRows, CachedMask, in_columns
from burst_rt.serving.decode_plan import DecodePlan, plan_decode
from burst_rt.serving.decode_run import run_decode
from burst_rt.serving.history import History
from burst_rt.serving.layer_call import LayerCall, calls_in_words
from burst_rt.serving.memory import KVMemory, Layer
from burst_rt.serving.step_check import ATTEND, check_qkv, look_of, structure_of

__all__ = ["Step"]

_CONTRACT = Contract({"call": ATTEND})
_STALE = "another step has been begun since, or the cache's rows were changed"


# Some of the new tokens: rows of the batch, and their tokens. None: all tokens of all rows.
_Some: TypeAlias = tuple[slice, slice | list[int]] | None


class _Views(NamedTuple):
    """One layer's shard as a step uses it."""

    # Where new keys and values go, and which of the new tokens go there.
    targets: list[tuple[torch.Tensor, torch.Tensor, _Some]]
    filled: Layer  # the columns that are filled after the step


@dataclass(frozen=True)
class _Chunk:
    """The attention of one layer to a chunk: the `Forward` that runs it."""

    attention: AttentionState
    forward_plan: Plan
    scale: float | None
    forward_contract: Contract = _CONTRACT
    agreed: ClassVar[AgreedWhen] = AgreedWhen.WITH_OTHERS


class Step:
    """One step of a cache; made by `KVCache.step`.

    sharded: whether this rank has its own new tokens only. num_tokens: how many tokens of each row
    this rank's tensors have.
    """

    def __init__(
        self,
        attention: AttentionState,
        memory: KVMemory,
        history: History,
        rows: BatchRows,
        tokens: tuple[int, ...],
        *,
        sharded: bool,
    ) -> None:
        self._attention, self.sharded = attention, sharded
        self._memory, self._shape, self._history = memory, memory.shape, history
        self._rows, self._tokens = rows, tokens
        self._dealt, self._rank = memory.dealt, memory.rank
        self.num_tokens = rows.queries(self._dealt, self._rank) if sharded else max(tokens)
        self._plans: dict[object, Plan] = {}
        self._seen: dict[Mask, SeenColumns] = {}
        self._views: list[_Views] = []
        self._views_of: object = None  # the list of layers that these are views of
        self._known: dict[object, LayerCall] = {}  # by all that a check looks at, but for the layer
        self._called: list[tuple[int, LayerCall]] = []  # by layer, for the next step
        self._done = False
        self._waiting = set(range(self._shape.num_layers))  # layers that have not attended
        self._number = history.begin()
        memory.begin(rows)

    @cached_property
    def _places(self) -> Positions:
        """Where this rank's tokens stand in their rows; -1 for none. `[rows, num_tokens]`."""
        places = []
        for before, after in zip(self._rows.before, self._rows.after, strict=True):
            at = np.arange(self.num_tokens, dtype=np.int64)
            if self.sharded:
                first = self._dealt.count(before, self._rank)
                at = self._dealt.position(first + at, self._rank)
            else:
                at += before
            places.append(np.where(at < after, at, -1))
        return np.stack(places)

    @cached_property
    def valid(self) -> torch.Tensor:
        """Which of this rank's tokens there are: bool `[batch, num_tokens]`."""
        return self._on_device(self._places >= 0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where this rank's tokens stand in their sequences: int64 `[batch, num_tokens]`.

        Left padding counts. 0 where there is no token.
        """
        return self._on_device(np.maximum(self._places, 0))

    @cached_property
    def _index(self) -> torch.Tensor:
        """Which of the new tokens this rank's are: int64 `[batch, num_tokens]`."""
        before = np.array(self._rows.before, np.int64)[:, None]
        return self._on_device(np.maximum(self._places - before, 0))

    @property
    def last_owner(self) -> tuple[int, ...]:
        """For each row, a rank that has the row's last new token, as the last of its own."""
        batch = self._shape.batch
        owners = [self._dealt.owner(max(0, after - 1)) for after in self._rows.after]
        owners = owners if self.sharded else [0] * len(owners)
        return tuple(owners * batch if len(owners) == 1 else owners)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's `[batch, num_tokens, ...]` of all new tokens `[batch, tokens, ...]`.

        The numbers after a row's tokens mean nothing; see `valid`. Local. x may be on the host,
        where prompts come from.
        """
        if x.ndim < 2 or x.shape[:2] != (self._shape.batch, max(self._tokens)):
            self._refuse(
                f"cut: x must be [batch, tokens, ...] of {self._shape.batch} sequences and "
                f"{max(self._tokens)} new tokens, got shape {tuple(x.shape)}"
            )  # fmt: skip
        if not self.sharded:
            return x
        index = self._index.to(x.device).view(*self._index.shape, *(1,) * (x.ndim - 2))
        return x.gather(1, index.expand(*self._index.shape, *x.shape[2:]))

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """The values of each row's last new token, on every rank.

        Collective where the tokens are spread (`sharded`): every rank calls it, and it blocks at
        most `timeout_s`; otherwise local. No gradients.

        x: `[batch, num_tokens, ...]` of this rank's tokens; float64, float32, bfloat16 or float16.

        Returns `[batch, ...]`, the same values on every rank; zeros for a row without new tokens.
        Raises InputError on every rank that waits for this one.
        """
        rows = (self._shape.batch, self.num_tokens)
        if not isinstance(x, torch.Tensor) or x.shape[:2] != rows or x.dtype not in DTYPES:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            self._refuse(
                f"last: x must be floating point [batch, this rank's tokens of the step, "
                f"...] = {rows}, got {got}"
            )  # fmt: skip
        runtime = self._attention.runtime
        # Every number of these dtypes is one of the wider dtype, and a sum with zeros is exact.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        values = torch.zeros(len(x), *x.shape[2:], dtype=wide, device=x.device)
        for row, (owner, new) in enumerate(zip(self.last_owner, self._tokens, strict=True)):
            if new and (owner == self._rank or not self.sharded):
                at = int((self._places[row if len(self._places) > 1 else 0] >= 0).sum())
                values[row] = x[row, at - 1].detach()
        return (all_reduce(runtime, values) if self.sharded else values).to(x.dtype)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        strategy: str = "auto",
    ) -> torch.Tensor:
        """Adds this rank's keys and values to a layer, and attends to all that the layer has.

        Collective: every rank calls it for every layer, in one order. Blocks until this rank's part
        is done; another rank may come as late as `timeout_s`. No gradients.

        q: `[batch, num_tokens, heads, head_dim]`; k, v: the same with the cache's kv heads and, of
            v, its v_head_dim; all of the cache's dtype.
        mask: what queries see beside being causal, by positions in the sequence: SlidingWindow(w),
            for example. It has spans, and tells no rows apart. Documents and BlockSparse must be
            for `capacity` tokens.
        scale, softcap, sinks: as in `burst_attention`.
        strategy: of a prefill: "auto", "ring-kv" (keys travel), "ring-q" (queries travel), or
            another one of `burst_attention`.

        Returns out `[batch, num_tokens, heads, v_head_dim]`; of a decode the same bits on every
        rank. Raises InputError on every rank that makes the same call, also for a layer that has
        attended in this step; PeerLost and Stalled. An InputError of one rank alone breaks the
        context, because the others are in the call: they raise ContractMismatch, PeerLost or
        ProtocolError. Where memory runs out on a rank, every rank raises DeviceError, and the
        context is broken. Raises ConfigError once the context is closed.
        """
        runtime = self._attention.runtime
        runtime.check_usable()
        try:
            self._check_turn(layer)
            call = self._checked(QKV(q, k, v), sinks, mask, scale, softcap, strategy)
            score_options = (
                call.score_options if sinks is None else call.score_options._replace(sinks=sinks)
            )
            if self._attention.check_finite:
                check_values(ATTEND, QKV(q, k, v), score_options)
        except InputError as error:
            runtime.refuse(ATTEND, error)
        self._called.append((layer, call))
        with plain_math(q.device.type):
            if self._views_of is not self._memory.layers:
                self._view()
            targets, filled = self._views[layer]
            for keys, values, chosen in targets:
                keys.copy_(k if chosen is None else k[chosen])
                values.copy_(v if chosen is None else v[chosen])
            if call.decode is None:
                out = self._prefill(layer, q, call.structure, scale, score_options, strategy)
            else:
                plan, seen = call.decode
                out = run_decode(
                    self._attention,
                    _CONTRACT,
                    plan,
                    QKV(q, *filled),
                    seen,
                    scale=scale,
                    score_options=score_options,
                )
        self._waiting.discard(layer)
        if not self._waiting:
            self._history.attended(self._number)
        return out

    def explain(self, num_heads: int, mask: Mask | None = None, strategy: str = "auto") -> str:
        """How a layer of this step would attend, in words: what travels, bytes, memory. Local."""
        check_name(strategy, "Step.explain")
        structure = structure_of(mask, self._memory.capacity)
        if self.sharded:
            return self._plan(num_heads, structure, ScoreOptions(), strategy).explain()
        return self._plan_decode(num_heads, ScoreFlags()).explain()

    def commit(self) -> None:
        """Ends the step: the tokens are cached. Local. Calls after the first do nothing.

        Raises InputError, on every rank that waits for this one, where a layer has not attended,
        or where another step has been begun since, or the cache's rows were changed.
        """
        if not self._done:
            waiting = self._waiting
            if waiting or not self._history.goes_on(self._number):
                why = f"layer {min(waiting)} has not attended" if waiting else _STALE
                self._refuse(f"commit: {why}; begin another: cache.step(n)")
            self._done = True
            rows = len(self._rows)
            padding = self._rows.padding * (self._shape.batch if rows == 1 else 1)
            self._history.commit(self._tokens, padding, calls_in_words(self._called))
            if self.sharded:  # all layers have been cleared behind the step's tokens
                self._memory.cleared(self._rows)

    def _check_turn(self, layer: int) -> None:
        """Raises InputError where the layer may not attend now."""
        num_layers, where = self._shape.num_layers, ATTEND
        if self._done:
            raise InputError(f"{where}: this step has been committed; begin another: cache.step(n)")
        if not self._history.goes_on(self._number):
            raise InputError(f"{where}: {_STALE}; begin another: cache.step(n)")
        if not (is_count(layer, 0) and layer < num_layers):
            raise InputError(
                f"{where}: layer must be a number from 0 to {num_layers - 1}, got {layer!r}"
            )
        if layer not in self._waiting:
            raise InputError(
                f"{where}: layer {layer} has attended in this step; expected each layer once; give "
                "every layer its own number"
            )

    def _checked(
        self,
        qkv: QKV,
        sinks: torch.Tensor | None,
        mask: Mask | None,
        scale: float | None,
        softcap: float | None,
        strategy: str,
    ) -> LayerCall:
        """The call, which was checked now or for an earlier layer. Raises InputError."""
        options = (mask, scale, softcap, strategy)
        said = (
            *options, *map(type, options), torch.is_grad_enabled(), *map(look_of, (*qkv, sinks)),
        )  # fmt: skip
        try:
            call = self._known.get(said)
        except TypeError:  # what has no hash has not passed
            call = None
        if call is not None:
            return call
        structure = structure_of(mask, self._memory.capacity)
        check_name(strategy, ATTEND)
        check_factors(ATTEND, scale, softcap)
        device = self._attention.runtime.device
        num_heads = check_qkv(qkv, self._shape, self.num_tokens, device)
        check_scores(ATTEND, qkv.q, structure, scale, ScoreOptions(softcap, None, sinks))
        decode = None
        if not self.sharded:
            scores = ScoreOptions(softcap, None, sinks).flags
            decode = self._plan_decode(num_heads, scores), self._what_is_seen(structure)
        call = self._known[said] = LayerCall(
            words=f"{num_heads} heads, mask {mask!r}, scale {scale}, softcap {softcap}, "
            f"strategy {strategy}, {'no ' * (sinks is None)}sinks",
            structure=structure, score_options=ScoreOptions(softcap), decode=decode,
        )  # fmt: skip
        return call

    def _places_in_shard(self) -> list[tuple[tuple[slice, slice], _Some]]:
        """Where new tokens go, (rows of the batch, columns of the shard), and which of them go."""
        count, owner = self._dealt.count, self._dealt.owner
        places: list[tuple[tuple[slice, slice], _Some]] = []
        rows = list(zip(self._rows.before, self._rows.after, strict=True))
        for number, (before, after) in enumerate(rows):
            first, last = count(before, self._rank), count(after, self._rank)
            if first == last:
                continue
            tokens: slice | list[int] = slice(last - first)
            if not self.sharded and last - first < after - before:
                tokens = [at - before for at in range(before, after) if owner(at) == self._rank]
            batch = slice(None) if len(rows) == 1 else slice(number, number + 1)
            every = len(rows) == 1 and last - first == self.num_tokens
            places.append(((batch, slice(first, last)), None if every else (batch, tokens)))
        return places

    def _view(self) -> None:
        """Makes the views of all layers at once.

        Between two layers a model and its keys sweep the processor's caches, and an operator of
        torch that finds its code in none of them takes ten times as long.
        """
        layers, filled, places = self._memory.layers, self._num_columns, self._places_in_shard()
        # Layers outside inference mode could not write to views made inside it.
        with torch.inference_mode(False), torch.no_grad():
            self._views = [
                _Views(
                    [(k[at], v[at], chosen) for at, chosen in places],
                    Layer(k.narrow(1, 0, filled), v.narrow(1, 0, filled)),
                )
                for k, v in layers
            ]
        self._views_of = layers

    @cached_property
    def _num_columns(self) -> int:
        """How many columns of this rank's shard are filled after the step."""
        return max(self._dealt.count(after, self._rank) for after in self._rows.after)

    def _prefill(
        self,
        layer: int,
        q: torch.Tensor,
        structure: Mask,
        scale: float | None,
        score_options: ScoreOptions,
        strategy: str,
    ) -> torch.Tensor:
        attention = self._attention
        try:
            plan = self._plan(q.shape[2], structure, score_options, strategy)
        except (ConfigError, InputError) as error:
            attention.runtime.refuse(ATTEND, error)
        columns = self._rows.columns(self._dealt, self._rank)
        self._memory.clear(layer, self._rows)
        k, v = (x.narrow(1, 0, columns) for x in self._memory.layers[layer])
        out, _ = run_forward(_Chunk(attention, plan, scale), QKV(q, k, v), score_options)
        return out

    def _plan(
        self, num_heads: int, structure: Mask, score_options: ScoreOptions, strategy: str
    ) -> Plan:
        """The plan of a prefill; layers with the same mask share it."""
        shape = self._shape
        scores = score_options.flags
        key = (structure, num_heads, scores, strategy)
        plan = self._plans.get(key)
        if plan is None:
            problem = CachedMask(structure, self._dealt, self._rows).problem(
                batch=shape.batch, num_heads=num_heads, num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim, v_head_dim=shape.v_head_dim,
                input_bytes=shape.dtype.itemsize, sum_bytes=sum_dtype(shape.dtype).itemsize,
                scores=scores,
            )  # fmt: skip
            attention = self._attention
            plan = self._plans[key] = attention.plan(
                PlanKey(
                    forward=True,
                    problem=problem,
                    strategy=strategy,
                    kernel=attention.kernel,
                    dtype=shape.dtype,
                    device=attention.runtime.device,
                    partials=attention.partials,
                )
            )
        return plan

    def _plan_decode(self, num_heads: int, scores: ScoreFlags) -> DecodePlan:
        shape = self._shape
        q_shape = (shape.batch, self.num_tokens, num_heads, shape.head_dim)
        return plan_decode(
            self._attention, q_shape, shape.num_kv_heads, shape.v_head_dim, shape.dtype,
            keys=self._memory.capacity, scores=scores,
        )  # fmt: skip

    def _what_is_seen(self, structure: Mask) -> SeenColumns:
        """What the queries of a decode see of this rank's shard: one object for all layers."""
        seen = self._seen.get(structure)
        if seen is None:
            spans = self._rows.spans(structure, self._places)
            columns = in_columns(spans, self._dealt, self._rank)
            seen = self._seen[structure] = SeenColumns(columns, self._num_columns)
        return seen

    def _refuse(self, reason: str) -> NoReturn:
        error = InputError(f"KVCache.step: {reason}")
        self._attention.runtime.refuse("KVCache.step", error)

    def _on_device(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        numbers = torch.from_numpy(x).to(self._attention.runtime.device)
        return numbers.expand(self._shape.batch, -1)
