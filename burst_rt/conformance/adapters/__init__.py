"""Adapters of libraries: modules that import their library, and are imported by name.

All have the same functions, `attention` or `model`, so none is offered in an `__all__`.
"""
