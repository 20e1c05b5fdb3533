"""Telemetry: what every rank, GPU and transfer does, seen from one place, at a cost that cannot hurt the run."""
