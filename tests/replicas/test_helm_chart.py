"""The Helm chart: rendered by Helm's own library, checked against Kubernetes' schemas, our flags, routes, metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.commands.arguments import engine_config
from jaxserve.commands.cli import make_parser
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import _ROUTES

helm = pytest.importorskip("helm_python", reason="needs Helm's library: pip install 'jaxserve[chart]'")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs Kubernetes' schemas: pip install 'jaxserve[chart]'"
)

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "jaxserve"
LEAST: dict[str, Any] = {"image": {"repository": "registry.example/jaxserve"}, "model": "org/name"}
SECRET = {"host-secret": "0123456789abcdef", "api-keys": "k1 alice\nk2 bob\n", "metrics-key": "m"}
SEVERAL_HOSTS = LEAST | {"hosts": 2, "accelerator": {"type": "nvidia", "count": 8}, "secret": {"create": SECRET}}
SERVERS = ["first-jaxserve:8477", "second-jaxserve.prod:9000"]
CASES: dict[str, dict[str, Any]] = {
    "least": LEAST,
    "hosts": SEVERAL_HOSTS,
    "tpu": LEAST
    | {"accelerator": {"type": "tpu", "count": 4, "tpu": {"accelerator": "tpu-v6e-slice", "topology": "2x2"}}},
    "tpu hosts": LEAST
    | {"hosts": 4, "accelerator": {"type": "tpu", "count": 4}, "secret": {"name": "mine"}, "tensorParallelSize": 16},
    "groups": SEVERAL_HOSTS | {"dataParallelSize": 16, "args": ["--enable-expert-parallel"]},
    "stages": SEVERAL_HOSTS | {"pipelineParallelSize": 2},
    "cpu": LEAST | {"accelerator": {"type": "none", "count": 1}, "cache": {"existingClaim": "models"}},
    "hpa": LEAST | {"autoscaling": {"kind": "hpa", "maxReplicas": 8}},
    "keda hosts": SEVERAL_HOSTS | {"autoscaling": {"kind": "keda"}},
    "monitored": LEAST | {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "picked": LEAST | {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    "keys": LEAST | {"auth": {"apiKeys": True}, "secret": {"name": "mine"}, "podMonitor": {"enabled": True}},
    "prefill": LEAST | {"role": {"kind": "prefill", "prefillPort": 9000}, "secret": {"create": SECRET}},
    "decode": LEAST
    | {
        "role": {"kind": "decode", "kvOffloadGib": 0.5, "prefillServers": SERVERS},
        "secret": {"name": "mine"},
        "replicas": 2,
    },
    "more": LEAST
    | {
        "replicas": 3,
        "servedModelNames": ["small", "default"],
        "args": ["--max-model-len=8192", "--enable-lora"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"pool": "h200"},
        "imagePullSecrets": [{"name": "pull"}],
        "serviceAccountName": "server",
        "runtimeClassName": "nvidia",
        "podLabels": {"llm-d.ai/inferenceServing": "true"},
        "podAnnotations": {"note": "a"},
        "rollout": {"maxUnavailable": 1, "maxSurge": 0},
        "podDisruptionBudget": {"enabled": False},
    },
}


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """kind -> object, as `helm install test` in the namespace `prod` would send it."""
    with helm.Chart.load(CHART) as chart:
        manifests = chart.render(values, name="test", namespace="prod")
    objects = [
        document
        for name, text in manifests.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    assert len({one["kind"] for one in objects}) == len(objects)
    return {one["kind"]: one for one in objects}


def fields(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": required | (optional or {}),
    }


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
POSITIVE = {"type": "integer", "minimum": 1}
SELECTOR = fields({"matchLabels": TEXTS})
# Our part of the specs of kinds that are not Kubernetes' own, by the references of their projects.
SPECS = {
    "LeaderWorkerSet": fields(  # https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
        {
            "leaderWorkerTemplate": fields(
                {"size": POSITIVE, "workerTemplate": {"type": "object"}},
                {
                    "leaderTemplate": {"type": "object"},
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                },
            )
        },
        {
            "replicas": {"type": "integer"},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "rolloutStrategy": fields(
                {"type": {"const": "RollingUpdate"}},
                {
                    "rollingUpdateConfiguration": fields(
                        {}, {key: {"type": ["integer", "string"]} for key in ("maxUnavailable", "maxSurge")}
                    )
                },
            ),
        },
    ),
    "InferencePool": fields(  # https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
        {
            "selector": SELECTOR,
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": fields({"number": PORT})},
            "endpointPickerRef": fields(
                {"name": {"type": "string", "minLength": 1}, "port": fields({"number": PORT})},
                {"failureMode": {"enum": ["FailOpen", "FailClose"]}},
            ),
        }
    ),
    "PodMonitor": fields(  # https://prometheus-operator.dev/docs/api-reference/api/
        {
            "selector": SELECTOR,
            "podMetricsEndpoints": {
                "type": "array",
                "items": fields(
                    {"port": TEXT},
                    {
                        "path": TEXT,
                        "interval": TEXT,
                        "authorization": fields({"credentials": fields({"name": TEXT, "key": TEXT})}),
                    },
                ),
            },
        }
    ),
    "ScaledObject": fields(  # https://keda.sh/docs/latest/reference/scaledobject-spec/
        {
            "scaleTargetRef": fields({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT}),
            "triggers": {
                "type": "array",
                "items": fields(
                    {
                        "type": {"const": "prometheus"},
                        "metadata": fields({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}),
                    }
                ),
            },
        },
        {
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "advanced": {"type": "object"},
        },
    ),
}


def pods(objects: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The pod templates; the first one serves HTTP."""
    if "Deployment" in objects:
        return [objects["Deployment"]["spec"]["template"]]
    template = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_objects_have_kubernetes_schemas(case, version):
    objects = render(CASES[case])
    for kind, one in objects.items():
        if kind in SPECS:
            jsonschema.validate(one["spec"], SPECS[kind])
            assert set(one) == {"apiVersion", "kind", "metadata", "spec"}
        else:
            kubernetes_validate.validate(one, version, strict=True)
    for pod in pods(objects):
        labels = {"matchLabels": pod["metadata"]["labels"]}
        whole = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "x"},
            "spec": {"selector": labels, "template": pod},
        }
        kubernetes_validate.validate(whole, version, strict=True)
    service = objects["Service"]["spec"]["selector"].items()
    added = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}.items() if len(pods(objects)) > 1 else set()
    assert service <= pods(objects)[0]["metadata"]["labels"].items() | added


