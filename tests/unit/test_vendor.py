"""The cudnn and flash kernels without a GPU: what they hand to torch's operators and make of the
answers, with doubles of those operators.

The doubles compute in float64, by the spec's own formula, what the real ones are known to: BHSD
tensors, 16-bit results, lse in float32, a backward that takes O only in rowsum(dO * O). They insist
on what the real ones need (alignment, dense lse, squares under the diagonal) and differ in what
versions differ in: how lse is shaped. tests/gpu has the real ones.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spec import Attention, errors_of, reference, relative_error
from tolerances import ERROR, SINKS
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Context, Full, kernels
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.kernels import (
    KERNELS,
    QKV,
    Gradients,
    Results,
    State,
    Tile,
    Upstream,
    Work,
    speed,
)  # fmt: skip
from burst_rt.kernels.aten import CudnnKernel, FlashKernel
from burst_rt.planning.masks import Both, Mask, Piece, Shape
from burst_rt.planning.problem import TileShape

_16_BIT = (torch.bfloat16, torch.float16)
_LSE = {
    "as it is": lambda x: x,
    "padded": lambda x: torch.nn.functional.pad(x, (0, 5), value=math.nan),
    "with a last 1": lambda x: x[..., None],
}


def _check(q: torch.Tensor, *others: torch.Tensor, causal: bool) -> None:
    for x in (q, *others):
        assert x.dtype in _16_BIT
        assert x.shape[:1] + x.shape[3:] == q.shape[:1] + q.shape[3:]
        assert x.stride(3) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in x.stride()[:3])
        assert x.shape[2] > 0
    assert not causal or q.shape[2] == others[0].shape[2]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    s = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    return (
        s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if causal
        else s
    )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k, v, causal=causal)
    s = _scores(q, k, causal, scale)
    out = s.softmax(-1) @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    # Tokens before heads in memory, as the real ones leave it.
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), s.logsumexp(-1).float()


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(q, k, v, dout, out, causal=causal)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == q.shape[:3]
    group = q.shape[1] // k.shape[1]
    p = torch.exp(_scores(q, k, causal, scale) - lse.double()[..., None])
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (dout.double() @ v.double().repeat_interleave(group, 1).mT - delta) * scale
    dq = ds @ k.double().repeat_interleave(group, 1)
    dk, dv = (
        x.unflatten(1, (k.shape[1], group)).sum(2)
        for x in (ds.mT @ q.double(), p.mT @ dout.double())
    )
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class Doubles:
    """In the place of torch's operators; their arguments are bound to the real ones' schemas.
    calls: (rows, columns, causal) of each. outs: what backwards got as O.
    """

    def __init__(self, lse_as: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.outs: list[torch.Tensor] = []
        self._lse_as = lse_as

    def _bound(
        self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        """Arguments by the names of the real operator's schema, of the right kinds."""
        schema = operator._schema
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        positional = [a for a in schema.arguments if not a.kwarg_only]
        assert len(args) <= len(positional)
        bound |= {a.name: x for a, x in zip(positional, args, strict=False)} | options
        assert set(bound) == {a.name for a in schema.arguments}
        for argument in schema.arguments:
            value = bound[argument.name]
            # An undefined tensor is None in Python.
            kinds = {
                "Tensor": (torch.Tensor, type(None)),
                "bool": (bool,),
                "float": (float,),
                "int": (int,),
            }
            assert isinstance(
                value, kinds[str(argument.type).removeprefix("Optional[").removesuffix("]")]
            ), argument.name
        assert bound["dropout_p"] == 0.0
        return bound

    def forward(self, operator: Any) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any, **options: Any) -> tuple[Any, ...]:
            a = self._bound(operator, args, options)
            assert a.get("compute_log_sumexp", True)
            assert not a["return_debug_mask"]
            q, k, v = a["query"], a["key"], a["value"]
            self.calls.append((q.shape[2], k.shape[2], a["is_causal"]))
            out, lse = _forward(q, k, v, a["is_causal"], a["scale"])
            return (
                out,
                self._lse_as(lse),
                None,
                None,
                q.shape[2],
                k.shape[2],
                torch.empty(2),
                torch.empty(0),
                torch.empty(0),
            )

        return run

    def backward(self, operator: Any) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any, **options: Any) -> tuple[Any, ...]:
            a = self._bound(operator, args, options)
            q, k = a["query"], a["key"]
            assert (a["max_q"], a["max_k"]) == (q.shape[2], k.shape[2])
            assert a["cum_seq_q"] is None
            assert a["cum_seq_k"] is None
            self.calls.append((q.shape[2], k.shape[2], a["is_causal"]))
            self.outs.append(a["out"])
            lse = a["logsumexp"]
            if "cudnn" in operator._schema.name:
                # cuDNN gets its shape, which must be that of the scores with one column.
                assert lse.ndim == 4
                lse = lse.flatten(2)
                assert all(x.transpose(1, 2).is_contiguous() for x in (a["grad_out"], a["out"]))
            return _backward(
                a["grad_out"], q, k, a["value"], a["out"], lse, a["is_causal"], a["scale"]
            )

        return run


