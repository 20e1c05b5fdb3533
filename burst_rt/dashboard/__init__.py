"""The dashboard: a job's telemetry in a browser, in a terminal and for Prometheus.

The terminal's view is `burst-rt top`. All three read the one model of the job
(`telemetry.model`).
"""
