"""
Keeps tables that are computed from a topology, once for each topology.

A topology is frozen, so a table computed from it stays valid. Each table is stored under the function that computes
it, so tables never collide, whatever their names.
"""

from collections.abc import Callable
from copy import copy
from functools import cached_property, wraps
from typing import Any, Self, TypeVar

import msgspec

View = TypeVar("View")


SHAPE = "shape"
"""Where a description keeps its shape, together with its tables."""


class Viewed(msgspec.Struct, frozen=True, dict=True):
    """A frozen description that keeps the tables that are computed from it."""

    @property
    def shape(self) -> Self:
        """What all descriptions that differ in unique ids alone share (`shapes`); itself where that was not computed."""
        shape: Self = self.__dict__.get(SHAPE, self)
        return shape

    def without_tables(self) -> Self:
        """A copy that has nothing of what was computed from this one, and its shape."""
        same = copy(self)
        if self.shape is not self:
            same.__dict__[SHAPE] = self.shape
        return same

    @cached_property
    def views(self) -> dict[Callable[..., Any], Any]:
        """Function of `computed_once` -> the table that it made of this description."""
        return {}


Subject = TypeVar("Subject", bound=Viewed)


def computed_once(make: Callable[[Subject], View]) -> Callable[[Subject], View]:
    """Decorates a pure function of one description: it runs once for each, and later calls return the same object."""

    @wraps(make)
    def kept(subject: Subject) -> View:
        views = subject.views
        if make not in views:
            views[make] = make(subject)
        view: View = views[make]
        return view

    return kept
