"""`jaxserve plan`: its flags, and comparing several targets and settings."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.checkpoints.hub import BUNDLED
from jaxserve.commands.arguments import add_command, add_engine_flags, add_model, engine_config
from jaxserve.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from jaxserve.plan.report import PlanOptions


def add_plan(commands: Any) -> None:
    """Adds the command to a parser's subcommands."""
    plan = add_command(commands, "plan", run_plan, "size, time and price a model on devices that are not here")
    add_model(plan, nargs="?")
    plan.add_argument(
        "--target", default="cpu", metavar="NAME", help="such as h200x8, v6e-8; cpu or cpu:8: this process"
    )
    plan.add_argument("--compare", nargs="+", default=[], metavar="TARGET[,SETTING=VALUE]",
                      help="a table of several, such as h200x1 h200x8,quantization=int4")  # fmt: skip
    plan.add_argument("--estimate", action="store_true", help="compile nothing; memory of programs by arithmetic")
    plan.add_argument("--all-layers", action="store_true", help="compile whole models instead of a few layers")
    plan.add_argument("--request", default="1000+300", metavar="IN+OUT", help="tokens of the requests that are counted")
    plan.add_argument("--price", type=float, metavar="DOLLARS", help="of a device for an hour")
    plan.add_argument("--for", dest="goal", metavar="GOAL",
                      help="simulate traffic, for example ttft<500ms,tpot<25ms,rps=20,in=1000,out=300; with --compare "
                      "and prices, names the cheapest that holds")  # fmt: skip
    plan.add_argument("--prices", nargs="+", default=[], metavar="KIND=DOLLARS",
                      help="of a device for an hour, by target, such as h200=3.5 v6e=2.7")  # fmt: skip
    plan.add_argument("--constants", type=Path, metavar="JSON",
                      help="file of measured rates by kind of device; None: in the user's cache folder")  # fmt: skip
    plan.add_argument("--measure", action="store_true",
                      help="measure the device that is here: times of steps beside predicted ones; keeps its rates in "
                      "the file of --constants, for later plans")  # fmt: skip
    plan.add_argument("--json", nargs="?", const="-", metavar="FILE",
                      help="write the plan as JSON; without FILE, or with -, print it instead of text")  # fmt: skip
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    add_engine_flags(plan)


def run_plan(args: argparse.Namespace) -> int:
    from jaxserve.plan import constants as measured
    from jaxserve.plan import page
    from jaxserve.plan.text import table_of, text_of
    from jaxserve.plan.traffic import Goal

    if args.model is None and args.json not in (None, "-"):  # `plan --json MODEL`
        args.model = args.json
        args.json = "-"
    if args.model is None:
        raise ConfigError("jaxserve plan needs a model: a folder, a config.json, a hub id, or 'demo'")
    goal = None if args.goal is None else Goal.of(args.goal)
    shape = _shape(args.request)
    prices = _prices(args.prices)
    path = args.constants or measured.default_path()
    base = _without_weights(args)
    known = measured.read(path, args.constants is not None and not args.measure)
    plans = []
    for wanted in args.compare or [args.target]:
        target, changes = _wanted(wanted)
        config = _on_all_devices(replace(base, **changes), target)
        price = prices.get(target.split("x")[0].split("-")[0], args.price)
        options: PlanOptions = {
            "estimate": args.estimate,
            "all_layers": args.all_layers,
            "constants": known,
            "shape": shape,
            "price": price,
            "goal": goal,
        }
        made = _planned(config, target, path if args.measure else None, options)
        plans.append(made | {"label": ",".join(f"{key}={value}" for key, value in changes.items())})
    result: Any = plans if args.compare else plans[0]
    if args.json:
        text = json.dumps(result, indent=1)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n")
    if args.html:
        args.html.write_text(page.page_of(plans))
    if args.json != "-":
        print("\n".join(table_of(plans) if args.compare else text_of(plans[0])))
        if goal is not None and args.compare:
            print(_cheapest(plans))
    return 0


def _planned(config: EngineConfig, target: str, rates: Path | None, options: PlanOptions) -> dict[str, Any]:
    """A plan with these options of `make_plan`. rates: the device that is here is measured, and its rates are kept in
    this file; None: nothing is measured."""
    from jaxserve.plan import constants, measuring, report

    try:
        if rates is not None:
            options["measured"] = measuring.measure(config, target, rates)
            options["constants"] = constants.read(rates, required=True)
        return report.make_plan(config, target, **options)
    except ConfigError as error:
        raise ConfigError(f"{target}: {error}") from None


def _cheapest(plans: list[dict[str, Any]]) -> str:
    held = [plan for plan in plans if plan.get("served", {}).get("holds")]
    if not held:
        return "none of these holds"
    priced = [plan for plan in held if "price" in plan]
    if len(priced) < len(held):
        return f"{len(held)} of {len(plans)} hold; --price or --prices is needed to name the cheapest"
    best = min(priced, key=lambda plan: plan["price"]["dollars_per_hour"])
    return f"cheapest that holds: {best['target']} {best['label']}, ${best['price']['dollars_per_hour']:.2f} an hour"


def _without_weights(args: argparse.Namespace) -> EngineConfig:
    """The settings; a config.json, a folder without weights, or a hub id that is not here yet is enough for shapes."""
    path = Path(args.model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
        args.model = str(path) if path.name else str(path.resolve())
    weights = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
    if not weights and args.model not in BUNDLED:
        args.load_format = "dummy"
        what = "weights in the checkpoint's float dtype unless --quantization says otherwise"
        print(f"planning by config.json: {what}", file=sys.stderr)
    return engine_config(args)


def _wanted(text: str) -> tuple[str, dict[str, Any]]:
    """A target and changes of settings, whose values have the types of their defaults."""
    target, *parts = text.split(",")
    changes: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in EngineConfig.__dataclass_fields__:
            raise ConfigError(f"--compare: there is no setting {name!r}; names are those of EngineConfig")
        changes[name] = value
        if isinstance(default := EngineConfig.__dataclass_fields__[name].default, bool):
            changes[name] = value.lower() in ("", "true", "1")
        elif isinstance(default, int | None) and value.isdigit():
            changes[name] = int(value)
        elif isinstance(default, float):
            changes[name] = float(value)
    return target, changes


def _on_all_devices(config: EngineConfig, target: str) -> EngineConfig:
    """Devices that no setting of parallelism shares out share each layer, within their group or stage if there are
    several."""
    from jaxserve.plan.deployment import plan_devices

    if config.tensor_parallel_size > 1:
        return config
    groups = config.data_parallel_size * config.pipeline_parallel_size
    return replace(config, tensor_parallel_size=max(len(plan_devices(target)) // groups, 1))


def _shape(text: str) -> tuple[int, int]:
    first, _, second = text.partition("+")
    if not (first.isdigit() and second.isdigit() and int(first) and int(second)):
        raise ConfigError(f"--request must be like 1000+300, got {text!r}")
    return int(first), int(second)


def _prices(given: list[str]) -> dict[str, float]:
    try:
        return {name: float(value) for name, _, value in (one.partition("=") for one in given)}
    except ValueError:
        raise ConfigError(f"--prices must be like h200=3.5, got {' '.join(given)}") from None
