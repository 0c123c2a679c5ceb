"""Multi-head latent attention over pages of latents. `reference` defines it in plain XLA. `expanded` has the form for
long prompts, and decides which form is cheaper. The other modules are backends."""
