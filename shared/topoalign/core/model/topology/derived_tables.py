"""
Caches tables that are computed from a topology.

A topology is frozen, so a table that is computed from it stays valid. The key of a table is the function that computes
it, so tables never collide.
"""

from collections.abc import Callable
from copy import copy
from functools import cached_property, wraps
from typing import Any, Self, TypeVar

import msgspec

View = TypeVar("View")


SHAPE = "shape"
"""The key of the shape in the `__dict__` of a description."""


class Viewed(msgspec.Struct, frozen=True, dict=True):
    """A frozen description that caches the tables that are computed from it."""

    @property
    def shape(self) -> Self:
        """
        The shape (`shapes`), which is shared by all descriptions that differ only in unique ids. The description itself
        if the shape was not computed.
        """
        shape: Self = self.__dict__.get(SHAPE, self)
        return shape

    def without_tables(self) -> Self:
        """A copy without the cached tables, but with the same shape."""
        same = copy(self)
        if self.shape is not self:
            same.__dict__[SHAPE] = self.shape
        return same

    @cached_property
    def views(self) -> dict[Callable[..., Any], Any]:
        """Function decorated with `computed_once` -> the table that it computed from this description."""
        return {}


Subject = TypeVar("Subject", bound=Viewed)


def computed_once(make: Callable[[Subject], View]) -> Callable[[Subject], View]:
    """Decorates a pure function of a description. It runs once per description; later calls return the same object."""

    @wraps(make)
    def kept(subject: Subject) -> View:
        views = subject.views
        if make not in views:
            views[make] = make(subject)
        view: View = views[make]
        return view

    return kept
