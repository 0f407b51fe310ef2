"""
The `topoalign` command.

Answers go to stdout, everything else to stderr; `--json` everywhere; the exit codes are those of `topoalign.cli.errors`.
Each command is a module that is imported when it is called, so that `topoalign topo` does not wait for what only
`topoalign up` needs.
"""

import os
import sys


def main() -> None:
    """What the `topoalign` script calls."""
    if sys.stdout is None:  # who closed it wants no answer
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    if sys.argv[1:2] == ["health"]:
        from topoalign.cli.probe import quick  # which imports no library

        status = quick(sys.argv[1:])
        if status is not None:
            sys.exit(status)
    from topoalign.cli.root import run  # imported here, so that importing the package costs nothing

    sys.exit(run(sys.argv[1:]))
