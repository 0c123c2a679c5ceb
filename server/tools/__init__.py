"""Tool calls: what a request may ask for, and how the calls are found in a model's text."""
