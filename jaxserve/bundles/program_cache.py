"""Compiled programs that earlier starts left in the user's cache. A start that finds them neither traces nor compiles.

JAX's compilation cache has a program by what it was lowered to, so that it must be traced and lowered to be found:
seconds a program. Here a program is found by what it is made from: code, versions, device, settings, the model's
shape, and its arguments (`of`). What is not told by these must not change a program.

Entries are machine code, so they lie in a folder that only this user can write to, and one that is damaged, or that XLA
does not read, is compiled anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import msgspec
from jax.stages import Compiled

from jaxserve.bundles import environment, stored_programs
from jaxserve.bundles.container import BundleError
from jaxserve.bundles.stored_programs import Program
from jaxserve.config import EngineConfig
from jaxserve.devices import executables
from jaxserve.devices.compile_cache import KEPT, without_compile_cache
from jaxserve.devices.mesh import num_groups, on_one_cpu
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import ProgramName, Signature
from jaxserve.pallas_kernels import cpu, cpu_build, cpu_panels, tuning
from jaxserve.pallas_kernels.cache_folder import open_cache

log = logging.getLogger(__name__)

OFF = "JAXSERVE_NO_PROGRAM_CACHE"  # environment variable: if it is not empty, programs are neither kept nor looked for
MOST_FOLDERS = 16  # kinds of engines whose programs are kept; those that were not used for longest go
PREFIXES = ("JAX_", "XLA_", "JAXSERVE_", "TF_", "NVIDIA_", "CUDA_", "LIBTPU_", "TPU_")  # of variables that may matter
NEUTRAL = {"JAXSERVE_CACHE", "JAX_COMPILATION_CACHE_DIR"}


@dataclass(frozen=True)
class ProgramCache:
    """The programs of engines of one kind, in a folder of their own."""

    folder: Path
    runner: ModelRunner

    @classmethod
    def of(cls, config: EngineConfig, runner: Any, cache: Path | None) -> ProgramCache | None:
        """The programs for this runner below the folder of JAX's compilation cache. None where that cache is off, as it
        is while a bundle is made, where there is no private folder, or for engines whose programs depend on more than
        is compared here: with drafts, adapters, weights in host memory, or on several hosts."""
        if not isinstance(runner, ModelRunner):
            return None
        plain = (
            num_groups(runner.mesh) == 1 and runner.drafter is None and runner.stacks is None and not runner.streamed
        )
        off = cache is None or os.environ.get(OFF) or not jax.config.values["jax_enable_compilation_cache"]
        if cache is None or off or not plain or config.num_hosts > 1:
            return None
        opened = open_cache(cache / "programs")
        if opened is None or not opened.is_private:
            return None
        if runner.mesh.devices.flat[0].platform == "cpu":
            _register_kernels()
        folder = opened.path / _digest(_made_from(config, runner))
        forget_old(opened.path, folder)
        return cls(folder, runner)

    def load(self, name: ProgramName) -> Compiled | None:
        """The program, or None if it is not there."""
        try:
            head, _, data = self._file(name).read_bytes().partition(b"\n")
            described = msgspec.json.decode(head, type=Program)
            if hashlib.sha256(data).hexdigest() != described.file:
                raise ValueError("it is damaged")
            program = stored_programs.load_one(self.runner.mesh, str(name), self._signature(name), described, data)
            jax.monitoring.record_event(KEPT)
            return program
        except FileNotFoundError:
            return None
        except (OSError, ValueError, BundleError) as error:  # msgspec's errors are ValueErrors
            log.warning("the kept program %s is compiled anew: %s", name, error)
            return None

    def compiling(self) -> AbstractContextManager[None]:
        """See `KeptPrograms`. XLA:CPU cannot serialize a program that it has read from JAX's cache."""
        on_cpu = self.runner.mesh.devices.flat[0].platform == "cpu"
        return without_compile_cache() if on_cpu else nullcontext()

    def keep(self, name: ProgramName, compiled: Compiled) -> None:
        """Writes a program, unless that fails."""
        try:
            data = executables.serialize(compiled)
            digest = hashlib.sha256(data).hexdigest()
            described = stored_programs.describe(self.runner.mesh, self._signature(name), compiled, digest)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(msgspec.json.encode(described) + b"\n" + data)
            os.replace(file.name, self._file(name))
        except Exception as error:  # a full disk, or a program that XLA cannot serialize
            log.warning("the program %s is not kept: %s", name, error)

    def _file(self, name: ProgramName) -> Path:
        return self.folder / f"{name}-{_digest(stored_programs.arguments(self._signature(name)))}"

    def _signature(self, name: ProgramName) -> Signature:
        return self.runner.signatures.of(name)


def _made_from(config: EngineConfig, runner: ModelRunner) -> list[Any]:
    """All that decides what programs are, but their names and arguments, as JSON has it."""
    device = runner.mesh.devices.flat[0]
    model = runner.model
    settings = {k: v for k, v in environment.settings_of(config).items() if k not in environment.FREE}
    variables = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES) and k not in NEUTRAL}
    panels = on_one_cpu(runner.mesh) and cpu_panels.available()
    return [
        environment.describe(device, panels), device.client.platform_version, settings, sorted(variables.items()),
        repr(model.config), str(model.dtype), str(runner.mesh), runner.programs.static,
        {name: _told(getattr(model.ops, name)) for name in type(model.ops).__dataclass_fields__},
        tuning.describe(), tuning.choices(device.device_kind),
    ]  # fmt: skip


def _told(value: Any) -> Any:
    """A kernel, or an argument that one is made with, without addresses in memory."""
    if isinstance(value, partial):
        return [_told(value.func), [_told(one) for one in value.args], {k: _told(v) for k, v in value.keywords.items()}]
    if callable(value) or isinstance(value, ModuleType):
        module = getattr(value, "__module__", "")
        return f"{module}.{getattr(value, '__qualname__', getattr(value, '__name__', type(value).__name__))}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _register_kernels() -> None:
    """Registers the C++ kernels that are built already. XLA loads no program that calls others; usually a kernel is
    registered when a program that calls it is lowered."""
    for name in cpu_build.NAMES:
        if cpu_build.built(name) is not None:
            cpu.available(name)


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:32]


def forget_old(root: Path, own: Path) -> None:
    """Removes the folders that were not used for longest, and notes that `own` is used now."""
    if own.is_dir():
        os.utime(own)
    found = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
    for path in found[MOST_FOLDERS:]:
        shutil.rmtree(path, ignore_errors=True)
