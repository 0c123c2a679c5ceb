"""The weights of a runner, and of its image encoder, in a bundle, in the very form in which programs take them."""

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


def write(folder: Path, forms: Any, arrays: Sequence[jax.Array], description: str = WEIGHTS) -> None:
    """forms: the parameters as shapes with shardings. arrays: `ModelRunner.weights`, or the leaves of the parameters of
    an encoder. description: WEIGHTS or ENCODER, the file that tells of them; its stem is the folder of the shards."""
    writer = Writer(folder, Path(description).stem)
    stored = [writer.write(x) for x in arrays]
    writer.close()
    leaves, structure = jax.tree.flatten(forms)
    described = Described(trees.describe(structure), [leaf_of(x, x.sharding) for x in leaves], stored)
    (folder / description).write_bytes(msgspec.json.encode(described))


class StoredWeights:
    """The weights of a bundle, whose files were checked."""

    def __init__(self, bundle: Bundle, description: str = WEIGHTS):
        self._bundle = bundle
        self._path = bundle.path / description
        self._described = bundle.json(description, Described)

    def forms(self, mesh: Mesh) -> Any:
        """The parameters as shapes with shardings."""
        with contents_of(self._path, BundleError):
            leaves = [
                jax.ShapeDtypeStruct(tuple(x.shape), jax.numpy.dtype(x.dtype), sharding=sharding_of(x, mesh))
                for x in self._described.leaves
            ]
            return trees.build(self._described.tree, leaves, CLASSES)

    def arrays(self, mesh: Mesh) -> list[jax.Array]:
        """The arrays that were written, mapped from the files where the devices allow it."""
        known = self._bundle.names(self._path.stem)
        with contents_of(self._path, BundleError):
            return Reader(self._bundle.path, known).read(self._described.arrays, mesh)

    def params(self, mesh: Mesh) -> Any:
        """The parameters, where each array is one leaf of them, as an encoder's are. Raises BundleError."""
        arrays = self.arrays(mesh)
        leaves, structure = jax.tree.flatten(self.forms(mesh))
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in arrays]:
            raise BundleError(f"{self._path}: the arrays are not the leaves of the parameters")
        return jax.tree.unflatten(structure, arrays)
