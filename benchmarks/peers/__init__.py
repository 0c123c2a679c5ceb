"""What `benchmarks/compare.py` is made of: the model, the engines, the figures."""
