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
    from topoalign.cli.root import run  # imported here, so that importing the package costs nothing

    if sys.stdout is None:  # who closed it wants no answer
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    sys.exit(run(sys.argv[1:]))
