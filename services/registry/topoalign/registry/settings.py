"""The settings of the registry."""

import msgspec


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each."""

    registry_ask_seconds: float = 10.0
    """Seconds between two rounds in which every allocator is asked whether it is alive. A node whose allocator does not
    answer is shown as stale; ten seconds is well below the minutes after which a cluster gives up a node."""

    registry_answer_seconds: float = 2.0
    """Seconds that an allocator may take to answer this question."""

    registry_allocation_series: bool = True
    """Whether /metrics has `topoalign_gpu_allocation_info`: one series for each allocated GPU, with the names of its pod.
    `false` saves most of the page's size where no dashboard joins with these names."""
