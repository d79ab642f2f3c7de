"""The Helm chart renders valid manifests, in step with docker-compose.yml, and refuses values that cannot work."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys

import chart
import pytest
import yaml
from torchrelay.service.base.settings import ServiceSettings
from torchrelay.workers.pool import node_resources
from torchrelay.workers.settings import JobLimits

pytestmark = pytest.mark.skipif(chart.helm() is None, reason="no helm: `make check` fetches it")

COMPOSE = yaml.safe_load((chart.ROOT / "docker-compose.yml").read_text())
ALL = (
    "training.enabled=true",
    "ray.groups.train.enabled=true",
    "ray.groups.gpu.enabled=true",
    "ray.groups.gpu.train=true",
    "ingress.enabled=true",
    "ingress.host=relay.example.org",
    "ingress.tlsSecret=relay-tls",
    "monitoring.enabled=true",
    "edge.enabled=true",
)
OUTSIDE = (
    "redis.enabled=false",
    "existingSecret=mine",
    "blobs.url=s3://bucket/prefix",
    "gateway.autoscaling.enabled=false",
    "ray.autoscaling.enabled=false",
    "networkPolicy.enabled=false",
    "sandbox.unmaskedProc=true",
)
FORMS = [(), ALL, OUTSIDE]
SERVICES = [
    "redis",
    "ray-head",
    "signer",
    "gateway",
    "edge",
    "dispatcher",
    "worker-cpu",
    "worker-train",
    "worker-gpu",
]
KEYS = {
    name: name.removeprefix("TORCHRELAY_").lower().replace("_", "-")
    for name in re.findall(r"\$\{(\w+):\?", str(COMPOSE))
}
"""Keys of the Secret, by the variable of deploy/example.env."""


@pytest.fixture(scope="module")
def pods():
    return chart.pods(chart.manifests(*ALL))


@pytest.fixture(scope="module")
def services(pods):
    """The chart's containers in compose's form. A secret's value is <its key>."""
    return {name: chart.service(pods[name], {key: f"<{key}>" for key in KEYS.values()}) for name in pods}


