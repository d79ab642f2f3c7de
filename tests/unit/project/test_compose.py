"""docker-compose.yml holds to the Compose specification, its own promises, and the programs it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
SCHEMA = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


SECRETS = {
    "TORCHRELAY_OWNER_TOKEN",
    "TORCHRELAY_REDIS_PASSWORD",
    "TORCHRELAY_RAY_TOKEN",
    "TORCHRELAY_SIGNER_TOKEN",
    "TORCHRELAY_SIGNER_ADMIN_TOKEN",
}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(COMPOSE.read_text())


def test_it_is_valid_by_the_compose_specifications_schema(compose):
    schema = json.loads(SCHEMA.read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    broken = {**compose, "services": {**compose["services"], "redis": {"imagee": "redis"}}}
    assert list(validator.iter_errors(broken)), "the schema lets anything pass"


def test_only_gateway_and_edge_are_published_and_nodes_reach_neither_redis_nor_the_signer(compose):
    services = compose["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["gateway", "edge"]
    assert services["edge"]["networks"] == ["outside"]
    assert services["gateway"]["ports"] == ["${TORCHRELAY_BIND:-127.0.0.1:8642}:8642"]
    assert compose["networks"]["inside"]["internal"] is True
    for name in ("redis", "signer"):
        assert services[name]["networks"] == ["inside"]
    for name in ("ray-head", "worker-cpu"):
        assert services[name]["networks"] == ["nodes"]


def test_only_nodes_that_may_run_training_jobs_have_a_way_out(compose):
    services = compose["services"]
    ways_out = {name for name, network in compose["networks"].items() if not network.get("internal")}
    assert ways_out == {"outside"}
    assert {name for name, service in services.items() if "outside" in service["networks"]} == {
        "gateway",
        "edge",
        "worker-train",
        "worker-gpu",
    }
    assert "--no-train" in services["worker-cpu"]["command"]


def test_each_secret_is_only_where_it_is_needed(compose):
    """What joins Ray has neither the signing keys nor the owner's token; the signer has no other secret."""
    holders = {
        secret: {
            name for name, service in compose["services"].items() if secret in str(service.get("environment"))
        }
        for secret in SECRETS
    }
    assert holders == {
        "TORCHRELAY_OWNER_TOKEN": {"gateway"},
        "TORCHRELAY_REDIS_PASSWORD": {"redis", "gateway", "dispatcher"},
        "TORCHRELAY_RAY_TOKEN": {"ray-head", "dispatcher", "worker-cpu", "worker-train", "worker-gpu"},
        "TORCHRELAY_SIGNER_TOKEN": {"signer", "dispatcher"},
        "TORCHRELAY_SIGNER_ADMIN_TOKEN": {"signer", "gateway"},
    }
    assert [
        name for name, service in compose["services"].items() if "keys:" in str(service.get("volumes"))
    ] == ["signer"]


def test_every_secret_is_required_from_outside_and_listed_in_the_example():
    text = COMPOSE.read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required == SECRETS
    example = (ROOT / "deploy" / "example.env").read_text()
    for name in required:
        assert re.search(rf"^{name}=$", example, re.MULTILINE), f"{name} is missing, or has a value"
    for name in set(re.findall(r"\$\{(\w+):-", text)):
        assert name in example
    for line in text.splitlines():
        if re.search(r"(TOKEN|(?<!BACKUP_)PASSWORD): ", line):
            assert "${TORCHRELAY_" in line and ":?" in line, line


def test_who_asks_the_dispatcher_for_metrics_reaches_it(compose):
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    targets = [
        t for job in prometheus["scrape_configs"] for each in job["static_configs"] for t in each["targets"]
    ]
    assert len(targets) == 2
    for name, port in (target.split(":") for target in targets):
        command = compose["services"][name]["command"]
        assert (
            command[command.index("--host") + 1] == "0.0.0.0" and command[command.index("--port") + 1] == port
        )


