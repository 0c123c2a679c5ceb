"""Attention of ragged queries over a paged key-value cache."""
