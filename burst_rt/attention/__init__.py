"""Attention over the ranks of a context: the public call, its checks, plans and their execution."""
