"""Models that libraries compile for inference give Inductor's outputs on what the service compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrelay.examples.harness.private_service import PrivateService
from trainer_programs import PROGRAMS, ROUNDING, run


@pytest.mark.slow
@pytest.mark.parametrize("what", ["generate", "blocks"])
def test_outputs_are_those_of_inductor(service: PrivateService, folder: Path, what: str) -> None:
    found = run(service, folder, str(PROGRAMS / "inference.py"), what)
    for spelling in ("named", "enabled"):
        assert found[spelling] == pytest.approx(found["inductor"], rel=ROUNDING)
    misses, hits = found["served"]
    assert misses >= 1
    assert hits >= 1
