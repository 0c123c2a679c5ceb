"""The error of a replica's hosts."""


class HostError(OSError):
    """The hosts of a replica could not come together, or cannot go on; the message names the host."""
