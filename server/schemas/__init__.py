"""Bodies of requests as types, which decode, check and describe them."""
