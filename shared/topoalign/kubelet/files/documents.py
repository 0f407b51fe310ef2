"""
YAML and JSON documents of Kubernetes; the only module that imports PyYAML.

A document is small, is one mapping, and has no duplicates. Duplicate keys are refused here; the kubelet accepts one
with only a line in its log (v1.36.3, lenient decoding). Aliases are refused, because a few lines with aliases can
expand to gigabytes. Types are those of the text (YAML 1.1): a number in the place of a text is an error, as in the
kubelet, whose own reader is as strict.
"""

import json
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound, clean, quoted
from topoalign.kubelet.files import reading

MOST_BYTES = 256 << 10
"""Far above any configuration or pod: the largest pods that an API server takes have a few hundred containers."""
DEEPEST = 64
LONGEST_NUMBER = 400
"""Characters of a number in YAML: the largest that a float holds has 309 digits."""

Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C where PyYAML was built with it: a hundred times as fast."""

TEXT = "tag:yaml.org,2002:str"
NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})

Document = dict[Any, Any]


class InvalidDocument(BadRequest):
    """A file is not a document that can be read at all."""

    code = "InvalidDocument"

    def __init__(self, source: str, finding: str, remedy: str) -> None:
        super().__init__(f"{clean(source, 200)}: {finding}", remedy)


class Once(Loader):  # type: ignore[valid-type, misc]  # chosen when PyYAML is imported
    """Reads mappings whose keys stand once each."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node. Raises ConstructorError for a duplicate key."""
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise self.said_again(node)
        return mapping

    def said_again(self, node: yaml.MappingNode) -> yaml.MarkedYAMLError:
        """An error at the first key that stood before."""
        before: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Hashable = self.construct_object(key_node, deep=True)
            if key in before:
                return unwanted(f"a key stands twice: {quoted([str(key)])}", key_node)
            before.add(key)
        return unwanted("a key stands twice", node)

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        """
        Text such as 1:30 stays text: Kubernetes' YAML has no numbers to the base of 60. So does a long number: Python reads
        one of twenty thousand hexadecimal digits, and then refuses to show it.
        """
        tag: str = super().resolve(kind, value, implicit)
        return TEXT if tag in NUMBERS and (":" in value or len(value) > LONGEST_NUMBER) else tag


def load_document(path: Path) -> Document:
    """The document in a file. Raises NotFound where there is none, InvalidDocument where it cannot be read."""
    return read(content(path), str(path))


def content(path: Path) -> bytes:
    """What a file holds, and no more of it than shows that it is too large. Raises as `load`."""
    try:
        with reading.opened(path) as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFound("file", str(path), "give the path of a file that is there") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidDocument(str(path), f"cannot be read: {clean(why)}", "give a file that you may read") from error


def read(raw: bytes, source: str) -> Document:
    """The document that these bytes are; `source` is what to call them. Raises InvalidDocument."""
    if len(raw) > MOST_BYTES:
        raise InvalidDocument(source, f"it is larger than {MOST_BYTES >> 10} KiB", "give the document alone")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDocument(source, f"byte {error.start + 1} is not UTF-8", "save it as UTF-8 text") from error
    try:
        content = without_nulls(from_json(text) if text.lstrip().startswith("{") else from_yaml(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise InvalidDocument(source, f"{place}{clean(error.problem or 'no YAML', 200)}", "mend the YAML") from error
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        # ValueError: a number too long to be one, a date that never was, a key that stands twice in JSON
        raise InvalidDocument(source, f"no YAML and no JSON: {clean(str(error), 200)}", "mend the file") from error
    if not isinstance(content, dict):
        finding = "it is empty" if not text.strip() else "not a mapping of fields"
        raise InvalidDocument(source, finding, "give one document of fields and values, `field: value`")
    return content


def without_nulls(content: object, levels: int = DEEPEST) -> object:
    """
    The same with every field left out that is null: to Kubernetes that is not to mention it. Raises ValueError for more
    levels than these: whoever walks through a document need not expect them.
    """
    if isinstance(content, dict | list) and not levels:
        raise ValueError(f"more than {DEEPEST} levels deep")
    if isinstance(content, dict):
        return {key: without_nulls(value, levels - 1) for key, value in content.items() if value is not None}
    if isinstance(content, list):
        return [without_nulls(value, levels - 1) for value in content]
    return content


def from_json(text: str) -> object:
    """JSON, or YAML that starts like it. Raises ValueError and what `from_yaml` raises."""
    try:
        content: object = json.loads(text, object_pairs_hook=said_once, parse_constant=no_number)
    except json.JSONDecodeError:
        return from_yaml(text)
    return content


def said_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The JSON object of these pairs. Raises ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        times = Counter(key for key, _ in pairs)
        raise ValueError(f"a key stands twice: {quoted([key for key in mapping if times[key] > 1])}")
    return mapping


def no_number(name: str) -> object:
    """Refuse `NaN` and `Infinity`, which JSON does not have. Raises ValueError."""
    raise ValueError(f"{name} is no number")


def from_yaml(text: str) -> object:
    """The one document of this text. Raises YAMLError, ValueError, OverflowError, RecursionError."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent):
            raise unwanted("aliases are not read: write it out", event)
        if getattr(event, "tag", None) is not None:
            raise unwanted("tags are not read: write plain values", event)
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise unwanted(f"more than {DEEPEST} levels deep", event)
        if documents > 1:
            raise unwanted("a second document begins", event)
    return yaml.load(text, Loader=Once)  # noqa: S506  # Once is a safe loader


def unwanted(what: str, where: Any) -> yaml.MarkedYAMLError:
    """An error at an event or a node."""
    return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


KEY = "`key` in "
"""How msgspec says that it means a key and no value."""


def expect_kind(document: Document, kind: str, api_version: str, remedy: str) -> None:
    """Raises InvalidField for another kind of object."""
    found = [str(document.get("kind")), str(document.get("apiVersion"))]
    if found != [kind, api_version]:
        raise InvalidField("kind", f"{quoted(found[:1])} of {quoted(found[1:])} is no {kind} of {api_version}", remedy)


def converted(content: object, kind: Any, remedy: str) -> Any:
    """The content as this type; what it does not name is left out. Raises InvalidField with the path of a wrong value."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        finding, _, path = str(error).partition(" - at ")
        if path.startswith(KEY):
            finding = f"a key is no text: {finding}"
        field = path.removeprefix(KEY).strip("`$.")
        finding = finding.replace(" | null`", "`")  # it may be left out, which helps nobody who wrote something
        raise InvalidField(clean(field) or "document", clean(finding, 200), remedy) from error
