"""
Finds the installed services by entry point (group `topoalign.services`), and their settings.

The settings of a service are the Struct in the module `settings` of the package that contains its entry point.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module, metadata

import msgspec

from topoalign.core.model.errors import NotFound, Unavailable, clean
from topoalign.runtime.context import Serve
from topoalign.runtime.settings import PREFIX, RuntimeSettings

ENTRY_POINTS = "topoalign.services"
ORDER = ("discovery", "hinting", "allocator", "mps", "registry")
"""Publishers start before subscribers. Any order works; in this order, all services are ready soonest."""
EVERYWHERE = "every service"

OF_A_SERVICE = re.compile(r"_SERVICE_(?:HOST|PORT)(?:_\w+)?$|_PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?$")
OF_A_PORT = re.compile(r"(?:tcp|udp|sctp)://")


class ServiceFailed(Unavailable):
    """
    Raised when a service could not be started.

    Remedy: Read the message and the log: they name the cause.
    """


def load_services(names: Sequence[str]) -> dict[str, Serve]:
    """Loads the entry points of these services. Raises NotFound, and ServiceFailed for one that cannot be loaded."""
    points = entry_points(names)
    for name in names:
        if name not in points:
            raise NotFound("service", name, f"installed are: {', '.join(sorted(points, key=start_order)) or 'none'}")
    try:
        return {name: points[name].load() for name in names}
    except ImportError as error:
        raise ServiceFailed(
            f"a service cannot be loaded: {clean(str(error), 300)}", "install topoalign anew"
        ) from error


def entry_points(names: Collection[str] | None) -> dict[str, metadata.EntryPoint]:
    """Service -> its entry point in this package; in all packages if this one lacks a name, or for None."""
    try:
        own = metadata.distribution("topoalign").entry_points.select(group=ENTRY_POINTS)
    except metadata.PackageNotFoundError:  # it runs without being installed
        own = metadata.EntryPoints()
    points = {point.name: point for point in own}
    if names is None or not points.keys() >= {*names}:  # another package has it: all installed ones are read
        points |= {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    return points


def start_order(name: str) -> tuple[int, str]:
    """Sorts services as they are started."""
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def settings_by_service(names: Collection[str] | None = None) -> dict[str, type[msgspec.Struct]]:
    """Service -> its settings Struct, for the process and these services; None: for all installed services."""
    found: dict[str, type[msgspec.Struct]] = {EVERYWHERE: RuntimeSettings}
    points = entry_points(names)
    for name in sorted(points if names is None else points.keys() & {*names}, key=start_order):
        try:
            module = import_module(points[name].module.rpartition(".")[0] + ".settings")
        except ModuleNotFoundError:  # a service of another package without this module
            continue
        found.update(
            (name, each)
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
        )
    return found


def find_unknown_variables(environment: Mapping[str, str], running: Collection[str] = ()) -> list[str]:
    """Findings about variables with our prefix that are not settings of any service. `running`: the loaded services."""
    ours = {name for name, value in environment.items() if name.startswith(PREFIX) and not is_of_kubelet(name, value)}
    if not ours - list_variables(settings_by_service(running)):
        return []
    unknown = ours - list_variables(settings_by_service())
    return [f"{clean(variable)} is set but is not a setting" for variable in sorted(unknown)]


def list_variables(found: Mapping[str, type[msgspec.Struct]]) -> set[str]:
    """The variables of these settings."""
    return {PREFIX + field.upper() for kind in found.values() for field in kind.__struct_fields__}


def is_of_kubelet(variable: str, value: str) -> bool:
    """
    Whether a kubelet has set this variable for a Service whose name begins with `topoalign-`:
    `TOPOALIGN_NATS_SERVICE_HOST`, `TOPOALIGN_NATS_PORT` (an address), `TOPOALIGN_NATS_PORT_4222_TCP_ADDR`.
    """
    return bool(OF_A_SERVICE.search(variable) or (variable.endswith("_PORT") and OF_A_PORT.match(value)))
