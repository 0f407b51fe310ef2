"""Services for tests of the runner, which write down what happens to them."""

import anyio
from anyio.abc import TaskStatus

from topoalign.runtime.context import Context, Serve
from topoalign.runtime.runner import RunningServices

ENVIRONMENT = {"TOPOALIGN_NODE": "gpu-1", "TOPOALIGN_HTTP_PORT": "0"}


class Recorder:
    """Services that write down what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ready = anyio.Event()
        self.running: RunningServices | None = None

    def service(self, name: str) -> Serve:
        async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
            self.events.append(f"{name} starts on {context.environment['TOPOALIGN_NODE']}")
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                self.events.append(f"{name} ends")

        return serve

    def note(self, running: RunningServices) -> None:
        self.running = running
        self.ready.set()
