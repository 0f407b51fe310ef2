"""
Finds the documents inside a file that wraps them.

A configuration reaches a node in a wrapper: a ConfigMap whose values are files, a List, the values of a Helm chart, several
YAML documents in one file, a MachineConfig with encoded files. This module gives every mapping of fields that a file
contains, with the path of the field that holds it. A value that is text of several lines, JSON, base64 or a data URL is
opened, and its mappings have the path of the text.

The path is written as in an error: `items[0].data.kubelet`; of a file with several documents it begins with
`documents[1]`. `metadata` is left out: kubectl keeps a copy of the whole object there.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files import documents
from topoalign.kubelet.files.documents import Document, InvalidDocument

DEEPEST_TEXT = 3
"""So many texts may be opened inside one another: a chart's values in an object, and a file in those values."""

_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4}){6,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_DATA_URL = re.compile(r"data:[^,]{0,200}?(;base64)?,")

Path = tuple[str, ...]
"""The fields and places from the file to a mapping: `("items", "[0]", "data")`."""


class FieldMapping(NamedTuple):
    """A mapping of fields in a file, and where it stands."""

    path: Path
    content: Document

    @property
    def field(self) -> str:
        """The path as an error writes it; "" for the file itself."""
        return field_of(self.path)


def field_of(path: Path) -> str:
    """The path as an error writes it. A key that is no plain word stands in brackets: `data[config.yaml]`."""
    return clean("".join(key if key[:1] == "[" else f".{key}" for key in map(_key, path)).removeprefix("."), 300)


def nested_error(field: str, error: InvalidField, advice: str = "") -> InvalidField:
    """An error in the document that this field holds, as an error of the whole file; `advice` follows the remedy."""
    if not field:
        return error
    return InvalidField(f"{field}.{error.field}", error.finding.removeprefix(f"{error.field}: "), error.remedy + advice)


def _key(key: str) -> str:
    return key if key[:1] == "[" or re.fullmatch(r"[\w-]+", key) else f"[{key}]"


def mappings_in(raw: bytes, source: str) -> list[FieldMapping]:
    """Every mapping in a file, an outer one before those inside it. Raises InvalidDocument where it cannot be read."""
    contents = documents.documents_of(raw, source)
    several = sum(content is not None for content in contents) > 1
    found: list[FieldMapping] = []
    for place, content in enumerate(contents):
        found += _inside(("documents", f"[{place}]") if several else (), content, DEEPEST_TEXT)
    return found


def _inside(path: Path, content: object, texts: int) -> Iterator[FieldMapping]:
    if isinstance(content, dict):
        yield FieldMapping(path, content)
        for key, value in content.items():
            if key != "metadata":
                yield from _inside((*path, str(key)), value, texts)
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield from _inside((*path, f"[{place}]"), value, texts)
    elif isinstance(content, str) and texts:
        opened = open_text(content)
        if opened is not None:
            yield from _inside_text(path, opened, texts - 1)


def _inside_text(path: Path, raw: bytes, texts: int) -> Iterator[FieldMapping]:
    try:
        contents = [content for content in documents.documents_of(raw, field_of(path)) if content is not None]
    except InvalidDocument:
        return  # a script, a certificate, a template: no document, which the whole file may contain
    for place, content in enumerate(contents):
        yield from _inside((*path, f"[{place}]") if len(contents) > 1 else path, content, texts)


def open_text(text: str) -> bytes | None:
    """The bytes of a value that may be a document; None for a plain word or sentence."""
    url = _DATA_URL.match(text)
    if url is not None:
        content = unquote_to_bytes(text[url.end() :])
        return _decoded(content) if url[1] else content
    if _BASE64.fullmatch(text):
        return _decoded(text.encode())
    return text.encode() if "\n" in text or text.lstrip().startswith("{") else None


def _decoded(content: bytes) -> bytes | None:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error:
        return None
