"""The flags of a server with several models. Imports nothing heavy, so that the command line can use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.setting import check_settings, documented, in_range, setting


@documented
@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """The operator's settings of several models in one server; see docs/several-models.md. Raises ConfigError."""

    models: Path | None = setting(
        None, "YAML, JSON or TOML file with the models of a server: `name`, `source` and their own settings",
        topic="models", short="file with the models of a server", type=Path, metavar="FILE",
    )  # fmt: skip
    model_dir: Path | None = setting(
        None, "folder whose subfolders and GGUF files are the models of a server, by their names",
        topic="models", short="folder with the models of a server", type=Path, metavar="DIR",
    )  # fmt: skip
    models_memory: float | None = setting(
        None, "memory that all models may take together, of the host on CPU and of each GPU elsewhere; None: "
        "--memory-utilization of what is free on CPU, and of all that a GPU has",
        topic="models", short="memory of all models together", metavar="GIB", rule=in_range(0.1, 2**20, "GiB"),
    )  # fmt: skip
    keep_alive: float = setting(
        300.0, "time without a request after which a model is stopped; negative: never",
        topic="models", metavar="SECONDS", rule=in_range(-1e9, 1e9, "seconds"),
    )  # fmt: skip
    model_wait: float = setting(
        60.0, "longest time that a request waits for its model to start; then it gets status 503",
        topic="models", metavar="SECONDS", rule=in_range(0, 86_400, "seconds"),
    )  # fmt: skip
    model_start_limit: float = setting(
        600.0, "longest time that a model may take to start; then its process is ended",
        topic="models", metavar="SECONDS", rule=in_range(0.1, 86_400, "seconds"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def several(self) -> bool:
        return self.models is not None or self.model_dir is not None
