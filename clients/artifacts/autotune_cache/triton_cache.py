"""Triton's cache, with the team's winners for `triton.autotune(..., cache_results=True)`.

    TRITON_CACHE_MANAGER=torchrelay.integrations:TritonCacheManager

Source: triton/runtime/autotuner.py, Autotuner.check_disk_cache (Triton 3.6 to 3.9).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from triton import __version__
from triton.runtime.cache import FileCacheManager

from ....compiler import decoding
from ....compiler.tuning.records import Finite
from ...reports.run_report import process_report
from .team_winners import caller_locals, process_winners

_log = logging.getLogger(__name__)

_SUFFIX = ".autotune.json"


class TritonConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A triton.Config as Triton writes it. A hook cannot be sent, and a file of IR (ir_override) is this machine's."""

    kwargs: dict[str, int | float | str | bool | None]
    num_warps: Annotated[int, Meta(ge=1, le=64)]
    num_ctas: Annotated[int, Meta(ge=1, le=64)]
    num_stages: Annotated[int, Meta(ge=0, le=64)]
    maxnreg: Annotated[int, Meta(ge=1, le=1024)] | None
    pre_hook: None
    ir_override: None


class TimedTritonConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest configuration. timing: milliseconds; Triton's own benchmark gives the median and two quantiles."""

    config: TritonConfig
    timing: Finite | Annotated[list[Finite], Meta(min_length=1, max_length=16)]


class TritonCacheManager(FileCacheManager):  # type: ignore[misc, unused-ignore]
    """Triton's own cache on disk. What an autotuner does not find there it takes from the team's service, and what it
    measured goes there; kernels stay on this machine.

    Of a winner from the service the file has the timing of the winner alone. Raises what FileCacheManager raises;
    failures of the service are counted, and Triton measures.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._shares = not (override or dump)

    def get_file(self, filename: str) -> str | None:
        found: str | None = super().get_file(filename)
        if found is None and self._shares and filename.endswith(_SUFFIX):
            found = self._from_team(filename)
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        if self._shares and filename.endswith(_SUFFIX):
            self._to_team(data, filename)
        return path

    def _to_team(self, data: Any, filename: str) -> None:
        """Send the fastest of the configurations, in the form in which Triton writes them. One that did not run has the
        time infinity, which cannot be sent."""
        try:
            config, timing = min(json.loads(data)["configs_timings"], key=lambda pair: pair[1])
            winner = decoding.convert({"config": config, "timing": timing}, type=TimedTritonConfig)
            text = msgspec.json.encode(winner).decode()
        except Exception as error:  # whatever a program has among its values: the kernel is launched
            _log.info("torchrelay: the winner for %s is not sent: %s", filename, error)
            return
        process_winners().store("triton", __version__, self.key, text)

    def _from_team(self, filename: str) -> str | None:
        """Path of the file with the team's winner; None if there is none among the configurations to be measured."""
        caller = caller_locals("triton.runtime.autotuner", "check_disk_cache")
        configs: Sequence[Any] | None = caller.get("configs")
        if not configs or (text := process_winners().find("triton", __version__, self.key)) is None:
            return None
        try:
            winner = decoding.from_json(text, type=TimedTritonConfig)
            # The program's own configuration is written, not what came: the answer only chooses.
            chosen = next((config for config in configs if _config(vars(config)) == winner.config), None)
            if chosen is None:
                return None
            content = {"key": caller.get("tuning_key"), "configs_timings": [(vars(chosen), winner.timing)]}
            path: str = super().put(json.dumps(content), filename, binary=False)
        except Exception as error:  # an answer in another form, a full disk: the kernel is measured
            _log.info("torchrelay: the team's winner for %s is not used: %s", filename, error)
            return None
        process_report().count("autotune_hits")
        return path


def _config(fields: dict[str, Any]) -> TritonConfig | None:
    """None for a configuration that is not sent."""
    try:
        return decoding.convert(fields, type=TritonConfig)
    except msgspec.ValidationError:
        return None
