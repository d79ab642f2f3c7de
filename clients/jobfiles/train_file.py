"""Reads a training job from a YAML file or from options of the command line. No torch.

docs/training.md describes the fields; the types of TrainSpec say what is allowed. Errors name file and line.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
from msgspec import Meta, Struct

from ...compiler.api.training.jobs import ProfileSpec, TrainSpec
from ...compiler.errors import BadTrainJob
from . import yaml_lines
from .yaml_lines import YamlPath

FIELDS = {
    "name": "name",
    "script": "script",
    "function": "function",
    "arguments": "arguments",
    "directory": "package",
    "requirements": "requirements",
    "environment": "environment",
    "device": "device",
    "workers": "workers",
    "min_workers": "min_workers",
    "cpus": "cpus",
    "memory": "memory_bytes",
    "precision": "precision",
    "retries": "retries",
    "checkpoints": "checkpoints",
    "compile": "compile",
    "capture": "capture",
    "tune": "tune",
    "profile": "profile",
    "timeout": "timeout_seconds",
}
"""What people write, and the TrainSpec's field that it becomes."""
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NAME = 200
_TYPES = get_type_hints(TrainSpec, include_extras=True)


class TrainFileJob(Struct, frozen=True, kw_only=True):
    """A job as it was written. spec: its package is yet to be made of `directory`, which is relative to the file's
    folder (or whole). lines: of the spec's fields, where the file has them."""

    spec: TrainSpec
    directory: str = "."
    file: str = ""
    lines: dict[str, int] = {}


def load(path: Path, options: Mapping[str, Any] | None = None) -> TrainFileJob:
    """A job's file, with `options` (by the file's own names) over what it says. Raises BadTrainJob, which names file
    and line; SettingsError without ruamel.yaml."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadTrainJob(f"{path} cannot be read: {error.strerror}", hint="Name a job's file") from None
    return read(data, str(path), name=path.stem, options=options)


def read(data: bytes, file: str, *, name: str = "", options: Mapping[str, Any] | None = None) -> TrainFileJob:
    """A file's bytes; `file`: what errors call it; `name`: the job's, if the file gives none. Raises as `load`."""
    tree = yaml_lines.tree(data, file, BadTrainJob)
    if options and isinstance(tree.value, dict):
        beside = {"script": "function", "function": "script"}
        over = {*options, *(beside[each] for each in options if each in beside)}
        value = {each: given for each, given in tree.value.items() if each not in over}
        lines = {at: line for at, line in tree.lines.items() if at and at[0] not in over}
        texts = {at: text for at, text in tree.texts.items() if at and at[0] not in over}
        tree = yaml_lines.YamlTree({**value, **options}, lines, texts)
    return _Reader(file, tree).job(name or "job", file)


def of_options(options: Mapping[str, Any], *, name: str) -> TrainFileJob:
    """A job without a file, by the file's own names. Raises BadTrainJob, which names the option."""
    return _Reader("the command line", yaml_lines.YamlTree(dict(options))).job(name, "")


