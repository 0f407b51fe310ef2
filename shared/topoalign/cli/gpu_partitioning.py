"""Formats the partitioning of GPUs as text: `20 cores, 4096 MiB`, `3 slices`, `1g.10gb`."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from topoalign.core.model.allocations import OWNER_CHARACTERS
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.device_names import name_device
from topoalign.core.model.topology.mig import free_placements, occupied_placements
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts, UsedParts


def format_parts(parts: Parts) -> str:
    """`20 cores, 4096 MiB`; empty: nothing."""
    amounts = ["whole"] if parts.whole else []
    amounts += [f"{clean(profile)}" for profile in parts.instances]
    amounts += [f"{parts.slices} slice{'' if parts.slices == 1 else 's'}"] if parts.slices else []
    amounts += [f"{parts.slots} slot{'' if parts.slots == 1 else 's'}"] if parts.slots else []
    amounts += [f"{parts.cores} cores"] if parts.cores else []
    amounts += [f"{parts.memory // MIB} MiB"] if parts.memory else []
    return ", ".join(amounts)


def format_remaining(partitioning: GpuPartitioning) -> str:
    """The remaining amounts of a GPU: `80 cores, 77824 MiB`, `2 slices`, `whole` or `nothing`."""
    return format_parts(partitioning.left) or "nothing"


def format_strategy(partitioning: GpuPartitioning) -> str:
    """`units`, `MIG, time slices`, or `not offered`."""
    return ", ".join(partitioning.ways) or "not offered"


def holder_text(held: UsedParts) -> str:
    """
    A holder of a GPU with its share: `ml/train/main: 20 cores, 4096 MiB`. For an init container, also the part that
    later containers do not reuse, which counts in addition: `ml/prepare/init: 60 cores (30 cores of it alone)`.
    """
    owner = held.owner
    name = "?" if owner is None else f"{owner.namespace}/{owner.pod}/{owner.container}"
    lost = ", its MIG instance is gone" if held.lost else ""
    alone = f" ({format_parts(held.alone) or 'nothing'} of it alone)" if held.is_left else ""
    return f"{clean(name, OWNER_CHARACTERS)}: {format_parts(held.parts)}{lost}{alone}"


def partitioning_document(partitioning: GpuPartitioning) -> dict[str, object]:
    """The partitioning of a GPU as JSON, without empty amounts; memory in bytes."""
    return {
        "ways": partitioning.ways,
        **({"limiter": partitioning.limiter} if partitioning.limiter is not None else {}),
        "held": [
            {
                "owner": None if each.owner is None else msgspec.to_builtins(each.owner),
                **_parts_document(each.parts),
                **({"lost": each.lost} if each.lost else {}),
                **({"alone": _parts_document(each.alone)} if each.is_left else {}),
            }
            for each in partitioning.held
        ],
        "left": _parts_document(partitioning.left),
    }


def mig_document(gpu: Gpu | None) -> dict[str, object]:
    """
    The field `mig_profiles` of a GPU for JSON output; empty if it has none. `free`: the starts at which another
    instance can be created now; null if the placement of an instance is unknown. `gpu`: None for other devices.
    """
    if gpu is None or not gpu.mig_profiles:
        return {}
    taken = occupied_placements(gpu.mig or ())
    profiles = [
        {
            **msgspec.to_builtins(each),
            "free": None if taken is None else [place.start for place in free_placements(each, taken)],
        }
        for each in gpu.mig_profiles
    ]
    return {"mig_profiles": profiles}


def _parts_document(parts: Parts) -> dict[str, object]:
    return {name: amount for name, amount in parts._asdict().items() if amount}


def list_partitioning_rows(
    topology: Topology, gpus: Iterable[tuple[DeviceID, GpuPartitioning]]
) -> Iterator[Sequence[str]]:
    """Rows of a table: GPU, sharing strategy, holders with their shares (one a row), and remaining amounts."""
    for gpu, partitioning in gpus:
        name = name_device(topology, GPU, gpu).short
        first, *others = [holder_text(each) for each in partitioning.held] or ["-"]
        yield name, format_strategy(partitioning), first, format_remaining(partitioning)
        yield from (("", "", each, "") for each in others)
