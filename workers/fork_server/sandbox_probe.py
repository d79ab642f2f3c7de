"""Finds the strongest form of isolation in which the engine works on this machine, by trying each, strongest first.

A form works if a child names its toolchain in it and its tools work. If a form only hides a tool (a compiler in a home
folder, a driver that needs more), a weaker one is used: a worker never loses an ability to isolation.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from ...compiler import decoding
from ...compiler.errors import CompileKilled, IsolationUnavailable, RelayError
from ...compiler.request import schema
from ..messages import JobFailed
from ..sandbox import isolation
from ..settings import Form
from . import child, job_runner

_SECONDS, _LAST_SECONDS = 60.0, 240.0
"""CUDA starts in seconds, and may hang in a sandbox that lacks something. The weakest form gets more time: the machine
may be slow, and no other form is left to try."""


class ProbedForm(Struct, frozen=True):
    """A form that works here, and how the engine describes itself in it."""

    form: Form
    toolchain: schema.Toolchain
    target: schema.Target
    others: list[schema.OtherTarget]
    missing: str


def strongest(context: job_runner.JobContext) -> ProbedForm:
    """Raises IsolationUnavailable if none may be used, and what the engine raised if it works in none."""
    first: ProbedForm | None = None
    failure: RelayError = CompileKilled(
        "the process that names this worker's toolchain died", hint="See its log"
    )
    forms = isolation.forms(context.settings)
    for form in forms:
        seconds = _LAST_SECONDS if form == forms[-1] else _SECONDS
        try:
            found = _try_form(form, seconds, context)
        except RelayError as error:
            failure = error
            print(f"isolation by {form!r} does not work here: {error.message}", file=sys.stderr, flush=True)
            continue
        if not found.missing:
            return found
        first = first or found
        print(f"under isolation by {form!r}: {found.missing}", file=sys.stderr, flush=True)
    if first is not None:  # a weaker form lacks the tool too
        return first
    if context.settings.isolation == "required":
        raise IsolationUnavailable(f"compiles cannot be isolated on this machine: {failure.message}")
    raise failure


def _try_form(form: Form, seconds: float, context: job_runner.JobContext) -> ProbedForm:
    with job_runner.job_folder(context) as work:
        body = functools.partial(child.describe, context.engine, context.settings, work, context.environment)
        sandbox = isolation.Sandbox(form, context.view, work, [])
        with job_runner.started_child(body, work / "log", sandbox) as started:
            data = _answer(started.pipe, seconds)
        try:
            described = decoding.from_msgpack(
                data, type=tuple[schema.Toolchain, schema.Target, list[schema.OtherTarget], str]
            )
        except msgspec.MsgspecError:
            raise _failure(data, work / "log") from None
        return ProbedForm(form, *described)


def _answer(pipe: int, seconds: float) -> bytes:
    """All that the child writes until it closes its pipe."""
    end = time.monotonic() + seconds
    data = b""
    while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(pipe, 1 << 20)
        if not piece:
            break
        data += piece
    return data


def _failure(data: bytes, log: Path) -> RelayError:
    try:
        return decoding.from_msgpack(data, type=JobFailed).error()
    except msgspec.MsgspecError:
        lines = child.read_log(log, 4000).splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "no answer")
        return CompileKilled(f"the process that names this worker's toolchain died: {last.strip()}")
