"""A configuration keeps up with its file: real files, swapped as a kubelet swaps a ConfigMap."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from topoalign.core.model.errors import BadRequest, InvalidField, NotFound
from topoalign.plugin_config.file_watch import POLL_SECONDS, ConfigurationFile
from topoalign.runtime.context import Context, Reload
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

HUGE = f"imex: {{channelIDs: [0x{'f' * 20_000}]}}"
GOOD, OTHER, WRONG = "flags: {migStrategy: mixed}", "flags: {migStrategy: single}", "flags: {migStrategy: both}"


class ConfigMap:
    """A volume as the kubelet writes it: the file is a link into `..data`, which is a link to the newest version."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.version = folder, 0
        self.file = folder / "config.yaml"
        self.holds(text)
        self.file.symlink_to("..data/config.yaml")

    def holds(self, text: str) -> None:
        self.version += 1
        (self.folder / f"..{self.version}").mkdir()
        (self.folder / f"..{self.version}" / "config.yaml").write_text(text)
        (self.folder / "..new").symlink_to(f"..{self.version}")
        os.rename(self.folder / "..new", self.folder / "..data")


class Kept:
    """A configuration that is kept up on a clock of the test."""

    def __init__(self, file: Path) -> None:
        self.clock, self.reload = ManualClock(), Reload()
        self.configuration = ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})

    @property
    def strategy(self) -> str:
        return self.configuration.current.flags.mig_strategy

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        async with background() as tasks:
            tasks.start_soon(self.configuration.keep_up, self.clock, self.reload.wait)
            await all_tasks_blocked()
            yield

    async def until(self, strategy: str) -> None:
        """Looks until the file has come into use: reading it takes a thread, whose time is not ours."""
        while self.strategy != strategy:
            await self.clock.advance(POLL_SECONDS)
            await anyio.to_thread.run_sync(int)

    async def refused(self) -> None:
        while self.configuration.reason_not_current is None:
            await self.clock.advance(POLL_SECONDS)
            await anyio.to_thread.run_sync(int)  # as long as a look takes


@pytest.fixture
def volume(tmp_path: Path) -> ConfigMap:
    return ConfigMap(tmp_path, GOOD)


async def test_a_file_that_says_again_what_it_said_at_first_is_another_change(tmp_path: Path) -> None:
    volume = ConfigMap(tmp_path, GOOD)
    kept = Kept(volume.file)
    seen = [kept.strategy]
    for text in (OTHER, GOOD):
        volume.holds(text)
        await kept.configuration.look()
        seen.append(kept.strategy)

    assert ["mixed", "single", "mixed"] == seen


async def test_a_swapped_link_is_noticed_without_being_asked(volume: ConfigMap) -> None:
    kept = Kept(volume.file)
    changed = kept.configuration.changed
    async with kept.up():
        volume.holds(OTHER)
        with anyio.fail_after(10):
            await kept.until("single")

    assert changed.is_set() and not kept.configuration.changed.is_set()


async def test_a_file_of_the_same_time_and_size_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "topoalign.yaml"
    file.write_text(GOOD + " ")
    before = file.stat()
    kept = Kept(file)
    file.write_text(OTHER)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert before.st_size == file.stat().st_size

    assert await kept.configuration.look()
    assert "single" == kept.strategy


@pytest.mark.parametrize("wrong", [WRONG, "", "flags: [", "\xff", "x" * 300_000, HUGE])
async def test_a_wrong_file_keeps_the_configuration_and_says_why_once(volume: ConfigMap, wrong: str) -> None:
    configuration = Kept(volume.file).configuration
    volume.holds(wrong)
    with capture_logs() as lines:
        assert [False] * 3 == [await configuration.look() for _ in range(3)]

    assert "mixed" == configuration.current.flags.mig_strategy
    assert ["configuration refused, the one before stays in use"] == [line["event"] for line in lines]
    assert lines[0]["finding"] and lines[0]["remedy"]
    assert configuration.reason_not_current is not None and lines[0]["finding"] in configuration.reason_not_current


async def test_a_file_that_is_gone_keeps_the_configuration_and_is_taken_up_again(volume: ConfigMap) -> None:
    configuration = Kept(volume.file).configuration
    volume.file.unlink()
    with capture_logs() as lines:
        assert not await configuration.look() and not await configuration.look()
        assert configuration.reason_not_current is not None
        volume.file.symlink_to("..data/config.yaml")
        assert not await configuration.look(), "it is the same as before"

    assert None is configuration.reason_not_current
    assert ["warning", "info"] == [line["log_level"] for line in lines]


async def test_whoever_asks_while_the_file_is_being_read_is_answered_afterwards() -> None:
    """Two SIGHUPs on top of one another: the second one may come after the file has changed again."""
    reload = Reload()
    reload.ask()
    with anyio.fail_after(10):
        await reload.wait()
    with anyio.move_on_after(0) as again:
        await reload.wait()

    assert again.cancelled_caught, "one wish is one look"


async def test_a_change_that_means_the_same_changes_nothing(volume: ConfigMap) -> None:
    configuration = Kept(volume.file).configuration
    changed = configuration.changed
    volume.holds(f"# as before\n{GOOD}\n")

    assert not await configuration.look()
    assert not changed.is_set()


async def test_without_a_file_the_environment_says_all(tmp_path: Path) -> None:
    configuration = ConfigurationFile({"MIG_STRATEGY": "mixed"})

    assert "mixed" == configuration.current.flags.mig_strategy
    assert not await configuration.look()


async def test_services_of_a_process_share_one_configuration_and_its_error(volume: ConfigMap) -> None:
    """The services of a process share one configuration, and its error is a note of the process."""
    environment = {"TOPOALIGN_CONFIG": str(volume.file)}
    context = Context(bus=MemoryBus(), clock=ManualClock(), environment=environment)
    configuration = context.configuration
    volume.holds(WRONG)
    await configuration.look()

    assert configuration is context.configuration
    assert configuration.reason_not_current == context.notes["configuration"]()


def test_nvidias_name_of_the_file_is_read_where_ours_is_not_set(volume: ConfigMap, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(OTHER)

    assert "mixed" == ConfigurationFile({"CONFIG_FILE": str(volume.file)}).current.flags.mig_strategy
    both = {"CONFIG_FILE": str(volume.file), "TOPOALIGN_CONFIG": str(other)}
    assert "single" == ConfigurationFile(both).current.flags.mig_strategy


def test_an_error_of_the_first_file_names_the_file_or_the_variable(tmp_path: Path) -> None:
    """An error in a field of the first file names the file; an error in a variable names the variable."""
    file = tmp_path / "topoalign.yaml"
    file.write_text(WRONG)
    with pytest.raises(InvalidField) as wrong_field:
        ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})
    with pytest.raises(InvalidField) as wrong_variable:
        ConfigurationFile({"TOPOALIGN_CONFIG": str(file), "MIG_STRATEGY": "some"})

    assert ("flags.migStrategy", True) == (wrong_field.value.field, str(file) in wrong_field.value.remedy)
    assert ("MIG_STRATEGY", False) == (wrong_variable.value.field, str(file) in wrong_variable.value.remedy)


def test_a_first_file_that_is_wrong_is_no_start(tmp_path: Path) -> None:
    file = tmp_path / "topoalign.yaml"
    with pytest.raises(NotFound):
        ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})
    file.write_text(WRONG)
    with pytest.raises(BadRequest, match=r"flags\.migStrategy"):
        ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})
    os.unlink(file)
    os.mkfifo(file)
    with pytest.raises(BadRequest, match="cannot be read"):
        ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})
