"""`TritonKernel`, a `Kernel`: what the Triton kernels refuse, and which of them is started.

Checks, tables, and the choice of the kernel to start; no kernel code. triton is imported with
the first tile: the import takes time, and TRITON_INTERPRET=1 (CPU tensors, for tests) must be set
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec

import torch

from burst_rt.kernels.base import (
    QKV,
    Gradients,
    Kept,
    Kernel,
    PairOfRows,
    Places,
    Results,
    ScoreOptions,
    State,
    Tile,
    Upstream,
    Work,
    write_from_sums,
)
from burst_rt.kernels.conditions import too_old
from burst_rt.kernels.decode import Partial, SeenColumns
from burst_rt.kernels.triton import chosen
from burst_rt.kernels.triton.configs import CELLS, Config, takes_more
from burst_rt.kernels.triton.launch import (
    LOG2_E,
    OfBackward,
    TileArguments,
    both_of,
    check_dense,
    check_places,
    check_state,
    fit_descriptors,
    of_forward,
)
from burst_rt.kernels.triton.parts import ascending_groups, in_order, places_of_parts, slices_of
from burst_rt.kernels.triton.start import Launch, keep_launch, restart, start
from burst_rt.kernels.triton.tables import (
    bytes_of_tables,
    cells_table,
    lists_for,
    ordered_lists,
    positions_of_tile,
    same_tables,
    spans_of_tile,
)
from burst_rt.kernels.triton.tuned import config_of
from burst_rt.planning.problem import TileShape

__all__ = ["TritonKernel"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256


class TritonKernel(Kernel):
    """See `Kernel`. float32, bfloat16, float16; head_dim 16 to 256.

    Launches are asynchronous, on the current stream: no method waits for the device. Nothing is
    added in an order of chance, so results are repeatable. The kernel reads tables of a tile's mask
    (`tables.py`), not its pieces. Where a mask has no spans, a tile is done in parts for which the
    mask gives booleans. The state's m is in powers of two. float32 is multiplied in float32 (no
    TF32). 16-bit inputs are multiplied on the tensor cores with float32 sums; probabilities and
    score gradients are rounded to the inputs' type.
    """

    name = "triton"
    m_scale = LOG2_E
    starts_sums = True

    def refuses(self, work: Work) -> str | None:
        """Refuses all but the devices, types and head sizes that it can do.

        The device is a GPU, or a CPU under TRITON_INTERPRET=1.
        """
        wanted = "cpu" if chosen.under_interpreter() else "cuda"
        if work.device.type != wanted:
            why = (
                "TRITON_INTERPRET=1 is set"
                if wanted == "cpu"
                else "CPU tensors only where TRITON_INTERPRET=1 is set"
            )
            return f"the triton kernel takes {wanted.upper()} tensors ({why}), got {work.device}"
        if find_spec("triton") is None:
            return "the triton kernel needs the package triton, which is not installed"
        if work.dtype not in _DTYPES:
            return f"the triton kernel takes float32, bfloat16 and float16, got {work.dtype}"
        for head_dim in work.head_dims:
            if not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
                limits = f"{_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}"
                return f"the triton kernel takes a head_dim of {limits}, got {head_dim}"
        return too_old(self.name, work.device) if wanted == "cuda" else None

    def writes_results(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_results`: always; a tile in parts gets a state of its own."""
        return True

    def writes_gradients(self, work: Work, tile: TileShape) -> bool:
        """See `Kernel.writes_gradients`: in two passes, under a mask with spans."""
        plain = not (work.scores.softcap or work.scores.alibi_slopes)
        one_pass = plain and chosen.one_pass_config(work.device, work.head_dims, work.dtype)
        return work.mask.has_spans and not one_pass

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: whether block sizes come from `burst-rt bench tune`, and whether
        Triton could not compile a kernel.
        """
        kinds = ("forward",) if work.forward else ("dq", "dkdv")
        head_dim = max(work.head_dims)
        trouble = chosen.why_no_producer()
        tuned = {kind: config_of(kind, work.device, head_dim, work.dtype) for kind in kinds}
        if not work.forward:
            one_pass = chosen.one_pass_config(work.device, work.head_dims, work.dtype)
            tuned["backward in one pass"] = one_pass
        told = ", ".join(f"{kind} {config}" for kind, config in tuned.items() if config)
        blocks = f"blocks tuned on this machine: {told}" if told else None
        return tuple(remark for remark in (blocks, trouble) if remark)

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        """See `Kernel.forward`."""
        kept = tile.kept
        if kept is not None and restart(kept, "forward", *of_forward(qkv, tile, state)):
            tile.progress()
            return
        given = state
        check_places(qkv, tile)
        groups = list(in_order(tile))
        if tile.only and not (tile.mask.has_spans and len(groups) == 1):
            state = _with_sums(state)
        launch = None
        for columns, some in groups:
            k, v = qkv.k[:, columns], qkv.v[:, columns]
            launch = self._forward_in_order(QKV(qkv.q, k, v), some, state)
        if (kept := _may_be_kept(tile)) is not None:
            keep_launch(kept, "forward", *of_forward(qkv, tile, given), launch)

    def _forward_in_order(self, qkv: QKV, tile: Tile, state: State) -> Launch | None:
        if tile.mask.has_spans:
            return self._forward(qkv, tile, state, None)
        for part in slices_of(qkv, tile):
            views = State(*map(part.rows, state))
            dense = State(*(x.contiguous() for x in views))
            if state.out is state.acc:
                dense = dense._replace(out=dense.acc)
            self._forward(part.of(qkv), part.tile, dense, part.cells)
            # Before the last part nothing is in out and lse.
            written = 5 if part.tile.last else 3
            for x, y in zip(views[:written], dense[:written], strict=True):
                if x.data_ptr() != y.data_ptr():
                    x.copy_(y)
        return None

    def _forward(
        self, qkv: QKV, tile: Tile, state: State, cells: torch.Tensor | None
    ) -> Launch | None:
        check_state(state)
        out = state.out
        if chosen.under_interpreter() and tile.last and out.dtype != torch.float32:
            # The interpreter rounds towards zero when it stores 16-bit numbers; torch does not.
            out = torch.empty_like(state.acc, dtype=torch.float32)
        while True:
            arguments, config = _arguments("forward", qkv, tile, cells)
            with chosen.attempt(config):
                launch = _forward_launcher(config)
                started = start(out.device, launch, qkv, state._replace(out=out), arguments, config)
                break
        if out is not state.out:
            state.out.copy_(out)
        tile.progress()
        return started

    def decode(
        self, qkv: QKV, seen: SeenColumns, scale: float, softcap: float | None, into: Partial
    ) -> None:
        """See `Kernel.decode`."""
        if not qkv.k.shape[1]:
            into.start()
            return
        from burst_rt.kernels.triton.decode import launch_decode

        config, device = chosen.config_for("decode", qkv.q, qkv.v), into.lse.device
        start(
            device, launch_decode, qkv, seen, scale, softcap, into, config,
            chosen.processors(device), chosen.under_interpreter(),
        )  # fmt: skip

    def delta(self, results: Results, rows: PairOfRows, kept: Kept | None = None) -> None:
        """See `Kernel.delta`."""
        out, lse, dout, dlse = results
        top, delta = rows
        kind, of_dlse = ("delta", lse) if dlse is None else ("delta with dlse", dlse)
        pointers = [x.data_ptr() for x in (dout, out, lse, of_dlse, top, delta)]
        layouts = (
            dout.stride(), out.stride(), lse.stride(), of_dlse.stride(), dout.dtype, of_dlse.dtype,
        )  # fmt: skip
        if kept is not None and restart(kept, kind, pointers, layouts):
            return
        from burst_rt.kernels.triton.delta import launch_delta

        check_dense(top, delta)
        config = chosen.config_for("delta", dout)
        launch = start(
            top.device, launch_delta, results, (top, delta), config, chosen.under_interpreter()
        )
        if kept is not None:
            keep_launch(kept, kind, pointers, layouts, launch)

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        """See `Kernel.backward`."""
        if tile.kept is not None:
            grads = _restarted(tile.kept, qkv, upstream, grads)
            if not any(x is not None for x in grads):
                tile.progress()
                return
        check_places(qkv, tile)
        groups = list(in_order(tile))
        if tile.only and not (tile.mask.has_spans and len(groups) == 1):
            # The tile is done in several parts, which add up.
            tile = tile._replace(first=False, kept=None)
            write_from_sums(grads, lambda sums: self.backward(qkv, upstream, tile, sums))
            return
        if tile.new_sums and not (tile.mask.has_spans and len(groups) == 1):
            for x in grads[:1] if tile.new_sums == "q" else grads[1:]:
                if x is not None:
                    x.zero_()
            groups = [(at, each._replace(new_sums="")) for at, each in groups]
        for columns, some in groups:
            k, v = qkv.k[:, columns], qkv.v[:, columns]
            dk, dv = (None if x is None else x[:, columns] for x in grads[1:])
            self._backward_in_order(QKV(qkv.q, k, v), upstream, some, Gradients(grads.dq, dk, dv))

    def _backward_in_order(
        self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients
    ) -> None:
        if tile.mask.has_spans:
            self._backward(qkv, upstream, tile, grads, None)
            return
        tile = tile._replace(first=False)  # no part is the only one
        for part in slices_of(qkv, tile):
            dout, lse, delta = map(part.rows, upstream[:3])
            some = Upstream(dout, lse.contiguous(), delta.contiguous())
            sums = Gradients(*part.sides(*grads))
            self._backward(part.of(qkv), some, part.tile, sums, part.cells)

    def _backward(
        self,
        qkv: QKV,
        upstream: Upstream,
        tile: Tile,
        grads: Gradients,
        cells: torch.Tensor | None,
    ) -> None:
        from burst_rt.kernels.triton.dkdv import launch_dkdv
        from burst_rt.kernels.triton.dq import launch_dq

        check_dense(upstream.lse, upstream.delta)
        device, given = qkv.q.device, grads
        one_pass = None if cells is not None else _one_pass(qkv, upstream, tile, grads)
        if one_pass is not None and _started_in_one_pass(qkv, upstream, grads, *one_pass):
            tile.progress()
            return
        if chosen.under_interpreter() and tile.only:
            # As in the forward: torch rounds, where the interpreter would cut digits off.
            wide = (None if x is None else torch.empty_like(x, dtype=torch.float32) for x in given)
            grads = Gradients(*wide)
        kept = _may_be_kept(tile)
        if grads.dk is not None or grads.dv is not None:
            arguments = _arguments("dkdv", qkv, tile, cells)
            launch = start(device, launch_dkdv, qkv, upstream, grads, *arguments)
            if kept is not None:
                keep_launch(
                    kept, "dkdv", *OfBackward(qkv, upstream).writing(*both_of(grads)), launch
                )
        if grads.dq is not None:
            arguments = _arguments("dq", qkv, tile, cells)
            launch = start(device, launch_dq, qkv, upstream, grads.dq, *arguments)
            if kept is not None:
                keep_launch(kept, "dq", *OfBackward(qkv, upstream).writing(grads.dq), launch)
        if grads is not given:
            for x, wide_x in zip(given, grads, strict=True):
                if x is not None and wide_x is not None:
                    x.copy_(wide_x)
        tile.progress()

    def table_bytes(self, work: Work, places: Iterable[Places], tile: TileShape) -> int:
        """See `Kernel.table_bytes`. Spans of rows, lists of work, and positions with ALiBi.

        Where a tile's tensors decide between two kernels that cut it differently, it counts both.
        """
        head_dim = max(work.head_dims)
        cuts = [
            cut
            for kind in (("forward",) if work.forward else ("dkdv", "dq"))
            for cut in {
                chosen.cuts_of(kind, work.device, head_dim, work.dtype, producer)[0]
                for producer in (
                    False,
                    chosen.may_have_producer(kind, work.device, work.head_dims, work.dtype),
                )
            }
        ]
        parts = (
            part
            for rows, runs in places
            for columns in ascending_groups(runs)
            for part in places_of_parts(work.mask, (rows, columns), tile)
        )
        ordered = (
            None
            if work.forward
            else chosen.one_pass_config(work.device, work.head_dims, work.dtype)
        )
        return bytes_of_tables(
            work.mask, parts, cuts, positions=work.scores.alibi_slopes,
            ordered=None if ordered is None else ordered.blocks,
        )  # fmt: skip

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`: none, because sums stay in registers and shared memory.

        It does not count tensor descriptors, where they are used (at most 512 bytes a block of the
        grid), the counts of a backward in one pass (4 bytes for 64 queries of a head), the cells of
        a mask without spans (bytes of some 2**24 cells, or of 128 columns), and the interpreter's
        temporaries.
        """
        return 0


