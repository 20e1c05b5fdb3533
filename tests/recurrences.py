"""Drawn calls of recurrences: inputs, the spec's results, and a call over ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from recurrence_spec import SPECS

from burst_rt import Causal, Context, Documents, Mask, PrefixTree
from burst_rt import recurrence as room

__all__ = [
    "KINDS", "Drawn", "attend", "drawn", "drawn_along_a_tree", "drawn_tree", "errors", "paths_of",
    "truth", "truth_of_paths",
]  # fmt: skip

Tensor = torch.Tensor
KINDS = (
    "delta rule", "delta rule by channel", "linear attention", "linear attention, fixed decays",
    "state space", "selective scan", "linear recurrence", "convolution",
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One call. tokens: names of tensors with tokens; shared: of those without."""

    function: str
    layout: str
    world_size: int
    tokens: dict[str, Tensor]
    shared: dict[str, Tensor]
    options: dict[str, Any]
    state: Tensor | None
    returns_state: bool
    documents: Documents | None
    as_tensor: bool
    dout: Tensor
    dstate: Tensor
    about: str = field(default="")
    tree: PrefixTree | None = None
    paths: tuple[tuple[int, ...], ...] = ()  # of the tree's leaves, in places of the row

    @property
    def seq_len(self) -> int:
        return next(iter(self.tokens.values())).shape[1]

    @property
    def batch(self) -> int:
        return next(iter(self.tokens.values())).shape[0]

    def begins(self) -> Tensor:
        """`[batch, tokens]`, where documents begin; nowhere, without documents."""
        if self.documents is None:
            return torch.zeros(self.batch, self.seq_len, dtype=torch.bool)
        positions = torch.arange(self.seq_len).numpy()
        begins = torch.from_numpy(self.documents.begins(positions) == positions)
        return begins.expand(self.batch, -1)


