"""Makes bundles: compiles a model's programs, and writes them with its weights in the form that an engine loads."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxserve.bundles import environment, stored_programs, stored_weights
from jaxserve.bundles.container import (
    ENCODER,
    FORMAT,
    KERNELS,
    MODEL,
    STAMPS,
    BundleError,
    File,
    Manifest,
    hashed,
    is_bundle,
    seal,
)
from jaxserve.bundles.environment import model_files
from jaxserve.checkpoints.export import copy_rest, write_json
from jaxserve.checkpoints.gguf import write_header
from jaxserve.checkpoints.hub import BUNDLE_GGUF, commit_of
from jaxserve.commands.ahead import compile_ahead
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.compile_cache import without_compile_cache
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.engine.engine import Engine
from jaxserve.engine.model_plan import find_files
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import Signature
from jaxserve.models.load import read_hf_config, read_model
from jaxserve.pallas_kernels import cpu_build, cpu_panels, selfcheck_stamps, tuning
from jaxserve.text.tokenizer_files import KEPT, KeptTokenizer

log = logging.getLogger(__name__)

HERE = "here"  # the target that means the devices of this machine


def refuse_settings(config: EngineConfig, out: Path) -> None:
    """Raises ConfigError for what bundles do not hold."""
    speculative = config.speculative_config
    for wrong, what in (
        (out.exists() and (not out.is_dir() or any(out.iterdir())), f"{out} is not empty; give a new folder"),
        (is_bundle(config.model), f"{config.model} is a bundle already; give the model that it was made of"),
        (config.num_hosts > 1, "a bundle is for a replica on one host; leave out --num-hosts"),
        (config.enable_lora, "bundles have no places for LoRA adapters; leave out --enable-lora"),
        (config.cpu_offload_gib > 0, "a bundle holds all weights as devices do; leave out --cpu-offload-gib"),
        (config.tokenizer is not None, "a bundle holds the model's own tokenizer; leave out --tokenizer"),
        (speculative is not None and speculative.method not in ("ngram", "suffix"),
         "bundles hold no draft models and heads; --speculative-config must have the method ngram or suffix"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(what)


def make_bundle(
    config: EngineConfig,
    out: Path,
    *,
    target: str = HERE,
    flags: Mapping[str, Any] | None = None,
    key: bytes | None = None,
) -> str:
    """Writes a bundle to a new folder, with everything that serving needs, compiled for the devices of this machine or
    of a target (`devices.targets`). `flags` are those of `serve`, with which the bundle starts. Returns its digest.

    Raises ConfigError, CheckpointError or OSError; then there is no folder.
    """
    refuse_settings(config, out)
    options = dict(flags or {})
    source = find_files(config)[0]
    if source.suffix == ".gguf" and read_model(source, config.ignore_config_keys).vision is not None:
        log.info("bundles of GGUF files hold no image encoders: this one serves text only")
        config = replace(config, language_model_only=True)
        options["language-model-only"] = True
    with without_compile_cache():
        if target == HERE:
            engine = Engine.load(config)
            if engine.pooler is not None:
                raise ConfigError("bundles are for models that generate; this one embeds or scores")
            engine.compile()
            folder = engine.model_folder
            runner = engine.runner
            arrays = engine.runner.weights
            eyes = None if runner.encoder is None else runner.encoder.params
            shapes = engine.shapes
            longest = engine.max_model_len
        else:
            made = compile_ahead(config, target)
            config = made.config
            folder = made.folder
            runner = made.runner
            arrays = made.arrays
            eyes = made.eyes
            shapes = made.shapes
            longest = made.longest
    known = runner.executables
    compiled = {text: known[name] for text, name in stored_programs.names_of(runner, shapes).items()}
    if runner.encoder is not None:
        compiled |= runner.encoder.compiled
    if target != HERE:
        options["max-num-batched-tokens"] = config.max_num_batched_tokens
        options["tensor-parallel-size"] = config.tensor_parallel_size
    signatures = stored_programs.signatures_of(runner, shapes)
    made_of = folder, runner, signatures, compiled, longest, arrays, eyes
    return Making(config, target, *made_of, options).write(out, key)


@dataclass
class Making:
    """A bundle that is being written: what its manifest says, and the weights and programs."""

    config: EngineConfig
    target: str
    model: Path
    runner: ModelRunner
    signatures: Mapping[str, Signature]
    compiled: Mapping[str, Compiled]
    longest: int
    arrays: list[Any]
    eyes: Any  # parameters of the image encoder; None: there is none
    flags: dict[str, Any] = field(default_factory=dict)

    def write(self, out: Path, key: bytes | None) -> str:
        """Writes everything to a folder beside `out`, which then gets this name."""
        out = out.expanduser().absolute()
        out.parent.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o077)
        try:
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
                folder = Path(temporary) / "bundle"
                folder.mkdir()
                digest = self._fill(folder, key)
                if out.is_dir():
                    out.rmdir()
                folder.rename(out)
        finally:
            os.umask(before)
        return digest

    def _fill(self, folder: Path, key: bytes | None) -> str:
        copy_model(self.model, folder / MODEL, self.config)
        stored_weights.write(folder, self.runner.forms, self.arrays)
        if self.eyes is not None:
            arrays, structure = jax.tree.flatten(self.eyes)
            forms = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]
            stored_weights.write(folder, jax.tree.unflatten(structure, forms), arrays, ENCODER)
        stored_programs.write(folder, self.runner.mesh, self.compiled, self.signatures)
        device = self.runner.mesh.devices.flat[0]
        panels = on_one_cpu(self.runner.mesh) and cpu_panels.available()
        if device.platform == "cpu":
            (folder / "libraries").mkdir()
            for name in cpu_build.NAMES:
                if (data := cpu_build.built(name)) is not None:
                    (folder / "libraries" / f"{name}.so").write_bytes(data)
        if self.target == HERE and (stamps := selfcheck_stamps.passed()):
            write_json(folder / STAMPS, stamps)
        found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        manifest = Manifest(
            format=FORMAT,
            model=self.config.model,
            revision=commit_of(self.model),
            target=self.target,
            environment=environment.describe(device, panels) | {KERNELS: tuning.choices(device.device_kind)},
            settings=environment.settings_of(self.config),
            flags=self.flags,
            pages=self.runner.layout.num_pages,
            longest=self.longest,
            files={name: File(*hashed(path)) for name, path in found.items()},
            source=model_files(self.model) if self.config.load_format != "dummy" else {},
        )
        return seal(folder, manifest, key)


def copy_model(source: Path, folder: Path, config: EngineConfig) -> None:
    """Copies config, tokenizer, chat template and generation config, but no weights. Raises BundleError if the copy
    does not describe the same model."""
    folder.mkdir()
    copied = folder
    if source.suffix == ".gguf":
        copied = folder / BUNDLE_GGUF
        write_header(source, copied)
    else:
        copy_rest(source, folder)
        if (source / "config.json").exists():
            shutil.copyfile(source / "config.json", folder / "config.json")
        else:
            write_json(folder / "config.json", read_hf_config(source).values)
    with contextlib.suppress(Exception):  # without a tokenizer that can be read, the start tells why
        KeptTokenizer.write(folder / KEPT, copied)
    ignored = config.ignore_config_keys
    sees = source.suffix != ".gguf"  # the encoder, which is in another file, is not copied
    if read_model(copied, ignored, sees=sees) != read_model(source, ignored, sees=sees):
        raise BundleError(f"{source}: the settings of this model cannot be copied without its weights")
