"""The parts of `benchmarks/compare.py`: the model, the engines, the figures."""