def _forward_launcher(config: Config) -> Callable[..., Launch | None]:
    if config.loads == "producer":
        from burst_rt.kernels.triton.forward_hopper import launch_forward_hopper

        return launch_forward_hopper
    from burst_rt.kernels.triton.forward import launch_forward

    return launch_forward


def _arguments(
    kind: str, qkv: QKV, tile: Tile, cells: torch.Tensor | None
) -> tuple[TileArguments, Config]:
    """The arguments of a kernel. cells: the tile's cells, if its mask has no spans."""
    device, score_options = qkv.q.device, tile.score_options
    alike = same_tables(tile)
    seen = None if cells is not None else spans_of_tile(alike, device)
    width = CELLS if seen is None else seen.width
    producer = _takes_producer(kind, qkv, score_options, width)
    head_dim = max(qkv.q.shape[3], qkv.v.shape[3])
    cut, *configs = chosen.cuts_of(kind, device, head_dim, qkv.q.dtype, producer)
    lists = lists_for(alike, cut, width, device)
    config = configs[takes_more(width, single=lists.single)]
    if cells is not None:
        seen = cells_table(cells, config.block_n)
        if not lists.by_row:
            # Batch rows may see other cells, but have the same work.
            lists = lists._replace(lines=lists.lines.repeat(len(cells)), by_row=1)
    assert seen is not None
    arguments = TileArguments(
        seen, lists, qkv.q.shape[1], qkv.k.shape[1], tile.scale, tile.first, tile.last,
        chosen.under_interpreter(), score_options, tile.new_sums,
        None if score_options.alibi_slopes is None else positions_of_tile(tile, device),
    )  # fmt: skip
    return arguments, config


