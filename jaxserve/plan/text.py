"""Plans as text: all figures of one, or a row for each of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.execution.memory import size
from jaxserve.plan import measuring
from jaxserve.plan.report import PARTS


def text_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """The plan's lines."""
    weights = "" if plan["quantization"] == "auto" else f", weights in {plan['quantization']}"
    devices = f"{plan['devices']} x {plan['device_kind']}"
    yield f"{plan['model']} on {plan['target']}: {devices}, computing in {plan['dtype']}{weights}"
    yield from _memory(plan)
    if not plan["fits"]:
        yield f"does not fit: {plan['reason']}"
        return
    room = plan["capacity"]
    if room["groups"] > 1:
        yield f"  in each of {room['groups']} groups of devices; what follows is of all groups together"
    yield f"fits: {room['tokens']:,} tokens, longest request {room['longest_request']:,}"
    inputs, outputs = room["shape"]
    yield f"  {room['requests_of_shape']:,} requests of {inputs:,} + {outputs:,} tokens at once"
    yield from _programs(plan)
    yield from _roofline(plan)
    if "measured" in plan:
        yield from measuring.lines(plan["measured"])
    if "price" in plan:
        cost = plan["price"]
        yield f"${cost['dollars_per_hour']:.2f} an hour, {cost['output_tokens_per_dollar']:,.0f} output tokens a dollar"
    if "served" in plan:
        yield _served(plan["served"])


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    held = plan["memory"]
    sources = plan["sources"]
    stages = plan["stages"]
    if len(stages) > 1:
        layers = ", ".join(str(one["layers"]) for one in stages)
        yield f"{len(stages)} stages of {layers} layers; the memory is that of the stage with the least room"
    weights = ", ".join(f"{size(count)} {dtype}" for dtype, count in held["weights_by_dtype"].items())
    yield f"memory of a device    {size(held['total'])} x {held['utilization']:g}"
    yield f"  weights             {size(held['weights']):>12}  ({weights})"
    if "encoder" in held:
        most = f"of pictures with up to {held['most_patches']:,} patches"
        yield f"    of it the encoder {size(held['encoder']):>12}  ({most})"
    for name in ("slots", "states", "temporaries", "results", "code", "reserve"):
        if held[name]:
            yield f"  {name:19} {size(held[name]):>12}" + (f"  ({sources[name]})" if name in sources else "")
        if name == "slots" and "features" in held:
            yield f"    of it features    {size(held['features']):>12}  (of pictures)"
    if plan["fits"]:
        room = plan["capacity"]
        yield f"  KV cache            {size(room['cache_bytes']):>12}  ({room['pages']:,} pages of {room['page_size']})"


def _programs(plan: Mapping[str, Any]) -> Iterator[str]:
    """What the compiler said of the largest programs."""
    for step in plan["steps"]:
        sent = ", ".join(f"{one['number']} {kind} ({size(one['bytes'])})" for kind, one in step["exchanges"].items())
        stage = f"stage {step['stage'] + 1}, " if len(plan["stages"]) > 1 else ""
        launched = f"{step['launches']} launches, " if step["launches"] else ""
        yield f"  {stage}{step['program']}: {launched}collectives: {sent or 'none'}"


def _roofline(plan: Mapping[str, Any]) -> Iterator[str]:
    """The times of steps, and those parts of them that any step has."""
    steps = plan["roofline"]["decode"]
    parts = [part for part in PARTS if any(one["shares"][part] for one in steps)]
    yield f"times by a roofline over {_source(plan['constants'])}"
    heads = " ".join(f"{part:>{max(len(part), 8)}}" for part in parts)
    yield f"  {'batch':>6} {'context':>8} {'TPOT ms':>9} | {heads}"
    for one in steps:
        shares = " ".join(f"{100 * one['shares'][part]:{max(len(part), 8) - 1}.0f}%" for part in parts)
        yield f"  {one['batch']:6} {one['context']:8,} {1e3 * one['tpot']:9.2f} | {shares}"
    if plan["constants"]["overlaps"]:
        yield "  weights are read while products are computed: of these two only the longer counts"
    yield f"  {'prompt':>15} {'TTFT ms':>9}"
    for one in plan["roofline"]["prompt"]:
        yield f"  {one['tokens']:15,} {1e3 * one['ttft']:9.1f}"


def _source(constants: Mapping[str, Any]) -> str:
    if constants["source"] == "assumed":
        return "assumed rates: this kind of device was never measured (see --measure)"
    if constants["source"] != "measured":
        return "rates of data sheets, not measured"
    rates = f"{constants['bandwidth'] / 1e9:,.1f} GB/s of weights, {constants['matmul'] / 1e9:,.0f} GFLOP/s"
    if constants["cache"]:
        rates += f", {constants['cache'] / 1e9:,.1f} GB/s of cached tokens"
    beside = f"{1e3 * constants['call']:.2f} ms a call and {1e3 * constants['layer']:.3f} ms a layer"
    return f"rates measured on this kind of device on {constants['when'] or 'an unknown day'}:\n  {rates}; {beside}"


def _served(served: Mapping[str, Any]) -> str:
    word = "holds" if served["holds"] else "does not hold"
    latencies = f"TTFT {1e3 * served['ttft']:.0f} ms and TPOT {1e3 * served['tpot']:.1f} ms at the 95th percentile"
    return f"simulated traffic: {latencies}, {served['tokens_per_second']:,.0f} tokens/s: {word}"


def table_of(plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each plan; TTFT and TPOT of simulated traffic are 95th percentiles."""
    widest = max(len("settings"), *(len(plan["label"]) for plan in plans))
    start = f"{'target':10} {'settings':{widest}} {'weights':>10}"
    priced, simulated = (any(key in plan for plan in plans) for key in ("price", "served"))
    heads = f"{'tokens':>11} {'requests':>8} {'TPOT ms':>8}" + f" {'$ an hour':>9}" * priced
    yield f"{start} {heads}" + f" {'p95 TTFT ms':>12} {'p95 TPOT ms':>12}" * simulated
    for plan in plans:
        start = f"{plan['target']:10} {plan['label']:{widest}} {size(plan['memory']['weights']):>10}"
        if not plan["fits"]:
            yield f"{start} does not fit"
            continue
        one = plan["roofline"]["decode"][0]
        room = plan["capacity"]
        row = f"{start} {room['tokens']:11,} {room['requests_of_shape']:8,} {1e3 * one['tpot']:8.2f}"
        if priced:
            row += f" {plan['price']['dollars_per_hour']:9.2f}" if "price" in plan else f" {'':9}"
        if simulated:
            served = plan["served"]
            row += f" {1e3 * served['ttft']:12,.0f} {1e3 * served['tpot']:12.1f}  "
            row += "holds" if served["holds"] else "does not hold"
        yield row