def test_redis_asks_for_a_password_and_keeps_its_data(compose, tmp_path):
    redis = compose["services"]["redis"]
    script = redis["command"][-1]
    assert "--appendonly yes" in script and "--dir /data" in script and "--maxmemory " in script
    data, users = redis["volumes"]
    assert data == "redis:/data"
    source, target, mode = users.split(":")
    assert (ROOT / source).read_text().startswith("user default off\nuser torchrelay on >CHANGE-ME ")
    assert target in script and mode == "ro"
    configuration = tmp_path / "redis-server"  # prints what the server would read
    configuration.write_text("#!/bin/sh\nexec cat\n")
    configuration.chmod(0o755)
    one, two = {"TORCHRELAY_REDIS_PASSWORD": "one"}, {"TORCHRELAY_REDIS_BACKUP_PASSWORD": "two"}
    for passwords, wanted in (
        (one, {"torchrelay": "one"}),
        (one | two, {"torchrelay": "one", "backup": "two"}),
    ):
        done = subprocess.run(
            ["sh", "-c", script.replace(target, str(ROOT / source)).replace("$$", "$")],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **passwords},
            capture_output=True,
            text=True,
            check=True,
        )
        users = dict(re.findall(r"^user (\w+) on >(\S+)", done.stdout, re.MULTILINE))
        assert users == wanted and "CHANGE-ME" not in done.stdout


def test_ray_asks_for_a_token_on_every_node(compose):
    services = compose["services"]
    for name in ("ray-head", "worker-cpu", "worker-train", "worker-gpu"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"


def test_the_edge_stores_in_memory_what_its_configuration_names(compose):
    edge = compose["services"]["edge"]
    (volume,) = edge["volumes"]
    source, target, mode = volume.split(":")
    config = (ROOT / source).read_text()
    assert target in edge["command"] and mode == "ro"
    (memory,) = edge["tmpfs"]
    written = re.findall(r" (/\w\S+?)[;\s]", re.sub("#.*", "", config))
    assert len(written) == 7 and all(path.startswith(f"{memory.partition(':')[0]}/") for path in written)
    assert edge["ports"] == ["${TORCHRELAY_EDGE_BIND:-127.0.0.1:8640}:8640"]
    assert "listen 8640 " in config and "server gateway:8642 " in config


def test_every_build_target_exists_and_the_dockerfile_copies_only_what_is_there(compose):
    dockerfile = DOCKERFILE.read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    for service in compose["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (ROOT / service["build"]["dockerfile"]) == DOCKERFILE
            declared = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
            assert set(service["build"]["args"]) <= declared
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())


def test_workers_can_isolate_their_compiles_and_keep_files_where_the_dispatcher_says(compose):
    services = compose["services"]
    settings = services["dispatcher"]["environment"]
    kernels, trains = settings["TORCHRELAY_SERVICE_KERNELS_DIR"], settings["TORCHRELAY_SERVICE_TRAIN_DIR"]
    port = services["gateway"]["command"][services["gateway"]["command"].index("--port") + 1]
    assert settings["TORCHRELAY_SERVICE_TRAIN_URL"] == f"http://gateway:{port}"
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for name in ("worker-cpu", "worker-train", "worker-gpu"):
        assert "seccomp=unconfined" in services[name]["security_opt"]
        assert services[name]["volumes"] == [f"kernels:{kernels}", f"trains:{trains}"]
        (stage,) = (stage for stage in stages if f" AS {services[name]['build']['target']}\n" in stage)
        assert (
            f"mkdir {kernels} {trains} && chown relay {kernels} {trains}" in stage
        )  # a new volume takes over owner and mode
    assert {"kernels", "trains"} <= set(compose["volumes"])
    assert "security_opt" not in services["gateway"] and "security_opt" not in services["dispatcher"]


def test_the_gateways_image_gets_every_requirement_but_torch():
    printed = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "requirements.py"), "server"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = {*project["dependencies"], *project["optional-dependencies"]["server"]}
    assert every - set(printed) == {line for line in every if line.startswith("torch")}
