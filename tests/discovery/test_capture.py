"""A machine that is captured on real hardware can be played by anybody, and does not say whose it was."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvml_support import DGX1_VOLTA, Node, direct_links, host_tree, put, script, standing_in

from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines import catalogue, load_machine
from topoalign.tools.capture import NO_DRIVER, main

SECRETS = ("GPU-5e7a-4c11", "MIG-77aa", "c0ffee", "enx0badcafe0001", "uverbs7")


@pytest.fixture
def node(nvml_library: Path, tmp_path: Path) -> Iterator[Node]:
    root = host_tree(tmp_path / "host")
    put(root, "sys/devices/pci0000:00/0000:00:09.0/0000:09:00.0/net/enx0badcafe0001/address", "0b:ad:ca:fe:00:01")
    put(root, "sys/devices/pci0000:00/0000:00:09.0/0000:09:00.0/infiniband_verbs/uverbs7/dev", "231:7")
    lines = [line.replace("uuid=GPU-", "uuid=GPU-5e7a-4c11-") for line in script().splitlines()]
    lines[2] += " mig=1"
    more = [
        "mig 2 gi=1 ci=0 uuid=MIG-77aa name=MIG_1g.10gb memory=9728 slices=1 compute=1",
        "fabric 0 4 3 0 c0ffee00112233445566778899aabbcc",
        *direct_links(DGX1_VOLTA),
    ]
    with standing_in(nvml_library, tmp_path, "\n".join([*lines, *more])) as standin:
        yield Node(root, standin)


def test_its_shape_stays_and_its_names_go(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main([str(tmp_path / "captured")], node.driver)

    file = tmp_path / "captured" / "8x-nvidia-h100-80gb.json"
    written = file.read_text()
    said = written + capsys.readouterr().out
    assert [] == [secret for secret in SECRETS if secret in said]
    machine = load_machine(str(file))
    validate(machine.topology)
    assert "2 sockets, 2 NUMA nodes, CPUs 0-31, 8 GPUs, 2 NICs" == machine.topology.describe()
    assert ["GPU-0", "GPU-1"] == [gpu.id for gpu in machine.topology.gpus[:2]]
    gpus, links = machine.topology.gpus, machine.topology.link_by_pair
    assert [sum(row) for row in DGX1_VOLTA] == [
        sum(links[a.id, b.id].fabric_links for b in gpus if a != b) for a in gpus
    ]
    assert "captured by nvml" == machine.source
    assert "serial" not in json.dumps(json.loads(written))


def test_it_is_in_the_catalogue_from_then_on(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "CAPTURED", tmp_path / "captured")
    main([str(tmp_path / "captured")], node.driver)

    assert "8x-nvidia-h100-80gb" == catalogue.names()[-1]
    assert 8 == len(load_machine("8x-nvidia-h100-80gb").topology.gpus)


def test_without_a_driver_it_says_so_and_ends_with_an_error(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.standin.play("fail nvmlInitWithFlags * 9")

    assert NO_DRIVER == main([], node.driver)
    told = capsys.readouterr()
    assert ("", True) == (told.out, "no machine to capture: NVML does not work" in told.err)
