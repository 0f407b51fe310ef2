"""
The effect of an XID on the health of its GPU.

An XID is the number that NVIDIA's driver gives to an error. Most XIDs report a defect of a program, and the GPU is as
good as before; some report a GPU that gives wrong results until it was reset. This module alone decides what each XID
means for the next pod.

Sources: the XIDs that NVIDIA's device plugin v0.20.0 ignores and its variables to change that; NVIDIA's documents "Xid
Errors" and "GPU Memory Error Management" for those after which a GPU needs a reset.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.plugin_config import nvidia

APPLICATION_XIDS = (13, 31, 43, 45, 68, 109)
"""Errors of a program, after which the GPU is as good as before: what NVIDIA's device plugin ignores."""

LASTING_XIDS: Mapping[int, str] = {
    48: "uncorrectable memory error",
    62: "the GPU's own controller has halted",
    64: "a defective memory row could not be recorded",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware has failed",
    140: "unrecovered memory error",
}
"""XID -> what it means. Nothing that the GPU does is to be trusted any more until it was reset."""

RECOVERY_ACTION_XID = 154
"""What the GPU needs to recover has changed. A reading says what it needs now, and whether it needs anything."""

MEANINGS: Mapping[int, str] = {
    **LASTING_XIDS,
    13: "graphics engine exception",
    31: "memory page fault",
    43: "a channel was stopped",
    45: "clean-up after an earlier error",
    63: "a defective memory row was recorded",
    68: "video processor exception",
    92: "many corrected memory errors",
    94: "contained memory error",
    109: "context switch timeout",
    RECOVERY_ACTION_XID: "what it needs to recover has changed",
}

DISABLE, ENABLE = nvidia.DP_VARIABLES
"""XIDs to ignore beside the usual ones, and XIDs to heed whatever else is said."""


class Gravity(Enum):
    """What becomes of the GPU."""

    IGNORED = "it is as good as before"
    LOOK = "a reading is to tell"
    PASSING = "it is out of use until it has been quiet for a while and a reading finds it all right"
    LASTING = "it is out of use until it was reset"


class XidRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which XIDs are ignored."""

    ignored: frozenset[int] = frozenset(APPLICATION_XIDS)
    all_ignored: bool = False
    heeded: frozenset[int] = frozenset()
    """Whatever the other two say."""

    def gravity(self, xid: int) -> Gravity:
        """The severity of an XID by these rules."""
        if xid not in self.heeded and (self.all_ignored or xid in self.ignored):
            return Gravity.IGNORED
        if xid == RECOVERY_ACTION_XID:
            return Gravity.LOOK
        return Gravity.LASTING if xid in LASTING_XIDS else Gravity.PASSING


def xid_rules(ignored: Iterable[int], environment: Mapping[str, str]) -> XidRules:
    """The configured XIDs, and what NVIDIA's variables add to them. Raises InvalidField for a variable that is no list."""
    disabled, every = xids_of(DISABLE, environment)
    heeded, none = xids_of(ENABLE, environment)  # `all` takes back the other variable's `all`, as there
    return XidRules(ignored=frozenset(ignored) | disabled, all_ignored=every and not none, heeded=heeded)


def xids_of(variable: str, environment: Mapping[str, str]) -> tuple[frozenset[int], bool]:
    """The XIDs of such a variable, and whether it names all (`all`, or `xids`, which means the same)."""
    words = [word.strip().lower() for word in environment.get(variable, "").split(",")]
    if "all" in words or "xids" in words:
        return frozenset(), True
    wrong = [word for word in words if word and not (word.isascii() and word.isdigit() and len(word) < 10)]
    if wrong:
        raise InvalidField(variable, f"{quoted(wrong)} is no XID", "set it to `all`, or to numbers with commas between")
    return frozenset(int(word) for word in words if word), False


def worded(xid: int) -> str:
    """`XID 79 (the GPU has fallen off the bus)`."""
    meaning = MEANINGS.get(xid)
    return f"XID {xid}" if meaning is None else f"XID {xid} ({clean(meaning)})"
