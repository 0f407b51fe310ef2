"""Formats allocations and decisions as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from topoalign.cli import output
from topoalign.cli.gpu_partitioning import format_parts
from topoalign.core.model.allocations import OWNER_CHARACTERS
from topoalign.core.model.decisions import Alignment, Decision, Explanation, Refusal
from topoalign.core.model.errors import clean
from topoalign.core.model.events import Allocation, MemoryBlock, Owner
from topoalign.core.model.hints import HintRule, Hints, TopologyHint
from topoalign.core.model.holdings import UnitKind, base_of, unit_kind
from topoalign.core.model.ids import MEMORY, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.device_names import NamedDevice, name_device, named_devices
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.preference import seam_of
from topoalign.core.state.gpu_partitioning import Parts

MOST_HINTS = 8
"""Maximum number of hints of one resource in text output; the JSON output has all."""
BY_POLICY = "TopologyAffinityError"
"""The kubelet's reason if its topology policy refuses a pod. Other reasons concern the pod's requests."""
SCORES = (
    "seam: the NVLinks, or else the PCIe path, between the two parts of a set where these are connected the worst, for any\n"
    "division into two parts. A collective is no faster than its seam.\n"
    "score: summed over all pairs of GPUs, 100 for each NVLink and 10 (SYS) to 60 (same board) for the PCIe path;\n"
    "of NICs, summed over their PCIe paths to the container's GPUs. More is better connected.\n"
    "Four GPUs with 12 NVLinks a pair and PIX: 6 pairs x 1250 = 7500."
)
"""The legend of the seams (`placement.gpus.bandwidth`) and scores (those of go-gpuallocator)."""


def owner(of: Owner | None) -> str:
    """`namespace/pod/container`."""
    return "not known yet" if of is None else clean(f"{of.namespace}/{of.pod}/{of.container}", OWNER_CHARACTERS)


def format_numa_nodes(nodes: Sequence[int] | None) -> str:
    """`0-1`; `any` for None, which is no affinity; `unknown` if empty."""
    return "any" if nodes is None else format_cpuset(nodes) or "unknown"


def show_allocation(allocation: Allocation, topology: Topology, *, decided: bool = True) -> None:
    """Prints an allocation, one line per device. `decided`: by topoalign; CPUs, memory and alignment are then known."""
    tentative = "/" in allocation.id  # named after its container: a prediction
    name = "would get" if tentative else f"allocation {clean(allocation.id, 120)}"
    output.print_line(output.heading(f"{owner(allocation.owner)}  ({name})"))
    if allocation.pod_uid:
        output.print_line(f"pod UID     {clean(allocation.pod_uid, 120)}")
    for former in allocation.displaced:
        shared = ", ".join(clean(device, 120) for ids in former.devices.values() for device in ids)
        output.print_line(
            f"shared      {shared} with {owner(former.owner)}, which was not seen to end: delete one of the two pods"
        )
    rows = [*device_rows(allocation, topology)]
    if rows:
        output.columns(("RESOURCE", "INDEX", "DEVICE", "PCI", "NUMA"), rows)
    gpus = {topology.parent_of(device) for device in allocation.device_ids} & topology.gpu_by_id.keys()
    if len(gpus) > 1:
        output.print_line(f"seam        {seam_of(topology, gpus)}")
    if not decided:
        output.print_line("CPUs        given by the kubelet, as are memory and alignment: not in this record")
        return
    output.print_line(f"CPUs        {allocation.cpus or 'shared pool'}")
    for block in allocation.memory:
        output.print_line(
            f"{'memory' if block.resource == MEMORY else clean(block.resource):<11} {format_memory_block(block)}"
        )
    output.print_line(f"aligned to  NUMA {format_numa_nodes(allocation.affinity)}")


def device_rows(allocation: Allocation, topology: Topology) -> Iterator[tuple[object, ...]]:
    """A row for each device, virtual function, and GPU with units. The row of a slot also has its part of the GPU."""
    for resource, ids in allocation.devices.items():
        units = Counter(base_of(device) for device in ids if unit_kind(device) is not None)
        plain = [device for device in ids if unit_kind(device) is None]
        for gpu, amount in units.items():
            at = name_device(topology, resource, gpu)
            yield _device_row(at, f"{amount} units of {gpu}", at.pci or "-")
        for at in named_devices(topology, {resource: plain}):
            amounts = allocation.slots.get(at.id)
            part = "" if amounts is None else format_parts(Parts(cores=amounts.cores, memory=amounts.memory))
            for address in [f"VF {each}" for each in allocation.virtual_functions.get(at.id, ())] or [at.pci or "-"]:
                yield _device_row(at, f"{at.id}: {part}" if part else at.id, address)


def _device_row(at: NamedDevice, device: str, address: str) -> tuple[object, ...]:
    return at.resource, "-" if at.index is None else at.index, device, address, format_numa_nodes(at.numa_affinity)


def format_memory_block(block: MemoryBlock) -> str:
    """`64 GiB on NUMA 0`."""
    return f"{binary(block.size)} on NUMA {format_cpuset(block.nodes)}"


def brief(allocation: Allocation, topology: Topology) -> str:
    """One allocation on one line."""
    parts = [clean(short) for name, ids in allocation.devices.items() for short in short_names(name, ids, topology)]
    parts += [f"CPUs {allocation.cpus}"] if allocation.cpus else []
    parts += [f"{clean(block.resource)} {format_memory_block(block)}" for block in allocation.memory]
    return " ".join(parts) or "nothing exclusive"


def show_refusal(refusal: Refusal) -> None:
    """Prints why a pod was refused, and what to do about it."""
    where = f"container {clean(refusal.container)}" if refusal.container is not None else "the pod as a whole"
    if refusal.provider is not None:
        where += f", by the {clean(refusal.provider)} manager"
    elif refusal.reason == BY_POLICY:
        where += ", by the topology policy"
    output.print_line(output.heading(f"refused: {clean(refusal.reason)} ({clean(refusal.code)})"))
    output.print_line(f"where    {where}")
    output.print_line(f"finding  {clean(refusal.finding, 1000)}")
    output.print_line(f"remedy   {clean(refusal.remedy, 1000)}")


def show_decision(decision: Decision, topology: Topology) -> None:
    """Prints a decision without its reasons; first what it does not cover."""
    show_not_covered(decision.explanation.not_covered)
    if isinstance(decision, Refusal):
        show_refusal(decision)
        return
    for allocation in decision.allocations:
        show_allocation(allocation, topology)
    for one in decision.explanation.considered:
        if one.alignment_cost:
            output.print_line(f"{shorts(one.resource, one.devices, topology)}: {one.seam}; {one.alignment_cost}")


def show_not_covered(things: Iterable[str]) -> None:
    """Prints what the pod requests and the answer does not cover."""
    for each in things:
        output.print_line(f"not covered: {clean(each, 1000)}")


def show_explanation(explanation: Explanation, topology: Topology) -> None:
    """Prints the reasons of a decision: the hints of each provider, the merge, the considered sets."""
    for alignment in explanation.alignments:
        _show_alignment(alignment)
    if explanation.considered:
        output.print_line()
        output.print_line(output.heading("Sets of devices that were considered"))
        output.columns(
            ("", "RESOURCE", "DEVICES", "SEAM", "SCORE", "WHY"),
            [
                (
                    "chosen" if one.chosen else "",
                    one.resource,
                    shorts(one.resource, one.devices, topology),
                    one.seam or "-",
                    one.score,
                    f"{one.why}; {one.alignment_cost}" if one.alignment_cost else one.why,
                )
                for one in explanation.considered
            ],
        )
        output.print_line()
        output.print_line(SCORES)


def _show_alignment(alignment: Alignment) -> None:
    whose = "pod as a whole" if alignment.container is None else f"container {clean(alignment.container)}"
    output.print_line()
    output.print_line(output.heading(f"Hints for {whose}"))
    rows = [
        (provider, resource, hints_text(hints))
        for provider, resources in alignment.hints.items()
        for resource, hints in (resources or {ResourceName("-"): None}).items()
    ]
    output.columns(("PROVIDER", "RESOURCE", "HINTS (* preferred)"), rows)
    verdict = "admitted" if alignment.admitted else "refused by the policy"
    output.print_line(f"merged: {hint_text(alignment.merged)}, {verdict}")


def hints_text(hints: Hints) -> str:
    """The hints of one resource on one line, at most `MOST_HINTS` of a list."""
    if hints is None:
        return "no preference"
    if isinstance(hints, HintRule):
        besides = "".join(
            f" or {hint_text(TopologyHint(mask, mask.bit_count() == hints.least))}" for mask in hints.besides
        )
        return f"any {hints.least}* or more of {{{format_cpuset(nodes_of(hints.nodes))}}} that have enough{besides}"
    if not hints:
        return "cannot be met"
    text = " ".join(hint_text(hint) for hint in hints[:MOST_HINTS])
    return text if len(hints) <= MOST_HINTS else f"{text} and {len(hints) - MOST_HINTS} more"


def hint_text(hint: TopologyHint) -> str:
    """`{0-1}*`: the NUMA nodes of a hint; `*` marks a preferred one."""
    affinity = "{any}" if hint.affinity is None else "{" + format_cpuset(nodes_of(hint.affinity)) + "}"
    return affinity + ("*" if hint.preferred else "")


def shorts(resource: ResourceName, devices: Iterable[DeviceID], topology: Topology) -> str:
    """`GPU0 GPU1 GPU2`."""
    return " ".join(short_names(resource, devices, topology))


def short_names(resource: ResourceName, devices: Iterable[DeviceID], topology: Topology) -> Iterator[str]:
    """`GPU0`, `GPU1::3` and so on; of units `20 cores of GPU0`, `16 blocks of GPU0`."""
    units: Counter[tuple[DeviceID, UnitKind]] = Counter()
    plain: list[DeviceID] = []
    for device in devices:
        if (kind := unit_kind(device)) is None:
            plain.append(device)
        else:
            units[base_of(device), kind] += 1
    for (gpu, kind), amount in units.items():
        yield f"{amount} {'cores' if kind == 'cores' else 'blocks'} of {name_device(topology, resource, gpu).short}"
    yield from (device.short for device in named_devices(topology, {resource: plain}))


def binary(size: int) -> str:
    """A size in bytes as text, `64 GiB`: in the largest unit with a value of at least 1, with one decimal if needed."""
    for power, unit in reversed(tuple(enumerate(("KiB", "MiB", "GiB", "TiB"), 1))):
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{size} B"
