"""Plans of published models: benchmarks/results/plan-published.json, and its table in docs/plan.md.

python benchmarks/plan_published.py                   all, by arithmetic on what the compilers said of some
python benchmarks/plan_published.py --compile 0 5     first asks the compilers about these rows
python benchmarks/plan_published.py --table           prints the table

What the compilers said is kept in benchmarks/results/plan-programs.json, which grows with each row.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.launches import Exchange
from jaxserve.execution.memory import Needs
from jaxserve.plan.deployment import Compiled, Deployment, StepFigures, plan_devices
from jaxserve.plan.report import make_plan

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "plan-published.json"
PROGRAMS = ROOT / "benchmarks" / "results" / "plan-programs.json"
MODELS = {
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B-Instruct",
    "Llama 3.1 70B": "meta-llama/Llama-3.1-70B-Instruct",
    "Llama 3.1 405B": "meta-llama/Llama-3.1-405B-Instruct",
    "Mixtral 8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "gpt-oss 20B": "openai/gpt-oss-20b",
    "gpt-oss 120B": "openai/gpt-oss-120b",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "Gemma 3 27B": "google/gemma-3-27b-it",
}
TARGETS = ("h200x1", "h200x8", "v5e-8", "v6e-8")
SCHEMES = {"bf16": "auto", "fp8": "fp8", "int4": "int4"}
KEYS = [(model, target, scheme) for model in MODELS for target in TARGETS for scheme in SCHEMES]
LONGEST = 8192  # tokens of a request


def published_configs() -> dict[str, Any]:
    """Repository -> its config.json."""
    found: dict[str, Any] = {}
    for name in ("configs", "dense", "experts"):
        for repository, given in json.loads((ROOT / "tests" / f"published_{name}.json").read_text()).items():
            found[repository] = given.get("config", given)
    return found


@contextmanager
def settings(model: str, target: str, scheme: str) -> Iterator[EngineConfig]:
    """The settings of one row. Without quantization of the checkpoint: all weights are in `scheme`."""
    config = dict(published_configs()[MODELS[model]])
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield EngineConfig(
            model=folder, load_format="dummy", quantization=SCHEMES[scheme],
            tensor_parallel_size=len(plan_devices(target)), max_model_len=LONGEST,
            ignore_config_keys=("quantization_config",),
        )  # fmt: skip


def programs() -> dict[str, Any]:
    """ "model, target, scheme" -> what the compiler said, as JSON."""
    return json.loads(PROGRAMS.read_text()) if PROGRAMS.exists() else {}


def compile_row(model: str, target: str, scheme: str) -> Compiled:
    """Asks the compiler of a row's target. Raises ConfigError if nothing fits."""
    with settings(model, target, scheme) as config:
        return Deployment.of(config, target).compile()


def known(model: str, target: str, scheme: str) -> Compiled | None:
    """What the compiler said of a row; None: it was not asked."""
    compiled = programs().get(f"{model}, {target}, {scheme}")
    if compiled is None:
        return None
    steps = [
        StepFigures(**step | {"exchanges": {kind: Exchange(*sent) for kind, sent in step["exchanges"].items()}})
        for step in compiled["steps"]
    ]
    return Compiled(Needs(**compiled["needs"]), steps, compiled["layers"])


def entry(model: str, target: str, scheme: str, compiled: Compiled | None = None) -> dict[str, Any]:
    """The figures of one row."""
    row: dict[str, Any] = {"model": model, "target": target, "scheme": scheme}
    with settings(model, target, scheme) as config:
        try:
            plan = make_plan(config, target, estimate=True, compiled=None if compiled is None else [compiled])
        except ConfigError as error:
            return row | {"fits": False, "source": "estimated", "reason": str(error)[:160]}
    row |= {"fits": plan["fits"], "source": plan["sources"]["temporaries"], "weights": plan["memory"]["weights"]}
    row |= {name: plan["memory"][name] for name in ("temporaries", "results", "code")}
    if not plan["fits"]:
        return row | {"reason": plan["reason"][:160]}
    room = plan["capacity"]
    decodes = plan["roofline"]["decode"]
    row |= {"tokens": room["tokens"], "requests": room["requests_of_shape"]}
    return row | {f"tpot_{one['batch']}": one["tpot"] for one in decodes if one["context"] == 1024}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, of the rows that fit."""
    times = "estimated TPOT ms, batch 1 | batch 128, estimated"
    lines = [f"| model | target | weights in | GiB a device | tokens | {times} | programs |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["fits"]:
            times = " | ".join(f"{1e3 * row[f'tpot_{n}']:.1f}" for n in (1, 128))
            how = "estimated" if row["source"] == "estimated" else "compiled"
            lines.append(
                f"| {row['model']} | {row['target']} | {row['scheme']} | {row['weights'] / 2**30:.1f} | "
                f"{row['tokens']:,} | {times} | {how} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", nargs="*", type=int, default=[], metavar="I", help="rows to compile, by index")
    parser.add_argument("--table", action="store_true", help="print the table of the present file")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULT.read_text())))
        return
    for index in args.compile:
        found = asdict(compile_row(*KEYS[index]))
        found["steps"] = [step._asdict() for step in found["steps"]]
        _write(PROGRAMS, programs() | {", ".join(KEYS[index]): found})
    _write(RESULT, [entry(*key, known(*key)) for key in KEYS])


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(value, indent=1) + "\n")
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
