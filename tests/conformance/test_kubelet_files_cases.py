"""
The kubelet's own decisions follow from its files alone.

The published sequences of admissions once more, but before each decision the node goes through the files that its kubelet
would have in its root directory, and is decided on as it is read from there.
"""

from pathlib import Path

import msgspec
from kubelet_files_support import write_files

from topoalign.core.model.decisions import Decision
from topoalign.core.model.requests import PodRequest
from topoalign.kubelet.files.node_state import node_state
from topoalign.tools.conformance.kubelet_admission import AdmissionCase, Admit, Sequence


class ThroughFiles(Sequence):
    """Decides on the node as it is read from `root`."""

    root: Path

    def decide(self, pod: PodRequest) -> Decision:
        known = self.state
        assert known.topology is not None and known.health is not None
        write_files(self.root, known, self.rules)
        found = node_state(known.topology, known.health, self.root, self.rules)
        assert () == found.findings
        try:
            self.state = found.state
            return super().decide(pod)
        finally:
            self.state = known


def test_every_pod_is_decided_from_the_files_as_the_kubelet_decided_it(vectors: Path, tmp_path: Path) -> None:
    ThroughFiles.root = tmp_path
    wrong, decided = [], 0
    for line in (vectors / "kubelet/admission.jsonl").read_bytes().splitlines():
        case = msgspec.json.decode(line, type=AdmissionCase)
        sequence = ThroughFiles(case.machine, case.config.rules(case.machine))
        for number, step in enumerate(case.steps):
            decided += isinstance(step, Admit)
            if step.expect.answer != sequence.done(step):
                wrong.append((case.id, number))
                break

    assert [] == wrong
    assert 900 <= decided
