"""Every line of the log has one form, whoever wrote it, and none of it can steer a terminal or tell a secret."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from topoalign.runtime.logging import configure_logging


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert not captured.out
    return [json.loads(line) for line in captured.err.splitlines()]


def test_our_lines_and_those_of_libraries_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", service="allocator", node="gpu-1")
    structlog.get_logger("topoalign.x").info("allocated", pod="default/train", devices=("GPU-0",))
    logging.getLogger("grpclib.server").error("call %s failed", "Allocate")
    ours, theirs = lines(capsys)

    assert {
        "event": "allocated",
        "pod": "default/train",
        "devices": ["GPU-0"],
        "level": "info",
        "logger": "topoalign.x",
        "service": "allocator",
        "node": "gpu-1",
    }.items() <= ours.items()
    assert ("call Allocate failed", "error", "grpclib.server", "gpu-1") == (
        theirs["event"],
        theirs["level"],
        theirs["logger"],
        theirs["node"],
    )
    assert ours.keys() - {"pod", "devices"} == theirs.keys()


@pytest.mark.parametrize("form", ["json", "console"])
def test_control_characters_of_foreign_text_are_escaped(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """C59: a pod's name that clears the screen, ends the line or turns the writing round."""
    configure_logging(form)
    log = structlog.get_logger()
    log.warning("odd", pod="a\x1b[2Jb\nlevel=fake\u202ec", inner={"k\x07": ["\x9b1m"]})
    try:
        raise ValueError("bad \x1b[31m name\u202e")
    except ValueError:
        log.exception("failed")
    logging.getLogger("nats").error("from outside \x1b[2J")
    err = capsys.readouterr().err

    assert not {c for c in err if not c.isprintable()} - {"\n"}
    assert "[31m name" in err


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_values(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """C58."""
    configure_logging(form)
    password = "".join(["can", "ary"])
    try:
        _ = int("x" if password else "1")
    except ValueError:
        structlog.get_logger().exception("failed")

    assert "canary" not in capsys.readouterr().err


def test_the_level_holds_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "warning")
    structlog.get_logger("topoalign.x").info("small")
    logging.getLogger("uvicorn.error").info("small")
    structlog.get_logger("topoalign.x").warning("large")

    assert ["large"] == [line["event"] for line in lines(capsys)]
