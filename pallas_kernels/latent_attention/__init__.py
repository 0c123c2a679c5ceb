"""Multi-head latent attention over pages of latents: `reference` says what it is, `expanded` has the form for long
prompts and tells which form is cheaper, the other modules are backends."""
