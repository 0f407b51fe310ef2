"""`topoalign topo`: the matrix in the format of `nvidia-smi topo -m`, of a described machine or a running node."""

from pathlib import Path

import click

from topoalign.cli import options, output
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.machines import catalogue


@click.group(invoke_without_command=True, epilog=f"Machines of the catalogue: {', '.join(catalogue.names())}")
@options.MACHINE
@options.NODE
@options.NATS
@click.option("--wide", is_flag=True, help="More columns, to the right of those of nvidia-smi.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole topology as JSON.")
@click.pass_context
def topo(
    ctx: click.Context,
    machine: str | None,
    node: str | None,
    nats: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """
    Show how the GPUs and NICs of a machine are connected, in the format of `nvidia-smi topo -m`.

    FILE is any file that `topo import` reads. Without --machine: the topology of a running node, else of this machine.

    \b
    Examples:
      topoalign topo --machine dgx-a100
      topoalign topo --machine pasted.txt --wide
      topoalign topo --json | jq '.gpus[].pci'
    """
    if ctx.invoked_subcommand is not None:
        return
    used_by: dict[DeviceID, str] = {}
    if machine is not None:
        from topoalign.machines import load_machine  # the readers are not needed for a running node

        topology = load_machine(machine).topology
    else:
        from topoalign.cli import link  # imports the libraries for the network

        status = link.read_node_or_machine(node, nats)
        topology = status.topology
        used_by = {device: ", ".join(pods) for device, pods in status.holders.items()}
    if as_json:
        output.print_json(topology)
        return
    from topoalign.machines.nvidia_smi_print import print_matrix  # JSON needs no printer

    output.print_line(print_matrix(topology, wide, used_by).removesuffix("\n"))
    # On stderr, so that stdout has only the matrix, as with nvidia-smi.
    for gpu, finding in degraded_gpus(topology).items():
        output.note(f"GPU{topology.gpu_by_id[gpu].index} is degraded: {finding}")


@topo.command(name="import")
@click.argument("source", metavar="FILE|-")
@click.option(
    "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file."
)
def import_machine(source: str, target: Path | None) -> None:
    """
    Read a description of a machine and print it as topoalign's own JSON, which --machine accepts.

    The input is the output of `nvidia-smi topo -m`, lstopo's XML, a captured sysfs tree (a folder, or an archive of one) or
    topoalign's own JSON.

    \b
    Examples:
      nvidia-smi topo -m | topoalign topo import - --output this.json
      lstopo --of xml | topoalign topo import -
    """
    from topoalign.machines import document, load_machine  # as above

    machine = load_machine(source)
    written = output.escape_json(document.encode_machine(machine))
    if target is None:
        output.print_line(written.removesuffix("\n"))
        return
    target.write_text(written, "utf-8")
    output.note(f"{clean(str(target), 200)}: {clean(machine.name)}, {machine.topology.describe()}")
