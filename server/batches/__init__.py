"""Batches: files of requests, answered at low priority through the handlers of the HTTP endpoints."""
