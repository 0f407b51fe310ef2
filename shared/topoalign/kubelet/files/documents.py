"""
Parses YAML and JSON documents of Kubernetes.

A document is small, is one mapping, and has no duplicate keys. Duplicate keys are rejected here; the kubelet accepts
and logs them (v1.36.3, lenient decoding). Aliases are rejected, because a few lines with aliases can expand to
gigabytes. Types are those of YAML 1.1: a number in place of a string is an error, as in the kubelet.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound, clean, quoted
from topoalign.core.model.strict_json import load_strict_json
from topoalign.kubelet.files import reading

MOST_BYTES = 256 << 10
"""Far above any configuration or pod: the largest pods that an API server accepts have a few hundred containers."""
MOST_DOCUMENTS = 100
"""Maximum number of documents in a file. A rendered Helm chart has some dozens."""
DEEPEST = 64
Document = dict[Any, Any]


class InvalidDocument(BadRequest):
    """
    Raised for a file that is not valid YAML or JSON, or not the expected document.

    Remedy: Correct the file at the line that the message names.
    """

    def __init__(self, source: str, finding: str, remedy: str) -> None:
        super().__init__(f"{clean(source, 200)}: {finding}", remedy)


def read_bounded(path: Path) -> bytes:
    """Reads at most `MOST_BYTES` + 1 bytes. Raises NotFound, and InvalidDocument if the file cannot be read."""
    try:
        with reading.open_regular_file(path) as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFound("file", str(path), "give the path of a file that is there") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidDocument(str(path), f"cannot be read: {clean(why)}", "give a file that you may read") from error


def parse_document(raw: bytes, source: str, *, nulls: bool = False) -> Document:
    """Parses exactly one document. `source`: its name in errors. `nulls`: keeps null fields. Raises InvalidDocument."""
    (found,) = documents_of(raw, source, 1, nulls=nulls) or [None]
    if not isinstance(found, dict):
        finding = "not a mapping of fields" if raw.strip() else "it is empty"
        raise InvalidDocument(source, finding, "give one document of fields and values, `field: value`")
    return found


def documents_of(raw: bytes, source: str, most: int = MOST_DOCUMENTS, *, nulls: bool = False) -> list[object]:
    """Parses the documents in these bytes, at most `most`, including empty ones; otherwise like `parse_document`."""
    if len(raw) > MOST_BYTES:
        raise InvalidDocument(source, f"it is larger than {MOST_BYTES >> 10} KiB", "give the document alone")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDocument(source, f"byte {error.start + 1} is not UTF-8", "save it as UTF-8 text") from error
    try:
        contents = load_json_or_yaml(text, most)
        known = [without_nulls(content) for content in contents]  # also checks the depth
    except (ValueError, RecursionError, OverflowError) as error:
        # ValueError: also for a number that is too long, an invalid date, or a duplicate key in JSON
        raise InvalidDocument(source, clean(str(error), 200), "correct the file: it is read as YAML or JSON") from error
    return contents if nulls else known


def without_nulls(content: object, levels: int = DEEPEST) -> object:
    """The content without null fields, which Kubernetes treats as missing. Raises ValueError for too many levels."""
    if isinstance(content, dict | list) and not levels:
        raise ValueError(f"more than {DEEPEST} levels deep")
    if isinstance(content, dict):
        return {key: without_nulls(value, levels - 1) for key, value in content.items() if value is not None}
    if isinstance(content, list):
        return [without_nulls(value, levels - 1) for value in content]
    return content


def load_json_or_yaml(text: str, most: int) -> list[object]:
    """The documents of a text; YAML may start like JSON. Raises the errors of `yaml_text.load`."""
    if text.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            return [load_strict_json(text)]
    from topoalign.kubelet.files import yaml_text  # only if a file is read: PyYAML is slow to import

    return yaml_text.load(text, DEEPEST, most)


def other_kind(document: Document, kind: str, api_version: str, remedy: str) -> InvalidField:
    """The error for another kind of object, or for a mapping without a kind."""
    found = [str(document[field]) for field in ("kind", "apiVersion") if field in document]
    what = " of ".join(quoted([word]) for word in found) if found else "a mapping without kind and apiVersion"
    return InvalidField("kind", f"{what} is no {kind} of {api_version}", remedy)


def convert_document(content: object, kind: Any, remedy: str) -> Any:
    """Converts the content to this type; ignores unknown fields. Raises InvalidField with the path of a wrong value."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        finding, _, path = str(error).partition(" - at ")
        field = name_key(path.rpartition("$")[2].strip("`."), finding, content)
        finding = finding.replace(" | null`", "`")  # that the field is optional does not help to correct its value
        raise InvalidField(clean(field) or "document", clean(finding, 200), remedy) from error


GOT = re.compile(r"got `(\w+)`")
TYPES = {"array": "list", "object": "dict", "null": "NoneType"}
"""msgspec's name of a type -> Python's; for other types they are equal."""


def name_key(field: str, finding: str, content: Any) -> str:
    """
    The path of a wrong value. In a mapping, msgspec writes `limits[...]`: the key is the first whose value has the type
    that msgspec has found.
    """
    found = GOT.search(finding)
    begin, any_key, rest = field.partition("[...]")
    if not any_key or rest or found is None:
        return field
    for step in re.findall(r"[^.\[\]]+", begin):
        content = content[int(step) if isinstance(content, list) else step]
    keys = (key for key, value in content.items() if type(value).__name__ == TYPES.get(found[1], found[1]))
    return f"{begin}[{next(keys, '...')}]"