@pytest.fixture(params=_LSE)
def doubles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Doubles:
    made = Doubles(_LSE[request.param])
    aten = torch.ops.aten
    for name in ("flash", "cudnn"):
        whole = f"_scaled_dot_product_{name}_attention"
        monkeypatch.setattr(
            f"burst_rt.kernels.aten._{name}_forward", made.forward(getattr(aten, whole).default)
        )
        monkeypatch.setattr(
            f"burst_rt.kernels.aten._{name}_backward",
            made.backward(getattr(aten, f"{whole}_backward").default),
        )
    for kernel in (FlashKernel, CudnnKernel):
        monkeypatch.setattr(kernel, "device_type", "cpu")
        monkeypatch.setattr(kernel, "_missing", lambda self, device: None)
    return made


# Of a tile of 60 x 80: pieces, and what the operators are asked for.
PIECES = {
    "a rectangle": ([(0, 60, 0, 80, False)], [(60, 80, False)]),
    "a square under the diagonal": ([(0, 60, 20, 80, True)], [(60, 60, True)]),
    "a rectangle and a triangle": (
        [(0, 60, 0, 20, False), (0, 60, 20, 80, True)],
        [(60, 20, False), (60, 60, True)],
    ),
    "more rows than columns under the diagonal": (
        [(5, 60, 0, 30, True)],
        [(30, 30, True), (25, 30, False)],
    ),
    "two corners": (
        [(0, 20, 0, 30, False), (31, 59, 33, 80, False)],
        [(20, 30, False), (28, 47, False)],
    ),
}


def _tile(
    name: str, dtype: torch.dtype, **options: Any
) -> tuple[Tile, list[torch.Tensor], Attention]:
    """A tile, its tensors q, k, v, dout, dlse (strided views, misaligned ones among them), and the
    truth.
    """
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, head_dim = (
        options.get("heads", 4),
        options.get("kv_heads", 2),
        options.get("head_dim", 16),
    )
    packed = torch.randn(
        2, 80, heads + 2 * kv_heads, head_dim + 1, generator=generator, dtype=torch.float64
    ).to(dtype)[..., 1:]
    q, (k, v) = packed[:, :60, :heads], packed[:, :, heads:].split(kv_heads, dim=2)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype) * options.get(
        "magnitude", 1.0
    )
    dlse = torch.randn(2, heads, 60, generator=generator) * options.get("dlse", 1.0)
    visible = torch.zeros(60, 80, dtype=torch.bool)
    pieces = []
    for a, b, c, d, diagonal in PIECES[name][0]:
        part = torch.ones(b - a, d - c, dtype=torch.bool)
        visible[a:b, c:d] = part.tril() if diagonal else part
        shape = Shape.LOWER if diagonal else Shape.RECTANGLE
        pieces.append(Piece(a, b, c, d, shape, int(visible[a:b, c:d].sum())))
    tile = Tile(
        tuple(pieces),
        (range(20, 80),),
        (range(80),),
        Full(),
        0.3,
        lambda: None,
        first=True,
        last=True,
    )

    class Seen(Mask):
        def allows(self, q_position: Any, kv_position: Any) -> Any:  # tensors
            return visible[q_position - 20, kv_position]

    return tile, [q, k, v, dout, dlse], reference(q, k, v, dout, dlse, mask=Seen(), scale=0.3)


def _state(q: torch.Tensor) -> State:
    """All of it NaN."""
    acc, out = (torch.full(q.shape, torch.nan, dtype=dtype) for dtype in (torch.float32, q.dtype))
    m, l, lse = (torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan) for _ in range(3))  # noqa: E741
    return State(acc, m, l, out, lse)


