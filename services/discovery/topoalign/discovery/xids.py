"""
The effect of an XID on the health of its GPU.

NVIDIA's catalogue has an action for each XID (`XID_CATALOG`). For most XIDs, the action is to restart the application
or to do nothing: the GPU works correctly and stays healthy. After others, the GPU may compute wrong results until it is
reset or replaced. For some, the driver reports what the GPU needs, so the next reading decides. After an XID without an
action, the GPU is unhealthy until a quiet time has passed; NVIDIA's device plugin makes it unhealthy, too.

Sources: NVIDIA's catalogue; the variables of NVIDIA's device plugin v0.20.0 that list XIDs.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.plugin_config import nvidia_fields

# The meaning of each XID, and its immediate action in NVIDIA's catalogue.
#
# An XID is the number that NVIDIA's driver assigns to an error of a GPU. The catalogue has an immediate action for
# each. For some XIDs, the driver itself reports what the GPU needs, as its recovery action. Numbers that are unused or
# have no action in the catalogue are omitted here; GPUs before Ampere report some of them.
#
# Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (A100 to GB200), read in November 2026. XID 45 is ignored,
# as by NVIDIA's device plugin, because the error that precedes it has its own XID. XIDs 162 to 165 concern only power
# smoothing.


class Action(Enum):
    """The immediate action, as a text for users."""

    NONE = "nothing is to be done"
    RESTART_APPLICATION = "restart the application"
    READ_RECOVERY_ACTION = "the driver reports what the GPU needs"
    RESET_GPU = "reset the GPU"
    RESTART_NODE = "reboot the node"
    CONTACT_SUPPORT = "contact the vendor"


# Short description -> the XIDs with this meaning; one mapping for each action.

APPLICATION: Mapping[str, tuple[int, ...]] = {
    "GPU stopped processing": (8,),
    "invalid commands of a program": (11, 25, 32),
    "graphics engine exception": (13,),
    "memory page fault": (31,),
    "copy engine error": (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    "video processor exception": (60,),
    "video decoder error": (68, 83, 84, 88, 89, 96, 97, 98),
    "graphics engine class error": (69,),
    "corrupted data was sent to the GPU": (80,),
    "JPEG decoder error": (82, *range(99, 106)),
    "optical flow engine error": (86, 139),
    "contained memory error": (94,),
}
"""XIDs with the catalogue's action RESTART_APP."""

INFORMATION: Mapping[str, tuple[int, ...]] = {
    "injected error": (14,),
    "driver firmware error": (37, 38),
    "a channel was stopped": (43,),
    "graphics engine fault during a context switch": (44,),
    "clean-up after an earlier error": (45,),
    "a defective memory row was recorded": (63,),
    "illegal access by the driver": (66, 67),
    "many corrected memory errors": (92,),
    "the InfoROM may not be written any more": (93,),
    "test message": (106, 107),
    "illegal access over NVLink": (108, 137),
    "corrected errors of the link to the CPU": (121,),
    "CUDA fast path error": (141,),
    "deep learning accelerator error": (152, 153),
    "no resources are left to retire defective ones": (157,),
    "channel retirement": (160, 161),
    "power smoothing": (162, 163, 164, 165),
}
"""XIDs with the catalogue's action IGNORE."""

RECOVERY_ACTION_XID = 154
"""The XID which reports that the recovery action of the GPU has changed."""

BY_RECOVERY_ACTION = {
    "NVLink error": tuple(range(144, 151)),
    "what it needs to recover has changed": (RECOVERY_ACTION_XID,),
    "error of the link to the CPU": (159,),
    "details of an uncorrectable memory error": (171, 172),
}
"""Actions XID_154, WORKFLOW_NVLINK5_ERR and CHECK_UVM, which refer to XID 154, and the XIDs that come with XID 48."""

RESET = {
    "GPU stopped processing": (46,),
    "uncorrectable memory error": (48,),
    "the GPU's own controller has halted": (62,),
    "a defective memory row could not be recorded": (64,),
    "NVLink error": (74, 155),
    "uncontained memory error": (95,),
    "context switch timeout": (109,),
    "security fault": (110,),
    "the GPU's firmware does not answer": (119,),
    "the GPU's firmware has failed": (120,),
    "NVLink training failed": (136,),
    "unrecovered memory error": (140,),
    "the GPU could not be initialized": (143,),
    "a defective resource is to be retired": (156,),
    "fatal timeout of the GPU": (158,),
}
"""XIDs with the actions RESET_GPU, WORKFLOW_XID_48 and WORKFLOW_NVLINK_ERR."""

REBOOT = {"the GPU has fallen off the bus": (79,), "key rotation error": (151,)}
"""XIDs with the actions RESTART_BM and RESTART_VM."""

SUPPORT = {
    "auxiliary power is not connected": (54,),
    "the vGPU software does not match": (78,),
    "video encoder error": (142,),
}
"""XIDs with the actions CONTACT_SUPPORT, CHECK_MECHANICALS and UPDATE_SWFW."""

XID_CATALOG: Mapping[int, tuple[str, Action]] = {
    xid: (meaning, action)
    for action, meanings in {
        Action.RESTART_APPLICATION: APPLICATION,
        Action.NONE: INFORMATION,
        Action.READ_RECOVERY_ACTION: BY_RECOVERY_ACTION,
        Action.RESET_GPU: RESET,
        Action.RESTART_NODE: REBOOT,
        Action.CONTACT_SUPPORT: SUPPORT,
    }.items()
    for meaning, xids in meanings.items()
    for xid in xids
}
"""XID -> its short description, and the action."""

IGNORED_XIDS = frozenset(
    xid for xid, (_, action) in XID_CATALOG.items() if action in (Action.NONE, Action.RESTART_APPLICATION)
)
"""XIDs after which the GPU still works correctly."""

DISABLE, ENABLE = nvidia_fields.DP_VARIABLES
"""The variables with XIDs to ignore in addition to the configured ones, and with XIDs that are never ignored."""


class Severity(Enum):
    """What an XID means for the GPU's health."""

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
"""Severity of XIDs that are not ignored. XIDs with the first two actions are ignored by default."""


class XidRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules that decide which XIDs are ignored."""

    ignored: frozenset[int] = IGNORED_XIDS
    all_ignored: bool = False
    never_ignored: frozenset[int] = frozenset()
    """Takes precedence over the other two."""

    def severity(self, xid: int) -> Severity:
        """The severity of an XID by these rules."""
        if xid not in self.never_ignored and (self.all_ignored or xid in self.ignored):
            return Severity.IGNORED
        entry = XID_CATALOG.get(xid)
        return Severity.PASSING if entry is None else SEVERITIES[entry[1]]


def xid_rules(ignored: Iterable[int] | None, environment: Mapping[str, str]) -> XidRules:
    """The rules from the configured XIDs (None: the catalogue's) and NVIDIA's variables. Raises InvalidField."""
    disabled, every = _xids_of(DISABLE, environment)
    enabled, none = _xids_of(ENABLE, environment)  # `all` overrides `all` of the other variable, as in the plugin
    configured = IGNORED_XIDS if ignored is None else frozenset(ignored)
    return XidRules(ignored=configured | disabled, all_ignored=every and not none, never_ignored=enabled)


def _xids_of(variable: str, environment: Mapping[str, str]) -> tuple[frozenset[int], bool]:
    # returns the XIDs, and whether the variable selects all of them: `xids` means the same as `all`
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
    return f"XID {xid}" if entry is None else f"XID {xid} ({entry[0]}: {entry[1].value})"
