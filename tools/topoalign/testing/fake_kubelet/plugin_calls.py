"""
The calls of the fake kubelet to plugins for a pod: GetPreferredAllocation, Allocate, PreStartContainer.

Source: kubelet v1.36.3, cm/devicemanager. There is no deadline on Allocate and GetPreferredAllocation.
"""

from functools import partial

from grpclib.exceptions import ProtocolError

from topoalign.core.admission.admit import drive_async, iterate_decision
from topoalign.core.admission.pipeline import AdmissionRun, Question, Reply
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.providers import answer_hint_request
from topoalign.core.model.decisions import Decision, Explanation, PreferenceQuestion, Refusal
from topoalign.core.model.ids import DeviceID
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import FAILURES, KubeletAway, call_in_own_task, describe_call_error
from topoalign.testing.fake_kubelet.admission import Admitting, HandOut
from topoalign.testing.fake_kubelet.plugins import Plugins
from topoalign.testing.fake_kubelet.pods import Running

PRE_START_SECONDS = 30.0


class AllocateFailed(Exception):
    """A plugin's Allocate failed. It ends the admission at once: nothing else of the pod is decided."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


async def decide(deciding: AdmissionRun, plugins: Plugins) -> Decision:
    """Answers the questions of the decision, and hands out what it tells to. Raises InvalidField."""
    for container in deciding.demand.containers:
        for resource in container.devices:
            if plugins.forgotten(resource):
                why = f"no healthy devices present; cannot allocate unhealthy devices {resource}"
                return unexpected(why, Explanation())

    if isinstance(deciding, Admitting):
        plugins.preferred = []

    async def answered(asked: Question) -> Reply:
        if isinstance(asked, HintRequest):
            return answer_hint_request(asked)
        try:
            if isinstance(asked, HandOut) and isinstance(deciding, Admitting):
                deciding.given(asked, await allocated(asked, plugins))
                return None
            chosen = await preferred(asked, plugins)
            if isinstance(deciding, Admitting):
                plugins.preferred += chosen
            return chosen
        except FAILURES as error:
            raise (
                AllocateFailed(error) if isinstance(asked, HandOut) else KubeletAway(describe_call_error(error))
            ) from error

    try:
        return await drive_async(iterate_decision(deciding), answered)
    except AllocateFailed as failed:
        return unexpected(describe_call_error(failed.error), deciding.explanation())


async def preferred(question: PreferenceQuestion, plugins: Plugins) -> tuple[DeviceID, ...]:
    """GetPreferredAllocation. Raises what the call fails with."""
    endpoint = plugins.endpoints[question.resource]
    if not endpoint.options.get_preferred_allocation_available:
        return ()
    request = v1beta1.ContainerPreferredAllocationRequest(
        available_deviceIDs=list(question.available),
        must_include_deviceIDs=list(question.must_include),
        allocation_size=question.size,
    )
    question_of_all = v1beta1.PreferredAllocationRequest(container_requests=[request])
    response = await call_in_own_task(partial(endpoint.client().get_preferred_allocation, question_of_all))
    return tuple(DeviceID(device) for answer in response.container_responses[:1] for device in answer.device_i_ds)


async def allocated(told: HandOut, plugins: Plugins) -> v1beta1.ContainerAllocateResponse:
    """Allocate. Raises what the call fails with."""
    request = v1beta1.ContainerAllocateRequest(devices_ids=list(told.available))
    call = plugins.endpoints[told.resource].client().allocate
    response = await call_in_own_task(partial(call, v1beta1.AllocateRequest(container_requests=[request])))
    if not response.container_responses:
        raise ProtocolError(f"the plugin of {told.resource} answered for no container")
    return response.container_responses[0]


async def pre_start(running: Running, plugins: Plugins) -> None:
    """PreStartContainer, where plugins want it. Raises what the call fails with."""
    for _, resource, devices in running.parts():
        endpoint = plugins.endpoints[resource]
        if endpoint.options.pre_start_required:
            start = v1beta1.PreStartContainerRequest(devices_ids=list(devices))
            await call_in_own_task(partial(endpoint.client().pre_start_container, start, timeout=PRE_START_SECONDS))


def unexpected(why: str, explanation: Explanation) -> Refusal:
    """What the kubelet says of every failure that has no word of its own."""
    return Refusal(
        reason="UnexpectedAdmissionError",
        code="AllocateFailed",
        finding=f"Allocate failed due to {why}, which is unexpected",
        remedy="see the log of the device plugin that serves the resource",
        container=None,
        provider="device",
        explanation=explanation,
    )
