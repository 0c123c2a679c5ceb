"""Products with quantized weights: one module per backend, all with the functions of `reference`."""
