"""
Names by which pods written for other GPU schedulers ask for GPUs, and names that were probably meant.

`SETTINGS` has, for each such resource, the setting by which a node serves it. `nearest_name` finds the known name that a
misspelt one was probably meant for: the same domain and a similar rest, where case and the marks `-`, `_` and `.` do not
count. `nvidia.com/gpus` is near `nvidia.com/gpu`, and `hami.io/use-gpu-uuid` has the rest of `nvidia.com/use-gpuuuid`.

Sources: HAMi 4707fb02, tkestack/gpu-manager 8cd842ed, koordinator a7a1b76b and volcano-vgpu-device-plugin 4fb76ba1, their
READMEs, examples and device documents.
"""

from collections.abc import Iterable, Mapping

from topoalign.core.demand.shares import USUAL_NAMES, USUAL_SLOTS
from topoalign.core.deviceshare.names import FPGA, GPU_RESOURCES, RDMA
from topoalign.core.model.ids import GPU, NIC, ResourceName

MARKS = str.maketrans("", "", "-_.")
SAME_DOMAIN = 0.75
"""How alike domains are at least: twice the characters in common, of those of both."""
SIMILAR = 0.7
"""The same of the rests of names."""
LONGEST = 100
"""Characters of a name that are compared."""

VOLCANO = tuple(f"volcano.sh/vgpu-{each}" for each in ("number", "memory", "memory-percentage", "cores"))
OLD_KOORDINATOR = tuple(f"kubernetes.io/gpu{each}" for each in ("", "-core", "-memory", "-memory-ratio"))
"""Koordinator's names for GPUs before it had a domain of its own."""

IN_SLOTS = "offer GPUs in slots (`sharing.slots` in the plugin configuration)"
IN_UNITS = "offer GPUs in units (`sharing.units` in the plugin configuration)"
AS_VOLCANO = "give slots of GPUs Volcano's names (`resources.gpus` and `sharing.slots` in the plugin configuration)"
NOT_BY_KUBELET = (
    "ask for slots (nvidia.com/gpu with nvidia.com/gpucores and nvidia.com/gpumem-percentage), for units "
    "(tencent.com/vcuda-core, tencent.com/vcuda-memory), or for whole GPUs (nvidia.com/gpu); or give slots Koordinator's "
    "names in the plugin configuration"
)
SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(USUAL_SLOTS.slots.resources, IN_SLOTS),
    **dict.fromkeys(USUAL_NAMES, IN_UNITS),
    **dict.fromkeys(VOLCANO, AS_VOLCANO),
    **dict.fromkeys((*GPU_RESOURCES, *OLD_KOORDINATOR), NOT_BY_KUBELET),
    RDMA: f"ask for {NIC}, or in a pod that asks for {GPU} use it with the annotation device-joint-allocate",
    FPGA: "topoalign gives out no FPGAs: leave it out",
}
"""Resource -> how a node comes to serve it, or how a pod asks for the same."""


def setting_for(name: ResourceName) -> str:
    """How a node comes to serve this resource; empty: nothing is known of it."""
    if name.startswith("nvidia.com/mig-"):
        return "offer MIG instances (`flags.migStrategy: mixed`), and create instances of this profile"
    if name.endswith(".shared") and name.startswith("nvidia.com/"):
        return "share GPUs in time with `renameByDefault: true` (`sharing.timeSlicing` in the plugin configuration)"
    return SETTINGS.get(name, "")


def nearest_name(name: str, known: Iterable[str], *, any_domain: bool = False) -> str | None:
    """
    The known name that this one was probably meant for; None: there is none. `any_domain`: a name of another domain counts
    as well, if the rest is the same.
    """
    domain, rest = domain_and_rest(name)
    best: tuple[float, str] | None = None
    for each in sorted({*known} - {name}):
        other_domain, other_rest = domain_and_rest(each)
        domains = likeness(domain, other_domain, SAME_DOMAIN)
        if not domains and not (any_domain and rest == other_rest):
            continue
        rests = likeness(rest, other_rest, SIMILAR)
        if rests and (best is None or rests + domains > best[0]):
            best = rests + domains, each
    return None if best is None else best[1]


def domain_and_rest(name: str) -> tuple[str, str]:
    """The domain, and the rest without marks: `nvidia.com/use-gpuuuid` is `nvidia.com` and `usegpuuuid`."""
    domain, _, rest = name[:LONGEST].lower().rpartition("/")
    return domain, rest.translate(MARKS)


def likeness(one: str, other: str, least: float) -> float:
    """Twice the characters that both have in common, of those of both; 0 where that is below `least`."""
    if one == other:
        return 1.0
    from difflib import SequenceMatcher  # here, because seldom anything is misspelt

    matcher = SequenceMatcher(None, one, other, autojunk=False)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio)  # upper ones, each in less time than the ratio
    return matcher.ratio() if all(bound() >= least for bound in bounds) and matcher.ratio() >= least else 0.0
