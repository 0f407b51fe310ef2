"""
Writes the CDI specifications of the node's devices for the container runtime: device nodes, the driver's libraries, and
the hooks with which the dynamic loader finds these libraries (decision record 0008).

Vendor, classes and names are those of NVIDIA's device plugin, so that our file replaces its file: two specifications of
the same kind would conflict. Each device is named by its UUID and by its index. Every GPU and MIG instance is included,
offered or not, because a running container can be restarted under an old name.

Sources: Container Device Interface specification 1.1.0 (only features of version 0.5.0 are used); k8s-device-plugin
v0.20.0, internal/cdi; nvidia-container-toolkit v1.17, pkg/nvcdi.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from topoalign.allocator.containers import host_files
from topoalign.allocator.containers.host_files import (
    ContainerUnready,
    HostRoot,
    dev_root,
    driver_root,
    find_driver_files,
)
from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Configuration
from topoalign.runtime.whole_files import replace_file

VENDOR = "k8s.device-plugin.nvidia.com"
VERSION = "0.5.0"
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
"""A valid device name."""

GPUS = "gpu"
CHANNELS = "imex-channel"
ALL = "all"
"""The name of the only device of a class."""

HOOKS = ("/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook")
"""Programs of the host that run the hooks. The first is the default of k8s-device-plugin."""
READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")


Json = dict[str, Any]
"""A part of a CDI specification, with its keys. A key whose value would be empty is omitted."""


class Extra(NamedTuple):
    """A device class that a container can have in addition to its GPUs: device nodes and other host paths."""

    nodes: tuple[str, ...]
    """The last component of each path can contain `*`."""
    paths: tuple[str, ...] = ()


EXTRAS = {
    "gdrcopy": Extra(("/dev/gdrdrv",)),
    "gds": Extra(("/dev/nvidia-fs*",), ("/etc/cufile.json", "/run/udev")),
    "mofed": Extra(("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm")),
}


def qualified_cdi_name(kind: str, name: str) -> str:
    """Returns the qualified name of a device: `k8s.device-plugin.nvidia.com/gpu=GPU-1`."""
    return f"{VENDOR}/{kind}={name}"


def cdi_annotation(prefix: str, devices: Sequence[str]) -> dict[str, str]:
    """
    Returns the annotation that names a container's CDI devices. Its key contains a digest of them, because the kubelet
    keeps one value per key across all resources of a container.
    """
    value = ",".join(devices)
    digest = hashlib.sha256(value.encode()).hexdigest()[:32]
    return {f"{prefix}topoalign_{digest}": value}


def specifications(
    configuration: Configuration,
    topology: Topology,
    channels: Sequence[int],
    minors: Mapping[host_files.Instance, int],
) -> dict[str, Json]:
    """
    Builds the CDI specifications of a node by class; none without GPUs. Raises ContainerUnready if containers would
    start with less than they need. Extras that are not on this node are omitted, as in NVIDIA's device plugin.
    """
    dev = dev_root(configuration.flags)
    root = driver_root(configuration.flags)
    gpus = gpu_nodes(topology, minors)
    if not gpus:
        return {}
    devices = {name: edits_of(nodes, dev) for name, nodes in gpus.items()}
    found = {GPUS: specification(GPUS, devices, driver_edits(configuration, dev, root))}
    if channels:
        nodes = {str(channel): edits_of([host_files.of_channel(channel)], dev) for channel in channels}
        found[CHANNELS] = specification(CHANNELS, nodes)
    for name in extras(configuration):
        paths = list[str]()
        for pattern in EXTRAS[name].nodes:
            directory, _, last = pattern.rpartition("/")
            paths += sorted(f"{directory}/{each}" for each in glob(last, root_dir=dev.below(directory)))
        if paths:
            mounted = host_files.present(root, EXTRAS[name].paths)
            edits = edits_of(paths, dev) | ({"mounts": mounts(mounted, root)} if mounted else {})
            found[name] = specification(name, {ALL: edits})
    return found


def extras(configuration: Configuration) -> list[str]:
    """Returns the extra classes that the configuration enables: some of `gdrcopy`, `gds`, `mofed`."""
    flags = configuration.flags
    asked = {"gdrcopy": flags.gdrcopy_enabled, "gds": flags.gds_enabled, "mofed": flags.mofed_enabled}
    return [name for name, wanted in asked.items() if wanted]


def specification(kind: str, devices: Mapping[str, Json], edits: Json | None = None) -> Json:
    """Returns the specification of a class; `edits` are applied once to each container that has any of its devices."""
    listed = [{"name": name, "containerEdits": each} for name, each in devices.items()]
    common = {"containerEdits": edits} if edits else {}
    return {"cdiVersion": VERSION, "kind": f"{VENDOR}/{kind}", "devices": listed, **common}


def gpu_nodes(topology: Topology, minors: Mapping[host_files.Instance, int]) -> dict[str, tuple[str, ...]]:
    """Returns name -> device nodes of all GPUs and MIG instances, by UUID and by index. Omits invalid names."""
    by_uuid: dict[str, tuple[str, ...]] = {}
    by_index: dict[str, tuple[str, ...]] = {}
    for gpu in topology.gpus:
        for instance in (None, *(gpu.mig or ())):
            try:
                nodes = host_files.device_node_paths(gpu, instance, minors)
            except ContainerUnready:
                continue
            by_uuid[gpu.id if instance is None else instance.uuid] = nodes
            if (index := index_of(gpu, instance)) is not None:
                by_index[index] = nodes
    return {name: nodes for name, nodes in (by_uuid | by_index).items() if NAME.fullmatch(name)}


def index_of(gpu: Gpu, instance: MigDevice | None) -> str | None:
    """The index by which NVIDIA's tools identify a GPU (`2`) or a MIG instance (`2:1`); None: unknown."""
    if instance is None:
        return str(gpu.index)
    return None if instance.index is None else f"{gpu.index}:{instance.index}"


