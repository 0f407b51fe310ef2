"""Which rules a request for an allocation may choose; the others are the node's own."""

from topoalign.core.model.errors import InvalidField, clean

CHOICES = frozenset({"policy", "scope", "mode", "placement", "compat", "prefer_closest_numa_nodes"})


def allowed(changes: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """
    The same changes, if somebody who asks for a pod may make them. What the node keeps for itself is not among them; a
    prediction may assume anything. Raises InvalidField that names the rule.
    """
    for name in sorted(changes.keys() - CHOICES):
        raise InvalidField(
            f"rules.{clean(name)}", "is the node's own", f"choose {', '.join(sorted(CHOICES))} per request"
        )
    return changes
