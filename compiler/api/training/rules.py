"""Rules between the fields of a training job. The client checks them before it sends a job, and the service again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from .jobs import TrainSpec

STORES = ("s3", "gs", "az", "file")
_PART = r"[A-Za-z_]\w*"
_FUNCTION = re.compile(rf"{_PART}(\.{_PART})*:{_PART}(\.{_PART})*", re.ASCII)

FieldPath = tuple[str | int, ...]
"""A field of TrainSpec, or a part of it."""


def broken_rules(spec: TrainSpec) -> Iterator[tuple[FieldPath, str]]:
    """The fields that break a rule, each with what is wrong."""
    if bool(spec.script) + bool(spec.function) != 1 and (spec.kind == "train" or spec.function):
        yield (
            ("function",) if spec.function else ("script",),
            "a job has a script (train.py), or a function (module:function)",
        )
    if spec.script and not _is_inside(spec.script):
        yield (
            ("script",),
            f"script is {spec.script[:80]!r}; it is relative to the working directory, and in it",
        )
    if spec.function and not _FUNCTION.fullmatch(spec.function):
        yield (
            ("function",),
            f"function is {spec.function[:80]!r}; allowed: module:function, as package.module:main",
        )
    if not spec.name.isprintable():
        yield ("name",), "a job's name is one line"
    if spec.min_workers > spec.workers:
        yield ("min_workers",), f"min_workers is {spec.min_workers}, and workers {spec.workers}"
    if spec.checkpoints and not _is_place(spec.checkpoints):
        yield (
            ("checkpoints",),
            f"checkpoints is {spec.checkpoints[:80]!r}; allowed: a folder that all nodes see, by its absolute path, or "
            f"the URL of an object store, as s3://bucket/folder ({', '.join(STORES)})",
        )
    if spec.profile is not None and spec.profile.first >= spec.profile.last:
        yield (
            ("profile", "steps"),
            f"profile's steps end at {spec.profile.last}, and begin at {spec.profile.first}",
        )
    if spec.profile is not None and max(spec.profile.ranks) >= spec.workers:
        yield ("profile", "ranks"), f"profile's ranks are from 0 to {spec.workers - 1}"
    for path, text in _texts(spec):
        if "\0" in text or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            yield path, f"{path[0]} has a text that no program can be given"


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and path.isprintable() and bool(parts.parts)


def _is_place(location: str) -> bool:
    """Whether it is an absolute path, or the URL of a store."""
    if "://" not in location:
        return location.startswith("/")
    try:
        parts = urlsplit(location)
    except ValueError:
        return False
    return parts.scheme in STORES and bool(parts.netloc or parts.scheme == "file")


def _texts(spec: TrainSpec) -> Iterator[tuple[FieldPath, str]]:
    """What programs are given."""
    yield ("checkpoints",), spec.checkpoints
    for name in ("arguments", "requirements"):
        yield from (((name, position), text) for position, text in enumerate(getattr(spec, name)))
    yield from ((("environment", variable), text) for variable, text in spec.environment.items())
