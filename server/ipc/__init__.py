"""Between an API server's process and the engine's: typed messages over a unix socket, and both of its ends."""
