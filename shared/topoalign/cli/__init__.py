"""
The `topoalign` command.

Answers go to stdout, everything else to stderr. Every command has `--json`. The exit codes are those of
`topoalign.cli.exit_codes`. Each command is a module that is imported only when the command runs, so that `topoalign
topo` does not load the libraries of `topoalign up`.
"""

import os
import sys


def main() -> None:
    """Run the command line: the entry point of the `topoalign` script. Ends the process with the exit code."""
    if sys.stdout is None:  # its reader has closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    if sys.argv[1:2] == ["health"]:
        from topoalign.cli.health_check import quick  # which imports no library

        status = quick(sys.argv[1:])
        if status is not None:
            sys.exit(status)
    from topoalign.runtime.collector import importing  # here, so that importing the package costs nothing

    with importing():
        from topoalign.cli.root import run_command_line

    sys.exit(run_command_line(sys.argv[1:]))