def drawn(seed: int, kind: str | None = None, world_size: int | None = None) -> Drawn:
    """A call that is drawn; the same one for the same arguments."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    world_size = world_size or rng.choice([1, 2, 3, 4, 5])
    layout = rng.choice(["zigzag", "contiguous", "balanced"])
    n = rng.choice([1, 2, 5, 17, 63, 64, 65, 127, 200, 333])
    b = rng.choice([1, 2])
    h, key_heads = rng.choice([(1, 1), (2, 2), (4, 2)])
    key, value, width = rng.choice([4, 8, 16]), rng.choice([3, 8, 16]), rng.choice([2, 3, 4])
    strength = rng.choice([1e-4, 0.1, 1.0, 8.0])  # of decays: near 1 and near 0

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    def decays(*shape: int) -> Tensor:
        return -strength * torch.rand(shape, generator=gen, dtype=torch.float64) ** 3

    state: tuple[int, ...]
    out: tuple[int, ...]
    options: dict[str, Any] = {}
    shared: dict[str, Tensor] = {}
    if kind.startswith("delta"):
        function = "gated_delta_rule"
        g = (b, n, h, key) if "channel" in kind else (b, n, h)
        normalised = rng.random() < 0.5
        size = 1.0 if normalised else key**-0.5  # else the rule itself may grow without bounds
        tokens = {
            "q": normal(b, n, key_heads, key), "k": size * 0.7 * normal(b, n, key_heads, key),
            "v": normal(b, n, h, value), "g": decays(*g),
            "beta": torch.rand((b, n, h), generator=gen, dtype=torch.float64),
        }  # fmt: skip
        options = {"use_qk_l2norm": normalised, "scale": rng.choice([None, 0.5])}
        state, out = (b, h, key, value), (b, n, h, value)
    elif kind.startswith("linear attention"):
        function = "linear_attention"
        tokens = {
            "q": normal(b, n, key_heads, key), "k": normal(b, n, key_heads, key),
            "v": normal(b, n, h, value),
        }  # fmt: skip
        (shared if "fixed" in kind else tokens)["g"] = (
            decays(h) if "fixed" in kind else decays(b, n, h)
        )
        options = {"scale": rng.choice([None, 0.5])}
        state, out = (b, h, key, value), (b, n, h, value)
    elif kind == "state space":
        function = "state_space"
        tokens = {
            "x": normal(b, n, h, value), "dt": decays(b, n, h).abs(),
            "B": normal(b, n, key_heads, key), "C": normal(b, n, key_heads, key),
        }  # fmt: skip
        shared = {"A": -torch.rand(h, generator=gen, dtype=torch.float64) - 0.1, "D": normal(h)}
        state, out = (b, h, value, key), (b, n, h, value)
    elif kind == "selective scan":
        function, channels = "selective_scan", value
        tokens = {
            "x": normal(b, n, channels), "dt": decays(b, n, channels).abs(),
            "B": normal(b, n, key), "C": normal(b, n, key),
        }  # fmt: skip
        shared = {
            "A": -torch.rand((channels, key), generator=gen, dtype=torch.float64) - 0.1,
            "D": normal(channels),
        }
        state, out = (b, channels, key), (b, n, channels)
    elif kind == "linear recurrence":
        function = "linear_recurrence"
        tokens = {"x": normal(b, n, key), "log_a": decays(b, n, key)}
        state, out = (b, key), (b, n, key)
    else:
        function = "causal_conv1d"
        tokens = {"x": normal(b, n, key)}
        shared = {"weight": normal(key, width), "bias": normal(key)}
        options = {"activation": rng.choice([None, "silu"])}
        state, out = (b, key, width - 1), (b, n, key)
    return Drawn(
        function, layout, world_size, tokens, shared, options,
        normal(*state) if rng.random() < 0.5 else None,
        rng.random() < 0.5, _documents(rng, n, b), rng.random() < 0.3, normal(*out), normal(*state),
        about=f"seed {seed}: {kind}, {layout}, {world_size} ranks, {n} tokens, decays {strength}",
    )  # fmt: skip


def _documents(rng: random.Random, n: int, batch: int) -> Documents | None:
    if rng.random() < 0.4:
        return None

    def row() -> list[int]:
        lengths, left = [], n
        while left:
            lengths.append(min(left, rng.choice([1, 1, 2, 7, 40, 150])))
            left -= lengths[-1]
        return lengths

    return Documents([row() for _ in range(batch)] if rng.random() < 0.5 else row())


def drawn_tree(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Lengths and parents of nodes of at most n tokens: several trees, of at most four nodes on a
    path; many nodes of a token, and some of none.
    """
    lengths: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    left = n if rng.random() < 0.8 else max(1, n - rng.choice([1, 3, 9]))  # the rest is padding
    while left:
        lengths.append(min(left, rng.choice([0, 1, 1, 2, 3, 7, 20, 70])))
        left -= lengths[-1]
        able = [node for node, depth in enumerate(depths) if depth < 4]
        # Chains, answers to one question, and anything.
        ways = [-1, rng.choice(able), able[-1], able[0]] if able else [-1]
        parents.append(rng.choice(ways))
        depths.append(1 + (depths[parents[-1]] if parents[-1] >= 0 else 0))
    return lengths, parents


