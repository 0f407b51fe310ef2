"""
Reads the two annotations that make a pod a member of a gang: pods that start together or not at all.

    topoalign.io/gang: llama-70b       name of the gang, within a namespace
    topoalign.io/gang-size: "64"       number of pods in the gang
"""

import re

import msgspec

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.requests import GANG, GANG_SIZE, PodRequest

NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
SIZE = re.compile(r"[1-9][0-9]{0,3}")


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """The gang that a pod belongs to."""

    name: str
    """`namespace/name`."""
    size: int
    """Number of its pods, from 1."""


def gang_of(pod: PodRequest) -> Gang | None:
    """The pod's gang. None: it is in no gang. Raises InvalidField for invalid annotations."""
    name = pod.annotations.get(GANG)
    size = pod.annotations.get(GANG_SIZE)
    if name is None and size is None:
        return None
    if name is None or not NAME.fullmatch(name):
        finding = "is missing" if name is None else f"{quoted([name])} is not a name"
        raise InvalidField(annotation_path(GANG), finding, "use lower-case letters, digits, `-` and `.`")
    if size is None or not SIZE.fullmatch(size):
        finding = "is missing" if size is None else f"{quoted([size])} is not a number of pods"
        raise InvalidField(annotation_path(GANG_SIZE), finding, "write how many pods the gang has, 1 to 9999")
    return Gang(name=f"{pod.namespace}/{name}", size=int(size))


def annotation_path(key: str) -> str:
    """The path of a pod's annotation, for error messages."""
    return f"metadata.annotations[{key}]"