class _Reader(yaml_lines.YamlReader):
    def __init__(self, name: str, tree: yaml_lines.YamlTree) -> None:
        super().__init__(name, tree, BadTrainJob)

    def job(self, name: str, file: str) -> TrainFileJob:
        top = self.mapping((), self._top)
        self.only((), top, FIELDS)
        given = {
            each: value
            for each, value in top.items()
            if value is not None and not (value == "" and each in ("name", "directory"))
        }
        fields = {
            FIELDS[each]: self._field(each, value)
            for each, value in given.items()
            if each not in ("directory", "profile")
        }
        spec = TrainSpec(**{"name": name[:_NAME], **fields})
        script = self._checked_entry(spec.script, spec.function)
        if spec.min_workers > spec.workers:
            self.fail(("min_workers",), f"min_workers is {spec.min_workers}, and workers {spec.workers}")
        profile = self._profile(given["profile"], spec.workers) if "profile" in given else None
        return TrainFileJob(
            spec=msgspec.structs.replace(spec, script=script, profile=profile),
            directory=self.value(("directory",), given.get("directory", "."), _TYPES["script"]),
            file=file,
            lines={FIELDS[each]: line for each in top if (line := self.line((each,)))},
        )

    def _field(self, name: str, value: Any) -> Any:
        """A field's value as the TrainSpec has it."""
        path, type = (name,), _TYPES[FIELDS[name]]
        match name:
            case "timeout":
                return self.seconds(path, value, type)
            case "cpus":
                return self.value(path, value, type, "a number above 0, at most 1024: cores of each rank")
            case "memory":
                if isinstance(value, str) and (
                    found := re.fullmatch(r"([0-9]{1,15})(?:([KMGT])(?:iB)?)", value)
                ):
                    value = int(found[1]) * _SIZES[found[2]]
                return self.value(path, value, type, "a number of bytes, or like 16GiB: of each rank")
            case "environment":
                return self._environment(value)
        converted = self.value(path, value, type)
        if name == "arguments":
            for i, text in enumerate(converted):
                self._check_text((name, i), text)
        if name == "checkpoints" and converted and not re.match(r"/|[a-z][a-z0-9+.-]*://[^/]", converted):
            self.fail(
                path,
                f"checkpoints is {converted[:80]!r}; allowed: a folder that all nodes see, by its whole path, or "
                "the URL of an object store, as s3://bucket/folder",
            )
        return converted

    def _checked_entry(self, script: str, function: str) -> str:
        """The script's path, normalized; '' for a function."""
        if bool(script) == bool(function):
            at: YamlPath = ("function",) if function else ()
            self.fail(at, "a job has a script (train.py), or a function (module:function)")
        if script.startswith("/") or ".." in script.split("/") or "\0" in script:
            self.fail(
                ("script",), f"script is {script[:80]!r}; it is relative to the working directory, and in it"
            )
        word = r"[^\W\d]\w*"
        if function and not re.fullmatch(rf"{word}(\.{word})*:{word}(\.{word})*", function):
            self.fail(
                ("function",),
                f"function is {function[:80]!r}; allowed: module:function, as package.module:main",
            )
        return posixpath.normpath(script) if script else ""

    def _environment(self, value: Any) -> dict[str, str]:
        given = self.mapping(("environment",), value)
        for name in given:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,200}", name):
                self.fail(("environment", name), f"{name[:40]!r} is no name of a variable")
        texts = {
            name: self.value(("environment", name), text, _TYPES["script"]) for name, text in given.items()
        }
        for name, text in texts.items():
            self._check_text(("environment", name), text)
        return cast(
            dict[str, str],
            self.value(("environment",), texts, _TYPES["environment"], "a list of at most 200 variables"),
        )

    def _check_text(self, path: YamlPath, text: str) -> None:
        if "\0" in text or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            self.fail(path, f"{path[0]} holds a text that no program can be given")

    def _profile(self, given: Any, workers: int) -> ProfileSpec:
        """`"10:15"`, or fields: steps, ranks, nvtx, memory."""
        fields = {"steps": given} if isinstance(given, str) else self.mapping(("profile",), given)
        self.only(("profile",), fields, ("steps", "ranks", "nvtx", "memory"))
        at: YamlPath = ("profile", "steps") if isinstance(given, dict) else ("profile",)
        found = re.fullmatch("(?:steps=)?([0-9]{1,15}):([0-9]{1,15})", str(fields.get("steps", "")))
        if found is None:
            self.fail(at, "profile's steps are like 10:15: from step 10 to before step 15")
        first, last = int(found[1]), int(found[2])
        if not first < last:
            self.fail(at, f"profile's steps end at {last}, and begin at {first}")
        rank = Annotated[int, Meta(ge=0, le=workers - 1)]
        types = {
            "ranks": Annotated[list[rank], Meta(min_length=1, max_length=64)],
            "nvtx": bool,
            "memory": bool,
        }
        options = {
            name: self.value(("profile", name), fields[name], type)
            for name, type in types.items()
            if name in fields
        }
        return ProfileSpec(first=first, last=last, **options)
