"""
Error messages and exit codes of the command line.

A mapping converts the three base classes of `topoalign.core.model.errors` to exit codes. The classes state who can fix
the error. An error is printed as a finding and a remedy; with `--json`, an object with both is also printed to stdout.
A defect of this program is not such an error: it ends with a traceback and exit code 1.
"""

import errno
import os
import sys
from contextlib import suppress

import click

from topoalign.cli import output
from topoalign.core.model.errors import BadRequest, NoFit, RemoteFailure, TopoalignError, Unavailable, clean

OK = 0
FAILURE = 1
USAGE = 2
NOT_FOUND = 3
REFUSED = 4
INVALID = 5
FINDINGS = 6
UNAVAILABLE = 69
INTERRUPTED = 130

REPORTED = (click.ClickException, click.Abort, TopoalignError, OSError, BaseExceptionGroup, KeyboardInterrupt)
"""The errors that `report` prints."""

BY_CODE = {
    "NotFound": NOT_FOUND,
    "KubeletOwnsDevices": REFUSED,
    "UnservedResource": FINDINGS,
}
"""Error code -> exit code, if it differs from that of the base class. Also applies to errors of other processes."""

BY_KIND = {BadRequest: INVALID, NoFit: REFUSED, Unavailable: UNAVAILABLE}

REMEDIES = {
    errno.ENOENT: "give a path that exists; a file is written only into a directory that exists",
    errno.EACCES: "run as a user with permission for it, or give another path",
    errno.ENOSPC: "free space on the disk of the output",
    errno.EROFS: "give a path on a writable file system",
}
"""Error number of the operating system -> remedy for a file error."""


def exit_code(error: TopoalignError) -> int:
    """The exit code for the cause of an error."""
    by_kind = next((status for kind, status in BY_KIND.items() if isinstance(error, kind)), FAILURE)
    return BY_CODE.get(code_of(error), by_kind)


def code_of(error: TopoalignError) -> str:
    """The stable code of an error: if another process failed, the code that it sent."""
    return error.failure.code if isinstance(error, RemoteFailure) else error.code


def report(error: BaseException, as_json: bool) -> int:
    """Prints an error and returns the exit code. Raises `error` again if it is a defect of this program."""
    match error:
        case BaseExceptionGroup():
            from topoalign.runtime.tasks import most_specific_error  # only commands that run tasks raise a group

            specific = most_specific_error(error)
            if specific is error:
                raise error
            return report(specific, as_json)
        case TopoalignError():
            return _print_error(code_of(error), error.finding, error.remedy, exit_code(error), as_json)
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message(), err=True)
            return USAGE
        case click.UsageError():
            command = error.ctx.command_path if error.ctx is not None else "topoalign"
            return _print_error(
                "Usage", " ".join(error.format_message().split()), f"see `{command} --help`", USAGE, as_json
            )
        case click.ClickException():
            return _print_error("Failure", error.format_message(), "", error.exit_code, as_json)
        case click.Abort() | KeyboardInterrupt():
            return INTERRUPTED
        case BrokenPipeError():  # the reader of the output has closed it
            drop_unprinted()
            return FAILURE
        case OSError(strerror=str() as why):
            name = f"{clean(str(error.filename), 200)}: " if error.filename is not None else ""
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else FAILURE
            status = _print_error("Failure", name + why, REMEDIES.get(error.errno or 0, ""), status, as_json)
            drop_unprinted()
            return status
        case _:
            raise error


def drop_unprinted() -> None:
    """Discards unwritten output. Otherwise, Python would try to write it again at exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(code: str, finding: str, remedy: str, status: int, as_json: bool) -> int:
    if as_json:
        with suppress(OSError):  # stdout itself may have failed; the text is still printed to stderr
            output.print_json_line({"error": {"code": code, "finding": finding, "remedy": remedy, "exit": status}})
    lines = [click.style("error:", fg="red", bold=True) + " " + clean(finding, 2000)]
    if remedy:
        lines.append(click.style("  do:", bold=True) + " " + clean(remedy, 2000))
    if code not in ("Usage", "Failure"):
        lines.append(f"  code: {clean(code)}")
    output.note("\n".join(lines))
    return status
