"""Random pods with shares that are limited, over real sockets, while the kubelet and the agent come and go."""

from random import Random

import pytest
from faults_support import THOROUGH
from share_support import BLOCKS, DEFAULT
from unit_support import CORES, MEMORY
from vcuda_support import VcudaNode, read_config

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import PodName, ResourceName

pytestmark = pytest.mark.anyio
ADMISSIONS = 12 if THOROUGH else 6
"""Of each seed."""


def share(chance: Random) -> tuple[int, int]:
    if chance.random() < 0.2:
        return 100 * chance.randint(1, 2), 0
    return chance.choice([0, 5, 30, 60]), chance.randint(1, 8)


def check_limits(it: VcudaNode, names: list[str]) -> None:
    """
    Whichever directory of an app container is mounted, it has the limits of that container; its name may be that of the init
    container from which it has all its units.
    """
    for name in names:
        running = it.kubelet.running[DEFAULT, PodName(name)]
        apps = {str(container.name) for container in running.pod.containers}
        units: dict[str, dict[ResourceName, set[str]]] = {}
        for each, resource, ids in running.parts():
            units.setdefault(str(each), {})[resource] = {*ids}
        for (container, _), directory in it.mounts(name).items():
            if container in apps:
                cores, blocks = (len(units[container].get(resource, ())) for resource in (CORES, MEMORY))
                memory = (cores // 100 * BLOCKS if cores >= 100 else blocks) << 28
                limits = read_config(directory / "vcuda.config")

                assert f"uid-{name}" == limits.pod_uid
                assert units[limits.container] == units[container]
                assert (cores or 100, memory, int(cores < 100)) == (limits.utilization, limits.memory, limits.enable)
                assert (directory / "vcuda.sock").is_socket()


@pytest.mark.parametrize("seed", range(200 if THOROUGH else 1))
async def test_no_container_has_the_limits_of_another(seed: int) -> None:
    """Also where units pass from init containers to app containers, and from pods that are gone to the next."""
    chance = Random(seed)
    async with VcudaNode.running(Random(seed)) as (it, tasks):
        running: list[str] = []
        admitted = 0
        for number in range(ADMISSIONS):
            if running and chance.random() < 0.45:
                gone = running.pop(chance.randrange(len(running)))
                await (it.remove(gone) if chance.random() < 0.6 else it.drop(gone))
            match chance.random():
                case low if low < 0.08:
                    await it.restart_kubelet()
                case low if low < 0.16:
                    await it.start_agent(tasks)
            name = f"p{number}"
            init = tuple(share(chance) for _ in range(chance.choice([0, 0, 1])))
            if isinstance(await it.admit(name, share(chance), init=init), Admission):
                running.append(name)
                admitted += 1
            else:
                await it.remove(name)
            await it.sweep()
            await it.check(running)
            check_limits(it, running)
        for name in running:
            await it.drop(name)
        for _ in range(8):  # owners of init containers are never known, and are waited for
            await it.settle()
        await it.sweep()

        assert admitted
        assert set() == it.directories()
