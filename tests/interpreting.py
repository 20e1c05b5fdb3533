"""Triton's interpreter without what takes two thirds of its time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

__all__ = ["spare_work"]


def spare_work(interpreter: Any) -> None:
    """Spares Triton's interpreter two thirds of its time: what it does again and again for nothing.

    interpreter: its module. The names are private; a release of Triton without them is only slower.
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    # After each sum and product of integers it computes in 64 bits whether they overflowed. The
    # answer is asserted in debug mode alone.
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        builder.options = replace(options, sanitize_overflow=False)
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return

    # Whenever a kernel calls a function, all of triton.language is searched for what to patch. Here
    # it is searched once for each function, and stays patched between launches: nothing is compiled
    # in this process.
    @cache
    def patch_once(fn: Any) -> Any:
        patch(fn)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_once
