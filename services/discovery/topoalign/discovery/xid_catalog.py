"""
What each XID means, and the immediate action that NVIDIA's catalogue asks for.

An XID is the number that NVIDIA's driver gives to an error of a GPU. The catalogue has an immediate action for each. Of
some the driver itself reports what the GPU needs, as its recovery action. Numbers that the catalogue calls unused, or gives
no action, are not here: GPUs before Ampere report some of them.

Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (A100 to GB200), read in November 2026. XID 45 is ignored, as by
NVIDIA's device plugin: the error that it follows has an XID of its own. 162 to 165 concern power smoothing alone.
"""

from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec


class Action(Enum):
    """The immediate action, in words for people."""

    NONE = "nothing is to be done"
    RESTART_APPLICATION = "restart the application"
    READ_RECOVERY_ACTION = "the driver reports what the GPU needs"
    RESET_GPU = "reset the GPU"
    RESTART_NODE = "reboot the node"
    CONTACT_SUPPORT = "contact the vendor"


class CatalogEntry(msgspec.Struct, frozen=True):
    """An XID of the catalogue."""

    meaning: str
    action: Action


def catalog_entries(action: Action, meanings: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, CatalogEntry]]:
    """Each XID with its entry. `meanings`: in a few words -> the XIDs that mean it."""
    for meaning, xids in meanings.items():
        for xid in xids:
            yield xid, CatalogEntry(meaning, action)


APPLICATION = {
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
"""RESTART_APP."""

INFORMATION = {
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
"""IGNORE."""

RECOVERY_ACTION_XID = 154
"""What the GPU needs to recover has changed."""

BY_RECOVERY_ACTION = {
    "NVLink error": tuple(range(144, 151)),
    "what it needs to recover has changed": (RECOVERY_ACTION_XID,),
    "error of the link to the CPU": (159,),
    "details of an uncorrectable memory error": (171, 172),
}
"""XID_154, WORKFLOW_NVLINK5_ERR and CHECK_UVM, which the catalogue links to XID 154, and what comes beside XID 48."""

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
"""RESET_GPU, WORKFLOW_XID_48 and WORKFLOW_NVLINK_ERR."""

REBOOT = {"the GPU has fallen off the bus": (79,), "key rotation error": (151,)}
"""RESTART_BM and RESTART_VM."""

SUPPORT = {
    "auxiliary power is not connected": (54,),
    "the vGPU software does not match": (78,),
    "video encoder error": (142,),
}
"""CONTACT_SUPPORT, CHECK_MECHANICALS and UPDATE_SWFW."""

XID_CATALOG: Mapping[int, CatalogEntry] = dict(
    sorted(
        (
            *catalog_entries(Action.RESTART_APPLICATION, APPLICATION),
            *catalog_entries(Action.NONE, INFORMATION),
            *catalog_entries(Action.READ_RECOVERY_ACTION, BY_RECOVERY_ACTION),
            *catalog_entries(Action.RESET_GPU, RESET),
            *catalog_entries(Action.RESTART_NODE, REBOOT),
            *catalog_entries(Action.CONTACT_SUPPORT, SUPPORT),
        )
    )
)