def test_helm_finds_nothing_to_say_about_it():
    done = chart.run("lint", "--strict", str(chart.CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("values", FORMS, ids=["default", "all", "outside"])
def test_the_manifests_are_kubernetes_own_by_its_strict_schemas(values, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kinds = set()
    for document in chart.manifests(*values):
        kinds.add(document["kind"])
        if document["kind"] not in ("RayCluster", "ServiceMonitor"):
            kubernetes_validate.validate(document, version, strict=True)
    for name, pod in chart.pods(chart.manifests(*values)).items():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": pod}
        kubernetes_validate.validate(template, version, strict=True)
        broken = copy.deepcopy(template)
        broken["template"]["spec"]["containers"][0]["imagee"] = "x"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, version, strict=True)
    assert {"Deployment", "StatefulSet", "Service", "RayCluster", "PodDisruptionBudget"} <= kinds


_READER = """
import json, sys
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
print(json.dumps(_derive_autoscaling_config_from_ray_cr(json.load(sys.stdin))))
"""


def test_rays_autoscaler_reads_from_it_what_each_node_offers():
    """Ray's own reader of a RayCluster. A group's resources must be those that `torchrelay worker` then offers."""
    (cluster,) = (each for each in chart.manifests(*ALL) if each["kind"] == "RayCluster")
    cluster["metadata"]["namespace"] = "relay"
    # in a process of its own: Ray reads its environment as it is imported, and this process may start one later
    read = subprocess.run(
        [sys.executable, "-c", _READER], input=json.dumps(cluster), capture_output=True, text=True, check=True
    )
    config = json.loads(read.stdout)
    offered = {
        name: {key: value for key, value in each["resources"].items() if key != "memory"}
        for name, each in config["available_node_types"].items()
    }
    assert offered == {
        "headgroup": {"CPU": 0, "GPU": 0},
        "cpu": {"CPU": 0, "GPU": 0, **node_resources(2)},
        "gpu": {"CPU": 8, "GPU": 1, **node_resources(1, 3)},
        "train": {"CPU": 8, "GPU": 0, **node_resources(0)},
    }
    assert config["available_node_types"]["cpu"]["max_workers"] == 4
    assert config["idle_timeout_minutes"] == 1.0


def test_a_node_that_compiles_has_the_disk_that_its_jobs_may_take(pods):
    compiles = {"worker-cpu": 2, "worker-gpu": 1 + 3}
    searches = {"worker-cpu": 2, "worker-gpu": 1 + 1}
    for name in compiles:
        (volume,) = (each for each in pods[name]["spec"]["volumes"] if each["name"] == "tmp")
        limit = volume["emptyDir"]["sizeLimit"]
        jobs = compiles[name] + searches[name]
        assert int(limit.removesuffix("Gi")) << 30 >= jobs * JobLimits().disk_bytes


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("redis.enabled=false", "/existingSecret"),
        ("ingress.enabled=true", "/ingress/tlsSecret"),
        ("ray.groups.cpu.min=-1", "/ray/groups/cpu/min"),
        ("isolation=none", "/isolation"),
        ("blobs.url=http://store", "/blobs/url"),
        ("replicas=3", "additional properties 'replicas' not allowed"),
    ],
)
def test_values_that_cannot_work_are_refused(value, problem):
    done = chart.run("template", "x", str(chart.CHART), "--set", value)
    assert done.returncode != 0 and problem in done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_its_containers_have_composes_environment_and_secrets(services, name):
    def secret(match):
        return f"<{KEYS[match[1]]}>"

    compose = {
        key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", re.sub(r"\$\{(\w+):\?.*?\}", secret, value))
        for key, value in COMPOSE["services"][name].get("environment", {}).items()
    }
    rendered = dict(services[name]["environment"])
    if name in ("gateway", "dispatcher"):
        assert rendered.pop("REDIS_PASSWORD") == "<redis-password>"  # a part of the URL
        assert rendered["TORCHRELAY_SERVICE_TRAINING"] == "true"
        compose["TORCHRELAY_SERVICE_TRAINING"] = "true"  # chosen above
    if name == "redis":
        assert compose.pop("TORCHRELAY_REDIS_BACKUP_PASSWORD") == ""  # nor in the Secret that the chart makes
    if name == "dispatcher":
        scaled = {key: rendered.pop(key) for key in list(rendered) if "_AUTOSCALE_" in key}
        assert sorted(scaled.values()) == ["12", "300", "4"]  # 4 x 2 + 4 x 1 slots, seconds, 4 GPUs
    if name == "signer":
        compose["TORCHRELAY_SERVICE_KEYS_DIR"] += "/ring"  # a volume's root may have a lost+found
    assert rendered == compose


def test_every_setting_is_one_and_every_service_of_compose_is_there(services):
    names = {name for each in services.values() for name in each["environment"]}
    settings = {name for name in names if name.startswith("TORCHRELAY_SERVICE_")}
    fields = {f"TORCHRELAY_SERVICE_{field.upper()}" for field in ServiceSettings.model_fields}
    assert settings and settings <= fields
    assert set(services) == set(COMPOSE["services"])
    source = (chart.CHART / "values.yaml").read_text()
    assert set(re.findall(r"TORCHRELAY_SERVICE_\w+[A-Z]", source)) <= fields


def test_its_images_are_targets_of_the_dockerfile_and_no_part_is_root(pods):
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (chart.ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    for name, pod in pods.items():
        (container,) = pod["spec"]["containers"]
        if name in ("redis", "edge"):
            assert container["image"] == COMPOSE["services"][name]["image"]
        else:
            assert container["image"].removeprefix("torchrelay-").partition(":")[0] in stages
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        allowed = container["securityContext"]
        assert allowed["readOnlyRootFilesystem"] is True and allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
        assert ("seccompProfile" in allowed) == name.startswith("worker")
        assert pod["spec"]["automountServiceAccountToken"] is (name == "ray-head")
    users = {name: pod["spec"]["securityContext"]["runAsUser"] for name, pod in pods.items()}
    assert [name for name, user in users.items() if user == users["signer"]] == ["signer"]


def test_only_the_signer_has_the_keys_volume_and_it_has_no_other(pods):
    assert {
        name
        for name, pod in pods.items()
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] == "keys"
    } == {"signer"}
    assert {mount["name"] for mount in pods["signer"]["spec"]["containers"][0]["volumeMounts"]} == {
        "keys",
        "tmp",
    }


