"""
Parses YAML and JSON documents of Kubernetes.

A document is small, is one mapping, and has no duplicates. Duplicate keys are refused here; the kubelet accepts one
with only a line in its log (v1.36.3, lenient decoding). Aliases are refused, because a few lines with aliases can
expand to gigabytes. Types are those of the text (YAML 1.1): a number in the place of a text is an error, as in the
kubelet, whose own reader is as strict.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound, clean, quoted
from topoalign.kubelet.files import reading

MOST_BYTES = 256 << 10
"""Far above any configuration or pod: the largest pods that an API server accepts have a few hundred containers."""
MOST_DOCUMENTS = 100
"""Documents of one file: a Helm chart printed as templates has some dozens."""
DEEPEST = 64
Document = dict[Any, Any]


class InvalidYaml(ValueError):
    """A text is not in the subset of YAML that is read here; the message has the place and the reason."""


class InvalidDocument(BadRequest):
    """
    Raised for a file that is no valid YAML, JSON or other expected document.

    Remedy: Correct the file at the line that the message names.
    """

    def __init__(self, source: str, finding: str, remedy: str) -> None:
        super().__init__(f"{clean(source, 200)}: {finding}", remedy)


def read_bounded(path: Path) -> bytes:
    """
    Reads a file, at most one byte more than the limit. Raises NotFound where there is none, and InvalidDocument where it
    cannot be read.
    """
    try:
        with reading.open_regular_file(path) as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFound("file", str(path), "give the path of a file that is there") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidDocument(str(path), f"cannot be read: {clean(why)}", "give a file that you may read") from error


def parse_document(raw: bytes, source: str, *, nulls: bool = False) -> Document:
    """
    The document that these bytes are; `source` names them in errors. `nulls`: fields that are null stay; else they are left
    out. Raises InvalidDocument.
    """
    (found,) = documents_of(raw, source, 1, nulls=nulls) or [None]
    if not isinstance(found, dict):
        finding = "not a mapping of fields" if raw.strip() else "it is empty"
        raise InvalidDocument(source, finding, "give one document of fields and values, `field: value`")
    return found


def documents_of(raw: bytes, source: str, most: int = MOST_DOCUMENTS, *, nulls: bool = False) -> list[object]:
    """The documents that these bytes are, at most `most`, empty ones too; otherwise as `parse_document`."""
    if len(raw) > MOST_BYTES:
        raise InvalidDocument(source, f"it is larger than {MOST_BYTES >> 10} KiB", "give the document alone")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDocument(source, f"byte {error.start + 1} is not UTF-8", "save it as UTF-8 text") from error
    try:
        contents = from_json(text, most) if text.lstrip().startswith("{") else from_yaml(text, most)
        known = [without_nulls(content) for content in contents]
    except InvalidYaml as error:
        raise InvalidDocument(
            source, str(error), "correct the YAML, or give one document alone" if most == 1 else "correct the YAML"
        ) from error
    except (ValueError, RecursionError, OverflowError) as error:
        # ValueError: a number too long to be one, a date that never was, a key that stands twice in JSON
        raise InvalidDocument(source, f"no YAML and no JSON: {clean(str(error), 200)}", "correct the file") from error
    return contents if nulls else known


def without_nulls(content: object, levels: int = DEEPEST) -> object:
    """
    The content without fields that are null: for Kubernetes they are missing. Raises ValueError for more nested levels.
    """
    if isinstance(content, dict | list) and not levels:
        raise ValueError(f"more than {DEEPEST} levels deep")
    if isinstance(content, dict):
        return {key: without_nulls(value, levels - 1) for key, value in content.items() if value is not None}
    if isinstance(content, list):
        return [without_nulls(value, levels - 1) for value in content]
    return content


def from_json(text: str, most: int) -> list[object]:
    """JSON, or YAML that starts like it. Raises ValueError and what `from_yaml` raises."""
    try:
        return [json.loads(text, object_pairs_hook=refuse_duplicate_keys, parse_constant=no_number)]
    except json.JSONDecodeError:
        return from_yaml(text, most)


def from_yaml(text: str, most: int) -> list[object]:
    """The documents of this text. Raises InvalidYaml, ValueError, OverflowError, RecursionError."""
    from topoalign.kubelet.files import yaml_text  # only where a file is read: PyYAML takes its time to load

    return yaml_text.load(text, DEEPEST, most)


def refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The JSON object of these pairs. Raises ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        times = Counter(key for key, _ in pairs)
        raise ValueError(f"a key stands twice: {quoted([key for key in mapping if times[key] > 1])}")
    return mapping


def no_number(name: str) -> object:
    """Called for `NaN` and `Infinity`, which JSON does not have."""
    raise ValueError(f"{name} is no number")


KEY = "`key` in "
"""The part of msgspec's messages about a key instead of a value."""
ANY_KEY = "[...]"
"""The path of a value in a mapping of any keys in msgspec's messages."""
STEP = re.compile(r"[^.\[\]]+")
"""A field, or a place in a list."""
GOT = re.compile(r"got `(\w+)`")
TYPES = {"array": "list", "object": "dict", "null": "NoneType"}
"""msgspec's name of a type -> Python's; for other types they are equal."""


def other_kind(document: Document, kind: str, api_version: str, remedy: str) -> InvalidField:
    """The error for another kind of object, or for a mapping without a kind."""
    found = [str(document[field]) for field in ("kind", "apiVersion") if field in document]
    what = " of ".join(quoted([word]) for word in found) if found else "a mapping without kind and apiVersion"
    return InvalidField("kind", f"{what} is no {kind} of {api_version}", remedy)


def convert_document(content: object, kind: Any, remedy: str) -> Any:
    """The content as this type; what it does not name is left out. Raises InvalidField with the path of a wrong value."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        finding, _, path = str(error).partition(" - at ")
        if path.startswith(KEY):
            finding = f"a key is no text: {finding}"
        field = with_key(path.removeprefix(KEY).strip("`$."), finding, content)
        finding = finding.replace(" | null`", "`")  # that the field may be left out does not help to correct its value
        raise InvalidField(clean(field) or "document", clean(finding, 200), remedy) from error


def with_key(field: str, finding: str, content: object) -> str:
    """
    The path of a wrong value. For a mapping of any keys msgspec writes `limits[...]`: the key is the first with a value
    of the type that msgspec has found.
    """
    found = GOT.search(finding)
    if not field.endswith(ANY_KEY) or field.count(ANY_KEY) > 1 or found is None:
        return field
    mapping: Any = content
    for part in STEP.findall(field.removesuffix(ANY_KEY)):
        mapping = mapping[int(part) if isinstance(mapping, list) else part]
    keys = (key for key, value in mapping.items() if type(value).__name__ == TYPES.get(found[1], found[1]))
    return f"{field.removesuffix(ANY_KEY)}[{next(keys, '...')}]"
