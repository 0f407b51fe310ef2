"""
Tells the kubelet that a resource is served here.

Within Register the kubelet dials back and asks for the plugin's options, so the plugin must be serving already, and on the
same event loop nothing may block.

Source: the device plugin handshake of kubelet v1.36.3 (cm/devicemanager/plugin/v1beta1).
"""

import os
from hashlib import sha256
from pathlib import Path

from topoalign.core.model.ids import ResourceName
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.client import ask
from topoalign.kubelet.grpc.plugin_api import API_VERSION, KUBELET_SOCKET
from topoalign.kubelet.grpc.sockets import LONGEST_PATH

REGISTER_SECONDS = 12.0
"""The kubelet allows itself ten seconds for dialling back."""


def socket_path(directory: Path, resource: ResourceName) -> Path:
    """
    Where a resource is served: `topoalign-nvidia.com_gpu.sock` in the kubelet's directory.

    No two resources share a name: the part before the slash is a domain and has no `_`. Where the name would make the path
    too long for a socket, a digest stands in for it.
    """
    plain = directory / f"topoalign-{resource.replace('/', '_')}.sock"
    return plain if len(os.fsencode(plain)) <= LONGEST_PATH else directory / digest_name(resource)


def digest_name(resource: str) -> str:
    """The shortest name of a resource's socket, as long for all of them."""
    return f"topoalign-{sha256(resource.encode()).hexdigest()[:12]}.sock"


def options(*, by_amounts: bool) -> v1beta1.DevicePluginOptions:
    """
    What the kubelet asks of a plugin. PreStartContainer only for units and slots of GPUs: whether both halves of a share are
    of one GPU, and whether a container has the amounts that are reserved for it, can be told when the container is known.
    Nothing else in a container depends on its owner, which is learned after Allocate.
    """
    return v1beta1.DevicePluginOptions(pre_start_required=by_amounts, get_preferred_allocation_available=True)


async def register(path: Path, resource: ResourceName, clock: Clock, *, by_amounts: bool = False) -> None:
    """
    Registers the plugin that serves at `path`, beside the kubelet's own socket. `by_amounts`: whether the resource is of
    units or slots.

    Raises KubeletAway, after `REGISTER_SECONDS` at most.
    """
    request = v1beta1.RegisterRequest(
        version=API_VERSION, endpoint=path.name, resource_name=resource, options=options(by_amounts=by_amounts)
    )
    await ask(
        path.parent / KUBELET_SOCKET,
        lambda channel: v1beta1.RegistrationStub(channel).register(request),
        clock,
        REGISTER_SECONDS,
    )
