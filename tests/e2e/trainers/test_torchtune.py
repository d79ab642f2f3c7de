"""torchtune's layers train on what the service compiled. It is no development package: torchtune 0.6.1 needs torchao
0.15.0 and ten packages more."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrelay.examples.harness.private_service import PrivateService
from trainer_programs import PROGRAMS, ROUNDING, run

pytest.importorskip("torchtune", reason="torchtune is not installed", exc_type=ImportError)


@pytest.mark.slow
def test_its_variable_names_the_back_end(service: PrivateService, folder: Path) -> None:
    found = run(service, folder, str(PROGRAMS / "torchtune_layers.py"))
    for spelling in ("named", "enabled"):
        assert found[spelling] == pytest.approx(found["inductor"], rel=ROUNDING)
    misses, hits = found["served"]
    assert misses >= 1
    assert hits >= misses