def paths_of(lengths: list[int], parents: list[int], n: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of each path from a root to a leaf, and the padding; one token after another."""
    paths: list[tuple[int, ...]] = []
    begin = 0
    for length, parent in zip(lengths, parents, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, *range(begin, begin + length)))
        begin += length
    leaves = [path for node, path in enumerate(paths) if node not in parents]
    return tuple(path for path in (*leaves, tuple(range(begin, n))) if path)


def drawn_along_a_tree(seed: int, kind: str | None = None, world_size: int | None = None) -> Drawn:
    """A call over the paths of a tree that is drawn; the same one for the same arguments."""
    rng = random.Random(1000 + seed)
    case = drawn(seed, kind, world_size or rng.choice([1, 2, 3, 4]))
    lengths, parents = drawn_tree(rng, case.seq_len)
    layout = rng.choice(["zigzag", "contiguous", "balanced", "whole"])
    return replace(
        case, layout=layout, state=None, returns_state=False, documents=None,
        tree=PrefixTree(lengths, parents, tokens=case.seq_len),
        paths=paths_of(lengths, parents, case.seq_len),
        about=f"{case.about}; in fact {layout}, {lengths}, {parents}",
    )  # fmt: skip


def truth_of_paths(case: Drawn) -> dict[str, Tensor]:
    """The spec's results of each path by itself. The result of a token that several share counts
    once, and its gradients are added up.
    """
    whole: dict[str, Tensor] = {}
    done: set[int] = set()
    for path in case.paths:
        at, new = list(path), torch.tensor([place not in done for place in path])
        done |= set(path)
        tokens = {name: x[:, at] for name, x in case.tokens.items()}
        shape = (1, -1, *(1 for _ in case.dout.shape[2:]))
        dout = case.dout[:, at] * new.view(shape)
        one = truth(replace(case, tokens=tokens, dout=dout, tree=None, paths=()))
        for name, x in one.items():
            if name == "out":
                whole.setdefault(name, torch.zeros_like(case.dout))[:, at] = x
            elif name[1:] in case.tokens:
                total = whole.setdefault(name, torch.zeros_like(case.tokens[name[1:]]))
                total[:, at] += x
            else:
                whole[name] = whole[name] + x if name in whole else x
    return whole


def truth(case: Drawn) -> dict[str, Tensor]:
    """The spec's result, last state and gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in (case.tokens | case.shared).items()}
    state = torch.zeros_like(case.dstate) if case.state is None else case.state.clone()
    state.requires_grad_()
    options = dict(case.options)
    if "scale" in options and options["scale"] is None:
        options["scale"] = case.tokens["k"].shape[-1] ** -0.5
    out, last = SPECS[case.function](**leaves, begins=case.begins(), state=state, **options)
    loss = (out * case.dout).sum()
    if case.returns_state:
        loss = loss + case.world_size * (last * case.dstate).sum()  # every rank's own share
    loss.backward()
    found = {"out": out.detach()} | {
        f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None
    }
    if case.returns_state:
        found["state"] = last.detach()
    if case.state is not None and state.grad is not None:
        found["dinitial"] = state.grad
    return found


def attend(ctx: Context, case: Drawn, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """This rank's call, put together over the ranks: results on every rank."""
    inside: Mask | None = case.tree or case.documents
    mask = Causal() if inside is None else Causal() & inside
    follows = case.layout in ("balanced", "whole")
    layout = ctx.layout(case.seq_len, case.layout, mask=mask if follows else None)
    device = ctx.device
    tokens = {
        name: layout.shard(x).to(device, dtype).requires_grad_() for name, x in case.tokens.items()
    }
    shared = {
        name: x.to(device, dtype, copy=True).requires_grad_() for name, x in case.shared.items()
    }
    state = None if case.state is None else case.state.to(device, dtype, copy=True).requires_grad_()
    documents: Any = inside
    if case.documents is not None and case.as_tensor:
        documents = layout.shard(case.begins().to(device))
    function = getattr(room, case.function)
    result = function(
        **tokens, **shared, **case.options, layout=layout, documents=documents,
        initial_state=state, return_state=case.returns_state,
    )  # fmt: skip
    out, last = result if case.returns_state else (result, None)
    loss = (out.double() * layout.shard(case.dout).to(device)).sum()
    if last is not None:
        loss = loss + (last.double() * case.dstate.to(device)).sum()
    loss.backward()
    found = {"out": layout.unshard(out.detach().cpu())}
    for name, x in tokens.items():
        assert x.grad is not None
        found[f"d{name}"] = layout.unshard(x.grad.cpu())
    for name, x in (shared | ({} if state is None else {"initial": state})).items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        found[f"d{name}"] = ctx.all_reduce(grad.double().contiguous().cpu())
    if last is not None:
        found["state"] = last.detach().cpu()
    return found


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors, by norms, of all results; of each of them 1 where one is missing."""
    return {
        name: float((found[name].double() - x).norm() / x.norm().clamp(min=1e-30))
        if name in found and found[name].shape == x.shape and x.norm() > 1e-12
        else float(name not in found or found[name].double().norm() > 1e-6)
        for name, x in true.items()
    }
