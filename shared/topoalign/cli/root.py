"""
Finds and runs commands, and contains the table of all commands.

The table contains the lines that `--help` prints, because importing all commands for their help would take longer than
running a command. Commands of services are found by entry point (group `topoalign.commands`).
"""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from topoalign.cli import exit_codes
from topoalign.runtime.collector import importing

ENTRY_POINTS = "topoalign.commands"


class CommandEntry(NamedTuple):
    """The function of a command, and its help in one line."""

    target: str
    """`module:name` below `topoalign`."""
    help: str


SECTIONS: dict[str, dict[str, CommandEntry]] = {
    "Run": {
        "up": CommandEntry("cli.up:up", "Run all services in one process, with NATS and the HTTP API."),
        "node": CommandEntry("cli.serve:run_node", "Run discovery, hinting and allocator: the agent of a GPU node."),
        "discovery": CommandEntry("cli.serve:run_discovery", "Run only the service that reads the hardware."),
        "hinting": CommandEntry("cli.serve:run_hinting", "Run only the service that answers hint questions."),
        "allocator": CommandEntry("cli.serve:run_allocator", "Run only the service that gives devices to containers."),
        "mps": CommandEntry("cli.serve:run_mps", "Run NVIDIA's MPS daemons, where GPUs are shared by MPS."),
        "registry": CommandEntry("cli.serve:run_registry", "Run only the service that shows the cluster over HTTP."),
    },
    "Look": {
        "topo": CommandEntry("cli.topo:topo", "Show how the GPUs and NICs of a machine are connected."),
        "fragmentation": CommandEntry(
            "cli.free_sets:compare_free_sets", "Compare the best free GPU sets with the machine's best."
        ),
        "watch": CommandEntry("cli.watch_events:watch", "Print allocation events as they occur."),
        "explain": CommandEntry("cli.explain:explain", "Show the reasons of a decision."),
        "why": CommandEntry("cli.why:why", "Show why a pod fits on no node of the cluster."),
        "what-if": CommandEntry("cli.explain:what_if", "Show what `allocate` would decide, without effect."),
        "nrt": CommandEntry("cli.nrt:nrt", "Print NodeResourceTopology objects of the nodes."),
    },
    "Change": {
        "allocate": CommandEntry(
            "cli.allocation_commands:allocate_for_container", "Request GPUs, CPUs, memory and NICs of a node."
        ),
        "release": CommandEntry("cli.allocation_commands:release_allocations", "Release an allocation."),
        "gpu": CommandEntry("cli.gpu:gpu", "Show the status of a node's devices, or override it."),
        "hook": CommandEntry("cli.hook:hook", "Install the library that limits containers with slots of GPUs."),
        "forget": CommandEntry("cli.forget:forget", "Delete the facts of a node that is gone for good."),
        "stores": CommandEntry("cli.stores:stores", "Create and change the stores of events at NATS."),
        "nats-config": CommandEntry("cli.nats_config:nats_config", "Write accounts and keys for nats-server."),
        "trust": CommandEntry(
            "cli.allocation_commands:trust", "Confirm a node's record after its journal was damaged."
        ),
    },
    "Check": {
        "health": CommandEntry(
            "cli.health_command:health", "Check whether a process is ready, as a health check does."
        ),
        "doctor": CommandEntry("cli.doctor:doctor", "Check this machine, and print a remedy for each problem."),
        "config": CommandEntry("cli.config:config", "Show every setting with its origin, or check a file."),
        "completion": CommandEntry("cli.completion:completion", "Print the completion script of your shell."),
        "version": CommandEntry("cli.version:version", "Print the versions of this program and its dependencies."),
    },
}
TOOLS = {
    "bench": "Measure the time of decisions and of kubelet calls.",
    "conformance": "Run published case files through the services' own functions.",
    "demo": "Run an example in a few seconds: a kubelet admits pods on this or a described machine.",
    "draw": "Draw a machine, and who holds its devices: as text, SVG or PNG.",
    "simulate": "Run a cluster on this machine: nodes, scheduler and pods.",
}
"""Help of the commands of topoalign-tools: importing them for one line of help would take half a second."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}

EXAMPLES = """\
\b
Examples:
  topoalign topo --machine dgx-a100
  topoalign up                          # then, in another terminal:
  topoalign allocate --gpus 2 --cpus 8 --memory 64Gi
  topoalign watch

\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 refused, 5 invalid input,
6 findings (see the help of the command) or a device that nobody serves,
69 service unavailable, 130 interrupted.
"""


class Commands(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands of the table, then those of other packages by name."""
        return [*COMMANDS, *sorted(find_other_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now; None if there is none."""
        if cmd_name in COMMANDS:
            module, name = COMMANDS[cmd_name].target.split(":")
            with importing():
                found = getattr(import_module(f"topoalign.{module}"), name)
        else:
            plugin = find_other_commands().get(cmd_name)
            found = plugin.load() if plugin is not None else None
        return found if isinstance(found, click.Command) else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completions of command names from the table, without an import of the commands."""
        commands = [
            CompletionItem(name, help=COMMANDS[name].help if name in COMMANDS else None)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)  # the group's own would import them all

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: commands by section, those of other packages in the section `More`."""
        sections = {
            title: [(name, entry.help) for name, entry in section.items()] for title, section in SECTIONS.items()
        }
        more = [(name, TOOLS.get(name, f"See `topoalign {name} --help`.")) for name in sorted(find_other_commands())]
        for title, rows in {**sections, "More": more}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def find_other_commands() -> dict[str, metadata.EntryPoint]:
    """Commands of other packages, by name. They cannot replace commands of the table."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in COMMANDS}


@click.command(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXAMPLES
)
@click.version_option(package_name="topoalign", message="topoalign %(version)s")
def topoalign() -> None:
    """Topology-aware GPU allocation: which GPUs, CPUs, memory and NICs a pod gets on a node."""


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs one command line, prints its errors, and returns its exit code."""
    as_json = "--json" in arguments
    try:
        status = topoalign.main(list(arguments), prog_name="topoalign", standalone_mode=False)
        sys.stdout.flush()
    except exit_codes.REPORTED as error:
        return exit_codes.report(error, as_json)
    return status if isinstance(status, int) else exit_codes.OK
