"""
What can happen to a node: a table of deeds with weights. Each begins at once and takes its time on its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from simulation import (
    bus_deeds,
    fault_deeds,
    instance_deeds,
    kubelet_deeds,
    liar_deeds,
    share_deeds,
    stale_deeds,
)

if TYPE_CHECKING:
    from simulation.scenario import Scenario


class Deed(NamedTuple):
    name: str
    weight: float
    do: "Callable[[Scenario], None]"
    needs: Literal["kubelet", "bus", "shares", "limits", "instances"] | None = None
    """
    Which way in the node must have for it, or that it has shares by amounts, directories that limit them, or slots that
    become MIG instances.
    """


DEEDS = (
    Deed("a pod comes", 4, kubelet_deeds.comes, "kubelet"),
    Deed("two pods come", 2, kubelet_deeds.two_come, "kubelet"),
    Deed("a pod goes", 2, kubelet_deeds.goes, "kubelet"),
    Deed("a pod is replaced", 2, kubelet_deeds.replaced, "kubelet"),
    Deed("Allocate again", 1, kubelet_deeds.again, "kubelet"),
    Deed("Allocate of what is held", 1, kubelet_deeds.conflict, "kubelet"),
    Deed("two Allocates race", 1, kubelet_deeds.race, "kubelet"),
    Deed("Allocates crowd in", 1, kubelet_deeds.crowd, "kubelet"),
    Deed("Allocate of nonsense", 0.5, kubelet_deeds.nonsense, "kubelet"),
    Deed("the kubelet restarts", 1, kubelet_deeds.kubelet_restarts, "kubelet"),
    Deed("the kubelet is away", 1, kubelet_deeds.kubelet_away, "kubelet"),
    Deed("the checkpoint cannot be read", 0.5, kubelet_deeds.checkpoint_unreadable, "kubelet"),
    Deed("a pod is refused after Allocate", 1, stale_deeds.is_refused, "kubelet"),
    Deed("a pod without volumes comes", 0.7, stale_deeds.comes_without_volumes, "kubelet"),
    Deed("a pod ends and stays", 1, stale_deeds.ends, "kubelet"),
    Deed("a pod is made anew", 1, stale_deeds.made_anew, "kubelet"),
    Deed("the checkpoint is lost", 0.5, stale_deeds.checkpoint_lost, "kubelet"),
    Deed("a pod is reserved for", 4, share_deeds.is_reserved, "shares"),
    Deed("a limiter's directory is spoilt", 1.5, share_deeds.directory_spoilt, "limits"),
    Deed("no room for limits", 1, share_deeds.no_room_for_limits, "limits"),
    Deed("the agent dies writing limits", 1, share_deeds.dies_writing_limits, "limits"),
    Deed("the driver fails", 3, instance_deeds.driver_fails, "instances"),
    Deed("the driver hangs", 3, instance_deeds.driver_hangs, "instances"),
    Deed("the agent dies in the driver", 4, instance_deeds.agent_dies_in_driver, "instances"),
    Deed("the agent dies noting instances", 3, instance_deeds.agent_dies_noting, "instances"),
    Deed("instances cannot be noted", 2, instance_deeds.book_cannot_be_written, "instances"),
    Deed("no agent for long", 0.5, instance_deeds.agent_is_away, "instances"),
    Deed("an instance is made by hand", 3, instance_deeds.made_by_hand, "instances"),
    Deed("an instance is destroyed by hand", 1, instance_deeds.destroyed_by_hand, "instances"),
    Deed("a monitor looks at instances", 2, instance_deeds.monitor_looks, "instances"),
    Deed("somebody asks", 5, bus_deeds.asks, "bus"),
    Deed("two ask at once", 2, bus_deeds.two_ask, "bus"),
    Deed("somebody asks again", 1, bus_deeds.asks_again, "bus"),
    Deed("a request comes late", 1.5, bus_deeds.asks_late, "bus"),
    Deed("somebody gives back", 3, bus_deeds.gives_back, "bus"),
    Deed("the allocator dies", 1, fault_deeds.allocator_dies),
    Deed("the allocator dies writing", 1.5, fault_deeds.allocator_dies_writing),
    Deed("the disk refuses", 1, fault_deeds.disk_refuses),
    Deed("discovery dies", 0.5, fault_deeds.discovery_dies),
    Deed("the registry is rebuilt", 0.7, fault_deeds.registry_rebuilt),
    Deed("the bus is away", 1, fault_deeds.bus_away),
    Deed("bad weather", 1, fault_deeds.bad_weather),
    Deed("good weather", 0.5, fault_deeds.good_weather),
    Deed("a device ails", 1, fault_deeds.device_ails),
    Deed("the devices recover", 0.5, fault_deeds.devices_recover),
    Deed("the clock jumps", 0.7, fault_deeds.clock_jumps),
    Deed("a process is paused", 0.7, fault_deeds.paused),
    Deed("the node reboots", 0.4, fault_deeds.reboots),
    Deed("the journal is damaged", 0.5, fault_deeds.journal_damaged, "kubelet"),
    Deed("the division changes", 0.7, fault_deeds.division_changes, "kubelet"),
    Deed("GPUs are renumbered", 0.4, fault_deeds.renumbered),
    Deed("somebody forges a snapshot", 0.6, liar_deeds.forges_snapshot),
    Deed("somebody forges facts", 0.8, liar_deeds.forges_facts),
    Deed("somebody forges the hardware", 0.6, liar_deeds.forges_hardware),
    Deed("somebody takes ids", 0.7, liar_deeds.takes_ids),
    Deed("compaction", 0.7, fault_deeds.compaction),
    Deed("a decision is compared", 0.5, fault_deeds.compared),
)


def only(*names: str) -> tuple[Deed, ...]:
    """The deeds of these names, with their weights."""
    chosen = tuple(deed for deed in DEEDS if deed.name in names)
    assert len(names) == len(chosen), f"no such deeds: {set(names) - {deed.name for deed in chosen}}"
    return chosen
