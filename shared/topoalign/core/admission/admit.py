"""
Decides whether a pod fits on a node, and which resources each of its containers is allocated.

`iterate_decision` does no I/O. It yields questions about hints and preferred devices, and `drive` sends the answers.
The allocator gets the answers from the hinting service, a simulated kubelet from its device plugins, and `admit` from
this package. The same answers lead to the same decision. The steps are in `pipeline`.
"""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TypeVar

from topoalign.core.admission.pipeline import AdmissionRun, Question, Reply, Steps
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.hints.preconditions import check_decidable
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.providers import answer_hint_request
from topoalign.core.model.decisions import Decision
from topoalign.core.model.errors import NoFit, TopoalignError
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.placement.preference import prefer
from topoalign.core.profile import profile_of
from topoalign.core.sharing.pod_checks import check_shares_on
from topoalign.core.state.fold import NodeState

# A decision is a generator that yields its questions and returns its result. So the same steps run whether an answer
# comes from this process, from NATS or from gRPC. `drive` gets each answer synchronously, and `drive_async` awaits it.


Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


def drive(steps: Generator[Q, R, T], answer: Callable[[Q], R]) -> T:
    """Runs the steps and returns their result. If `answer` raises a TopoalignError, it is thrown into the steps."""
    proceed: Callable[[], Q] = partial(next, steps)
    while True:
        try:
            asked = proceed()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            proceed = partial(steps.send, answer(asked))
        except TopoalignError as error:
            proceed = partial(steps.throw, error)


async def drive_async(steps: Generator[Q, R, T], answer: Callable[[Q], Awaitable[R]]) -> T:
    """`drive` for answers that are awaited."""
    proceed: Callable[[], Q] = partial(next, steps)
    while True:
        try:
            asked = proceed()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            proceed = partial(steps.send, await answer(asked))
        except TopoalignError as error:
            proceed = partial(steps.throw, error)


def admit(state: NodeState, pod: PodRequest, rules: AdmissionRules, *, explain: bool = False) -> Decision:
    """
    Decides about a pod with hints and preferences that are computed in this process. `explain`: the decision also lists
    the alternative sets of devices. Their comparison then takes a quarter of the time of the decision.

    Raises InvalidField for an invalid request or invalid rules. Every other result is an Admission or a Refusal.
    """
    return decide_demand(state, read_pod(pod, rules), explain=explain)


def decide_demand(state: NodeState, demand: PodDemand, *, explain: bool = False) -> Decision:
    """`admit` for a `PodDemand`."""
    steps = iterate_decision(AdmissionRun(state, demand, explain=explain))
    return drive(steps, lambda asked: answer_to(asked, state, demand.rules))


def iterate_decision_for_request(state: NodeState, pod: PodRequest, rules: AdmissionRules) -> Steps[Decision]:
    """`iterate_decision` for a request. Raises InvalidField, as `admit` does."""
    return iterate_decision(AdmissionRun(state, read_pod(pod, rules)))


def answer_to(asked: Question, state: NodeState, rules: AdmissionRules) -> Reply:
    """Answers in this process. In mode `kubelet`, a device plugin gets only the data that a kubelet sends to it."""
    if isinstance(asked, HintRequest):
        return answer_hint_request(asked)
    asked = asked if profile_of(rules.mode).gives_plugins_context else asked.without_context()
    return prefer(
        state.hardware,
        asked.resource,
        asked.available,
        asked.must_include,
        asked.size,
        rules.placement,
        asked.near,
        asked.context,
    )


def iterate_decision(run: AdmissionRun) -> Steps[Decision]:
    """
    Decides step by step. If there is no answer to a question, the caller (`drive`) throws an error into the steps: a
    NoFit for a HintRequest, or the TopoalignError of a device plugin.
    """
    try:
        check_decidable(run.state, run.demand)
        check_shares_on(run.demand, run.state.hardware)
        yield from run.decide()
    except NoFit as misfit:
        return run.refusal(misfit)
    return run.admission()
