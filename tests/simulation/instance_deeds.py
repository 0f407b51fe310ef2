"""What happens to GPUs whose slots become MIG instances: to the driver, to the file of ours, and by somebody's hand."""

from typing import TYPE_CHECKING

from simulation.mig_driver import CHANGES, PROFILES, Call, Driver, Instance

from topoalign.allocator.mig.instance_log import AWAY_SECONDS

if TYPE_CHECKING:
    from simulation.scenario import Scenario

HANGING: tuple[Call, ...] = ("nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", *CHANGES)


def driver_of(run: "Scenario") -> Driver:
    assert run.world.driver is not None
    return run.world.driver


def driver_fails(run: "Scenario") -> None:
    """Calls of NVML fail for a while, some or all."""
    driver, chance = driver_of(run), run.world.chance
    driver.failing = chance.choice((0.2, 0.5, 1.0))
    run.later(chance.choice((0.5, 8.0, 70.0)), lambda: setattr(driver, "failing", 0.0))


def driver_hangs(run: "Scenario") -> None:
    """The next call of one kind does not answer in time."""
    driver_of(run).hangs = run.world.chance.choice(HANGING)


def agent_dies_in_driver(run: "Scenario") -> None:
    """At the next change of a GPU, before or after it has happened."""
    chance = run.world.chance
    driver_of(run).kills = chance.choice(CHANGES), chance.random() < 0.5


def agent_dies_noting(run: "Scenario") -> None:
    """At the next write of the file of ours, before or after it has happened."""
    run.world.book.kills = True


def book_cannot_be_written(run: "Scenario") -> None:
    book = run.world.book
    book.full = True
    run.later(run.world.chance.choice((0.5, 8.0)), lambda: setattr(book, "full", False))


def agent_is_away(run: "Scenario") -> None:
    """Nobody looks after the instances for so long that what is there may be somebody else's."""
    run.away_seconds = AWAY_SECONDS + 60
    run.world.kill(run.agent.process)


def made_by_hand(run: "Scenario") -> None:
    """Somebody makes an instance at a place that is free, with `nvidia-smi mig`."""
    driver, chance = driver_of(run), run.world.chance
    gpu, kind = chance.choice(run.world.machine.gpus).id, chance.choice(PROFILES[:4])
    places = [place for place in kind.placements if not any(place.overlaps(each.placement) for each in driver.of(gpu))]
    if places:
        place = chance.choice(places)
        noted = [each for each in run.world.book.noted if each.gpu == gpu and each.profile == kind.name]
        is_noted = any(each.placement == place for each in noted)
        instance = Instance(gpu, kind, place, is_ours=False, has_compute=True, is_mistakable=is_noted)
        run.world.note("by hand", instance)
        driver.add(instance)


def destroyed_by_hand(run: "Scenario") -> None:
    """Somebody destroys an instance of their own."""
    driver = driver_of(run)
    if theirs := [each for each in driver.instances if not each.is_ours]:
        instance = run.world.chance.choice(theirs)
        run.world.note("by hand no more", instance)
        driver.remove(instance)


def monitor_looks(run: "Scenario") -> None:
    """A process of a monitor is in all instances for a while, so that none can be destroyed."""
    driver = driver_of(run)
    driver.watched = {*driver.instances}
    run.later(run.world.chance.choice((0.5, 8.0, 40.0)), driver.watched.clear)
