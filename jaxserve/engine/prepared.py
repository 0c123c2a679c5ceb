"""A model that is served from a bundle: which parts of the bundle fit this engine, and why the others do not."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.bundles import environment, stored_programs
from jaxserve.bundles.container import (
    ENCODER,
    KERNELS,
    MODEL,
    STAMPS,
    WEIGHTS,
    Bundle,
    BundleError,
    is_bundle,
    read_key,
)
from jaxserve.bundles.stored_weights import StoredWeights
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.execution.memory import Budget
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.pallas_kernels import cpu, cpu_build, cpu_panels, selfcheck_stamps, tuning
from jaxserve.pallas_kernels.ops import Ops

log = logging.getLogger(__name__)


@dataclass
class Prepared:
    """A bundle that is being loaded. Its weights are used, or loading fails. Its programs are used unless there are
    `reasons` against that; then this engine compiles its own."""

    bundle: Bundle
    weights: StoredWeights
    reasons: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: EngineConfig) -> Prepared | None:
        """The bundle that the settings name as the model; None: it is no bundle. Installs the bundle's kernels for a
        CPU, so call it before anything asks for them.

        Raises BundleError for damaged weights, tokenizer or settings of the model, and ConfigError for settings that
        the weights were not prepared for.
        """
        if not is_bundle(config.model):
            return None
        start = time.perf_counter()
        path = Path(config.model).expanduser()
        bundle = Bundle.open(path, read_key(config.bundle_key_file))
        made = bundle.manifest.settings
        if changed := environment.changed_settings(made, config, environment.OF_WEIGHTS):
            raise ConfigError(
                f"the weights of the bundle {path} were prepared for other settings: {'; '.join(changed)}. Start "
                f"without these flags, or make a bundle of {bundle.manifest.model} with them"
            )
        bundle.check(bundle.names(WEIGHTS, "weights", ENCODER, "encoder", MODEL))
        log.info("checked the weights of %s in %.2f s", path, time.perf_counter() - start)
        found = cls(bundle, StoredWeights(bundle))
        found.reasons += filter(None, [bundle.distrust()])
        found.reasons += environment.changed_settings(made, config)
        if config.kv_pages not in (None, bundle.manifest.pages):
            found.reasons.append(f"kv_pages is {config.kv_pages}, not {bundle.manifest.pages}")
        found._install_kernels()
        found._take_stamps()
        return found

    def _install_kernels(self) -> None:
        """Puts the kernels that were built for this processor, from these sources, into the cache of this user."""
        if self.reasons:
            return
        for name, key in self.bundle.manifest.environment.get("libraries", {}).items():
            file = f"libraries/{name}.so"
            if file in self.bundle.manifest.files and cpu_build.key(name) == key:
                try:
                    cpu_build.install(name, self.bundle.read(file))
                except BundleError as error:
                    self.reasons.append(str(error))

    def _take_stamps(self) -> None:
        """Keeps the stamps of checks that kernels have passed on the devices of the bundle. Each says what it is worth
        on, so those of other devices or versions do no harm."""
        if self.bundle.distrust() is None and STAMPS in self.bundle.manifest.files:
            try:
                selfcheck_stamps.add(self.bundle.json(STAMPS, list[str]))
            except BundleError as error:
                log.warning("%s; kernels are checked again", error)

    def _register_kernels(self, on_cpu: bool) -> None:
        """Registers the kernels that the programs may call. Raises BundleError if one is not available."""
        for name in cpu_build.NAMES if on_cpu else ():
            if f"libraries/{name}.so" in self.bundle.manifest.files and not cpu.available(name):
                raise BundleError(f"the kernels {name} are not available here")

    def check_places(self, mesh: Mesh) -> None:
        """Compares the devices with those of the bundle. Raises BundleError if the weights are in another order than
        these devices' kernels read. Should programs be compiled anew, the kernels are those of the bundle."""
        made = self.bundle.manifest.environment
        here = environment.describe(mesh.devices.flat[0], on_one_cpu(mesh) and cpu_panels.available())
        if other := environment.differences(made, here, environment.PLACES):
            raise BundleError(
                f"the bundle {self.bundle.path} was made for other devices ({self.bundle.manifest.target}): "
                f"{'; '.join(other)}; make one for these"
            )
        self.reasons += environment.differences(made, here)
        kind = mesh.devices.flat[0].device_kind
        tuning.use(kind, tuning.table_of(made.get(KERNELS, {}), self.bundle.path))

    def check_kernels(self, chosen: Ops, trusted: Ops) -> None:
        """Compares the operations that suit the devices with what is left of them after their checks. Programs with a
        kernel that is wrong here are not used.

        Raises BundleError if the weights are stored for kernels that are wrong."""
        if (chosen.fused is None) != (trusted.fused is None):
            raise BundleError(
                f"the weights of the bundle {self.bundle.path} are stored for kernels that are wrong here (see "
                f"the log); serve {self.bundle.manifest.model} instead"
            )
        if replace(chosen, trials=None) != trusted:
            self.reasons.append("they have kernels that are wrong on this device")

    def load_programs(self, runner: ModelRunner, shapes: list[StepShape], budget: Budget, page_bytes: int) -> None:
        """Gives the runner, whose cache has its size, the bundle's programs; or says in the log why not, and adds that
        to `reasons`."""
        if self.reasons:
            self.refuse()
            return
        start = time.perf_counter()
        try:
            self._register_kernels(runner.mesh.devices.flat[0].platform == "cpu")
            signatures = stored_programs.signatures_of(runner, shapes)
            found = stored_programs.load(self.bundle, runner.mesh, signatures)
        except BundleError as error:
            self.reasons.append(str(error))
            self.refuse()
            return
        runner.executables |= {name: found[text] for text, name in stored_programs.names_of(runner, shapes).items()}
        if runner.encoder is not None:
            runner.encoder.compiled = found
        if not budget.holds(runner.needs(shapes), runner.layout.num_pages * page_bytes):
            self.reasons.append(f"its {runner.layout.num_pages} KV pages do not fit the memory that is free")
            self.refuse()
            return
        log.info("loaded %d compiled programs in %.2f s", len(found), time.perf_counter() - start)

    def refuse(self) -> None:
        log.warning(
            "the compiled programs of %s are not used, and others are compiled: %s",
            self.bundle.path,
            "; ".join(self.reasons),
        )

    @property
    def pages(self) -> int | None:
        """The number of pages that the programs were compiled for; None if they are not used."""
        return None if self.reasons else self.bundle.manifest.pages

    def forms(self, mesh: Mesh) -> Any:
        return self.weights.forms(mesh)

    def arrays(self, mesh: Mesh) -> list[jax.Array]:
        return self.weights.arrays(mesh)

    def encoder(self, mesh: Mesh) -> Any:
        """The parameters of the image encoder. Raises BundleError if there are none."""
        return StoredWeights(self.bundle, ENCODER).params(mesh)