def test_lint():
    for values in CASES.values():
        report = helm.lint(CHART, values, strict=True, kube_version="v1.34.0")
        assert not report["errors"]
        assert not [message for message in report["messages"] if message["severity"] > 1]


@pytest.mark.parametrize("case", CASES)
def test_commands_are_ours(case, monkeypatch):
    """Every container's command line is one that `jaxserve` accepts, with the variables of a LeaderWorkerSet."""
    for index, pod in enumerate(pods(render(CASES[case]))):
        one = container(pod)
        assert one["command"] == ["jaxserve"]
        args = make_parser().parse_args([str(arg) for arg in one["args"]])
        assert (args.model, args.host, args.port) == ("org/name", "0.0.0.0", 8000)
        hosts = CASES[case].get("hosts", 1)
        groups = [CASES[case].get(name, 1) for name in ("dataParallelSize", "pipelineParallelSize")]
        assert [args.data_parallel_size, args.pipeline_parallel_size] == groups
        devices = hosts * CASES[case].get("accelerator", {"count": 1})["count"]
        assert args.tensor_parallel_size == devices // math.prod(groups)
        assert (args.coordinator == "auto") == (hosts > 1)
        assert pod["spec"]["terminationGracePeriodSeconds"] > args.drain_delay + args.drain_seconds
        assert args.drain_delay > 0
        monkeypatch.setenv("LWS_LEADER_ADDRESS", "test-jaxserve-0.test-jaxserve.prod")
        monkeypatch.setenv("LWS_GROUP_SIZE", str(hosts))
        monkeypatch.setenv("LWS_WORKER_INDEX", str(index))
        monkeypatch.setenv("JAXSERVE_HOST_SECRET", SECRET["host-secret"])
        config = engine_config(args)
        assert (config.num_hosts, config.host_id) == (hosts, index)


def test_roles(monkeypatch):
    """A decode server finds the port at which a prefill server waits, and both have the secret."""
    monkeypatch.setenv("JAXSERVE_HOST_SECRET", SECRET["host-secret"])
    configs = {}
    for case in ("prefill", "decode"):
        one = container(pods(render(CASES[case]))[0])
        configs[case] = engine_config(make_parser().parse_args([str(arg) for arg in one["args"]]))
        (secret,) = [given for given in one["env"] if given["name"] == "JAXSERVE_HOST_SECRET"]
        assert secret["valueFrom"]["secretKeyRef"]["key"] == "host-secret"
        assert configs[case].role == case
    assert configs["prefill"].prefill_listen == "0.0.0.0:9000"
    assert configs["decode"].prefill_servers == tuple(SERVERS)
    assert [configs[case].kv_offload_gib for case in configs] == [4, 0.5]
    objects = render(CASES["prefill"])
    ports = {port["name"]: port["containerPort"] for port in container(pods(objects)[0])["ports"]}
    assert ports == {"http": 8000, "prefill": 9000}
    service = {port["name"]: (port["port"], port["targetPort"]) for port in objects["Service"]["spec"]["ports"]}
    assert service == {"http": (80, "http"), "prefill": (9000, "prefill")}


@pytest.mark.parametrize("case", ["least", "hosts"])
def test_probes_ask_our_routes(case):
    first, *others = pods(render(CASES[case]))
    routes = {route.path for route in _ROUTES}
    probes = {name: container(first)[name]["httpGet"]["path"] for name in container(first) if name.endswith("Probe")}
    assert probes == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(probes.values()) <= routes
    for pod in others:  # they serve no HTTP
        assert not [name for name in container(pod) if name.endswith("Probe") or name == "ports"]


