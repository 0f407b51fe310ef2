"""
Whether slots of GPUs are listed to the kubelet with NUMA nodes, and what then never fits on this machine.

The plugin configuration is the one that the environment names, as for `topoalign node`.
"""

import os

from topoalign.cli.doctor.findings import Finding, Subject, ok, warning
from topoalign.cli.doctor.kubelets import kubelet_rules
from topoalign.core.model.errors import TopoalignError
from topoalign.core.policy import POLICIES


def slots(subject: Subject) -> Finding | None:
    """Only where the plugin configuration lists slots with NUMA nodes, and the GPUs of this machine are near several."""
    from topoalign.cli import this_machine  # brings in the drivers
    from topoalign.plugin_config import offers, watching  # brings in YAML; the other checks work without

    try:
        configuration = watching.first_read(os.environ)[2].configuration
        found = offers.offers(this_machine.read().topology, configuration).findings
    except TopoalignError:  # `config check` says why, or the check of the hardware
        return None
    beyond = next((each for each in found if each.field == offers.NUMA_TOPOLOGY), None)
    if beyond is None:
        return None
    rules = kubelet_rules(subject)
    if rules is not None and not POLICIES[rules.policy].asks:
        return ok(f"{offers.NUMA_TOPOLOGY}: the kubelet's policy {rules.policy} aligns nothing")
    return warning(str(beyond), beyond.remedy)
