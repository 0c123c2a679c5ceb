"""Settings of replicas on Ray, autoscaling's arithmetic, and what `jaxserve ray deploy` refuses. Without Ray."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from jaxserve.commands.cli import main
from jaxserve.ray.scaling import KV_USAGE, LoadPolicy
from jaxserve.ray.settings import RaySettings, read_settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing required field `model`"),
        ({"model": "demo", "replica": 3}, "unknown field `replica`"),
        ({"model": "demo", "max_replicas": "many"}, "max_replicas"),
        ({"model": "demo", "max_replicas": 0}, "max_replicas must be at least 1, got 0"),
        ({"model": "demo", "min_replicas": 3, "max_replicas": 2}, "min_replicas must be between 0 and 2, got 3"),
        ({"model": "demo", "target_kv_usage": 80}, "target_kv_usage must be between 0.001 and 1, got 80"),
        ({"model": "demo", "routing": "random"}, "routing"),
        ({"model": "demo", "route_prefix": "v1"}, "route_prefix must begin with /"),
        ({"model": "demo", "flags": ["--num-hosts=2"]}, "flags must not hold --num-hosts"),
        ({"model": "demo", "flags": ["--metrics-key=k"]}, "JAXSERVE_METRICS_KEY"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        RaySettings.of(given)


def test_values_of_a_command_line_are_texts():
    settings = RaySettings.of({"model": "demo", "max_replicas": "3", "target_requests": "2.5"})
    assert (settings.max_replicas, settings.target_requests) == (3, 2.5)


def test_files_are_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: demo\nflags: [--max-num-seqs=4]\nresources: {TPU: 4}\n")
    assert read_settings(path).resources == {"TPU": 4}
    path.write_text("model: [")
    with pytest.raises(ValueError, match="is not YAML"):
        read_settings(path)
    path.write_text("demo")
    with pytest.raises(ValueError, match="must hold names and values"):
        read_settings(path)


def wanted(requests: float, usages: dict[str, float]) -> float:
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics={KV_USAGE: usages})
    return LoadPolicy(target_requests=8, target_kv_usage=0.5)(context)[0]


def test_replicas_are_wanted_for_requests_and_for_pages():
    assert wanted(0, {"a": 0.0}) == 0
    assert wanted(20, {"a": 0.1}) == 2.5
    assert wanted(1, {"a": 1.0, "b": 0.5}) == 3  # few long requests fill the caches
    assert LoadPolicy(8, 0.5)(SimpleNamespace(total_num_requests=4, aggregated_metrics=None))[0] == 0.5


def test_wrong_flags_are_reported_before_anything_starts(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("model: demo\nflags: [--max-num-seqs=none]\n")
    with pytest.raises(SystemExit, match="2"):
        main(["ray", "deploy", str(path)])
    assert "--max-num-seqs" in capsys.readouterr().err
    path.write_text("model: demo\nflags: [--page-size=7]\n")
    assert main(["ray", "deploy", str(path)]) == 1
    assert "page_size" in capsys.readouterr().err
    assert main(["ray", "deploy", str(tmp_path / "missing.yaml")]) == 1


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_ray_is_named(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("model: demo\n")
    assert main(["ray", "deploy", str(path)]) == 1
    assert "pip install 'jaxserve[ray]'" in capsys.readouterr().err
