"""
Reads lstopo's XML into plain objects, safely.

The document may come from an untrusted source, so it is read as a stream with a limit on bytes, elements and depth.
The declaration of an entity is refused, independent of its content, and nothing outside the document is
opened. The DOCTYPE that names hwloc's own DTD is accepted and ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, NoReturn
from xml.sax import SAXException, SAXParseException
from xml.sax.handler import ContentHandler, ErrorHandler, feature_external_ges
from xml.sax.xmlreader import AttributesImpl, Locator

from defusedxml.common import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from topoalign.core.model.errors import InvalidMachine, clean, quoted

MOST_BYTES = 32 << 20
"""Ten times what lstopo writes for a machine of 64 NUMA nodes and a thousand CPUs."""
MOST_ELEMENTS = 200_000
DEEPEST = 128
"""Real files reach 20: caches and cores inside groups and packages, or a chain of bridges."""
CHUNK = 1 << 20
"""Bytes. Large, because older expats look at a token that is not finished from its start again with every chunk."""
LONGEST_TEXT = 1 << 20
"""Characters of a list of distances."""

EXPORT_AGAIN = "export the machine again with `lstopo --of xml FILE`"

_KEPT = frozenset(
    {"topology", "object", "info", "page_type", "distances", "latency", "distances2", "indexes", "u64values"}
)


@dataclass
class Element:
    """One relevant element, with its children in order."""

    tag: str
    attributes: dict[str, str]
    parent: "Element | None" = None
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    def get(self, name: str) -> str:
        """The value of an attribute; "" if it is missing."""
        return self.attributes.get(name, "")

    @property
    def type(self) -> str:
        """`PU`, `NUMANode`, …; "" if this is no object."""
        return self.get("type") if self.tag == "object" else ""

    def all(self) -> Iterator["Element"]:
        """This element and all below it, in the order of the document."""
        stack = [self]
        while stack:
            element = stack.pop()
            yield element
            stack.extend(reversed(element.children))

    def above(self) -> Iterator["Element"]:
        """The elements around this one, the nearest first."""
        element = self.parent
        while element is not None:
            yield element
            element = element.parent

    def info(self, name: str) -> str:
        """The value of `<info name=… value=…/>`; "" if there is none."""
        found = (child.get("value") for child in self.children if child.tag == "info" and child.get("name") == name)
        return next(found, "")


def read_elements(source: IO[bytes]) -> Element:
    """Parses a document and returns its topology element. Raises InvalidMachine with line and column."""
    # Not `forbid_external`: it would refuse the DOCTYPE of real files. What it names is not opened, and an external entity
    # has to be declared before it can be used, which `forbid_entities` refuses.
    parser = DefusedExpatParser(forbid_dtd=False, forbid_entities=True, forbid_external=False)
    parser.setFeature(feature_external_ges, False)
    builder = _Builder()
    parser.setContentHandler(builder)
    parser.setErrorHandler(ErrorHandler())
    size = 0
    try:
        while chunk := source.read(CHUNK):
            size += len(chunk)
            if size > MOST_BYTES:
                builder.refuse(f"the document is larger than {MOST_BYTES >> 20} MiB")
            parser.feed(chunk)
        parser.close()
    except DefusedXmlException as error:
        builder.refuse(f"it declares an entity, which no lstopo file does ({type(error).__name__})")
    except SAXParseException as error:
        line = error.getLineNumber() or 1
        column = (error.getColumnNumber() or 0) + 1
        raise InvalidMachine(f"no XML: {clean(error.getMessage())}", EXPORT_AGAIN, line, column) from error
    except (SAXException, ValueError, LookupError) as error:  # LookupError, ValueError: an encoding that there is not
        raise InvalidMachine(f"no XML: {clean(str(error))}", EXPORT_AGAIN) from error
    if builder.root is None:
        builder.refuse("the document is empty")
    return builder.root


class _Builder(ContentHandler):
    def __init__(self) -> None:
        super().__init__()
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = self._length = 0
        self._locator: Locator | None = None

    def setDocumentLocator(self, locator: Locator) -> None:
        self._locator = locator

    def startElement(self, name: str, attrs: AttributesImpl) -> None:
        self._count += 1
        if self._count > MOST_ELEMENTS:
            self.refuse(f"more than {MOST_ELEMENTS} elements")
        if len(self._open) >= DEEPEST:
            self.refuse(f"elements are nested deeper than {DEEPEST}")
        if self.root is None and name != "topology":
            self.refuse(f"the document is a {quoted([name])}, not a topology")
        parent = self._open[-1] if self._open else None
        element = Element(name, dict(attrs.items()), parent)
        if parent is not None and name in _KEPT:
            parent.children.append(element)
        self.root = self.root or element
        self._open.append(element)

    def endElement(self, name: str) -> None:
        self._open.pop()

    def characters(self, content: str) -> None:
        if self._open and self._open[-1].tag in ("indexes", "u64values"):
            self._length += len(content)
            if self._length > LONGEST_TEXT:
                self.refuse(f"more than {LONGEST_TEXT} characters of distances")
            self._open[-1].text += content

    def refuse(self, finding: str) -> NoReturn:
        line = self._locator.getLineNumber() if self._locator is not None else None
        column = self._locator.getColumnNumber() if self._locator is not None else None
        place = (line, (column or 0) + 1) if line else (None, None)
        raise InvalidMachine(finding, EXPORT_AGAIN, *place)
