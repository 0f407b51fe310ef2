"""What a kubelet leaves behind in its files of pods that are gone, and what it loses of pods that run."""

from typing import TYPE_CHECKING

import msgspec
from simulation.kubelet_deeds import new_pod
from simulation.record import held_by
from simulation.replaying import replayed
from simulation.share_deeds import come

if TYPE_CHECKING:
    from simulation.scenario import Scenario


def is_refused(run: "Scenario") -> None:
    """A pod gets its devices, and another manager refuses it: it has no directory, and its entries stay."""
    come(run, msgspec.structs.replace(new_pod(run), refused=True))


def comes_without_volumes(run: "Scenario") -> None:
    """Its directory never tells that it has ended."""
    come(run, msgspec.structs.replace(new_pod(run), volumes=False))


def ends(run: "Scenario") -> None:
    """A pod succeeds or fails, and is deleted later or never."""
    kubelet = run.kubelet
    assert kubelet is not None
    if kubelet.admitted:
        uid = run.world.chance.choice(sorted(kubelet.admitted))
        run.world.note("ends", uid)
        kubelet.end(uid)
        if run.world.chance.random() < 0.5:
            run.later(run.world.chance.choice((0.5, 8.0, 40.0)), lambda: kubelet.directories.delete(uid))


def made_anew(run: "Scenario") -> None:
    """A pod of a StatefulSet is deleted and comes again under its name, with another UID."""
    assert run.kubelet is not None
    if run.kubelet.wanted:
        old = run.kubelet.wanted[run.world.chance.choice(sorted(run.kubelet.wanted))]
        run.kubelet.remove(old.uid)
        come(run, msgspec.structs.replace(old, uid=f"uid-{run.next_name()}"))


def checkpoint_lost(run: "Scenario") -> None:
    """
    The kubelet starts anew without its checkpoint, while containers run. Of init containers nobody knows any more, nor of
    pods that were not yet bound with their UIDs.
    """
    kubelet, checks = run.kubelet, run.checks
    assert kubelet is not None
    checks.init_in_doubt = True
    known = [allocation for allocation in replayed(run.world.disk).allocations.values() if allocation.pod_uid]
    for uid, places in checks.running().items():
        if not places <= {place for a in known if a.pod_uid == uid for place in held_by(a)}:
            checks.unreadable.add(uid)
    kubelet.undelivered |= kubelet.directories.now().unreadable
    run.world.note("lost", sorted(kubelet.admitted), sorted(checks.unreadable))
    run.stop_kubelet()
    kubelet.lose_checkpoint()
    run.restart_kubelet()
