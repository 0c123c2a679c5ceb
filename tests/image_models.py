"""Small random checkpoints of language models inside models that see, for `tiny_models`; as those of `dense_models`."""

from dense_models import DenseCase

IMAGE_CASES: dict[str, DenseCase] = {}
