"""
What a device policy is: it chooses which GPUs a container gets, of those that its NUMA affinity leaves.

A policy is a module with its class, a line in PLACEMENTS and its name in `Placement`. Code elsewhere asks its methods, and
never which policy it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from topoalign.core.placement.gpus.nics import NO_NICS, Nics
from topoalign.core.placement.gpus.scores import Members, Scores
from topoalign.core.placement.gpus.set_scorer import SetScorer


class GpuChoice(NamedTuple):
    """The question to a device policy: how many GPUs of which. GPUs are named by their positions on the machine."""

    scorer: SetScorer
    """Of all GPUs of the machine."""
    available: Sequence[int]
    required: Sequence[int]
    """Some of those that are available; all of them have to be in the set."""
    size: int
    """At least 1 and as many as are required, at most as many as are available."""
    free: frozenset[int] = frozenset()
    """All GPUs that nobody holds, those that are not offered here included."""
    nics: Nics = NO_NICS
    """The NICs that the container could get beside them."""

    @property
    def scores(self) -> Scores:
        """The link score of each pair of GPUs."""
        return self.scorer.scores


class DevicePolicy(ABC):
    """Base of the device policies: a policy without anything to explain about the sets that it did not choose."""

    @abstractmethod
    def choose(self, asked: GpuChoice) -> Members:
        """Chooses a set of `size` of the available GPUs that holds all required ones; () for no preference."""

    def uncompared(self, asked: GpuChoice) -> str:
        """Explains what was not compared, as the end of a sentence about the chosen set; empty: all was compared."""
        return ""

    def weigh(self, asked: GpuChoice, chosen: Members) -> Callable[[Members], str]:
        """Returns a function that explains why another set lost against the chosen one; empty text: no reason known."""
        return lambda other: ""
