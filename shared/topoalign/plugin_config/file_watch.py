"""
Keeps a configuration up to date with its file.

The file is read every two seconds and on SIGHUP, and its content is compared, because a ConfigMap changes by a new
symbolic link, and times and sizes do not show every change. Invalid content changes nothing: the current configuration
stays in use. The log reports the error once; /readyz?verbose and a metric show it until it is corrected.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from topoalign.core.model.errors import BadRequest, InvalidField, clean
from topoalign.core.ports import Clock
from topoalign.plugin_config import nvidia_fields
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.file import Loaded, interpret_document, load_content
from topoalign.plugin_config.file import read_configuration_file as content_of

VARIABLE = "TOPOALIGN_CONFIG"
POLL_SECONDS = 2.0
"""Seconds between two reads. A kubelet takes up to a minute to update a ConfigMap on the node."""

log = structlog.get_logger("topoalign.plugin_config")


class ConfigurationFile:
    """Keeps the configuration in use up to date. Without a file, it comes from the environment and never changes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Reads the file. Raises NotFound, InvalidDocument or InvalidField: the first configuration must be valid."""
        self._environment = environment
        self.path, self._content, self.loaded = read_first(environment)
        self._refused: bytes | str | None = None
        """The content that was refused last, or why it could not be read."""
        self._looking = anyio.Lock()
        self.reason_not_current: str | None = None
        """Why the current file is not in use; None if it is."""
        self.changed = anyio.Event()
        """Set when another configuration comes into use; a new event then replaces it."""
        self._kept_up = False
        self._log("configuration read")

    @property
    def current(self) -> Configuration:
        """The configuration in use."""
        return self.loaded.configuration

    async def keep_up(self, clock: Clock, asked: Callable[[], Awaitable[None]]) -> None:
        """Reads the file periodically and whenever `asked` returns, until cancelled. Only the first caller reads it."""
        if self._kept_up:
            await anyio.sleep_forever()
        self._kept_up = True

        async def at_times() -> None:
            while True:
                await clock.sleep(POLL_SECONDS)
                await self.look()

        async with anyio.create_task_group() as tasks:
            if self.path is not None:
                tasks.start_soon(at_times)
            while True:
                await asked()
                await self.look()

    async def look(self) -> bool:
        """Reads the file. Returns whether another configuration came into use."""
        if self.path is None:
            return False
        async with self._looking:
            content: bytes | None = None
            try:
                content = await to_thread.run_sync(content_of, self.path)
                if content == self._content:
                    self._accept(self.loaded)
                    return False
                if content == self._refused:
                    return False
                found = await to_thread.run_sync(parse_configuration, content, self.path, self._environment)
            except BadRequest as error:
                self._refuse(error, content)
                return False
            self._content = content
            return self._accept(found)

    def _accept(self, found: Loaded) -> bool:
        """Returns whether the configuration is new. Logs a new one, or that the file is valid again."""
        other = found.configuration != self.current
        recovered = self.reason_not_current is not None
        self.loaded = found
        self.reason_not_current = None
        self._refused = None
        if other or recovered:
            self._log("configuration changed" if other else "configuration unchanged")
        if other:
            self.changed.set()
            self.changed = anyio.Event()
        return other

    def _refuse(self, error: BadRequest, content: bytes | None) -> None:
        refused = content if content is not None else error.finding
        if refused != self._refused:
            log.warning(
                "configuration refused, the one before stays in use",
                file=str(self.path),
                finding=error.finding,
                remedy=error.remedy,
            )
        self._refused = refused
        self.reason_not_current = f"{self.path} is not in use: {error.finding}"

    def _log(self, event: str) -> None:
        """Logs an event with the findings, unless there is neither a file nor a variable of NVIDIA's plugin."""
        findings = [str(finding) for finding in self.loaded.findings]
        if self.path is not None or self.loaded.origins:
            variables = sorted(set(self.loaded.origins.values()) & nvidia_fields.VARIABLES.keys())
            log.info(event, file=str(self.path or ""), variables=variables, findings=findings)


def read_first(environment: Mapping[str, str]) -> tuple[Path | None, bytes, Loaded]:
    """The file, its content and its configuration. Raises as `content_of` and `parse_configuration`."""
    name = environment.get(VARIABLE) or environment.get(nvidia_fields.FILE)
    path = Path(name) if name else None
    content = content_of(path) if path is not None else b""
    try:
        return path, content, parse_configuration(content, path, environment)
    except InvalidField as error:
        if path is None or error.field in environment:
            raise
        finding = error.finding.removeprefix(f"{error.field}: ")
        raise InvalidField(error.field, finding, f"{error.remedy}, in {clean(str(path), 200)}") from error


def parse_configuration(content: bytes, path: Path | None, environment: Mapping[str, str]) -> Loaded:
    """The configuration of a file; `path` None: only of the environment. Raises InvalidDocument, InvalidField."""
    return load_content(content, path, environment) if path is not None else interpret_document({}, environment)
