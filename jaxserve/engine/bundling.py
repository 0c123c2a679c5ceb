"""Makes bundles: compiles an engine's programs, and writes them with its weights in the form that it loads."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from jaxserve.bundles import environment, programs, weights
from jaxserve.bundles.container import FORMAT, MODEL, BundleError, File, Manifest, hashed, is_bundle, seal
from jaxserve.bundles.identity import model_files
from jaxserve.checkpoints.export import copy_rest, write_json
from jaxserve.checkpoints.gguf import write_header
from jaxserve.checkpoints.hub import commit_of, resolve_model
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import on_one_cpu
from jaxserve.engine.engine import Engine
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import ProgramName
from jaxserve.models.load import read_hf_config, read_model
from jaxserve.pallas_kernels import cpu_build, cpu_panels

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
        (config.tokenizer is not None, "a bundle holds the model's own tokenizer; leave out --tokenizer"),
        (speculative is not None and speculative.method not in ("ngram", "suffix"),
         "bundles hold no draft models and heads; --speculative-config must have the method ngram or suffix"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(what)


def make_bundle(config: EngineConfig, out: Path, key: bytes | None = None) -> str:
    """Loads a model on the devices of this machine, compiles everything that serving needs, and writes a bundle to a
    new folder. Returns its digest. Raises ConfigError, CheckpointError or OSError; then there is no folder."""
    refuse_settings(config, out)
    engine = Engine.load(config)
    if engine.pooler is not None:
        raise ConfigError("bundles are for models that generate; this one embeds or scores")
    engine.compile()
    names = programs.names_of(engine.runner, engine.shapes)
    known = engine.runner.executables
    compiled = {text: known[name] for text, name in names.items()}
    made = Making(config, HERE, engine.model_folder, engine.runner, names, compiled, engine.max_model_len)
    return made.write(out, engine.runner.weights, key)


class Making:
    """A bundle that is being written. The arguments are the manifest's, or what the manifest describes."""

    def __init__(
        self,
        config: EngineConfig,
        target: str,
        model: Path,
        runner: ModelRunner,
        names: Mapping[str, ProgramName],
        compiled: Mapping[str, Compiled],
        longest: int,
    ):
        self._config, self._target, self._model, self._runner = config, target, model, runner
        self._names, self._compiled, self._longest = names, compiled, longest

    def write(self, out: Path, arrays: list[Any], key: bytes | None) -> str:
        """Writes everything to a folder beside `out`, which then gets this name."""
        out = out.expanduser().absolute()
        out.parent.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o077)
        try:
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
                folder = Path(temporary) / "bundle"
                folder.mkdir()
                digest = self._fill(folder, arrays, key)
                if out.is_dir():
                    out.rmdir()
                folder.rename(out)
        finally:
            os.umask(before)
        return digest

    def _fill(self, folder: Path, arrays: list[Any], key: bytes | None) -> str:
        copy_model(self._model, folder / MODEL, self._config)
        weights.write(folder, self._runner.forms, arrays)
        programs.write(folder, self._runner, self._compiled, self._names)
        device = self._runner.mesh.devices.flat[0]
        panels = on_one_cpu(self._runner.mesh) and cpu_panels.available()
        if device.platform == "cpu":
            (folder / "libraries").mkdir()
            for name in cpu_build.NAMES:
                if (data := cpu_build.built(name)) is not None:
                    (folder / "libraries" / f"{name}.so").write_bytes(data)
        found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        manifest = Manifest(
            format=FORMAT,
            model=self._config.model,
            revision=commit_of(self._model),
            target=self._target,
            environment=environment.describe(device, panels),
            settings=environment.settings_of(self._config),
            pages=self._runner.layout.num_pages,
            longest=self._longest,
            files={name: File(*hashed(path)) for name, path in found.items()},
            source=model_files(self._model),
        )
        return seal(folder, manifest, key)


def copy_model(source: Path, folder: Path, config: EngineConfig) -> None:
    """Copies config, tokenizer, chat template and generation config, but no weights. Raises BundleError if the copy
    does not describe the same model."""
    folder.mkdir()
    if source.suffix == ".gguf":
        write_header(source, folder / "model.gguf")
        copied = folder / "model.gguf"
    else:
        copy_rest(source, folder)
        if (source / "config.json").exists():
            shutil.copyfile(source / "config.json", folder / "config.json")
        else:
            write_json(folder / "config.json", read_hf_config(source).values)
        copied = folder
    ignored = config.ignore_config_keys
    if read_model(copied, ignored) != read_model(source, ignored):
        raise BundleError(f"{source}: the settings of this model cannot be copied without its weights")


def model_folder(config: EngineConfig) -> Path:
    return resolve_model(config.model, weights=config.load_format != "dummy", revision=config.revision)


def with_pages(config: EngineConfig, pages: int) -> EngineConfig:
    return replace(config, kv_pages=pages)
