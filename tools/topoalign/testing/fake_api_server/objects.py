"""
Objects of one kind, each with the version at which it changed last, and the changes since.

Versions count for all kinds together, as in etcd. A write that names a version is refused with 409 unless the object still
has it. Only the newest changes are kept: who asks for what came after an older version gets 410 and has to list again.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

import anyio
import msgspec

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace, empty for kinds without one, and name."""

KEPT = 10_000
"""Changes of a kind that are kept."""


class ApiError(Exception):
    """An answer of the API server other than success: `code` is the HTTP status, `reason` its word for it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def status(self) -> Object:
        """The body of the answer, a v1 Status."""
        said = {"status": "Failure", "message": self.message, "reason": self.reason, "code": self.code}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


def conflict(message: str) -> ApiError:
    """409."""
    return ApiError(409, "Conflict", message)


class Change(msgspec.Struct, frozen=True):
    """An object as it is after a change, or was before it was deleted."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object
    version: int


class Versions:
    """Counts the changes of all kinds."""

    def __init__(self) -> None:
        self.newest = 100

    def next(self) -> int:
        """A version that no object has had."""
        self.newest += 1
        return self.newest


class Objects:
    """All objects of one kind."""

    def __init__(self, kind: str, api_version: str, plural: str, versions: Versions) -> None:
        self.kind = kind
        self.api_version = api_version
        self.plural = plural
        self._versions = versions
        self._objects: dict[Key, Object] = {}
        self._changes: deque[Change] = deque(maxlen=KEPT)
        self._forgotten = versions.newest
        self._changed = anyio.Event()

    def __iter__(self) -> Iterator[Object]:
        """The objects in the order of their keys, as etcd has them."""
        return iter([self._objects[key] for key in sorted(self._objects)])

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def newest(self) -> int:
        """The version that a list of now has."""
        return self._versions.newest

    @property
    def oldest(self) -> int:
        """The version after which all changes are kept."""
        return self._forgotten

    def get(self, key: Key) -> Object:
        """The object as it is now, not to be changed. Raises ApiError 404."""
        if key not in self._objects:
            raise ApiError(404, "NotFound", f'{self.plural} "{key[1]}" not found')
        return self._objects[key]

    def create(self, key: Key, given: Mapping[str, Any]) -> Object:
        """Raises ApiError 409 if there is one of that name."""
        if key in self._objects:
            raise ApiError(409, "AlreadyExists", f'{self.plural} "{key[1]}" already exists')
        made: Object = deepcopy(dict(given))
        metadata = made.setdefault("metadata", {})
        number = self._versions.newest + 1
        metadata |= {"name": key[1], **({"namespace": key[0]} if key[0] else {})}
        metadata.setdefault("uid", f"{number:08x}-0000-4000-8000-{number:012x}")
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["managedFields"] = [
            {"manager": "stand-in", "operation": "Update", "fieldsV1": {"f:metadata": {"f:annotations": {}}}}
        ]
        return self._write("ADDED", key, made)

    def replace(self, key: Key, given: Mapping[str, Any], expected: str | None = None) -> Object:
        """Writes the whole object. Raises ApiError 404, and 409 if it no longer has the expected version."""
        before = self.get(key)
        if expected not in (None, "", before["metadata"]["resourceVersion"]):
            raise conflict(
                f'Operation cannot be fulfilled on {self.plural} "{key[1]}": the object has been modified; '
                "please apply your changes to the latest version and try again"
            )
        metadata = {**given.get("metadata", {}), **{each: before["metadata"][each] for each in ("name", "uid")}}
        return self._write("MODIFIED", key, {**given, "metadata": metadata})

    def merge(self, key: Key, patch: Mapping[str, Any]) -> Object:
        """Changes some fields (JSON merge patch, RFC 7386). Raises ApiError 404, and 409 as `replace`."""
        expected = patch.get("metadata", {}).get("resourceVersion")
        return self.replace(key, merged(self.get(key), patch), expected)

    def apply(self, key: Key, given: Mapping[str, Any]) -> Object:
        """Creates the object, or writes all of it (server-side apply by its only writer)."""
        return self.replace(key, given) if key in self._objects else self.create(key, given)

    def remove(self, key: Key) -> Object:
        """Raises ApiError 404."""
        gone = self.get(key)
        del self._objects[key]
        return self._note("DELETED", gone)

    def since(self, version: int) -> list[Change]:
        """The changes after this version. Raises ApiError 410 where they are no longer kept."""
        if version < self._forgotten:
            raise ApiError(410, "Expired", f"too old resource version: {version} ({self._versions.newest})")
        newer: list[Change] = []
        for change in reversed(self._changes):
            if change.version <= version:
                break
            newer.append(change)
        return newer[::-1]

    def compact(self) -> None:
        """Forgets all changes, as etcd does every five minutes."""
        self._changes.clear()
        self._forgotten = self._versions.newest
        self.wake()

    def wake(self) -> None:
        """Lets those who wait for changes look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self) -> None:
        """Until something may have changed."""
        await self._changed.wait()

    def _write(self, what: Literal["ADDED", "MODIFIED"], key: Key, made: Object) -> Object:
        noted = self._note(what, made)
        self._objects[key] = noted
        return noted

    def _note(self, what: Literal["ADDED", "MODIFIED", "DELETED"], changed: Object) -> Object:
        version = self._versions.next()
        metadata = {**changed["metadata"], "resourceVersion": str(version)}
        said = {"kind": self.kind, "apiVersion": self.api_version, **changed, "metadata": metadata}
        if len(self._changes) == KEPT:
            self._forgotten = self._changes[0].version
        self._changes.append(Change(what, said, version))
        self.wake()
        return said


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    """A JSON merge patch: null removes a field, a mapping is merged, everything else replaces."""
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merged(result[name] if isinstance(result.get(name), dict) else {}, value)
        else:
            result[name] = value
    return result
