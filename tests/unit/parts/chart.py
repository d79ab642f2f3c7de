"""The Helm chart's manifests, and each container of them as a service of docker-compose.yml."""

from __future__ import annotations

import base64
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "torchrelay"
RELEASE = "torchrelay"
HOSTS = {
    f"{RELEASE}-{service}:": f"{host}:"
    for service, host in [
        ("head-svc", "ray-head"),
        ("redis", "redis"),
        ("signer", "signer"),
        ("gateway", "gateway"),
    ]
}
"""The chart's Services by compose's names."""


def helm() -> str | None:
    """The program: `make check` puts it beside this Python."""
    return shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = helm()
    assert program is not None
    return subprocess.run([program, *arguments], capture_output=True, text=True)


@functools.cache
def manifests(*values: str) -> list[dict[str, Any]]:
    """What `helm template` renders. values: for --set."""
    done = run("template", RELEASE, str(CHART), *(word for value in values for word in ("--set", value)))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates: by part, those of Ray's groups of workers as `worker-GROUP`."""
    found = {}
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "RayCluster":
            found["ray-head"] = spec["headGroupSpec"]["template"]
            found |= {f"worker-{group['groupName']}": group["template"] for group in spec["workerGroupSpecs"]}
        elif "template" in spec:
            found[spec["template"]["spec"]["containers"][0]["name"]] = spec["template"]
    return found


def secret(documents: list[dict[str, Any]]) -> dict[str, str]:
    (found,) = (document for document in documents if document["kind"] == "Secret")
    return {key: base64.b64decode(value).decode() for key, value in found["data"].items()}


def service(pod: dict[str, Any], secrets: dict[str, str]) -> dict[str, Any]:
    """The pod's container in compose's form, as Kubernetes would start it. secrets: the Secret's values."""
    (container,) = pod["spec"]["containers"]
    environment: dict[str, str] = {}
    for variable in container.get("env", []):
        if "value" in variable:
            environment[variable["name"]] = _expanded(variable["value"], environment)
        elif (reference := variable["valueFrom"]["secretKeyRef"])["key"] in secrets or not reference.get(
            "optional"
        ):
            environment[variable["name"]] = secrets[reference["key"]]
    words = {
        key: [_named(_expanded(word, environment)) for word in container.get(key, [])]
        for key in ("command", "args")
    }
    environment = {name: _named(value) for name, value in environment.items()}
    if "args" not in container:
        return {"command": words["command"], "environment": environment}
    entrypoint = {"entrypoint": words["command"]} if words["command"] else {}
    return {**entrypoint, "command": words["args"], "environment": environment}


def _expanded(text: str, environment: dict[str, str]) -> str:
    """Kubernetes' expansion: $(NAME) of an earlier variable, and $$ for one $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: environment.get(m[1], m[0]) if m[1] else "$", text)


def _named(text: str) -> str:
    for chart, compose in HOSTS.items():
        text = text.replace(chart, compose)
    return text