def _one_pass(
    qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients
) -> tuple[TileArguments, Config] | None:
    """The arguments of the backward in one pass; None where the tile has it in two passes."""
    q, _, v = qkv
    config = chosen.one_pass_config(q.device, (q.shape[3], v.shape[3]), q.dtype)
    if config is None or tile.only or any(x is None for x in grads):
        return None
    alike, options = same_tables(tile), tile.score_options
    spans = spans_of_tile(alike, q.device)
    if not _takes_producer("backward", (*qkv, upstream.dout), options, spans.width):
        return None
    lists = ordered_lists(alike, config.blocks, q.device)
    if lists is None:
        return None
    arguments = TileArguments(
        spans, lists, q.shape[1], qkv.k.shape[1], tile.scale, tile.first, tile.last,
        chosen.under_interpreter(), options, tile.new_sums, None,
    )  # fmt: skip
    return arguments, config


def _started_in_one_pass(
    qkv: QKV, upstream: Upstream, grads: Gradients, arguments: TileArguments, config: Config
) -> bool:
    """Starts the backward in one pass; False where Triton cannot compile it."""
    with chosen.attempt(config):
        from burst_rt.kernels.triton.backward_hopper import launch_backward_hopper

        start(qkv.q.device, launch_backward_hopper, qkv, upstream, grads, arguments, config)
        return True
    return False


