"""What surrounds the lines of a matrix in logs, diffs, mails and web pages is no part of it."""

import html
import json
from collections.abc import Callable

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines import catalogue
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats import read_topology
from topoalign.tools.machine_formats.nvidia_smi import read_matrix, topology_of

TEXT = print_matrix(catalogue.machine("dgx-a100"))
LINES = TEXT.rstrip("\n").split("\n")
EXPECTED = read_matrix(TEXT)


def prefixed(prefix: Callable[[int], str]) -> str:
    return "".join(f"{prefix(number)}{line}\n" for number, line in enumerate(LINES, 1))


def cells(line: str, tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell.strip())}</{tag}>' for cell in line.split(chr(9)))}</tr>\n"


TABLE = f"<table>\n{cells(LINES[0], 'th')}{''.join(cells(line, 'td') for line in LINES[1:19])}</table>\n"
LEGEND_AT = next(number for number, line in enumerate(LINES) if line == "Legend:")

PREFIXES: dict[str, Callable[[int], str]] = {
    "kubectl logs --timestamps": lambda n: f"2026-09-01T10:00:{n:02}.{n * 7}Z ",
    "the log of a CRI runtime": lambda n: f"2026-09-01T10:00:00.{n:09}+02:00 stdout F ",
    "klog": lambda n: f"I0901 10:00:00.{n:06}       1 main.go:{n + 90}] ",
    "docker compose": lambda n: "topo-1  | ",
    "docker compose in colours": lambda n: "\x1b[36mtopo-1  | \x1b[0m",
    "kubectl logs --prefix": lambda n: "[pod/nvidia-smi-x7k2p/GPU0-check] ",
    "a pod name that contains digits": lambda n: "gpu-node-7 nvidia-smi-5d4f ",
    "syslog": lambda n: f"Sep  1 10:00:{n:02} node-7 nvidia-smi[4242]: ",
    "pdsh": lambda n: "node7: ",
    "cat -n": lambda n: f"{n:6}\t",
    "grep -n": lambda n: f"{n}:",
    "grep -n with a file": lambda n: f"topo.txt:{n}:",
    "an added file of a diff": lambda n: "+",
    "a removed file of a diff": lambda n: "-",
    "a quote in a mail": lambda n: "> ",
    "a quote in a quote in a mail": lambda n: ">> ",
    "Markdown: a quoted list": lambda n: "> - ",
    "Markdown: an indented block": lambda n: "    ",
    "a comment": lambda n: "# ",
    "a comment of a language": lambda n: "// ",
    "times without a fraction on some lines": lambda n: f"2026-09-01T10:00:{n:02}{'.5' if n % 3 else ''}Z ",
    "hexadecimal numbers": lambda n: f"[0x{n * 4096:x}] ",
    "a border": lambda n: "| ",
    "mpirun": lambda n: "[1,0]<stdout>:",
    "blanks that do not end a line": lambda n: f"node7 {n:>3} | ",
}

FORMS = {
    "the legend first": "\n".join([*LINES[LEGEND_AT:], "", *LINES[:LEGEND_AT]]),
    "HTML": f"<!DOCTYPE html>\n<html><body><p>It prints</p><pre>{TEXT}</pre></body></html>",
    "HTML with entities": f"<div>{html.escape(TEXT).replace(chr(9), '&#9;').replace(chr(10), '<br/>')}</div>",
    "HTML with coloured words": f"<pre>{TEXT.replace('GPU0', '<span style=x>GPU0</span>')}</pre>",
    "HTML after a sentence": f"On my node:\n<pre><code>{TEXT}</code></pre>",
    "HTML as a table": TABLE + "<pre>" + "\n".join(LINES[LEGEND_AT:]) + "</pre>",
    "a list of strings in JSON": json.dumps({"stdout_lines": LINES}, indent=2)[1:],
    "a string in JSON": f"changed: {json.dumps(TEXT)}",
}


@pytest.mark.parametrize("kind", PREFIXES)
def test_a_prefix_of_every_line_is_no_part_of_the_matrix(kind: str) -> None:
    assert EXPECTED == read_matrix(prefixed(PREFIXES[kind]))


@pytest.mark.parametrize("kind", PREFIXES)
def test_a_fault_behind_a_prefix_is_named_by_its_line_and_column(kind: str) -> None:
    text = prefixed(PREFIXES[kind]).replace(" X ", " Y ", 1)
    with pytest.raises(InvalidMachine) as caught:
        read_matrix(text)

    line = text.split("\n")[1]
    assert (2, "'Y' is not a cell") == (caught.value.line, caught.value.finding.partition(": ")[2][:17])
    if "\x1b" not in line:
        assert line.index("Y") + 1 == caught.value.column


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_in_another_form_is_the_same_matrix(form: str) -> None:
    assert topology_of(EXPECTED) == read_topology(FORMS[form].encode())


@pytest.mark.parametrize("prefix", ["Device", "word: "])
def test_what_stands_before_the_header_alone_is_no_prefix(prefix: str) -> None:
    with pytest.raises(InvalidMachine):
        read_matrix(prefix + TEXT)


def test_blank_lines_of_a_log_may_lack_the_blanks_of_the_prefix() -> None:
    text = "\n".join(line.rstrip() for line in prefixed(lambda n: f"2026-09-01T10:00:00.{n}Z ").split("\n"))

    assert EXPECTED == read_matrix(text)
