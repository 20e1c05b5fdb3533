"""Baselines that attention over ranks is compared with: whole layers, and tensor parallelism."""
