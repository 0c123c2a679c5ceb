"""Folders with prepared weights and compiled programs, so that a start neither converts nor compiles; and the programs
that earlier starts have compiled (`program_cache`)."""