def _gradients(
    kernel: Any, tile: Tile, tensors: list[torch.Tensor], truth: Attention, *, start: float = 1.0
) -> list[torch.Tensor]:  # kernel: of either class
    """What the kernel adds to sums that are `start`; of the only tile of a call, what it writes."""
    q, k, v, dout, dlse = tensors
    rows = torch.full((2, *truth.lse.shape), torch.nan)
    kernel.delta(Results(truth.out.float(), truth.lse.float(), dout, dlse), rows)
    start, dtype = (torch.nan, q.dtype) if tile.only else (start, torch.float32)
    into = Gradients(*(torch.full(x.shape, start, dtype=dtype) for x in (q, k, v)))
    kernel.backward(QKV(q, k, v), Upstream(dout, rows[0], rows[1]), tile, into)
    return [x if tile.only else x - start for x in into if x is not None]


@pytest.mark.parametrize("dtype", _16_BIT)
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("kernel", [FlashKernel(), CudnnKernel()], ids=["flash", "cudnn"])
def test_a_tile_against_the_spec(
    kernel: Any, name: str, dtype: torch.dtype, doubles: Doubles
) -> None:
    tile, tensors, truth = _tile(name, dtype)
    state = _state(tensors[0])
    kernel.forward(QKV(*tensors[:3]), tile, state)
    assert doubles.calls == PIECES[name][1]
    assert relative_error(state.out, truth.out) < ERROR[dtype]
    assert relative_error(state.lse, truth.lse) < ERROR[torch.float32]
    if dtype == torch.float16:
        return  # its backward is refused
    for first in (False, True):
        doubles.calls.clear()
        found = _gradients(kernel, tile._replace(first=first), tensors, truth)
        for got, want in zip(found, truth[2:5], strict=True):
            assert want is not None
            assert relative_error(got, want) < ERROR[dtype]
        assert doubles.calls == PIECES[name][1]


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-25, 0.0, "every third row 0", "down to 0"])
def test_any_dout_with_any_gradient_of_lse(magnitude: float | str) -> None:
    """O' stands in for O where dO is large, where it is small, and where a gradient of lse is all
    there is.
    """
    rows = torch.ones(60)
    if magnitude == "every third row 0":
        rows[::3] = 0.0
    elif magnitude == "down to 0":
        rows = torch.logspace(0, -7, 60)
    for dlse in (0.0, 1.0, 300.0):
        tile, tensors, _ = _tile(
            "a rectangle",
            torch.bfloat16,
            dlse=dlse,
            magnitude=magnitude if isinstance(magnitude, float) else 1.0,
        )
        tensors[3] = (tensors[3] * rows[:, None, None]).to(torch.bfloat16)
        truth = reference(*tensors, scale=0.3)
        for got, want in zip(
            _gradients(KERNELS["flash"], tile, tensors, truth, start=0.0), truth[2:5], strict=True
        ):
            assert want is not None
            # A dV of 0 is off by what the row that stands in for dO adds.
            assert relative_error(got, want) < (ERROR[torch.bfloat16] if want.any() else 1e-25)


@pytest.mark.usefixtures("doubles")
def test_parts_of_several_tiles_add_up() -> None:
    """In bfloat16 each of three tiles is off by a roundoff at most, and so is their weighted
    mean.
    """
    tile, (q, k, v, *_), _ = _tile("a rectangle", torch.bfloat16)
    state = _state(q)
    for i, columns in enumerate((slice(30), slice(30, 31), slice(31, 80))):
        piece = Piece(0, 60, 0, columns.stop - (columns.start or 0), Shape.RECTANGLE, 0)
        part = tile._replace(pieces=(piece,), first=i == 0, last=i == 2)
        KERNELS["flash"].forward(QKV(q, k[:, columns], v[:, columns]), part, state)
    truth = reference(q, k, v, torch.zeros_like(q), scale=0.3)
    assert relative_error(state.out, truth.out) < ERROR[torch.bfloat16]
    assert relative_error(state.lse, truth.lse) < ERROR[torch.float32]


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize(
    ("case", "world_size", "partials"),
    [
        (Case(60, head_dim=16, mask=Causal(), dtype=torch.bfloat16), 1, "exact"),
        (
            Case(
                37,
                head_dim=24,
                heads=4,
                kv_heads=2,
                dtype=torch.float16,
                needs_grad=(False, False, False),
            ),
            1,
            "exact",
        ),
        (
            Case(61, head_dim=16, heads=4, kv_heads=2, mask=Causal(), dtype=torch.bfloat16),
            3,
            "16bit",
        ),
        (Case(60, head_dim=16, mask=Causal(), dtype=torch.bfloat16, sinks=True), 1, "16bit"),
        (
            Case(
                64,
                head_dim=16,
                mask=Causal(),
                kind="striped",
                strategy="burst",
                dtype=torch.bfloat16,
            ),
            2,
            "16bit",
        ),
    ],
)
def test_whole_calls(name: str, case: Case, world_size: int, partials: str) -> None:
    got = attend_over_threads(world_size, case, kernel=name, partials=partials)
    for field, error in errors_of(got, case.truth).items():
        # What is rounded once a tile is off by about as much as what is rounded at the end, and
        # both happen.
        limit = (
            ERROR[torch.float32]
            if field == "lse"
            else (SINKS if field == "dsinks" else ERROR)[case.dtype]
            * (1 if partials == "exact" else 2)
        )
        assert error < limit, (field, error)


