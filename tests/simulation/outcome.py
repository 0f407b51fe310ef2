"""What a run came to."""

import hashlib

from simulation.world import Trace, Violation


class Outcome:
    """What became of a run."""

    def __init__(
        self, seed: int, trace: Trace, step: int, violation: Violation | None, *, of_cluster: bool = False
    ) -> None:
        """`of_cluster`: the seed ran as a cluster, and not as a single node."""
        self.seed = seed
        self.step = step
        self.violation = violation
        self.trace = trace
        self._worlds = " WORLDS=cluster" if of_cluster else ""

    @property
    def digest(self) -> str:
        """Of the whole trace: equal for equal runs."""
        return hashlib.sha256("\n".join(map(repr, self.trace)).encode()).hexdigest()

    def report(self, last: int = 60, plant: str | None = None) -> str:
        """What was found, the end of the trace, and the command that shows it again."""
        lines = [f"seed {self.seed}, step {self.step}: {self.violation or 'no violation'}"]
        lines += [f"  ({len(self.trace) - last} lines before)"] if len(self.trace) > last else []
        lines += ["  " + " ".join(map(str, line)) for line in self.trace[-last:]]
        lines += [
            f"replay: make simulate SEED={self.seed}{self._worlds}" + (f" PLANT={plant}" if plant is not None else "")
        ]
        return "\n".join(lines)
