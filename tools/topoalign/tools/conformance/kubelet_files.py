"""
The suite `kubelet/files`: root directories as the managers of a kubelet left them, and its next decision.

Each case is written to a directory of its own and predicted from there, as `what-if --machine --kubelet-root` does it.
Compared are the admission; if the pod is refused, the reason; if it is admitted, for each container its exclusive CPUs,
its memory, and its devices unless the kubelet picks them at random.

What a device plugin prefers is an input of the kubelet and no decision of its own, and the cases were recorded with an older
device policy of topoalign's. So the plugin of a case prefers the devices that it preferred then, where these answer the
question: as many as are asked for, all available, with those that must be included.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from topoalign.cli.predict import Described
from topoalign.core.admission.admit import answer_to, drive
from topoalign.core.admission.admit import iterate_decision as decision_steps
from topoalign.core.admission.kubelet_devices import explain_unavailable_resources
from topoalign.core.admission.pipeline import AdmissionRun, Question, Reply
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Decision, PreferenceQuestion, Refusal
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.kubelet.files import kubelet_configuration, manifest, pod_directories
from topoalign.machines import load_machine
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome

PLUGIN = "kubernetes.io~projected"
VOLUME = "kube-api-access"


class Block(msgspec.Struct, frozen=True):
    """Memory or hugepages of one size, in bytes."""

    resource: ResourceName
    size: int
    nodes: tuple[int, ...]


class Given(msgspec.Struct, frozen=True):
    """What a container got of the kubelet."""

    cpus: str
    memory: list[Block]
    devices: dict[ResourceName, list[DeviceID]]

    def __post_init__(self) -> None:
        parse_cpuset(self.cpus)

    def compared(self, by_chance: bool) -> object:
        """What of it is compared; devices only where the kubelet did not choose them by chance."""
        blocks = {(block.resource, block.size, block.nodes) for block in self.memory}
        devices = {name: sorted(ids) for name, ids in self.devices.items() if ids and not by_chance}
        return parse_cpuset(self.cpus), blocks, devices


class Expected(msgspec.Struct, frozen=True):
    """What the kubelet decided."""

    admit: bool
    reason: str = ""
    containers: dict[ContainerName, Given] = {}
    by_chance: bool = False

    def preferred(self, asked: PreferenceQuestion) -> tuple[DeviceID, ...]:
        """The devices that the plugin preferred, where they answer the question; else ()."""
        given = self.containers.get(asked.container)
        devices = given.devices.get(asked.resource, []) if given is not None else []
        answers = len(devices) == asked.size and {*asked.must_include} <= {*devices} <= {*asked.available}
        return tuple(devices) if answers else ()

    @property
    def answer(self) -> object:
        """What a prediction has to equal."""
        if not self.admit:
            return self.reason
        return {name: given.compared(self.by_chance) for name, given in self.containers.items()}


class FilesCase(msgspec.Struct, frozen=True):
    """A kubelet's root directory and the pod that comes; the fields are those of the published README."""

    id: str
    machine: str
    config: dict[str, Any]
    files: dict[str, str]
    pods: list[str]
    emptied: list[str]
    bare: list[str]
    pod: dict[str, Any]
    expect: Expected

    def __post_init__(self) -> None:
        for name in (*self.files, *self.pods):
            if not name or name.startswith("/") or {"", ".", ".."} & {*name.split("/")}:
                raise ValueError(f"{name!r} is not a path below the kubelet's root directory")

    def lay_out(self, root: Path) -> None:
        """The kubelet's root directory."""
        for name, content in self.files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        (root / pod_directories.NAME).mkdir()
        for uid in self.pods:
            of_pod = root / pod_directories.NAME / uid
            volume = "" if uid in self.bare else PLUGIN if uid in self.emptied else f"{PLUGIN}/{VOLUME}"
            for each in (f"volumes/{volume}", "plugins", "containers"):
                (of_pod / each).mkdir(parents=True)


def files(path: Path) -> Iterator[CaseResult]:
    """The suite `kubelet/files`."""
    return results(path, FilesCase, outcome)


def outcome(case: FilesCase) -> Outcome:
    """What the kubelet decided, and what is predicted."""
    return case.expect.answer, told(decided(case), case.expect.by_chance)


def decided(case: FilesCase) -> Decision:
    """What is predicted of its pod."""
    with TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        config = Path(directory) / "config.json"
        root.mkdir()
        case.lay_out(root)
        config.write_bytes(msgspec.json.encode(case.config))
        rules = kubelet_configuration.load_configuration(config)
        node = Described(case.machine, config, root).node(load_machine(case.machine), rules)
    demand = read_pod(manifest.request_from_document(case.pod), rules)
    explain_unavailable_resources(demand, node.state.hardware, node.registered)

    def answer(asked: Question) -> Reply:
        if isinstance(asked, PreferenceQuestion) and (recorded := case.expect.preferred(asked)):
            return recorded
        return answer_to(asked, node.state, rules)

    return drive(decision_steps(AdmissionRun(node.state, demand)), answer)


def told(decision: Decision, by_chance: bool) -> object:
    """A prediction in the form of `Expected.answer`."""
    if isinstance(decision, Refusal):
        return decision.reason
    return {
        each.owner.container: Given(
            cpus=each.cpus,
            memory=[Block(block.resource, block.size, block.nodes) for block in each.memory],
            devices={name: list(ids) for name, ids in each.devices.items()},
        ).compared(by_chance)
        for each in decision.allocations
        if each.owner is not None
    }
