"""What the registry can be told from outside."""

import msgspec


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each."""

    registry_ask_seconds: float = 10.0
    """Between two rounds of asking every allocator whether it is there. A node whose allocator does not answer is shown as
    stale; ten seconds is well below the minutes after which a cluster gives up a node."""

    registry_answer_seconds: float = 2.0
    """How long an allocator may take to answer that."""
