"""
Tells the kubelet that a resource is served here.

Within Register the kubelet dials back and asks for the plugin's options, so the plugin must be serving already, and on the
same event loop nothing may block.

Source: the device plugin handshake of kubelet v1.36.3 (cm/devicemanager/plugin/v1beta1).
"""

from pathlib import Path

from topoalign.allocator.kubelet.api import v1beta1
from topoalign.allocator.kubelet.client import ask
from topoalign.core.ids import ResourceName
from topoalign.core.ports import Clock

KUBELET_SOCKET = "kubelet.sock"
API_VERSION = "v1beta1"

OPTIONS = v1beta1.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
"""PreStartContainer is wanted because it is the first moment at which PodResources names the owner."""

REGISTER_SECONDS = 12.0
"""The kubelet allows itself ten seconds for dialling back."""


def socket_name(resource: ResourceName) -> str:
    """File name of a resource's socket in the kubelet's directory: `topoalign-nvidia.com-gpu.sock`."""
    return f"topoalign-{resource.replace('/', '-')}.sock"


async def register(directory: Path, resource: ResourceName, clock: Clock) -> None:
    """Registers the plugin that serves in this directory. Raises KubeletAway, after `REGISTER_SECONDS` at most."""
    request = v1beta1.RegisterRequest(
        version=API_VERSION, endpoint=socket_name(resource), resource_name=resource, options=OPTIONS
    )
    await ask(
        directory / KUBELET_SOCKET,
        lambda channel: v1beta1.RegistrationStub(channel).register(request),
        clock,
        REGISTER_SECONDS,
    )
