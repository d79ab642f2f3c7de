"""A training job as people write it: YAML, or options of the command line, in; the job that is sent, out. No torch.

docs/training.md describes the fields. What is wrong is named by file and line.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from ...compiler.api.training.jobs import MOST_WORKERS, Precision, ProfileSpec, TrainSpec
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
_STEPS = (1 << 53) - 1
_TEXT = 4096


class TrainFileJob(Struct, frozen=True, kw_only=True):
    """A job as it was written. spec: its package is yet to be made of `directory`, which is relative to the file's
    folder (or whole). lines: of the spec's fields, where the file has them."""

    spec: TrainSpec
    directory: str = "."
    file: str = ""
    lines: dict[str, int] = {}


def load(path: Path, options: Mapping[str, Any] | None = None) -> TrainFileJob:
    """A job's file, with `options` (by the file's own names) over what it says. Raises BadTrainJob, which names file
    and line; SettingsError without PyYAML."""
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
        self.only((), top, set(FIELDS))
        script, function = self._entry(top)
        workers = self._number(top, "workers", 1, 1, MOST_WORKERS)
        least = self._number(top, "min_workers", 0, 0, MOST_WORKERS)
        if least > workers:
            self.fail(("min_workers",), f"min_workers is {least}, and workers {workers}")
        given: dict[str, Any] = {
            "name": self.text(("name",), top.get("name") or name, 200),
            "script": script,
            "function": function,
            "arguments": self._texts(top, "arguments", 1000),
            "requirements": self._texts(top, "requirements", 200),
            "environment": self._environment(top),
            "device": self.choice(("device",), top.get("device", "cpu"), ("cpu", "cuda")),
            "workers": workers,
            "min_workers": least,
            "cpus": self._cpus(top),
            "memory_bytes": self._size(top),
            "precision": self._precision(top),
            "retries": self._number(top, "retries", 3, 0, 1000),
            "checkpoints": self._checkpoints(top),
            "compile": self.choice(("compile",), top.get("compile", "torchrelay"), ("torchrelay", "off")),
            "capture": self.flag(("capture",), top.get("capture", True)),
            "tune": self.flag(("tune",), top.get("tune", False)),
            "profile": self._profile(top, workers),
            "timeout_seconds": self.seconds(("timeout",), top.get("timeout", 0), 10 * 366 * 86400),
        }
        lines = {FIELDS[each]: line for each in top if (line := self.line((each,)))}
        directory = self.text(("directory",), top.get("directory", "."), _TEXT)
        return TrainFileJob(spec=TrainSpec(**given), directory=directory or ".", file=file, lines=lines)

    def _entry(self, top: Mapping[str, Any]) -> tuple[str, str]:
        script = self.text(("script",), top.get("script"), _TEXT)
        function = self.text(("function",), top.get("function"), _TEXT)
        if bool(script) == bool(function):
            at: YamlPath = ("function",) if function else ()
            self.fail(at, "a job has a script (train.py), or a function (module:function)")
        parts = script.split("/")
        if script and (script.startswith("/") or ".." in parts or "\0" in script):
            self.fail(
                ("script",), f"script is {script[:80]!r}; it is relative to the working directory, and in it"
            )
        script = posixpath.normpath(script) if script else ""
        word = r"[^\W\d]\w*"
        if function and not re.fullmatch(rf"{word}(\.{word})*:{word}(\.{word})*", function):
            self.fail(
                ("function",),
                f"function is {function[:80]!r}; allowed: module:function, as package.module:main",
            )
        return script, function

    def _texts(self, top: Mapping[str, Any], name: str, most: int) -> list[str]:
        """As they are written: 3.10 stays 3.10, and off is a word."""
        values = top.get(name)
        values = [] if values is None else values
        if not isinstance(values, list) or len(values) > most:
            self.fail((name,), f"{name} is a list of at most {most} texts")
        return [self._one_text((name, i), value) for i, value in enumerate(values)]

    def _one_text(self, path: YamlPath, value: Any) -> str:
        text = self.text(path, self._written.get(path, value), _TEXT)
        if "\0" in text or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            self.fail(path, f"{path[0]} holds a text that no program can be given")
        return text

    def _environment(self, top: Mapping[str, Any]) -> dict[str, str]:
        given = self.mapping(("environment",), top.get("environment") or {})
        if len(given) > 200:
            self.fail(("environment",), "environment has at most 200 variables")
        for name in given:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,200}", name):
                self.fail(("environment", name), f"{name[:40]!r} is no name of a variable")
        return {name: self._one_text(("environment", name), value) for name, value in given.items()}

    def _number(self, top: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
        return self.whole((name,), top.get(name, default), least, most)

    def _cpus(self, top: Mapping[str, Any]) -> float:
        value = top.get("cpus", 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1024:
            self.fail(("cpus",), "cpus is a number above 0, at most 1024: cores of each rank")
        return float(value)

    def _size(self, top: Mapping[str, Any]) -> int:
        value = top.get("memory", 0)
        if isinstance(value, str) and (found := re.fullmatch(r"([0-9]{1,15})(?:([KMGT])(?:iB)?)", value)):
            value = int(found[1]) * _SIZES[found[2]]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 50:
            self.fail(("memory",), "memory is a number of bytes, or like 16GiB: of each rank")
        return value

    def _precision(self, top: Mapping[str, Any]) -> str:
        allowed = [each for each in get_args(Precision) if each]
        return self.choice(("precision",), top["precision"], allowed) if top.get("precision") else ""

    def _checkpoints(self, top: Mapping[str, Any]) -> str:
        text = self.text(("checkpoints",), top.get("checkpoints"), _TEXT)
        if text and not (text.startswith("/") or re.match(r"[a-z][a-z0-9+.-]*://[^/]", text)):
            self.fail(
                ("checkpoints",),
                f"checkpoints is {text[:80]!r}; allowed: a folder that all nodes see, by its whole path, or the "
                "URL of an object store, as s3://bucket/folder",
            )
        return text

    def _profile(self, top: Mapping[str, Any], workers: int) -> ProfileSpec | None:
        """`"10:15"`, or fields: steps, ranks, nvtx, memory."""
        given = top.get("profile")
        if given is None:
            return None
        fields = {"steps": given} if isinstance(given, str) else self.mapping(("profile",), given)
        self.only(("profile",), fields, {"steps", "ranks", "nvtx", "memory"})
        at: YamlPath = ("profile", "steps") if isinstance(given, dict) else ("profile",)
        found = re.fullmatch("(?:steps=)?([0-9]{1,15}):([0-9]{1,15})", str(fields.get("steps", "")))
        if found is None:
            self.fail(at, "profile's steps are like 10:15: from step 10 to before step 15")
        first, last = int(found[1]), int(found[2])
        if not first < last <= _STEPS:
            self.fail(at, f"profile's steps end at {last}, and begin at {first}")
        ranks = fields.get("ranks", [0])
        if not isinstance(ranks, list) or not 1 <= len(ranks) <= 64:
            self.fail(("profile", "ranks"), "profile's ranks are a list of 1 to 64, as [0, 1]")
        return ProfileSpec(
            first=first,
            last=last,
            ranks=[self.whole(("profile", "ranks", i), rank, 0, workers - 1) for i, rank in enumerate(ranks)],
            nvtx=self.flag(("profile", "nvtx"), fields.get("nvtx", False)),
            memory=self.flag(("profile", "memory"), fields.get("memory", True)),
        )
