"""Reads a YAML text with the limits of `documents`, and writes one; the only module that imports PyYAML."""

from collections.abc import Hashable
from typing import Any

import yaml

from topoalign.core.model.errors import quoted

LONGEST_NUMBER = 400
"""Maximum length of a number in YAML, in characters. The largest number that a float holds has 309 digits."""

Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader; the one in C, which is a hundred times as fast, if PyYAML was built with it."""

TEXT = "tag:yaml.org,2002:str"
NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class Once(Loader):  # type: ignore[valid-type, misc]  # chosen when PyYAML is imported
    """A loader that rejects duplicate keys in mappings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node. Raises ConstructorError for a duplicate key."""
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        if len(mapping) == len(node.value):
            return mapping
        before: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Hashable = self.construct_object(key_node, deep=True)
            if key in before:
                raise unwanted(f"a key stands twice: {quoted([str(key)])}", key_node)
            before.add(key)
        raise unwanted("a key stands twice", node)

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        """
        Reads 1:30 as a string, because Kubernetes' YAML has no base-60 numbers. Also reads a long number as a string:
        Python parses a number of 20,000 hexadecimal digits, but then refuses to print it.
        """
        tag: str = super().resolve(kind, value, implicit)
        return TEXT if tag in NUMBERS and (":" in value or len(value) > LONGEST_NUMBER) else tag


def load(text: str, deepest: int, most: int = 1) -> list[object]:
    """The documents of a text, at most `most`, with at most `deepest` levels. Raises ValueError with the position."""
    try:
        check_events(text, deepest, most)
        return list(yaml.load_all(text, Loader=Once))  # Once is a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ValueError(f"{place}{error.problem or 'no YAML'}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def check_events(text: str, deepest: int, most: int) -> None:
    """Raises YAMLError for aliases and tags, and for too many levels or documents."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent):
            raise unwanted("aliases are not read: write it out", event)
        if getattr(event, "tag", None) is not None:
            raise unwanted("tags are not read: write plain values", event)
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > deepest:
            raise unwanted(f"more than {deepest} levels deep", event)
        if documents > most:
            raise unwanted(f"more than {most} documents" if most > 1 else "a second document begins", event)


def unwanted(what: str, where: Any) -> yaml.MarkedYAMLError:
    """An error at an event or a node."""
    return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


def write_yaml(document: object) -> str:
    """A document as YAML in ASCII, with its keys in their order."""
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    return text
