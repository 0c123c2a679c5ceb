"""Products with the matrices of adapters, with a file for each backend."""
