"""The dashboard: a job's telemetry in a browser, in a terminal (`burst-rt top`) and for Prometheus.
All read the one model.
"""
