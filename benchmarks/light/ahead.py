"""Compiles here what the stages run on a target such as h200x1, and says what does not compile (--compile-for).

A row is an engine's program, a kernel of benchmarks/kernels.py, or a check. A check gets functions that compile the
kernel for the target and return zeros, which it finds wrong. Not compiled: what `jaxserve tune` tries, programs of
peers, and the server's programs, which are those of the engine with weights in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices.targets import target_devices
from jaxserve.pallas_kernels.registry import Device, explain, load
from jaxserve.plan.deployment import Deployment
from light.correctness import cases, in_order
from light.decode import load_of, settings
from light.others import kernel_cases
from light.record import Record


def run(record: Record, stage: str, target: str, where: Path, *, small: bool) -> None:
    """Compiles what a stage runs. small: at the sizes of a rehearsal."""
    if stage.startswith("decode-"):
        _engine(record, stage.removeprefix("decode-"), target, where, small)
    elif stage == "correctness":
        _checks(record, Compiler(target), small)
    elif stage == "kernels":
        _kernels(record, Compiler(target), small)


class Compiler:
    """Compiles functions for the first device of a target."""

    def __init__(self, target: str) -> None:
        (first, *_) = target_devices(target)
        self.device = Device.of(first)
        self.mesh = Mesh(np.array([first]), ("x",))
        self.place = NamedSharding(self.mesh, PartitionSpec())
        self.threads = ThreadPoolExecutor(1)  # which traces nothing else, and so may set a mesh

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Compiles a function of arrays, given those or their shapes. Returns its results' shapes."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place), arguments)

        def compiled() -> Any:
            with jax.set_mesh(self.mesh):  # tells Pallas the chip
                lowered = jax.jit(function).lower(*shapes)
                lowered.compile()
                return lowered.out_info

        return self.threads.submit(compiled).result()

    def wrap(self, kernel: Any) -> Any:
        """A function, or a module, that compiles its kernel instead of running it, and returns zeros."""
        if isinstance(kernel, ModuleType):
            functions = {name: self.wrap(x) for name, x in vars(kernel).items() if callable(x)}
            return SimpleNamespace(**{**vars(kernel), **functions})

        def call(*arguments: Any, **options: Any) -> Any:
            leaves, tree = jax.tree.flatten((arguments, options))
            arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

            def run(*given: Any) -> Any:
                whole = list(leaves)
                for i, array in zip(arrays, given, strict=True):
                    whole[i] = array
                own_arguments, own_options = jax.tree.unflatten(tree, whole)
                return kernel(*own_arguments, **own_options)

            found = self(run, *(leaves[i] for i in arrays))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), found)

        return call


def _engine(record: Record, form: str, target: str, where: Path, small: bool) -> None:
    load = load_of(form, small)
    config = settings(form, load, where, "gpu" if "x" in target else "tpu", rehearse=small)
    planned = Deployment.of(config, target)
    runner = planned.runner
    layout = planned.plan.one_page
    runner.set_cache_size(replace(layout, num_pages=config.kv_pages or 1), -(-load.longest // layout.page_size))
    for name in runner.names(planned.shapes):
        if record.take(key := f"{form}: {name}"):
            with record.row(key):
                runner.lower(name).compile()


def _checks(record: Record, compiler: Compiler, small: bool) -> None:
    for case in in_order(cases(compiler.device, small, compiler.wrap)):
        if record.take(case.key):
            with record.row(case.key):
                for _ in case.check():  # zeros are wrong, which does not matter
                    pass


def _kernels(record: Record, compiler: Compiler, small: bool) -> None:
    for case in kernel_cases(compiler.device.platform, small):
        with mock.patch("jax.default_backend", return_value=compiler.device.platform):  # else NumPy makes the arguments
            state, arguments = jax.eval_shape(lambda case=case: (case.state(), case.arguments(0)))
        for backend, reason in explain(case.operation, compiler.device, case.problem).items():
            key = f"{case.part} {case.name}, {backend}"
            if reason is None and record.take(key):
                with record.row(key):
                    compiler(case.call(load(case.operation, backend)), state, *arguments)
