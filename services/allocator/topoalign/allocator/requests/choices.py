"""Which rules a request for an allocation may choose; the others are the node's own."""

from topoalign.core.model.errors import InvalidField, clean

CHOICES = frozenset({"policy", "scope", "mode", "placement", "compat", "prefer_closest_numa_nodes"})


def allowed(changes: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """
    Returns the changes of rules in a request for an allocation, if all are in `CHOICES`.

    Raises InvalidField that names the first rule that is the node's own. A prediction may change any rule.
    """
    for name in sorted(changes.keys() - CHOICES):
        raise InvalidField(
            f"rules.{clean(name)}", "is the node's own", f"choose {', '.join(sorted(CHOICES))} per request"
        )
    return changes
