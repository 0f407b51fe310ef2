"""Verdicts from amounts, against what a kubelet did in the published case files of whole admissions."""

from collections import Counter
from pathlib import Path

import msgspec

from topoalign.core.admission.alignment import NotAligned
from topoalign.core.admission.feasibility import judge_amounts, need_of
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Refusal
from topoalign.tools.conformance.kubelet_admission import AdmissionCase, Admit, Rejected, Sequence
from topoalign.tools.conformance.kubelet_pods import as_the_kubelet_reads


def test_verdicts_are_those_of_the_recorded_kubelet(vectors: Path) -> None:
    """
    Each pod that a case admits or refuses, where amounts decide; of a refusal the recorded kind, too. Of a pod that the
    policy refuses, the kubelet does not record what the node has too little of: that is the code of the decision.
    """
    counts = Counter[str]()
    for line in (vectors / "kubelet" / "admission.jsonl").read_bytes().splitlines():
        case = msgspec.convert(msgspec.json.decode(line), AdmissionCase, str_keys=True)
        sequence = Sequence(case.machine, case.config.rules(case.machine))
        for step in case.steps:
            if isinstance(step, Admit):
                demand = read_pod(as_the_kubelet_reads(step.pod.read), sequence.rules)
                state = as_others(sequence.state, demand)
                need = need_of(state.hardware, demand)
                got = None if need is None else judge_amounts(need, count_free(state, sequence.rules))
                told = step.expect.answer
                wanted = told.code if isinstance(told, Rejected) else ""
                if wanted == NotAligned.code:
                    decision = sequence.decide(as_the_kubelet_reads(step.pod.read))
                    assert isinstance(decision, Refusal)
                    wanted = decision.code
                counts["asks" if got is None else "refused" if got else "admitted"] += 1
                assert got in (None, wanted), (case.id, step.pod)
            sequence.done(step)
    assert counts["admitted"] > 200 < counts["refused"]
