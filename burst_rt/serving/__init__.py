"""Serving: keys and values of sequences kept over the ranks of a context, and attention to them."""
