"""Products with quantized weights. Each backend is one module with the functions of `reference`."""
