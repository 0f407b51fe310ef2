"""Reads a YAML text with the limits of `documents`, and writes one; the only module that imports PyYAML."""

from collections.abc import Hashable
from typing import Any

import yaml

from topoalign.core.model.errors import quoted

LONGEST_NUMBER = 400
"""Characters of a number in YAML: the largest that a float holds has 309 digits."""

Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C where PyYAML was built with it: a hundred times as fast."""

TEXT = "tag:yaml.org,2002:str"
NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class Once(Loader):  # type: ignore[valid-type, misc]  # chosen when PyYAML is imported
    """Reads mappings whose keys stand once each."""

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
        Text such as 1:30 stays text: Kubernetes' YAML has no numbers to the base of 60. So does a long number: Python reads
        one of twenty thousand hexadecimal digits, and then refuses to show it.
        """
        tag: str = super().resolve(kind, value, implicit)
        return TEXT if tag in NUMBERS and (":" in value or len(value) > LONGEST_NUMBER) else tag


def load(text: str, deepest: int, most: int = 1) -> list[object]:
    """The documents of a text, at most `most` of at most `deepest` levels. Raises ValueError with the place."""
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
    """Raises YAMLError for aliases, tags, more levels and more documents."""
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
    """A document as YAML, its keys in their order, in ASCII, on lines of their own."""
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
    return text