def _takes_producer(
    kind: str, inputs: Sequence[torch.Tensor], options: ScoreOptions, width: int
) -> bool:
    """`may_have_producer` for a tile. inputs: q, k, v, and what else is loaded in blocks. width:
    WIDTH of `work.py`.
    """
    q, _, v, *_ = inputs
    return kind in ("forward", "backward") and chosen.may_have_producer(
        kind,
        q.device,
        (q.shape[3], v.shape[3]),
        q.dtype,
        width=width,
        plain=options.softcap is None and options.alibi_slopes is None and fit_descriptors(*inputs),
    )


def _with_sums(state: State) -> State:
    """A state for parts that add up: new, but for its results."""
    acc = torch.empty_like(state.acc, dtype=torch.float32)
    return State(acc, torch.empty_like(state.lse), torch.empty_like(state.lse), *state[3:])


def _may_be_kept(tile: Tile) -> Kept | None:
    """Where launches of a tile are kept: of a tile in one part, without tensors of this call."""
    alone = tile.mask.has_spans and len(ascending_groups(tile.kv_positions)) == 1
    return tile.kept if alone and tile.score_options.alibi_slopes is None else None


def _restarted(kept: Kept, qkv: QKV, upstream: Upstream, grads: Gradients) -> Gradients:
    """Starts what is kept of a backward; returns the gradients that are left to do."""
    of, (dq, dk, dv) = OfBackward(qkv, upstream), grads
    if (dk is not None or dv is not None) and restart(kept, "dkdv", *of.writing(*both_of(grads))):
        dk = dv = None
    if dq is not None and restart(kept, "dq", *of.writing(dq)):
        dq = None
    return Gradients(dq, dk, dv)
