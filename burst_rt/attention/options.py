"""The options of an attention call, as one record that everything but public signatures takes.

A new option is a field of `Options` and of `OptionArguments` (type checkers cannot derive one from
the other; a test compares them), a parameter of `burst_attention`, and its check: here, or in
`tensor_check.py` where it depends on tensors. The key under which checked calls are kept, the words
that ranks compare and the arguments of the custom ops follow from the fields.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, TypedDict

import torch

from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import InputError
from burst_rt.planning.masks import Causal, Full, Mask
from burst_rt.planning.strategies import check_name

__all__ = [
    "CAUSAL",
    "FULL",
    "PLAIN",
    "NeedsGrad",
    "OptionArguments",
    "Options",
    "check_factors",
    "check_options",
    "check_types",
]

# The masks of calls that name no mask. They are made once, so that the compiler reads their numbers
# and makes no mask of its own.
FULL, CAUSAL = Full(), Causal()

_WHERE = "burst_attention"

# Whether q, k, v and sinks need gradients.
NeedsGrad = tuple[bool, bool, bool, bool]


class OptionArguments(TypedDict, total=False):
    """The arguments of `burst_attention` besides q, k, v, `layout` and `return_lse`."""

    kv_layout: ContextLayout | None
    mask: Mask | None
    causal: bool
    scale: float | None
    softcap: float | None
    dropout_p: float
    strategy: str
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None


class Options(NamedTuple):
    """The options of one call, as the user gave them; `resolved` says what they mean.

    See `burst_attention`. The order matters: layouts and mask first, tensors last, and everything
    in between is plain, a number or a word that can be hashed, compared and sent.
    """

    layout: ContextLayout
    kv_layout: ContextLayout | None = None
    mask: Mask | None = None
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    strategy: str = "auto"
    return_lse: bool = False
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> tuple[bool | float | str | None, ...]:
        """The values of the fields that `PLAIN` names."""
        return self[3:-2]

    def resolved(self) -> Options:
        """The same, with the mask and the layout of keys that these options mean."""
        mask = self.mask if self.mask is not None else CAUSAL if self.causal else FULL
        return self._replace(kv_layout=self.kv_layout or self.layout, mask=mask, causal=False)

    def without_tensors(self) -> Options:
        """The same without slopes and sinks: what may be kept, and compared."""
        return self._replace(alibi_slopes=None, sinks=None)


# The names of the fields between the mask and the tensors.
PLAIN = Options._fields[3:-2]


def check_types(options: Options) -> None:
    """Checks what each option is, and what a compiled call depends on. Raises InputError.

    The compiler traces this function: a compiled call reads the numbers of layouts and masks, and
    decides by the two flags, before the op that checks the rest.
    """
    _check_layouts(options)
    _check_flags(options)
    _check_dropout(options.dropout_p)
    slopes, mask = options.alibi_slopes, options.mask
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise InputError(
            f"{_WHERE}: alibi_slopes must not require grad, because their gradient is not "
            "computed; pass alibi_slopes.detach()"
        )
    if mask is not None and not isinstance(mask, Mask):
        raise InputError(
            f"{_WHERE}: mask must be a burst_rt.Mask such as burst_rt.Causal(), got "
            f"{type(mask).__name__}"
        )


def _check_layouts(options: Options) -> None:
    """Raises InputError where a layout is none; `layout` itself must be given."""
    layout, kv_layout, *_ = options
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        if not isinstance(given, ContextLayout) and (name == "layout" or given is not None):
            raise InputError(
                f"{_WHERE}: {name} must come from ctx.layout(...), got {type(given).__name__}"
            )


def _check_flags(options: Options) -> None:
    """Raises InputError where a flag is no bool, or where there are two masks."""
    for name, flag in (("causal", options.causal), ("return_lse", options.return_lse)):
        if not isinstance(flag, bool):
            raise InputError(f"{_WHERE}: {name} must be True or False, got {flag!r}")
    if options.causal and options.mask is not None:
        raise InputError(
            f"{_WHERE}: give mask or causal=True, not both; Causal() & mask combines them"
        )


def _check_dropout(dropout_p: object) -> None:
    """Raises InputError unless the probability is 0."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        raise InputError(
            f"{_WHERE}: dropout_p must be 0, got {dropout_p!r}: attention is exact here, and which "
            "probabilities are dropped would depend on the ranks and the strategy; use dropout on "
            "the output instead"
        )


def check_options(options: Options) -> None:
    """Checks all options but tensors and the mask's own rules. Raises InputError."""
    check_types(options)
    kv_layout = options.kv_layout or options.layout
    if options.layout.attention is not kv_layout.attention:
        raise InputError(
            f"{_WHERE}: layout and kv_layout must belong to one context, got layouts of two "
            "contexts; make both with the layout(...) of the same context"
        )
    check_name(options.strategy)
    check_factors(_WHERE, options.scale, options.softcap)


def check_factors(where: str, scale: object, softcap: object) -> None:
    """Raises InputError where one of them is neither None nor a number above 0."""
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not _is_positive(number):
            hint = "; give an integer below 2**63, or a float" if type(number) is int else ""
            raise InputError(
                f"{where}: {name} must be None or a finite number above 0, got {number!r}{hint}"
            )


def _is_positive(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    # Torch takes integers of 64 bits only.
    most = 2**63 - 1 if isinstance(number, int) else sys.float_info.max
    # Fused kernels mask a score by adding -inf, and scale afterwards. A scale of 0 or less would
    # give NaN where scores are masked.
    return 0 < number <= most
