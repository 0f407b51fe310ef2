"""The suites of the kubelet's resource managers (v1.36.3), by name."""

from topoalign.tools.conformance import kubelet_cpus, kubelet_devices, kubelet_memory
from topoalign.tools.conformance.kubelet_admission import admissions, pod_level_resources
from topoalign.tools.conformance.kubelet_files import files
from topoalign.tools.conformance.kubelet_merge import merge
from topoalign.tools.conformance.kubelet_pods import pod_requests
from topoalign.tools.conformance.suite import Suite

SUITES: dict[str, Suite] = {
    "kubelet/merge": merge,
    "kubelet/device_hints": kubelet_devices.hints,
    "kubelet/filter_affinity": kubelet_devices.filter_affinity,
    "kubelet/device_allocate": kubelet_devices.allocate,
    "kubelet/cpu_hints": kubelet_cpus.hints,
    "kubelet/cpu_take": kubelet_cpus.take,
    "kubelet/cpu_allocate": kubelet_cpus.allocate,
    "kubelet/admission": admissions,
    "kubelet/pod_level_resources": pod_level_resources,
    "kubelet/memory_hints": kubelet_memory.hints,
    "kubelet/memory_allocate": kubelet_memory.allocate,
    "kubelet/pod_requests": pod_requests,
    "kubelet/files": files,
}
