"""Makes checkpoints: quantizes models, and converts them between layouts."""
