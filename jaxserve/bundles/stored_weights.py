"""The weights of a runner in a bundle, in the very form in which its programs take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxserve.bundles import trees
from jaxserve.bundles.arrays import Reader, Stored, Writer
from jaxserve.bundles.container import WEIGHTS, Bundle, BundleError
from jaxserve.checkpoints.files import contents_of
from jaxserve.devices.executables import Leaf, leaf_of, sharding_of

CLASSES = {kind.__name__: kind for kind in trees.PLAIN}


class Described(msgspec.Struct, frozen=True):
    """The tree of parameters with the forms of its leaves, and the arrays that hold them (`packed_params.bundle`)."""

    tree: Any
    leaves: list[Leaf]
    arrays: list[Stored]


def write(folder: Path, forms: Any, arrays: Sequence[jax.Array]) -> None:
    """forms: the parameters as shapes with shardings. arrays: `ModelRunner.weights`."""
    writer = Writer(folder)
    stored = [writer.write(x) for x in arrays]
    writer.close()
    leaves, structure = jax.tree.flatten(forms)
    described = Described(trees.describe(structure), [leaf_of(x, x.sharding) for x in leaves], stored)
    (folder / WEIGHTS).write_bytes(msgspec.json.encode(described))


class StoredWeights:
    """The weights of a bundle, whose files were checked."""

    def __init__(self, bundle: Bundle):
        self._bundle = bundle
        self._described = bundle.json(WEIGHTS, Described)

    def forms(self, mesh: Mesh) -> Any:
        """The parameters as shapes with shardings."""
        with contents_of(self._bundle.path / WEIGHTS, BundleError):
            leaves = [
                jax.ShapeDtypeStruct(tuple(x.shape), jax.numpy.dtype(x.dtype), sharding=sharding_of(x, mesh))
                for x in self._described.leaves
            ]
            return trees.build(self._described.tree, leaves, CLASSES)

    def arrays(self, mesh: Mesh) -> list[jax.Array]:
        """The arrays of `ModelRunner.weights`, mapped from the files where the devices allow it."""
        known = self._bundle.names("weights")
        with contents_of(self._bundle.path / WEIGHTS, BundleError):
            return Reader(self._bundle.path, known).read(self._described.arrays, mesh)
