"""Reads a training job from a YAML file or from options of the command line. No torch.

docs/training.md describes the fields; the types of TrainSpec say what is allowed. Errors name file and line.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...compiler.api.training.jobs import ProfileSpec, TrainSpec
from ...compiler.api.training.rules import broken_rules
from ...compiler.errors import BadTrainJob
from . import yaml_lines
from .yaml_lines import YamlPath

_WRITTEN = {"package": "directory", "memory_bytes": "memory", "timeout_seconds": "timeout"}
"""Fields of TrainSpec that a file calls otherwise."""
FIELDS = {_WRITTEN.get(field, field): field for field in TrainSpec.__struct_fields__ if field != "kind"}
"""Names in a file -> fields of TrainSpec."""
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NAME_LENGTH = 200


class TrainFileJob(Struct, frozen=True, kw_only=True):
    """A job as it is written. spec: without its package, which is made of `directory` (a path relative to the file's
    folder). lines: of the spec's fields that the file has."""

    spec: TrainSpec
    directory: str = "."
    file: str = ""
    lines: dict[str, int] = {}


def load(path: Path, options: Mapping[str, Any] | None = None) -> TrainFileJob:
    """A job's file, with `options` (by the file's own names) over what it says. Raises BadTrainJob, which names file
    and line; SettingsError without ruamel.yaml."""
    data = yaml_lines.read_file(path, BadTrainJob)
    return read(data, str(path), name=path.stem, options=options)


def read(data: bytes, file: str, *, name: str = "", options: Mapping[str, Any] | None = None) -> TrainFileJob:
    """A file's bytes; `file`: what errors call it; `name`: the job's, if the file gives none. Raises as `load`."""
    tree = yaml_lines.tree(data, file, BadTrainJob)
    if options and isinstance(tree.value, dict):
        replaced = set(options)
        if replaced & {"script", "function"}:  # a job has one of the two
            replaced |= {"script", "function"}
        value = {name: given for name, given in tree.value.items() if name not in replaced}
        lines = {path: line for path, line in tree.lines.items() if path and path[0] not in replaced}
        tree = yaml_lines.YamlTree({**value, **options}, lines)
    return _TrainFileReader(file, tree).job(name or "job", file)


def of_options(options: Mapping[str, Any], *, name: str) -> TrainFileJob:
    """A job without a file, by the file's own names. Raises BadTrainJob, which names the option."""
    return _TrainFileReader("the command line", yaml_lines.YamlTree(dict(options))).job(name, "")


class _TrainFileReader(yaml_lines.YamlReader):
    error = BadTrainJob

    def job(self, name: str, file: str) -> TrainFileJob:
        given = self.fields((), self._top, FIELDS)
        directory = str(given.pop("directory", "."))
        profile = given.pop("profile", None)
        if "timeout" in given:
            given["timeout"] = self.seconds(("timeout",), given["timeout"])
        if "memory" in given:
            given["memory"] = self._bytes(given["memory"])
        fields = {FIELDS[each]: value for each, value in given.items()}
        spec = self.convert((), {"name": name[:_NAME_LENGTH], **fields}, TrainSpec, _WRITTEN)
        if profile is not None:
            spec = msgspec.structs.replace(spec, profile=self._profile(profile))
        for (field, *part), problem in broken_rules(spec):
            self.fail((_WRITTEN.get(str(field), field), *part), problem)
        if spec.script:
            spec = msgspec.structs.replace(spec, script=posixpath.normpath(spec.script))
        return TrainFileJob(
            spec=spec,
            directory=directory,
            file=file,
            lines={FIELDS[each]: line for each in self._top if (line := self.line((each,)))},
        )

    def _bytes(self, value: Any) -> int:
        found = re.fullmatch(r"([0-9]{1,15})(?:([KMGT])(?:iB)?)?", str(value))
        if found is None:
            self.fail(
                ("memory",), f"memory is {str(value)[:40]!r}; allowed: bytes of each rank, or like 16GiB"
            )
        return int(found[1]) * _SIZES[found[2] or ""]

    def _profile(self, value: Any) -> ProfileSpec:
        """`"10:15"`, or fields: steps, ranks, nvtx, memory."""
        path: YamlPath = ("profile",)
        named = {"steps": value} if isinstance(value, str) else value
        fields = self.fields(path, named, ("steps", "ranks", "nvtx", "memory"))
        found = re.fullmatch("(?:steps=)?([0-9]{1,15}):([0-9]{1,15})", str(fields.pop("steps", "")))
        if found is None:
            self.fail((*path, "steps"), "profile's steps are like 10:15: from step 10 to before step 15")
        first, last = int(found[1]), int(found[2])
        return self.convert(path, {"first": first, "last": last, **fields}, ProfileSpec)
