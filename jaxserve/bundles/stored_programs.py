"""The compiled programs of a runner as files, in a bundle or in the user's cache (`program_cache`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve.bundles import trees
from jaxserve.bundles.container import PROGRAMS, Bundle, BundleError
from jaxserve.devices import executables
from jaxserve.devices.executables import Leaf, leaf_of
from jaxserve.execution.programs import compile_threads
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import CREATE_CACHE, CREATE_SLOTS, ProgramName, Signature
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.steps import StepResult
from jaxserve.pallas_kernels.types import (
    ConvState,
    DeltaState,
    KVPages,
    LatentPages,
    LightningState,
    MambaState,
    NgramState,
    ScanState,
)

_KINDS = (
    Sampled,
    StepResult,
    SlotState,
    KVPages,
    LatentPages,
    DeltaState,
    ConvState,
    NgramState,
    MambaState,
    ScanState,
    LightningState,
)
CLASSES: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}


class Program(msgspec.Struct, frozen=True):
    """A compiled program: its file, its flat arguments, and its results as a tree of `leaves`."""

    file: str
    arguments: list[Leaf]
    results: Any
    leaves: list[Leaf]


def names_of(runner: ModelRunner, shapes: Sequence[StepShape]) -> dict[str, ProgramName]:
    """All programs of serving, also those that create cache and slots, by their names in a bundle."""
    names: list[ProgramName] = [CREATE_SLOTS, CREATE_CACHE, *runner.names(shapes)]
    by_text = {str(name): name for name in names}
    assert len(by_text) == len(set(names)), "two programs have one name"
    return by_text


def signatures_of(runner: ModelRunner, shapes: Sequence[StepShape]) -> dict[str, Signature]:
    """Of all programs of serving, the image encoder's among them, by their names in a bundle."""
    found = {text: runner.signatures.of(name) for text, name in names_of(runner, shapes).items()}
    return found if runner.encoder is None else found | runner.encoder.signatures


def write(folder: Path, mesh: Mesh, compiled: Mapping[str, Compiled], signatures: Mapping[str, Signature]) -> None:
    """Writes the programs and their description."""
    (folder / "programs").mkdir()
    described = {}
    for number, (text, program) in enumerate(compiled.items()):
        file = f"programs/{number:03}.bin"
        (folder / file).write_bytes(executables.serialize(program))
        described[text] = describe(mesh, signatures[text], program, file)
    (folder / PROGRAMS).write_bytes(msgspec.json.encode(described))


def load(bundle: Bundle, mesh: Mesh, signatures: Mapping[str, Signature]) -> dict[str, Compiled]:
    """The programs of these names and signatures. The bundle's code must be trusted (`Bundle.distrust`).

    Raises BundleError for a missing or damaged program, or one with other arguments.
    """
    described = bundle.json(PROGRAMS, dict[str, Program])
    if missing := sorted(signatures.keys() - described.keys()):
        raise BundleError(f"the bundle lacks the program {missing[0]}")

    def one(text: str) -> Compiled:
        return load_one(mesh, text, signatures[text], described[text], bundle.read(described[text].file))

    on_cpu = mesh.devices.flat[0].platform == "cpu"
    with ThreadPoolExecutor(compile_threads(len(signatures), on_cpu=on_cpu)) as pool:
        made = list(pool.map(one, signatures))
    return dict(zip(signatures, made, strict=True))


def describe(mesh: Mesh, signature: Signature, program: Compiled, file: str) -> Program:
    results = trees.describe(program.out_tree)
    return Program(file, arguments(signature), results, executables.results_of(program, mesh))


def load_one(mesh: Mesh, name: str, signature: Signature, known: Program, data: bytes) -> Compiled:
    """The program that `executables.serialize` made `data` of. Raises BundleError if its arguments are not those of the
    signature, or XLA cannot read it."""
    if arguments(signature) != known.arguments:
        raise BundleError(f"the kept program {name} has other arguments than this engine's")
    try:
        results = trees.build(known.results, known.leaves, CLASSES)
        rest = signature.arguments, signature.donated, results
        return executables.load(data, f"jit({name})", mesh, *rest)
    except Exception as error:  # XLA raises many types for bytes that it cannot read
        raise BundleError(f"the kept program {name} cannot be loaded: {error}") from error


def arguments(signature: Signature) -> list[Leaf]:
    """The arguments of a program, one after the other."""
    return [_leaf(x) for x in jax.tree.leaves(signature.arguments)]


def _leaf(x: Any) -> Leaf:
    sharding = getattr(x.sharding, "sharding", x.sharding)  # a Format has a layout and a sharding
    return leaf_of(x, sharding)
