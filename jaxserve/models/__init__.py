"""Model code: `spec` describes an architecture, `decoder` computes it, `families` read the configs of published models,
and `load` places their weights."""
