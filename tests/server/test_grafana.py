"""The dashboard asks for metrics that a server has."""

from __future__ import annotations

import json
import re

import httpx
from serving import ROOT

PANELS = json.loads((ROOT / "server" / "grafana.json").read_text())["panels"]


def test_every_metric_of_the_dashboard_exists(demo_server):
    body = {"model": "test-model", "prompt": [5] * 40, "max_tokens": 5}
    httpx.post(demo_server.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    lines = httpx.get(demo_server.url + "/metrics").text.splitlines()
    series = {line.partition("{")[0]: line for line in lines if not line.startswith("#")}
    expressions = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    asked = {name for text in expressions for name in re.findall(r"jaxserve:\w+", text)}
    assert len(expressions) > 30
    assert asked <= set(series), asked - set(series)
    for text in expressions:
        for name, label in re.findall(r"by \((\w+)\) \(\w+\((jaxserve:\w+)", text):
            assert f'{name}="' in series[label]
        assert text.count("(") == text.count(")")
        assert re.findall(r"jaxserve:\w+", text) == re.findall(r'(jaxserve:\w+)\{model_name=~"\$model"\}', text)


def test_panels_have_places_of_their_own():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
