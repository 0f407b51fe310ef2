"""Families of metrics as text, in the form that Prometheus reads, for services that write their series themselves."""

from topoalign.core.model.errors import clean

LONGEST_LABEL = 253
"""Characters of a label's value: as many as a name in Kubernetes may have."""


def header(name: str, meaning: str) -> bytes:
    """What stands above the series of a gauge."""
    return f"# HELP {name} {meaning}\n# TYPE {name} gauge\n".encode()


def line(name: str, value: float, **labels: str) -> bytes:
    """One sample; its labels in alphabetical order, each one printable, bounded and escaped."""
    pairs = (f'{label}="{escaped(clean(text, LONGEST_LABEL))}"' for label, text in sorted(labels.items()))
    return f"{name}{{{','.join(pairs)}}} {float(value)}\n".encode()


def escaped(text: str) -> str:
    """A label's value without an end of its own; `clean` has replaced line ends."""
    return text.replace("\\", r"\\").replace('"', r"\"")
