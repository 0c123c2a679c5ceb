"""What works with which model, as docs/models.md has it: the tests' small models of each family are planned with each
feature, so that the table says what the code does. `make models` writes the page.

A family appears as soon as it has a small model (`tiny_models`), and a feature's limit where the code says why.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

from engines import request
from tiny_models import CASES, write_config

from jaxserve.checkpoints.gguf_architectures import gguf_names
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.engine import pipeline, streaming
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.models.adapter_targets import AdapterTargets
from jaxserve.models.families import Family, families
from jaxserve.models.load import read_model
from jaxserve.scheduling.beam import Beams
from jaxserve.types import InvalidRequestError

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
YES = "yes"
NO_EXPERTS = "without experts"
DIVIDED = "does not divide"  # said of sizes, which small models have others of than real ones


@dataclass(frozen=True)
class Feature:
    """A column of the table.

    settings: of an engine that uses the feature.
    tell: what the table says of a model that was planned with it. Raises ConfigError or InvalidRequestError for what is
      refused later than when a model is planned.
    """

    title: str
    settings: dict[str, Any]
    tell: Callable[[EngineConfig, ModelPlan], str] = lambda config, plan: YES


def _beams(config: EngineConfig, plan: ModelPlan) -> str:
    blocks = SimpleNamespace(pages_for=lambda tokens: 1, num_groups=1, capacity=1000)
    recurrent = plan.model.recurrent is not None
    scheduler: Any = SimpleNamespace(recurrent=recurrent, blocks=blocks, running=SimpleNamespace(num_slots=8))
    Beams(scheduler, ()).check(request("0", [1], n=2, use_beam_search=True), 2, 0)
    return YES


def _prefixes(config: EngineConfig, plan: ModelPlan) -> str:
    return YES if plan.one_page.states is None else "at snapshots"


def _stages(config: EngineConfig, plan: ModelPlan) -> str:
    pipeline.check_model(config, _deeper(plan))
    return YES


def _streamed(config: EngineConfig, plan: ModelPlan) -> str:
    streaming.check_model(config, _deeper(plan))
    return YES


def _deeper(plan: ModelPlan) -> ModelPlan:
    """The plan of a model of as many layers as real ones have."""
    return replace(plan, model=replace(plan.model, layers=plan.model.layers * 8))


def _adapted(config: EngineConfig, plan: ModelPlan) -> str:
    if not AdapterTargets.of(plan.decoder, plan.mesh).targets:
        raise ConfigError("adapters can change none of the model's products")
    return YES


LOOKUP = {"method": "ngram", "num_speculative_tokens": 2}
FEATURES = (
    Feature("several devices", {"tensor_parallel_size": 2}),
    Feature("experts apart", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    Feature("pipeline", {"pipeline_parallel_size": 2}, _stages),
    Feature("groups", {"data_parallel_size": 2}),
    Feature("LoRA", {"enable_lora": True}, _adapted),
    Feature("speculation", {"speculative_config": LOOKUP}),
    Feature("beam search", {}, _beams),
    Feature("cached prefixes", {}, _prefixes),
    Feature("pages in host memory", {"kv_offload_gib": 1}),
    Feature("weights in host memory", {"cpu_offload_gib": 1}, _streamed),
    Feature("deterministic", {"deterministic": True}),
)
HEAD = """# What works with which model

Written by `make models` from the code that serves or refuses each combination. A number is that of the reason below the
table. `jaxserve models list` has the published sizes; quantized checkpoints of all families are read
([formats.md](formats.md)), and `jaxserve plan` and `jaxserve models inspect` know all of them.

Columns: *GGUF*: the architectures of GGUF files that load. *Own draft*: the model's own layers for several tokens are
read ([speculation.md](speculation.md)). *Pictures*: the model sees ([pictures.md](pictures.md)). *Several devices*:
`--tensor-parallel-size`. *Experts apart*: `--enable-expert-parallel`; – stands for models without experts. *Pipeline*,
*groups*: `--pipeline-parallel-size`, `--data-parallel-size` ([parallelism.md](parallelism.md)). *LoRA*:
[adapters.md](adapters.md). *Speculation*: [speculation.md](speculation.md). *Cached prefixes*: whether requests share
the pages of a common beginning, or only up to a snapshot ([memory.md](memory.md#models-with-recurrent-layers)). *Pages
in host memory*: [kv-offload.md](kv-offload.md). *Weights in host memory*: `--cpu-offload-gib`. *Deterministic*: on one
CPU ([determinism.md](determinism.md)).

Numbers of devices must divide a model's heads and widths; an error names the numbers that do.
"""


def outcome(feature: Feature, folder: Path) -> str:
    """What the table says of a model: why it is refused, or what `feature` tells."""
    try:
        config = EngineConfig(model=str(folder), load_format="dummy", max_num_batched_tokens=64, **feature.settings)
        return feature.tell(config, ModelPlan.of(config))
    except (ConfigError, InvalidRequestError) as error:
        return YES if DIVIDED in str(error) else str(error)


def cases_of(family: Family) -> list[str]:
    """The family's small models."""
    return [name for name, case in CASES.items() if set(case.config["architectures"]) <= set(family.architectures)]


def table() -> Iterator[tuple[Family, list[str]]]:
    """Each family that has small models, with what is said of each feature."""
    with tempfile.TemporaryDirectory() as place:
        for family in families():
            folders = [write_config(name, Path(place) / name) for name in cases_of(family)]
            if folders:
                sees = any(read_model(folder).vision is not None for folder in folders)
                yield family, [YES if sees else "", *(_of_family(feature, folders) for feature in FEATURES)]


def _of_family(feature: Feature, folders: list[Path]) -> str:
    """What is said of the family's first model; where that has no experts, of another one that has."""
    found = outcome(feature, folders[0])
    others = (outcome(feature, folder) for folder in folders[1:]) if NO_EXPERTS in found else ()
    return next((other for other in others if NO_EXPERTS not in other), found)


def page() -> str:
    reasons: dict[str, int] = {}

    def cell(text: str) -> str:
        if text in (YES, "", "at snapshots"):
            return text
        if NO_EXPERTS in text:
            return "–"
        return f"no ({reasons.setdefault(text, len(reasons) + 1)})"

    columns = ["model", "GGUF", "own draft", "pictures", *(feature.title for feature in FEATURES)]
    lines = [HEAD, f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for family, outcomes in table():
        names = ", ".join(f"`{name}`" for name in family.architectures)
        files = ", ".join(dict.fromkeys(name for one in family.architectures for name in gguf_names(one)))
        cells = [names, files, YES if family.mtp else "", *map(cell, outcomes)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
