"""The last step of every reader: refuses a machine that cannot exist, with the terms of the text that was read."""

from topoalign.core.model.errors import InvalidField, InvalidMachine
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate


def check_possible(topology: Topology, what: str, remedy: str = "") -> Topology:
    """Returns the machine that was read. Raises InvalidMachine if there can be none such; `remedy` replaces the field's."""
    try:
        validate(topology)
    except InvalidField as error:
        raise InvalidMachine(f"{what} is of no possible machine: {error.finding}", remedy or error.remedy) from error
    return topology
