"""The compiled programs of a runner as files, in a bundle or in the user's cache (`program_cache`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.stages import Compiled

from jaxserve.bundles import trees
from jaxserve.bundles.container import PROGRAMS, Bundle, BundleError
from jaxserve.devices import executables
from jaxserve.devices.executables import Leaf, leaf_of
from jaxserve.execution.programs import compile_threads
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import CREATE_CACHE, CREATE_SLOTS, ProgramName
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


def write(
    folder: Path, runner: ModelRunner, compiled: Mapping[str, Compiled], names: Mapping[str, ProgramName]
) -> None:
    """Writes the programs and their description."""
    (folder / "programs").mkdir()
    described = {}
    for number, (text, program) in enumerate(compiled.items()):
        file = f"programs/{number:03}.bin"
        (folder / file).write_bytes(executables.serialize(program))
        described[text] = describe(runner, names[text], program, file)
    (folder / PROGRAMS).write_bytes(msgspec.json.encode(described))


def load(bundle: Bundle, runner: ModelRunner, names: Mapping[str, ProgramName]) -> dict[ProgramName, Compiled]:
    """The programs of these names. The bundle's code must be trusted (`Bundle.distrust`).

    Raises BundleError for a missing or damaged program, or one with other arguments than the runner's.
    """
    described = bundle.json(PROGRAMS, dict[str, Program])
    if missing := sorted(names.keys() - described.keys()):
        raise BundleError(f"the bundle lacks the program {missing[0]}")

    def one(text: str) -> Compiled:
        return load_one(runner, names[text], described[text], bundle.read(described[text].file))

    on_cpu = runner.mesh.devices.flat[0].platform == "cpu"
    with ThreadPoolExecutor(compile_threads(len(names), on_cpu=on_cpu)) as pool:
        made = list(pool.map(one, names))
    return dict(zip(names.values(), made, strict=True))


def describe(runner: ModelRunner, name: ProgramName, program: Compiled, file: str) -> Program:
    results = trees.describe(program.out_tree)
    return Program(file, arguments(runner, name), results, executables.results_of(program, runner.mesh))


def load_one(runner: ModelRunner, name: ProgramName, known: Program, data: bytes) -> Compiled:
    """The program that `executables.serialize` made `data` of. Raises BundleError if its arguments are not the
    runner's, or XLA cannot read it."""
    if arguments(runner, name) != known.arguments:
        raise BundleError(f"the kept program {name} has other arguments than this engine's")
    signature = runner.signatures.of(name)
    try:
        results = trees.build(known.results, known.leaves, CLASSES)
        rest = signature.arguments, signature.donated, results
        return executables.load(data, f"jit({name})", runner.mesh, *rest)
    except Exception as error:  # XLA raises many types for bytes that it cannot read
        raise BundleError(f"the kept program {name} cannot be loaded: {error}") from error


def arguments(runner: ModelRunner, name: ProgramName) -> list[Leaf]:
    """The arguments of a program, one after the other."""
    return [_leaf(x) for x in jax.tree.leaves(runner.signatures.of(name).arguments)]


def _leaf(x: Any) -> Leaf:
    sharding = getattr(x.sharding, "sharding", x.sharding)  # a Format has a layout and a sharding
    return leaf_of(x, sharding)
