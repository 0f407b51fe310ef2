"""How a device that is handed out is: compared with a naive reading of the rule."""

from typing import NamedTuple

import msgspec
from decision_support import machine
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.holding_health import HandedOut, worst

SHARED, SLICE = ResourceName("nvidia.com/gpu.shared"), ResourceName("nvidia.com/mig-1g.10gb")
WHOLE, CUT = DeviceID("GPU-0"), DeviceID("GPU-1")
INSTANCES = (DeviceID("MIG-0"), DeviceID("MIG-1"))
PARENT = dict.fromkeys(INSTANCES, CUT)
BASES = (WHOLE, CUT, *INSTANCES)
SHARES = tuple(DeviceID(f"{base}::{number}") for base in BASES for number in range(2))
THINGS = (*BASES, *SHARES)
RANKS = {HealthState.HEALTHY: 0, HealthState.UNKNOWN: 1, HealthState.UNHEALTHY: 2}

healths = st.builds(
    DeviceHealth,
    state=st.sampled_from(HealthState),
    reason=st.sampled_from(["", "hot", "lost"]),
    cordoned=st.booleans(),
)


class Told(NamedTuple):
    """GPU-1 is cut into two instances; whatever is offered of the two GPUs, and whatever was told of anything."""

    topology: Topology
    health: dict[DeviceID, DeviceHealth]
    blocked: frozenset[DeviceID]

    def of(self, device: DeviceID) -> list[DeviceHealth]:
        """All that bears on a device: what is told of itself, of what it is a share of, of its card, of its instances."""
        base = DeviceID(device.split("::")[0])
        names = [device, base, PARENT.get(base, base)]
        names += [each for each in INSTANCES if PARENT[each] == base and not self.alone(each)]
        return [self.health[name] for name in dict.fromkeys(names) if name in self.health]

    def alone(self, instance: DeviceID) -> bool:
        offered = {base for offer in self.topology.offered for base in offer.devices}
        return instance in offered and instance not in self.blocked


@st.composite
def tellings(draw: st.DrawFn) -> Told:
    instances = tuple(
        MigDevice(uuid=uuid, profile="1g.10gb", gpu_instance=i, compute_instance=0, memory=1)
        for i, uuid in enumerate(INSTANCES)
    )
    plain = machine(gpus=(0, 1), nics=())
    cut = msgspec.structs.replace(plain, gpus=(plain.gpus[0], msgspec.structs.replace(plain.gpus[1], mig=instances)))
    offers = draw(
        st.sampled_from(
            [
                (Offer(resource=GPU, devices=(WHOLE, CUT)),),
                (Offer(resource=SHARED, devices=(WHOLE, CUT), replicas=2),),
                (Offer(resource=GPU, devices=(WHOLE,)), Offer(resource=SLICE, devices=INSTANCES)),
                (Offer(resource=SLICE, devices=INSTANCES[1:], replicas=2),),
            ]
        )
    )
    told = draw(st.dictionaries(st.sampled_from(THINGS), healths))
    blocked = draw(st.frozensets(st.sampled_from(BASES), max_size=2))
    return Told(msgspec.structs.replace(cut, offers=offers), told, blocked)


@given(tellings())
def test_a_device_is_as_bad_as_the_worst_that_bears_on_it(told: Told) -> None:
    """Of a device on which nothing bears that is told of itself or of what it is a part of, nothing is known."""
    known = HandedOut(told.topology, told.health, told.blocked)

    for device in (*THINGS, *THINGS):
        base = DeviceID(device.split("::")[0])
        got = known.health_of(device)
        if base in told.blocked:
            assert (HealthState.UNHEALTHY, False) == (got.state, got.usable)
            assert "former" in got.reason or "before" in got.reason
        elif not {device, base, PARENT.get(base, base)} & told.health.keys():
            assert (HealthState.UNKNOWN, False, "not judged yet") == (got.state, got.usable, got.reason)
        else:
            check_worst(told.of(device), got)


def check_worst(bearing: list[DeviceHealth], got: DeviceHealth) -> None:
    state = max((each.state for each in bearing), key=RANKS.__getitem__)
    reasons = {each.reason for each in bearing if each.state is state}

    assert state is got.state
    assert any(each.cordoned for each in bearing) == got.cordoned
    assert got.reason in (reasons - {""} or {""})


@given(tellings())
def test_healthy_are_the_usable_of_a_resource_in_the_order_of_the_hardware(told: Told) -> None:
    known = HandedOut(told.topology, told.health, told.blocked)

    for resource, listed in told.topology.devices.items():
        expected = tuple(device for device in listed if known.health_of(device).usable)
        assert (expected, expected) == (tuple(known.healthy(resource)), tuple(known.healthy(resource)))
    assert () == tuple(known.healthy(ResourceName("example.com/none")))


def test_of_two_equally_bad_the_last_says_why() -> None:
    """A share and its card: what is told of the card counts."""
    share, card = (DeviceHealth(state=HealthState.UNHEALTHY, reason=reason) for reason in ("share", "card"))

    assert "card" == worst([share, card]).reason
    assert "share" == worst([share, DeviceHealth(state=HealthState.UNHEALTHY)]).reason
    assert "share" == worst([share, DeviceHealth(state=HealthState.UNKNOWN, reason="card")]).reason
