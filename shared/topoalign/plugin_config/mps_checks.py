"""
Checks of what MPS is to do: share GPUs in equal parts (`sharing.mps`), or limit their units and slots (`sharing.limiter`).
"""

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import GPU, NIC
from topoalign.plugin_config.configuration import Configuration

MOST_CLIENTS = 48
"""Of an MPS server on a GPU, whatever its architecture: more replicas are refused by NVIDIA's device plugin, too."""


def check_mps(found: Configuration, mig_prefix: str) -> None:
    """
    Raises InvalidField for what MPS cannot share, as NVIDIA's device plugin v0.20.0 does, and for two ways to share.
    Resources of MIG instances begin with `mig_prefix`.
    """
    mps = found.sharing.mps
    if not mps.resources:
        return
    if found.flags.mig_strategy == "mixed":
        raise InvalidField("flags.migStrategy", "mixed cannot be used with sharing.mps", "use none or single")
    check_root(found, "sharing.mps")
    whole = {str(GPU), *(each.name for each in found.resources.gpus)}
    no_gpus = {str(NIC), *(each.name for each in found.nics), *({each.name for each in found.resources.mig} - whole)}
    in_time = {name for each in found.sharing.time_slicing.resources for name in (each.name, each.rename)}
    replicas: dict[str, int] = {}
    for place, each in enumerate(mps.resources):
        path = f"sharing.mps.resources[{place}]"
        called = each.rename or each.name
        if not 2 <= each.replicas <= MOST_CLIENTS:
            finding = f"{each.replicas} shares of a GPU by MPS"
            raise InvalidField(f"{path}.replicas", finding, f"use 2 to {MOST_CLIENTS}: a server has no more clients")
        if each.name in no_gpus or each.name.startswith(mig_prefix):
            raise InvalidField(
                f"{path}.name", f"{each.name} is not a resource of whole GPUs", "share it by timeSlicing"
            )
        if not in_time.isdisjoint((each.name, called)):
            finding = f"{called} is shared by timeSlicing, too"
            raise InvalidField(f"{path}.name", finding, "share it in one way, or give some GPUs a name of their own")
        if replicas.setdefault(called, each.replicas) != each.replicas:
            finding = f"{called} has {replicas[called]} shares of other GPUs, and one daemon has one limit for all"
            raise InvalidField(f"{path}.replicas", finding, "use the same number, or another rename")
        if each.devices != "all" and called == each.name and not mps.fail_requests_greater_than_one:
            finding = "a container could get a share and a whole GPU, which its daemon does not serve"
            raise InvalidField(f"{path}.rename", finding, "give the shares a name of their own")


def check_limiter(found: Configuration, mig_prefix: str) -> None:
    """Raises InvalidField where MPS is to limit nothing, MIG instances, or more containers than a server has clients."""
    slots = found.sharing.slots
    if slots is None and found.sharing.units is None:
        remedy = (
            "add sharing.units or sharing.slots, or leave the limiter out: shares by sharing.mps are limited anyway"
        )
        raise InvalidField("sharing.limiter", "mps limits GPUs in units or slots, and none are offered so", remedy)
    if slots is not None:
        instances = {each.name for each in found.resources.mig} - {
            str(GPU),
            *(each.name for each in found.resources.gpus),
        }
        if slots.name in instances or slots.name.startswith(mig_prefix):
            finding = f"mps does not limit MIG instances, which {quoted([slots.name])} is a resource of"
            remedy = "leave the limiter out: an instance keeps its containers from other instances"
            raise InvalidField("sharing.limiter", finding, remedy)
        if slots.replicas > MOST_CLIENTS:
            finding = f"{slots.replicas} slots of a GPU by MPS"
            remedy = f"use 2 to {MOST_CLIENTS}: a server has no more clients"
            raise InvalidField("sharing.slots.replicas", finding, remedy)
    check_root(found, "the limiter mps")


def check_root(found: Configuration, needed_by: str) -> None:
    """Raises InvalidField where there is no directory for the pipes of the daemons."""
    if not found.flags.mps_root:
        remedy = "name the directory on the host where topoalign mps has its pipes, such as /run/nvidia/mps"
        raise InvalidField("flags.mpsRoot", f"is missing, and {needed_by} needs it", remedy)
