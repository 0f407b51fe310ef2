"""The suites `nccl` and `openb` on small files: what fails, what is skipped, and what is summed up."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from topoalign.cli import root
from topoalign.core.model.errors import InvalidMachine
from topoalign.machines import document, load_machine
from topoalign.tools.conformance import suites
from topoalign.tools.conformance.suite import RatedResult


def written(folder: Path, slow: float = 10.0, sets: int | None = None, name: str = "pairs") -> Path:
    """A file about eight GPUs in linked pairs: two GPUs that are no pair have `slow` GB/s, all other sets 40."""
    machine = load_machine("8x-nvlink-pairs")
    (folder / "machines").mkdir(exist_ok=True)
    (folder / "machines" / f"{name}.json").write_bytes(
        document.encode_machine(machine).replace(b'"fabric_links"', b'"nvlinks"')  # as published
    )
    members = [each for size in (2, 3, 4) for each in combinations(range(8), size)]
    linked = {(a, a + 1) for a in range(0, 8, 2)}
    lines = [
        json.dumps({"gpus": each, "allreduce_1GiB_GBps": 40.0 if each in linked or len(each) > 2 else slow})
        for each in members[:sets]
    ]
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def rated(name: str, file: Path) -> list[RatedResult]:
    return [each for each in suites()[name](file) if isinstance(each, RatedResult)]


def test_every_free_set_of_every_listed_size_is_a_case(tmp_path: Path) -> None:
    """Of eight GPUs there are 247 sets of two and more, 219 of three and more, and 163 of four and more."""
    results = rated("nccl", written(tmp_path))

    assert 247 + 219 + 163 == len(results)
    assert {1.0} == {each.ratio for each in results}


def test_a_choice_below_seventy_per_cent_of_the_best_fails(tmp_path: Path) -> None:
    """The measure takes linked pairs for the fastest; NCCL is made to say the opposite."""
    results = rated("nccl", written(tmp_path, slow=60.0))

    failed = [each for each in results if not each.passed]
    assert failed
    assert {40.0 / 60.0} == {each.ratio for each in failed}
    assert all("2 of" in each.id for each in failed)


def test_of_a_part_of_the_sets_only_what_is_listed_is_compared(tmp_path: Path) -> None:
    """Ten of the 28 pairs are listed."""
    results = rated("nccl", written(tmp_path, sets=10))

    assert 0 < len(results) <= 45
    assert all(each.passed for each in results)


@pytest.mark.parametrize("name", ["pairs.two-nodes", "pairs.nics"])
def test_files_about_two_nodes_are_skipped(tmp_path: Path, name: str) -> None:
    assert [] == rated("nccl", written(tmp_path, name=name))


def test_a_file_without_its_machine_or_with_other_lines_is_an_error(tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "other.jsonl").write_text(file.read_text())
    file.write_text('{"gpus": "all"}\n')

    for each in (tmp_path / "other.jsonl", file):
        with pytest.raises(InvalidMachine):
            list(suites()["nccl"](each))


def test_two_containers_are_compared_with_the_best_sum(tmp_path: Path) -> None:
    results = rated("nccl/two-containers", written(tmp_path))

    assert {1.0} == {each.ratio for each in results}
    assert all(len(each.id.split(" of ")[1].split(",")) >= 4 for each in results)


def test_ratios_are_summed_up_before_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["conformance", "nccl", str(written(tmp_path, slow=60.0))])

    *_, titles, row, last = capsys.readouterr().out.splitlines()
    assert "WITHIN 1 %  WITHIN 10 %" in titles
    assert ["pairs", "629", "0.6667"] == [row.split()[0], row.split()[1], row.split()[-1]]
    assert last.endswith("failed") and not last.endswith(" 0 failed")
    assert 1 == status


def test_a_cluster_is_filled_as_well_as_by_gradient_descent(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    sizes = [
        {"gpus": 1, "milli": 400, "pods": 3},
        {"gpus": 1, "milli": 700, "pods": 2},
        {"gpus": 8, "milli": 1000, "pods": 1},
    ]
    file.write_text(json.dumps({"some": sizes}))

    (result,) = rated("openb", file)

    assert result.passed, result
    assert result.ratio > 0.7