def test_autoscaling_reads_our_metrics():
    published = Metrics("m", "vllm").render().decode()
    for case in ("hpa", "keda hosts"):
        objects = render(CASES[case])
        if case == "hpa":
            metrics = [one["pods"]["metric"]["name"] for one in objects["HorizontalPodAutoscaler"]["spec"]["metrics"]]
            target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        else:
            triggers = [one["metadata"]["query"] for one in objects["ScaledObject"]["spec"]["triggers"]]
            assert all('{namespace="prod",pod=~"test-jaxserve-.*"}' in query for query in triggers)
            metrics = [query.partition("(")[2].partition("{")[0] for query in triggers]
            target = objects["ScaledObject"]["spec"]["scaleTargetRef"]
        assert metrics == ["vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
        assert all(f"\n{name}{{" in published for name in metrics)
        workload = objects[target["kind"]]
        assert (workload["apiVersion"], workload["metadata"]["name"]) == (target["apiVersion"], target["name"])
        assert "replicas" not in workload["spec"]  # an upgrade leaves the autoscaler's number


def test_accelerators():
    resources = {case: container(pods(render(CASES[case]))[0])["resources"] for case in ("hosts", "tpu", "cpu")}
    assert resources["hosts"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}
    assert resources["hosts"]["requests"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 8}
    assert resources["tpu"]["limits"]["google.com/tpu"] == 4
    assert set(resources["cpu"]["limits"]) == {"memory"}
    nodes = pods(render(CASES["tpu"]))[0]["spec"]["nodeSelector"]
    assert nodes == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x2",
    }


def test_secrets_are_not_in_pods():
    objects = render(SEVERAL_HOSTS | {"auth": {"apiKeys": True}})
    assert objects["Secret"]["stringData"] == SECRET
    shown = json.dumps({kind: one for kind, one in objects.items() if kind != "Secret"})
    assert not [text for text in ("0123456789abcdef", "k1 alice") if text in shown]
    changed = render(SEVERAL_HOSTS | {"secret": {"create": SECRET | {"metrics-key": "n"}}})
    digests = {pods(one)[0]["metadata"]["annotations"]["checksum/secret"] for one in (objects, changed)}
    assert len(digests) == 2  # a change restarts the pods
    assert "Secret" not in render(CASES["keys"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "repository"),
        ({"image": {"repository": "x"}}, "model"),
        (LEAST | {"replica": 2}, "replica"),
        (LEAST | {"drain": {"delaySeconds": "long"}}, "delaySeconds"),
        (LEAST | {"accelerator": {"type": "gpu"}}, "accelerator"),
        (LEAST | {"accelerator": {"count": 0}}, "count"),
        (LEAST | {"args": ["--port=9000"]}, "args"),
        (LEAST | {"args": ["-tp", "2"]}, "args"),
        (LEAST | {"env": [{"name": "JAXSERVE_ADMIN_KEY", "value": "x"}]}, "env"),
        (LEAST | {"autoscaling": {"kvUsage": 80}}, "kvUsage"),
        (LEAST | {"autoscaling": {"minReplicas": 5}}, "maxReplicas must be at least"),
        (LEAST | {"metricsPrefix": "a b"}, "metricsPrefix"),
        (LEAST | {"hosts": 2}, "several hosts need a secret"),
        (LEAST | {"auth": {"apiKeys": True}}, "auth.apiKeys needs secret.name"),
        (LEAST | {"secret": {"create": {"host-secret": "short"}}}, "host-secret"),
        (LEAST | {"secret": {"name": "a", "create": SECRET}}, "not both"),
        (LEAST | {"args": ["--role=prefill"]}, "args"),
        (LEAST | {"role": {"kind": "prefill"}}, "a role needs a secret"),
        (SEVERAL_HOSTS | {"role": {"kind": "prefill"}}, "role.kind must be both if hosts"),
        (SEVERAL_HOSTS | {"dataParallelSize": 3}, "must divide the 16 devices of a replica, got 3"),
        (LEAST | {"args": ["--data-parallel-size=2"]}, "args"),
        (CASES["prefill"] | {"replicas": 2}, "by its own address"),
        (CASES["prefill"] | {"autoscaling": {"kind": "hpa"}}, "by its own address"),
        (CASES["decode"] | {"role": {"kind": "decode"}}, "goes with role.kind decode"),
        (LEAST | {"role": {"kind": "both", "prefillServers": SERVERS}}, "goes with role.kind decode"),
        (LEAST | {"inferencePool": {"enabled": True}}, "endpointPicker.name"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(helm.HelmError, match=message):
        render(values)


def test_values_and_schema_have_the_same_names():
    """Every value is in the schema, and each of the schema's is in values.yaml, where it is explained."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        assert schema.get("additionalProperties") is False, where
        optional = {"global", "timeoutSeconds", "initialDelaySeconds"}
        assert set(values) <= set(schema["properties"]), where
        assert set(schema["properties"]) - set(values) <= optional, where
        for name, value in values.items():
            if isinstance(value, dict) and value and "properties" in schema["properties"][name]:
                compare(value, schema["properties"][name], f"{where}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")
    assert yaml.safe_load((CHART / "values.yaml").read_text())["drain"]["seconds"] >= ServerSettings.drain_seconds
