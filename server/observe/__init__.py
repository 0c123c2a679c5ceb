"""Metrics, logs, traces, and records of requests."""
