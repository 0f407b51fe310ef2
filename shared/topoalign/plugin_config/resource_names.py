"""
Names of resources, and patterns that select devices by name.

A device plugin can register only extended resources. The rule for their names (Kubernetes v1.36,
IsExtendedResourceName): a domain, `/`, and a name of at most 63 letters, digits, `-`, `_` and `.`, which begins and
ends with a letter or a digit. The domain must not contain `kubernetes.io`. With the prefix `requests.`, the name must
still be a qualified name, because quotas use it.
"""

import glob
import re
from fnmatch import fnmatchcase

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import ResourceName

GPU_DOMAIN = "nvidia.com"
NIC_DOMAIN = "topoalign.io"
SHARED = ".shared"
"""The suffix that NVIDIA's device plugin adds to the name of a shared resource under `renameByDefault`."""

LONGEST_NAME = 63
LONGEST_DOMAIN = 253 - len("requests.")
_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?", re.ASCII)


def resource(path: str, text: str, domain: str = GPU_DOMAIN) -> ResourceName:
    """The name with its domain, or else `domain`. Raises InvalidField for a name that Kubernetes does not accept."""
    name = ResourceName(text if "/" in text else f"{domain}/{text}")
    of, _, local = name.partition("/")
    why = None
    if len(local) > LONGEST_NAME:
        why = f"has {len(local)} characters after its domain, and {LONGEST_NAME} are the most"
    elif not _NAME.fullmatch(local):
        why = "is no name of a resource"
    elif len(of) > LONGEST_DOMAIN or not all(map(_LABEL.fullmatch, of.split("."))):
        why = "does not begin with a domain"
    elif "kubernetes.io" in of:
        why = "is in a domain that is Kubernetes' own"
    elif of.startswith("requests."):
        why = "is taken for a quota's request"
    if why is not None:
        raise InvalidField(path, f"{quoted([text])} {why}", "write it as example.com/gpu-large, in lower case")
    return name


def found_in(pattern: str, name: str) -> bool:
    """Whether a part of the name matches the pattern (`*`: anything), as in NVIDIA's device plugin v0.20.0."""
    return matches_pattern(f"*{pattern}*", name)


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether the whole name matches the pattern. `*` stands for anything; no other character is special."""
    return fnmatchcase(name, glob.escape(pattern).replace("[*]", "*"))
