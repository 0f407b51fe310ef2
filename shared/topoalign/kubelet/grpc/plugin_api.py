"""Constants of the device plugin API that kubelet and plugins share (k8s.io/kubelet, deviceplugin v1beta1)."""

KUBELET_SOCKET = "kubelet.sock"
"""The kubelet's socket, in the device plugin directory (for registrations) and in the PodResources directory."""
API_VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
