"""Attention in both directions within segments of rows, as encoders of pictures compute it."""
