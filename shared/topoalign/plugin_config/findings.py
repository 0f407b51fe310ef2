"""Findings about a configuration that is valid and in use."""

import msgspec


class ConfigurationFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A field of a configuration that has no effect on this node, or in this program."""

    field: str
    """Path in the file, `sharing.timeSlicing.resources[0]`."""
    finding: str
    remedy: str = ""
    severe: bool = False
    """Something that was asked for is not offered."""

    def __str__(self) -> str:
        return f"{self.field}: {self.finding}"


class Findings(list[ConfigurationFinding]):
    """Collects findings."""

    def add(self, field: str, finding: str, remedy: str = "", *, severe: bool = False) -> None:
        """Adds a finding about a field of the configuration."""
        self.append(ConfigurationFinding(field=field, finding=finding, remedy=remedy, severe=severe))
