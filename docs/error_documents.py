"""
Generates the tables of docs/errors.md from the code: every error code with its cause and its remedy.

Both come from the docstring of the error's class (the last paragraph begins with `Remedy:`), or else from the text that the
extender gives to kube-scheduler for the code. `make event-documents` writes them; a test generates them again and
expects no difference.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from event_documents import cell, replace_generated

import topoalign
from topoalign.core.model.errors import BadRequest, NoFit, TopoalignError, Unavailable
from topoalign.registry.scheduling.extender.extender_answers import FINDINGS

OTHER_PACKAGES = ("topoalign.testing", "topoalign.tools")
"""Those that are not part of the product."""

SECTIONS: dict[type[TopoalignError], str] = {
    BadRequest: "The request or the configuration is invalid",
    NoFit: "The request is valid and does not fit",
    Unavailable: "The machine or a service failed",
    TopoalignError: "Others",
}
"""Base class -> heading; a code is below the first one that its class derives from."""

REMEDY = re.compile(r"\s*Remedy:\s*")
RAISED = re.compile(r"Raised (?:when|if|for|while|where) ")


class ErrorCode(NamedTuple):
    """One row."""

    code: str
    base: type[TopoalignError]
    cause: str
    remedy: str


def main(docs: Path) -> None:
    """Writes the tables of the page below this folder."""
    page = docs / "errors.md"
    page.write_text(replace_generated(page.read_text(), tables()))


def tables() -> str:
    """A table for each section."""
    codes = error_codes()
    return "\n\n".join(
        "\n".join([f"## {heading}", "", "| code | cause | remedy |", "|---|---|---|", *rows])
        for base, heading in SECTIONS.items()
        if (
            rows := [
                f"| `{each.code}` | {cell(each.cause)} | {cell(each.remedy)} |" for each in codes if each.base is base
            ]
        )
    )


def error_codes() -> list[ErrorCode]:
    """All codes, sorted. Raises LookupError for one without a cause or a remedy."""
    classes: dict[str, list[type[TopoalignError]]] = {}
    kinds: list[type[TopoalignError]] = [TopoalignError, *sorted(error_classes(), key=lambda kind: kind.__name__)]
    for kind in kinds:
        if "code" in vars(kind):
            classes.setdefault(kind.code, []).append(kind)
    found = [describe(code, kinds) for code, kinds in classes.items()]
    found += [ErrorCode(code, NoFit, *extender_text(code)) for code in FINDINGS.keys() - classes.keys()]
    return sorted(found)


def error_classes() -> Iterator[type[TopoalignError]]:
    """Every class of errors of the product."""
    for module in pkgutil.walk_packages(topoalign.__path__, "topoalign."):
        if of_product(module.name):
            importlib.import_module(module.name)
    todo: list[type[TopoalignError]] = [TopoalignError]
    while todo:
        below = [kind for kind in todo.pop().__subclasses__() if of_product(kind.__module__)]
        yield from below
        todo += below


def of_product(module: str) -> bool:
    """Whether a module is a part of the product."""
    return module.startswith("topoalign.") and not module.startswith(OTHER_PACKAGES)


def describe(code: str, kinds: list[type[TopoalignError]]) -> ErrorCode:
    """The row of a code. Of several classes with one code, the class of that name describes it."""
    kind = next((kind for kind in kinds if kind.__name__ == code), kinds[0])
    base = next(base for base in SECTIONS if issubclass(kind, base))
    text, *remedy = REMEDY.split(kind.__doc__ or "")
    if remedy:
        return ErrorCode(code, base, first_sentence(RAISED.sub("", text, count=1)), one_line(remedy[0]))
    return ErrorCode(code, base, *extender_text(code))


def extender_text(code: str) -> tuple[str, str]:
    """Cause and remedy that the extender gives for a code."""
    cause, _, remedy = FINDINGS.get(code, "").partition("; ")
    if not remedy:
        raise LookupError(f"the docstring of the error {code} has no paragraph `Remedy:`")
    return capitalised(cause) + ".", capitalised(remedy) + "."


def first_sentence(text: str) -> str:
    """The first sentence of a docstring."""
    line = one_line(text)
    return capitalised(re.split(r"(?<=\.) (?=[A-Z`])", line)[0])


def one_line(text: str) -> str:
    """The text without line ends."""
    return " ".join(text.split())


def capitalised(text: str) -> str:
    """The text with a capital letter at its beginning; the rest stays."""
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
