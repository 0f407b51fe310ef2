"""
Defers the import of aiohttp and nats.js, the JetStream part of the NATS client library, until they are used (nats-py
2.16.0).

The client library imports all of it, and uses the names of some headers. The bus uses the JetStream API directly. So a
node agent would spend a fifth of the time in which it imports the library, and 1.5 MB, on what it never calls. The module
that stands in has those names; it is loaded with its first other attribute, so that other code of the process finds in it
what it expects.

aiohttp is for WebSockets alone (`load_websockets`), and would cost as much as all else that an agent imports for NATS.
"""

import sys
from contextlib import suppress
from enum import StrEnum
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from topoalign.runtime.logging import hide_module

JETSTREAM = "nats.js"
API = "nats.js.api"


class ReservedHeader(StrEnum):
    """The headers that the client library itself looks at. Their names are those of the protocol."""

    CONSUMER_STALLED = "Nats-Consumer-Stalled"
    DESCRIPTION = "Description"
    STATUS = "Status"


class DeferredApi(ModuleType):
    """Stands in for `nats.js.api`."""

    Header = ReservedHeader

    def __getattr__(self, name: str) -> Any:
        """Any other attribute, from the module itself."""
        return getattr(import_module(API), name)


class DeferredPackage(ModuleType):
    """Stands in for `nats.js`, and becomes it."""

    def __getattr__(self, name: str) -> Any:
        """Loads the package at the first access to any other attribute."""
        if name not in JETSTREAM_NAMES:
            raise AttributeError(f"module {JETSTREAM!r} has no attribute {name!r}")
        vars(self).pop("api", None)
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


JETSTREAM_NAMES = ("JetStreamContext", "JetStreamManager", "__all__")


def defer_jetstream() -> None:
    """
    Imports the client library without `nats.js` and aiohttp. Does nothing where somebody has imported the library before.
    """
    if "nats" in sys.modules:
        return
    nats = PathFinder.find_spec("nats")
    spec = PathFinder.find_spec(JETSTREAM, nats.submodule_search_locations) if nats is not None else None
    if spec is None:
        return
    package = DeferredPackage(JETSTREAM)
    vars(package).update(vars(module_from_spec(spec)))
    vars(package)["api"] = DeferredApi(API)
    sys.modules[JETSTREAM] = package
    with hide_module("aiohttp"):
        import_module("nats").js = package  # type: ignore[attr-defined]  # which the import would have bound


def load_websockets() -> None:
    """Gives the client library what it needs for `ws://` and `wss://`, if that is installed."""
    transport = import_module("nats.aio.transport")
    with suppress(ModuleNotFoundError):
        for name in ("aiohttp", "multidict"):
            vars(transport)[name] = import_module(name)
