"""Several models behind one server: which there are, which are in memory, and how a request comes to its own."""
