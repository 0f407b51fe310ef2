"""
The effect of an XID on the health of its GPU.

NVIDIA's catalogue has an action for each XID (`xid_catalog`). After most the application is restarted, or nothing is done:
the GPU is as good as before, and stays healthy. After others it may give wrong results until it was reset or replaced. Of
some the driver reports what the GPU needs, so a reading decides. After an XID without an action the GPU is out of use for a
while; NVIDIA's device plugin makes it unhealthy, too.

Sources: NVIDIA's catalogue; the variables of NVIDIA's device plugin v0.20.0 that name XIDs.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.discovery.xid_catalog import XID_CATALOG, Action
from topoalign.plugin_config import nvidia

IGNORED_XIDS = frozenset(
    xid for xid, each in XID_CATALOG.items() if each.action in (Action.NONE, Action.RESTART_APPLICATION)
)
"""After these the GPU is as good as before."""

DISABLE, ENABLE = nvidia.DP_VARIABLES
"""XIDs to ignore beside the configured ones, and XIDs that are never ignored."""


class Severity(Enum):
    """What becomes of the GPU."""

    IGNORED = "it is as good as before"
    READ = "the next reading decides"
    PASSING = "it is out of use until it has been quiet for a while and a reading finds it all right"
    LASTING = "it is out of use until it was reset"


SEVERITIES: Mapping[Action, Severity] = {
    Action.NONE: Severity.PASSING,
    Action.RESTART_APPLICATION: Severity.PASSING,
    Action.READ_RECOVERY_ACTION: Severity.READ,
    Action.RESET_GPU: Severity.LASTING,
    Action.RESTART_NODE: Severity.LASTING,
    Action.CONTACT_SUPPORT: Severity.LASTING,
}
"""Of XIDs that are not ignored. The first two are ignored by default."""


class XidRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which XIDs are ignored."""

    ignored: frozenset[int] = IGNORED_XIDS
    all_ignored: bool = False
    never_ignored: frozenset[int] = frozenset()
    """Takes precedence over the other two."""

    def severity(self, xid: int) -> Severity:
        """The severity of an XID by these rules."""
        if xid not in self.never_ignored and (self.all_ignored or xid in self.ignored):
            return Severity.IGNORED
        entry = XID_CATALOG.get(xid)
        return Severity.PASSING if entry is None else SEVERITIES[entry.action]


def xid_rules(ignored: Iterable[int] | None, environment: Mapping[str, str]) -> XidRules:
    """
    The configured XIDs, None for those of the catalogue, and what NVIDIA's variables add to them. Raises InvalidField for a
    variable that is no list.
    """
    disabled, every = xids_of(DISABLE, environment)
    enabled, none = xids_of(ENABLE, environment)  # `all` takes back the other variable's `all`, as there
    configured = IGNORED_XIDS if ignored is None else frozenset(ignored)
    return XidRules(ignored=configured | disabled, all_ignored=every and not none, never_ignored=enabled)


def xids_of(variable: str, environment: Mapping[str, str]) -> tuple[frozenset[int], bool]:
    """The XIDs of such a variable, and whether it names all (`all`, or `xids`, which means the same)."""
    words = [word.strip().lower() for word in environment.get(variable, "").split(",")]
    if "all" in words or "xids" in words:
        return frozenset(), True
    wrong = [word for word in words if word and not (word.isascii() and word.isdigit() and len(word) < 10)]
    if wrong:
        raise InvalidField(variable, f"{quoted(wrong)} is no XID", "set it to `all`, or to numbers with commas between")
    return frozenset(int(word) for word in words if word), False


def describe_xid(xid: int) -> str:
    """`XID 95 (uncontained memory error: reset the GPU)`."""
    entry = XID_CATALOG.get(xid)
    return f"XID {xid}" if entry is None else f"XID {xid} ({entry.meaning}: {entry.action.value})"