def test_its_network_policies_allow_what_composes_networks_do_and_no_more(pods):
    policies = [each["spec"] for each in chart.manifests(*ALL) if each["kind"] == "NetworkPolicy"]

    def allowed(source, target, port, direction):
        own, other = (source, target) if direction == "egress" else (target, source)
        labels = pods[own]["metadata"]["labels"].items()
        (policy,) = (each for each in policies if each["podSelector"]["matchLabels"].items() <= labels)
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy[direction]:
            peers = rule.get("to" if direction == "egress" else "from")
            ports = [each["port"] for each in rule.get("ports", [])]
            named = peers is None or any(
                each["podSelector"]["matchLabels"].items() <= pods[other]["metadata"]["labels"].items()
                for each in peers
                if "podSelector" in each
            )
            if named and (not ports or port in ports):
                return True
        return False

    ports = {
        "redis": 6379,
        "signer": 8643,
        "gateway": 8642,
        "edge": 8640,
        "dispatcher": 10002,
        "ray-head": 6379,
    }
    edges = {
        (source, target)
        for source, target in itertools.permutations(pods, 2)
        if all(allowed(source, target, ports.get(target, 10002), way) for way in ("egress", "ingress"))
    }
    networks = {name: set(service["networks"]) for name, service in COMPOSE["services"].items()}
    assert edges <= {
        pair for pair in itertools.permutations(pods, 2) if networks[pair[0]] & networks[pair[1]]
    }
    ray = {"dispatcher", "ray-head", "worker-cpu", "worker-gpu", "worker-train"}
    assert edges == {
        *itertools.permutations(ray, 2),
        *itertools.product(("gateway", "dispatcher"), ("redis", "signer")),
        *itertools.product(("worker-train", "worker-gpu", "edge"), ("gateway",)),
    }
    public = {name for name in pods if any("ipBlock" in str(rule) for rule in _egress(policies, pods[name]))}
    assert public == {"worker-train", "worker-gpu"}
    assert _egress(policies, pods["signer"]) == [] == _egress(policies, pods["redis"])


def _egress(policies, pod):
    labels = pod["metadata"]["labels"].items()
    (policy,) = (each for each in policies if each["podSelector"]["matchLabels"].items() <= labels)
    return policy["egress"]


def test_selectors_find_pods_and_services_their_ports(pods):
    for document in chart.manifests(*ALL):
        selector = document.get("spec", {}).get("selector")
        if document["kind"] in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
            wanted = selector.get("matchLabels", selector).items()
            found = [pod for pod in pods.values() if wanted <= pod["metadata"]["labels"].items()]
            assert len(found) == 1, document["metadata"]["name"]
            for port in document["spec"].get("ports", []):
                container = found[0]["spec"]["containers"][0]
                assert {"name": port["targetPort"], "containerPort": port["port"]} in container["ports"]


def test_secrets_are_made_unless_there_is_one():
    made = chart.secret(chart.manifests())
    assert set(made) == set(KEYS.values())
    assert len({*made.values()}) == len(made) and all(len(value) >= 32 for value in made.values())
    mine = chart.manifests(*OUTSIDE)
    assert not [document for document in mine if document["kind"] == "Secret"]
    references = re.findall(r"'secretKeyRef': \{'name': '([\w-]+)', 'key': '([\w-]+)'", str(mine))
    assert {name for name, _ in references} == {"mine"}
    assert {key for _, key in references} == {*KEYS.values(), "redis-url"} - {"redis-password"}
