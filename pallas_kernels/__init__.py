"""Kernels: arrays in, arrays out. `ops` is the set of operations that model code calls, `registry` chooses a backend
for each by device and problem, and each operation has a folder with a reference in plain XLA and its backends. Imported
as `jaxserve.pallas_kernels`; it knows neither models nor the engine."""
