"""Benchmarks, baselines and studies of the project: `python -m benchmarks` in the source tree."""
