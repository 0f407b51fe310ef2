"""One argument names any machine: of the catalogue, or any file that tells what one is."""

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from topoalign import machines
from topoalign.core.model.errors import InvalidMachine, NotFound
from topoalign.machines import MOST_BYTES, document, load_machine
from topoalign.machines.nvidia_smi_print import print_matrix

MATRIX = print_matrix(load_machine("epyc-nps4-4gpu").topology)
XML = b'<?xml version="1.0"?><topology><object type="Machine"><object type="PU" os_index="0"/></object></topology>'


def test_a_name_of_the_catalogue_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu-only").write_text("no machine")

    assert "cpu-only" == load_machine("cpu-only").name


@pytest.mark.parametrize(
    ("raw", "gpus"),
    [
        (MATRIX.encode(), 4),
        (MATRIX.encode("utf-16"), 4),
        (MATRIX.encode("utf-8-sig"), 4),
        (document.encode_machine(load_machine("dgx2")), 16),
        (b"\xef\xbb\xbf \n" + document.encode_machine(load_machine("dgx2")), 16),
        (XML, 0),
        (b"\n\n" + XML.partition(b"?>")[2], 0),
    ],
)
def test_a_file_is_known_by_its_content_whatever_it_is_called(raw: bytes, gpus: int, tmp_path: Path) -> None:
    (tmp_path / "machine.log").write_bytes(raw)

    assert gpus == len(load_machine(str(tmp_path / "machine.log")).topology.gpus)


def test_a_machine_is_called_like_its_file_or_as_its_document_says(tmp_path: Path) -> None:
    (tmp_path / "rack-3.topo.txt").write_text(MATRIX)
    (tmp_path / "a.json").write_bytes(document.encode_machine(load_machine("dgx2")))

    assert ("rack-3", "dgx2") == (
        load_machine(str(tmp_path / "rack-3.topo.txt")).name,
        load_machine(str(tmp_path / "a.json")).name,
    )


def test_a_folder_is_the_root_of_a_tree(tmp_path: Path) -> None:
    (tmp_path / "node-7" / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "node-7" / "sys/devices/system/cpu/online").write_text("0-3")
    machine = load_machine(str(tmp_path / "node-7"))

    assert ("node-7", 4) == (machine.name, len(machine.topology.cpus))


def test_a_dash_reads_what_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MATRIX.encode())))

    machine = load_machine("-")

    assert ("stdin", 4) == (machine.name, len(machine.topology.gpus))


def test_an_unknown_name_is_refused_with_the_names_of_the_catalogue() -> None:
    with pytest.raises(NotFound) as caught:
        load_machine("dgx-a10")

    assert "the catalogue has dgx1-volta, dgx2, dgx-a100" in caught.value.remedy


NO_MACHINES = {
    "empty": b"",
    "a blank line": b"\n",
    "binary": b"\x00\x01",
    "a byte order mark alone": b"\xff\xfe\x00",
    "a word": b"hello",
    "latin-1": b"caf\xe9",
    "gzip without a tar": gzip.compress(b"no tar"),
    "json and more": b"{}x",
    "another xml": b"<a/>",
}


@pytest.mark.parametrize("raw", NO_MACHINES.values(), ids=NO_MACHINES)
def test_a_file_that_is_no_machine_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)

    with pytest.raises(InvalidMachine):
        load_machine(str(tmp_path / "file"))


def test_bytes_that_are_no_text_are_refused_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"line one\nand \xe9t")

    with pytest.raises(InvalidMachine, match="line 2, column 5: byte 0xE9 is no text"):
        load_machine(str(tmp_path / "file"))


@pytest.mark.parametrize("source", ["/proc/self/mem", "a\x00b", "x" * 5000])
def test_a_file_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(InvalidMachine, match="cannot be read"):
        load_machine(source)


def test_a_file_that_is_too_large_is_refused_and_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InvalidMachine, match=f"larger than {MOST_BYTES >> 20} MiB"):
        load_machine(str(tmp_path / "sparse"))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero")
def test_a_device_without_end_is_refused_unread() -> None:
    with pytest.raises(InvalidMachine, match="neither a file nor a folder"):
        load_machine("/dev/zero")


def test_a_folder_without_a_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidMachine, match="no CPU that is online") as caught:
        load_machine(str(tmp_path))
    assert "a root that has sys/devices/system/cpu" in caught.value.remedy


def test_other_formats_than_our_json_need_an_installed_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "ENTRY_POINTS", "topoalign.not_installed")
    (tmp_path / "matrix").write_text(MATRIX)
    (tmp_path / "json").write_bytes(document.encode_machine(load_machine("dgx2")))

    assert 16 == len(load_machine(str(tmp_path / "json")).topology.gpus)
    with pytest.raises(InvalidMachine, match="no reader of other formats") as caught:
        load_machine(str(tmp_path / "matrix"))
    assert "install topoalign-tools" in caught.value.remedy


def test_naming_a_machine_loads_no_reader_of_files() -> None:
    program = "import sys; from topoalign.machines import load_machine; load_machine('dgx-a100'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30
    ).stdout.split()

    assert not {"defusedxml", "xml.sax", "tarfile", "tempfile", "asyncio", "subprocess"} & set(loaded)
