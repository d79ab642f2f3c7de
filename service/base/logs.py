"""Logs: one event a line, on standard error, for people or (log_format=json) for machines; so many lines a second.

What other libraries log (asyncio, Ray's pool) goes the same way, from warnings on.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import TextIO, cast

import structlog

from .budgets import Rate
from .settings import ServiceSettings
from .tracing import current_trace


def configure(settings: ServiceSettings) -> None:
    """Set up structlog for this process. Tokens and bodies are never logged; keys and digests are."""
    lines = Rate(settings.log_lines_per_second)
    logging.lastResort = _OthersLog(lines, settings.log_format)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _escape,
    ]
    # Tracebacks without local variables: those hold tokens and bodies.
    if settings.log_format == "json":
        shared += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        shared += [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)
        ]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        # one write a line: processes that share standard error would write between a line and its end
        logger_factory=structlog.WriteLoggerFactory(
            cast(TextIO, LossyStream(sys.stderr, lines, settings.log_format))
        ),
        cache_logger_on_first_use=False,
    )


def _write_traceback(stream: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Each line begins with `| `, and no text of an exception can control a terminal or look like an entry."""
    plain = io.StringIO()
    structlog.dev.plain_traceback(plain, error)
    for line in plain.getvalue().splitlines():
        stream.write(f"\n| {line if line.isprintable() else repr(line)[1:-1]}")


def _add_trace(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The id by which the lines of all processes that work for one request are found."""
    if (trace := current_trace()) is not None:
        event["trace_id"] = trace.trace_id
    return event


class LossyStream:
    """A stream whose failures (a full disk, say) lose lines of the log and nothing else. `lines`: past this rate, they
    are dropped, and the next one that is not says how many texts were."""

    def __init__(self, stream: TextIO, lines: Rate, form: str) -> None:
        self._stream = stream
        self._lines = lines
        self._form = form

    def write(self, text: str) -> int:
        if not self._lines.allows(max(1, text.count("\n"))):
            return len(text)
        if dropped := self._lines.dropped:
            self._lines.dropped = 0
            told = {"event": "log_entries_dropped", "count": dropped, "level": "warning"}
            line = (
                json.dumps(told)
                if self._form == "json"
                else f"[warning  ] log_entries_dropped count={dropped}"
            )
            text = f"{line}\n{text}"
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._stream.flush()


class _OthersLog(logging.Handler):
    """Writes what loggers without a handler of their own log."""

    def __init__(self, lines: Rate, form: str) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines
        self._form = form

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # a library's wrong arguments
            self.handleError(record)
        else:
            LossyStream(sys.stderr, self._lines, self._form).write(text + "\n")


def _escape(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """So that texts of a request cannot control a terminal or begin a new line."""
    return {
        name: repr(value)[1:-1] if isinstance(value, str) and not value.isprintable() else value
        for name, value in event.items()
    }
