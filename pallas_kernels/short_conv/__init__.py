"""Short convolutions over states in the sequences' slots, with a file for each backend."""
