"""
Configures logging: one event name with key-value pairs per line, on stderr, as JSON or as text for people.

The records of the libraries (grpclib, nats, uvicorn, warnings) are processed in the same way and have the same format.
Names and messages from outside can contain anything, so control characters are escaped before a line is written.
Tracebacks do not show the values of local variables, because these can be secrets.
"""

import codecs
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import indent
from typing import Any


@contextmanager
def hide_module(module: str) -> Iterator[None]:
    """Makes a module appear not installed for imports in this block, unless it is already imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # as the import system marks a missing module
    try:
        yield
    finally:
        del sys.modules[module]


with hide_module("rich"):  # fifty modules for tracebacks with values, which are not shown here
    import structlog
    from structlog.typing import EventDict, ExcInfo, Processor

LIBRARIES = dict.fromkeys(("nats", "uvicorn", "hpack", "asyncio", "grpclib"), logging.WARNING)
"""Loggers of libraries that log more than an operator wants at level info."""


LONGEST = 4_000
"""Maximum number of characters of one value, so that a long name cannot fill a disk. Tracebacks are not cut."""


SELDOM_SECONDS = 60.0
"""
Minimum seconds between two equal records of some libraries. Without file descriptors, asyncio logs an error for each
try, hundreds per second. grpclib's server logs one, with a traceback, for each call that a peer aborts at the wrong
moment. uvicorn logs one for each request that is not HTTP.
"""

codecs.lookup("unicode_escape")  # otherwise loaded at the first use, when it may be impossible to open a file


class Seldom(logging.Filter):
    """Passes the first of several equal records; records are equal if their first lines are equal."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record: the same first line passes once in SELDOM_SECONDS."""
        line = record.getMessage().partition("\n")[0]
        now = time.monotonic()
        if now - self._logged.get(line, -SELDOM_SECONDS) < SELDOM_SECONDS:
            return False
        if len(self._logged) >= 100:
            self._logged.clear()
        self._logged[line] = now
        return True


def configure_logging(form: str = "console", level: str = "info", **context: str) -> None:
    """Sets up logging. `form`: json or console; `level`: debug to error; `context`: key-values of every line."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        escape_values,
    ]
    last: list[Processor] = (
        [
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if form == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain_traceback)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in LIBRARIES.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    for name in ("asyncio", "grpclib.server", "uvicorn.error"):
        logging.getLogger(name).filters[:] = [Seldom()]
    logging.captureWarnings(True)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**context)


def escape_values(logger: Any, name: str, event: EventDict) -> EventDict:
    """Escapes control characters in all values of a log event, before they reach a terminal or a file."""
    return {escape(key): printable(value) for key, value in event.items()}


def printable(value: object) -> object:
    """The value with control characters escaped and long texts truncated, at all levels."""
    match value:
        case str():
            return escape(value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…")
        case Mapping():
            return {escape(str(key)): printable(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [printable(inner) for inner in value]
        case _:
            return value


def escape(text: str, but: str = "") -> str:
    """Escapes characters that are not printable, as Python does: a newline becomes `\\n`, an escape `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode("ascii") for c in text)


def plain_traceback(sio: Any, exc_info: ExcInfo) -> None:
    """Formats a traceback without values, indented, so that no line of an error message can look like a log line."""
    text = "".join(structlog.processors.format_exc_info(None, "", {"exc_info": exc_info})["exception"])
    sio.write(indent(escape(text, "\n"), "    "))
