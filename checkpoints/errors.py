"""What can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """Files that are missing, damaged or do not fit the model; the message names the file and the tensor."""
