"""Tool calls: checking a request's tools, and finding calls in a model's text."""
