"""Compiled programs as bytes, and back, without pickle.

`jax.experimental.serialize_executable` pickles the description of a program: its arguments, results and shardings. Here
the description is plain data that the caller keeps (`Leaf`), and only XLA's own form of the executable is bytes. XLA's
bytes are machine code: load them only from a source that may run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src.interpreters import pxla
from jax._src.layout import Layout
from jax._src.lib import xla_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxserve.devices.jax_versions import with_int4_arguments


class Leaf(NamedTuple):
    """An argument or result of a program: `spec` has the axes of the mesh that split each of its axes."""

    shape: list[int]
    dtype: str
    spec: list[Any]
    weak: bool = False


def leaf_of(aval: Any, sharding: NamedSharding) -> Leaf:
    spec = [list(axis) if isinstance(axis, tuple) else axis for axis in sharding.spec]
    weak = bool(getattr(aval, "weak_type", False))
    return Leaf(list(aval.shape), jax.numpy.dtype(aval.dtype).name, spec, weak)


def sharding_of(leaf: Leaf, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in leaf.spec)))


def serialize(compiled: Compiled) -> bytes:
    """XLA's own bytes of a program. It must have no callbacks, effects or constant arguments."""
    whole: Any = compiled
    program = whole._executable._unloaded_executable
    rest = program.ordered_effects, program.unordered_effects, program.host_callbacks, whole._params.const_args
    assert not any(rest), f"{program.name} cannot be kept"
    executable = program.xla_executable
    if isinstance(executable, xla_client.LoadedExecutable):
        return executable.client.serialize_executable(executable)
    return executable.serialize()  # compiled for devices that are not here


def results_of(compiled: Compiled, mesh: Mesh) -> list[Leaf]:
    """The flat results of a program."""
    whole: Any = compiled
    program = whole._executable._unloaded_executable
    return [
        leaf_of(aval, sharding if isinstance(sharding, NamedSharding) else NamedSharding(mesh, PartitionSpec()))
        for aval, sharding in zip(program.output_avals, program.output_shardings, strict=True)
    ]


def load(data: bytes, name: str, mesh: Mesh, arguments: tuple, donated: Sequence[int], results: Any) -> Compiled:
    """The program that `serialize` made bytes of, on the devices of `mesh`.

    arguments: its abstract arguments with shardings. donated: numbers of those that are donated. results: a pytree of
    Leaf with the structure of what it returns.
    """
    devices = tuple(mesh.devices.flat)
    device_list = xla_client.DeviceList(devices)
    backend = devices[0].client
    executable = backend.deserialize_executable(data, executable_devices=device_list)
    flat_in, in_tree = jax.tree.flatten((arguments, {}))
    flat_out, out_tree = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, Leaf))
    in_avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in flat_in]
    out_avals = [jax.core.ShapedArray(tuple(x.shape), jax.numpy.dtype(x.dtype), weak_type=x.weak) for x in flat_out]
    in_shardings = [x.sharding for x in flat_in]
    out_shardings = [sharding_of(x, mesh) for x in flat_out]
    in_layouts, out_layouts = (
        [Layout.from_pjrt_layout(x) for x in some]
        for some in (executable.get_parameter_layouts(), executable.get_output_layouts())
    )
    program = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=backend,
        input_avals=in_avals,
        input_shardings=in_shardings,
        output_avals=out_avals,
        output_shardings=out_shardings,
        committed=True,
        name=name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(range(len(flat_in))),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_shardings, in_avals),
        xla_out_layouts=out_layouts,
        all_args_info=None,
        pgle_profiler=None,
    )
    given = [number in donated for number, one in enumerate(arguments) for _ in jax.tree.leaves(one)]
    infos = [jax.stages.ArgInfo(aval, is_donated) for aval, is_donated in zip(in_avals, given, strict=True)]
    made: Any = Compiled(program.load(), [], jax.tree.unflatten(in_tree, infos), out_tree, no_kwargs=True)
    return with_int4_arguments(made)
