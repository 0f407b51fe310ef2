"""Constants of the device plugin API that kubelet and plugins share (k8s.io/kubelet, deviceplugin v1beta1)."""

KUBELET_SOCKET = "kubelet.sock"
"""In the directory of device plugins the one for registrations; in that of PodResources the only one."""
API_VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