def edits_of(paths: Iterable[str], dev: HostRoot) -> Json:
    """Returns the edits that add the device nodes at these paths, each with its host path if that differs."""
    nodes = []
    for path in paths:
        host = dev.on_host(path)
        nodes.append({"path": path, **({} if host == path else {"hostPath": host}), "permissions": "rw"})
    return {"deviceNodes": nodes} if nodes else {}


def driver_edits(configuration: Configuration, dev: HostRoot, root: HostRoot) -> Json:
    """Returns the edits for every container with a GPU. Raises ContainerUnready."""
    driver = find_driver_files(root)
    path = hook_path(configuration, root)
    program = os.path.basename(path)
    start = [program, "hook"] if program == "nvidia-ctk" else [program]
    # The loader searches for libcuda.so.1, and some programs for libcuda.so.
    link = ["create-symlinks", "--link", f"libcuda.so.1::{driver.directory}/libcuda.so"]
    cache = ["update-ldcache", "--folder", driver.directory]
    return {
        # Images set this variable to `all`, and NVIDIA's runtime would then add all GPUs.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        **edits_of(host_files.present(dev, host_files.SHARED), dev),
        "mounts": mounts((*driver.libraries, *driver.programs), root),
        "hooks": [{"hookName": "createContainer", "path": path, "args": [*start, *args]} for args in (link, cache)],
    }


def hook_path(configuration: Configuration, root: HostRoot) -> str:
    """Returns the host path of the program that the hooks run. Raises ContainerUnready if it does not exist."""
    named = configuration.flags.plugin.nvidia_cdi_hook_path
    candidates = (named,) if named else HOOKS
    if root.host != "/":
        return candidates[0]  # in the root of a driver container the host's programs are not visible
    found = next((path for path in candidates if os.path.lexists(root.below(path))), None)
    if found is None:
        raise ContainerUnready(
            f"{' or '.join(candidates)}, which makes containers find the driver's libraries, is not below {root.here}",
            "install nvidia-container-toolkit on the node, set nvidiaCDIHookPath, or use deviceListStrategy envvar",
        )
    return found


def mounts(paths: Iterable[str], root: HostRoot) -> list[Json]:
    """Returns a read-only bind mount for each path below the driver's root, at the same path in the container."""
    return [{"hostPath": root.on_host(path), "containerPath": path, "options": READ_ONLY} for path in paths]


# A specification file is replaced atomically, so that a runtime never reads an incomplete one. It is not synced,
# because it is written again at the next start. Files are never removed, because running containers refer to them when
# they restart.
#
# The directory must exist. If this process created it and ran in a container without the mount, it would be created inside
# the container, where no runtime reads it.


READABLE = 0o644
"""Container runtimes can run as another user than this process."""


def write_specifications(directory: Path, specifications: Mapping[str, Json]) -> bool:
    """Writes the specifications that are missing or differ; returns whether it wrote any. Raises StateFault."""
    changed = False
    for kind, specification in specifications.items():
        path = directory / f"{VENDOR}-{kind}.json"
        content = msgspec.json.format(msgspec.json.encode(specification), indent=2) + b"\n"
        try:
            if not has_content(path, content):
                replace_file(path, content, mode=READABLE)
                changed = True
        except OSError as error:
            raise StateFault(
                f"cannot write the CDI specification {clean(str(path), 200)}: {error.strerror}",
                "create the directory on the node (in a container, mount the host's at the same path), check that it is "
                "writable and has space, or set TOPOALIGN_CDI_DIR",
            ) from error
    return changed


def has_content(path: Path, content: bytes) -> bool:
    """Whether the file exists with this content and is readable by all users."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            return mode & 0o777 == READABLE and file.read(len(content) + 1) == content
    except OSError:
        return False
