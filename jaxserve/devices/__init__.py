"""Which devices there are, and what they can do: meshes, layouts of arrays, the compilation cache, options of
compilers, and targets that are compiled for without being there."""
