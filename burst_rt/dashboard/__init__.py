"""The dashboard: a job's telemetry in a browser, in a terminal (`burst-rt top`) and for Prometheus.
All three read the one model of the job (`telemetry.job_model`).
"""