def _explained(ctx: Context, kv_len: int, **options: Any) -> str:
    x = torch.zeros(1, ctx.layout(64).shard_len, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    y = torch.zeros(1, ctx.layout(kv_len).shard_len, 2, 16, dtype=torch.bfloat16)
    return str(
        burst_rt.explain(x, y, y, layout=ctx.layout(64), kv_layout=ctx.layout(kv_len), **options)
    )


@pytest.mark.usefixtures("doubles")
def test_exact_partials_are_the_default_and_rounded_ones_are_told() -> None:
    def exact(ctx: Context) -> None:
        for kv_len, world in ((64, 1), (80, 1), (64, 2)):
            if world != ctx.world_size:
                continue
            if (kv_len, world) == (64, 1):
                assert "kernel flash: asked for by name\n" in _explained(ctx, kv_len, causal=True)
            else:
                with pytest.raises(
                    InputError,
                    match=r"rounds each partial result to bfloat16.*partials='16bit'",
                ):
                    _explained(ctx, kv_len, causal=True)

    for world_size in (1, 2):
        burst_rt.run_local(world_size, exact, kernel="flash")
    words = burst_rt.run_local(
        2, lambda ctx: _explained(ctx, 64, causal=True), kernel="flash", partials="16bit"
    )
    forward, backward = words[0].split("backward:")
    assert "partials are 16-bit: each partial result is rounded to bfloat16" in forward
    assert "differ" not in forward
    assert "partials are 16-bit" in backward
    assert "differ in the last bits from run to run" in backward


@pytest.mark.parametrize(
    ("option", "values"), [("partials", ("exact", "16bit")), ("deterministic", (True, False))]
)
def test_roundings_are_agreed_on_when_ranks_join(option: str, values: tuple[Any, Any]) -> None:
    with pytest.raises(
        InputError, match=r"partials must be one of \['exact', '16bit'\], got 'fp8'"
    ):
        burst_rt.init(partials="fp8")
    world = burst_rt.transport.LocalWorld(2)
    raised: list[BaseException] = []

    def join(rank: int) -> None:
        try:
            options: dict[str, Any] = {option: values[rank]}
            burst_rt.init(burst_rt.LocalRank(world, rank), timeout_s=20, **options)
        except ContractMismatch as error:
            raised.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    words = f"{option}: {values[0]} on rank 0, {values[1]} on rank 1"
    assert [str(error).count(words) for error in raised] == [1, 1]


@pytest.mark.usefixtures("doubles")
def test_init_says_whether_bits_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they need not, "auto" may take cuDNN's backward, until torch is told otherwise."""
    monkeypatch.setattr(kernels, "_ON_CPU_BF16", ("cpu", "cudnn"))
    monkeypatch.setattr(speed, "seconds_of", lambda *_: {"cpu": 2e-3, "cudnn": 1e-3})
    monkeypatch.setattr(speed, "_known", {})
    monkeypatch.setattr(speed, "recall", lambda *_: None)
    monkeypatch.setattr(speed, "remember", lambda *_: None)

    def taken(ctx: Context) -> str:
        return _explained(ctx, 64, causal=True).split("backward:")[1]

    def twice(ctx: Context) -> tuple[str, str]:
        before = taken(ctx)
        torch.use_deterministic_algorithms(True)
        try:
            return before, taken(ctx)
        finally:
            torch.use_deterministic_algorithms(False)

    (words,) = burst_rt.run_local(1, taken)
    assert "kernel cpu: " in words
    assert "init(deterministic=False) or kernel='cudnn' allows that" in words
    ((free, told),) = burst_rt.run_local(1, twice, deterministic=False)
    assert "kernel cudnn: the fastest of cudnn 1.000 ms, cpu 2.000 ms" in free
    assert "its sums differ in the last bits from run to run" in free
    assert "kernel cpu: " in told


@pytest.mark.parametrize("lse_grad", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a_call_of_one_tile_gives_its_output(name: str, lse_grad: bool, doubles: Doubles) -> None:
    """In place of the stand-in, which carries the gradient of lse."""
    case = Case(
        60, head_dim=16, heads=4, kv_heads=2, mask=Causal(), dtype=torch.bfloat16,
        lse_grad=lse_grad,
    )  # fmt: skip
    got = attend_over_threads(1, case, kernel=name)
    for field, error in errors_of(got, case.truth).items():
        assert error < ERROR[torch.float32 if field == "lse" else case.dtype], (field, error)
    (given,) = doubles.outs
    assert torch.equal(given, got.out.transpose(1, 2)) is not lse_grad
    attend_over_threads(2, case, kernel=name, partials="16bit")
    assert not any(torch.equal(x, got.out.transpose(1, 2)[:, :, :30]) for x in doubles.outs[1:])


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_which_gradients_they_write_without_sums(name: str) -> None:
    """Those of a tile that one call does from end to end."""
    shape = TileShape(1, 2, 2, 64, 8, 8)
    for piece, writes in (
        (Piece(0, 8, 0, 8, Shape.LOWER, 36), True),
        (Piece(0, 8, 0, 8, Shape.RECTANGLE, 64), True),
        (Piece(0, 8, 0, 5, Shape.RECTANGLE, 40), False),
        (Piece(2, 8, 0, 8, Shape.RECTANGLE, 48), False),
    ):
        work = Work(torch.device("cuda"), torch.bfloat16, 64, Full(), False, tiles=((piece,),))
        assert KERNELS[name].writes_gradients(work, shape) is writes


def test_what_they_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    square = ((Piece(0, 8, 0, 8, Shape.LOWER, 36),),)
    fine = Work(cuda, torch.bfloat16, 64, Causal(), tiles=square)
    for name in ("cudnn", "flash"):
        kernel = KERNELS[name]
        for work, why in (
            (fine._replace(device=torch.device("cpu")), "takes CUDA tensors, got cpu"),
            (fine._replace(dtype=torch.float32), "takes bfloat16 and float16, got torch.float32"),
            (fine._replace(dtype=torch.float16, forward=False), "backward takes bfloat16"),
            (fine._replace(head_dim=20), "a multiple of 8, at most"),
            (fine._replace(head_dim=264), "a multiple of 8, at most"),
            (
                fine._replace(
                    mask=Both(Causal(), Full()), tiles=((Piece(0, 8, 0, 8, Shape.MASKED, 64),),)
                ),
                "into other shapes",
            ),
        ):
            reason = kernel.refuses(work)
            assert reason is not None
            assert reason.startswith(f"the {name} kernel")
            assert why in reason
    assert "at most 128" in str(KERNELS["cudnn"].refuses(fine._replace(head_dim=136)))
    assert "at least 2 keys" in str(
        KERNELS["cudnn"].refuses(fine._replace(tiles=((Piece(0, 8, 0, 1, Shape.RECTANGLE, 8),),)))
    )
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: False)
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 8907)
    assert "built with FlashAttention" in str(KERNELS["flash"].refuses(fine))
    assert "cuDNN 9.0 or newer" in str(KERNELS["cudnn"].refuses(fine))
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
    for capability, refused in (((7, 5), True), ((9, 0), False)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, c=capability: c)
        assert (KERNELS["triton"].refuses(fine) is not None) is refused
        for name in ("cudnn", "flash"):
            assert (KERNELS[name].refuses(fine) is not None) is refused
            several = str(KERNELS[name].refuses(fine._replace(ring_size=2)))
            assert refused or "partials='16bit'" in several


def test_flash_repeats_itself_where_torch_is_told_to() -> None:
    flash = KERNELS["flash"]
    assert [flash.repeatable(forward) for forward in (True, False)] == [True, False]
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert flash.repeatable(False) is not warn_only
            assert not KERNELS["cudnn"].repeatable(False)
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_operators_take_what_they_are_given() -> None:
    """The schemas of this torch, against how they are called: the doubles bind by them, so here
    only that they are there.
    """
    for name in ("flash", "cudnn"):
        whole = f"_scaled_dot_product_{name}_attention"
        for operator in (
            getattr(torch.ops.aten, whole),
            getattr(torch.ops.aten, f"{whole}_backward"),
        ):
            assert inspect.isfunction(operator.default.redispatch) or callable(operator.default)
            assert len(operator.default._schema.returns) in (3, 9)
