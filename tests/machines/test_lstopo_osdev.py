"""What an OS device of an lstopo export is: by a number before hwloc 3, by a set of bits since."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.topology.model import Topology
from topoalign.machines import load_machine
from topoalign.tools.machine_formats.lstopo import read_lstopo

BITS = {"storage": 1, "memory": 2, "gpu": 4, "coprocessor": 8, "network": 16, "rdma": 32, "dma": 64}
NUMBERS = {"storage": 0, "gpu": 1, "network": 2, "rdma": 3, "dma": 4, "coprocessor": 5}

ABOVE = """<object type="Machine"><object type="Package" os_index="0"><object type="NUMANode" os_index="0"/>
<object type="Core"><object type="PU" os_index="0"/></object></object>
<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[00-03]">"""


def read(version: str, *devices: str, pci_type: str = "0207 [15b3:1021] [15b3:0003] 00") -> Topology:
    """A machine of one PCI device, with these OS devices below it."""
    text = f"""<topology{f' version="{version}"' * bool(version)}>{ABOVE}
    <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="{pci_type}">{"".join(devices)}</object>
    </object></object></topology>"""
    return read_lstopo(io.BytesIO(text.encode()))


def device(name: str, kind: int | str, subtype: str = "", inside: str = "") -> str:
    return f'<object type="OSDev" name="{name}" subtype="{subtype}" osdev_type="{kind}">{inside}</object>'


@pytest.mark.parametrize("version", ["3", "3.0", "3.1", "4.0"])
def test_since_hwloc_3_an_rdma_device_is_one_with_the_bit_of_openfabrics(version: str) -> None:
    machine = read(
        version,
        device("mlx5_0", 48, inside='<info name="Port1State" value="4"/>'),
        device("ib0", 16),
        device("mem0", 3, "CXLMem"),
        device("dax0.0", 2),
        device("card0", 4),
        device("ve0", 8),
        device("cuda0", 12, "CUDA"),
        device("dma0chan0", 64),
        device("sda", 1),
        device("odd0", "x"),
    )

    assert [("mlx5_0", ("ib0",), "ACTIVE")] == [(nic.id, nic.netdevs, nic.ports[0].state) for nic in machine.nics]


@pytest.mark.parametrize("version", ["", "2.0", "2.1"])
def test_before_hwloc_3_an_rdma_device_is_number_3(version: str) -> None:
    machine = read(
        version,
        device("mlx5_0", 3),
        device("ib0", 2),
        device("bxi0", 3, "BXI"),
        device("sda", 0),
        device("card0", 1),
        device("dma0chan0", 4),
        device("mic0", 5),
        device("mlx5_9", 48),
        device("odd0", -1),
    )

    assert [("mlx5_0", ("bxi0", "ib0"))] == [(nic.id, nic.netdevs) for nic in machine.nics]


@settings(max_examples=80)
@given(st.lists(st.sets(st.sampled_from(sorted(BITS)), min_size=1), max_size=8), st.integers(0, 1 << 9))
def test_any_set_of_bits_is_a_nic_if_openfabrics_is_among_them(devices: list[set[str]], unknown: int) -> None:
    written = [device(f"d{i}", sum(BITS[kind] for kind in kinds) | unknown << 7) for i, kinds in enumerate(devices)]
    machine = read("3.0", *written)

    assert [f"d{i}" for i, kinds in enumerate(devices) if "rdma" in kinds] == [nic.id for nic in machine.nics]
    netdevs = tuple(f"d{i}" for i, kinds in enumerate(devices) if "network" in kinds and "rdma" not in kinds)
    assert {netdevs} >= {nic.netdevs for nic in machine.nics}


@settings(max_examples=40)
@given(st.lists(st.sampled_from(sorted(NUMBERS)), max_size=8))
def test_one_machine_written_by_hwloc_2_and_by_hwloc_3_has_the_same_nics(kinds: list[str]) -> None:
    bits = {**BITS, "rdma": 48, "gpu": 12}
    old = read("2.0", *(device(f"d{i}", NUMBERS[kind]) for i, kind in enumerate(kinds)))
    new = read("3.0", *(device(f"d{i}", bits[kind]) for i, kind in enumerate(kinds)))

    assert [f"d{i}" for i, kind in enumerate(kinds) if kind == "rdma"] == [nic.id for nic in old.nics]
    assert old == new


@pytest.mark.parametrize("size", ["11796032", "11796032KiB"])
def test_the_memory_of_a_gpu_is_read_with_and_without_its_unit(size: str) -> None:
    cuda = device("cuda0", 12, "CUDA", f'<info name="CUDAGlobalMemorySize" value="{size}"/>')
    machine = read("3.0", cuda, pci_type="0302 [10de:1023] [10de:097e] a1")

    assert [11796032 << 10] == [gpu.memory for gpu in machine.gpus]


@pytest.mark.parametrize("size", ["", "-1", "many", "1e9", "11GiB", "9" * 30])
def test_a_memory_of_a_gpu_that_is_no_number_of_kibibytes_is_unknown(size: str) -> None:
    cuda = device("cuda0", 12, "CUDA", f'<info name="CUDAGlobalMemorySize" value="{size}"/>')
    machine = read("3.0", cuda, pci_type="0302 [10de:1023] [10de:097e] a1")

    assert [None] == [gpu.memory for gpu in machine.gpus]


def test_hwlocs_own_test_machines_have_the_listed_nics_and_gpus(vectors: Path) -> None:
    """The machines of hwloc's own tests have the NICs and GPUs of the expected list."""
    folder = vectors / "hwloc"
    if not folder.is_dir():
        pytest.skip("no machines of hwloc in the case files")
    for name, expected in json.loads((folder / "expected.json").read_text()).items():
        machine = load_machine(str(folder / "xml" / name)).topology

        assert sorted(expected["rdma"]) == sorted(nic.id for nic in machine.nics), name
        assert not {*expected["memory_devices"]} & {nic.id for nic in machine.nics}, name
        assert expected["nvidia_gpus"] == len(machine.gpus), name
