"""What every refusal must say."""

from typing import TYPE_CHECKING

from simulation.world import Violation

from topoalign.core.model.errors import TopoalignError

if TYPE_CHECKING:
    from simulation.scenario import Scenario


def sound(run: "Scenario", error: TopoalignError) -> None:
    """I8."""
    run.world.note("refused", error.code, run.world.limits.without_root(error.finding))
    if not (error.code and error.finding and error.remedy):
        run.world.violate(Violation("I8", f"a refusal says too little: {error!r}"))
