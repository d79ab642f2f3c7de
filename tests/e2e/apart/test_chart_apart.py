"""The Helm chart's containers as processes: what its manifests say is run, with their environment, and one graph is
compiled.

Like test_up_apart.py, whose scenario it runs, this file is the test and the program in the network namespace. Ray's
head and worker start with what KubeRay runs: the containers' own commands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "unit" / "parts")]
import chart  # noqa: E402
from test_up_apart import SECRETS, Apart, main, run_alone  # noqa: E402

VALUES = ("ray.groups.cpu.cpuSlots=1", "training.enabled=true")
RUN_BY_IMAGE = {"signer", "gateway", "dispatcher"}


class Charted(Apart):
    """The chart's containers on loopback."""

    def __init__(self, home):
        super().__init__(home)
        secrets = {
            "owner-token": SECRETS["TORCHRELAY_OWNER_TOKEN"],
            "redis-password": SECRETS["TORCHRELAY_REDIS_PASSWORD"],
            "ray-token": SECRETS["TORCHRELAY_RAY_TOKEN"],
            "signer-token": SECRETS["TORCHRELAY_SIGNER_TOKEN"],
            "signer-admin-token": SECRETS["TORCHRELAY_SIGNER_ADMIN_TOKEN"],
        }
        pods = chart.pods(chart.manifests(*VALUES))
        assert {
            name for name, pod in pods.items() if "command" not in pod["spec"]["containers"][0]
        } == RUN_BY_IMAGE
        self.compose = {name: chart.service(pod, secrets) for name, pod in pods.items()}

    def local(self, text):
        return super().local(text.replace("/users/redis-users.acl", "/redis-users.acl"))


@pytest.mark.slow
@pytest.mark.skipif(chart.helm() is None, reason="no helm: `make check` fetches it")
def test_the_charts_containers_compile_together_and_follow_a_worker_that_leaves(tmp_path):
    run_alone(__file__, tmp_path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Charted)
