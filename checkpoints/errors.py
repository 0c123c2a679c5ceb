"""The error for unusable checkpoints."""


class CheckpointError(ValueError):
    """Files are missing, damaged or do not fit the model; the message names the file and the tensor."""


class TooLongError(CheckpointError):
    """Reading a file takes longer than files of its size may take."""
