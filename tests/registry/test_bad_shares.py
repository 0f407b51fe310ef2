"""Shares that cannot be meant are refused in the same words by webhook, filter and what-if, with the field and a remedy."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from bad_share_support import (
    MOST,
    RULES,
    SECOND,
    UUIDS,
    WEIGHTS,
    cluster,
    filtered,
    pod,
    review,
    said,
    units,
    what_if,
)
from scheduling_support import serving
from slot_support import in_slots
from unit_support import CORES, DGX, MEMORY, in_units
from view_support import OneNode, Says, tell_all

from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.topology.device_offers import Limiter
from topoalign.core.model.topology.model import Topology
from topoalign.registry.scheduling.webhook.reviews import Webhook


def first_in_order(given: dict[str, Any], policy: str | None) -> dict[str, Any]:
    """The pod whose second container is its only init container instead; with policy `Always` it is a sidecar."""
    main, asking = given["spec"]["containers"]
    init = {**asking, **({"restartPolicy": policy} if policy is not None else {})}
    return {**given, "spec": {"initContainers": [init], "containers": [main]}}


pytestmark = pytest.mark.anyio

TYPES, POLICIES = "nvidia.com/use-gputype", "hami.io/gpu-scheduler-policy"
NO_EFFECT = "has no effect on units of GPUs, which go where least is left"
CHOOSE = "leave it out; nodeSelector and affinity choose the nodes"
HINT = "scheduling.koordinator.sh/device-allocate-hint"
PASSED_OVER = (
    "a kubelet passes this name over, and gives no GPU for it; ask for a part of a GPU in units "
    "(tencent.com/vcuda-core, tencent.com/vcuda-memory) or slots (nvidia.com/gpu with nvidia.com/gpucores and "
    "nvidia.com/gpumem), and for whole ones as nvidia.com/gpu"
)

REFUSED_BY_SLOTS = "not a share of a GPU; ask for amounts that a GPU has and for one where annotations choose GPUs"
GOOD = units("20", "16")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no cores": (pod(units("0"), {}), f"{SECOND}[{CORES}]: 0 units; leave it out, or ask for 1 or more"),
    "no cores beside memory": (
        pod(units("0", "16"), {}),
        f"{SECOND}[{CORES}]: 0 units; leave it out, or ask for 1 or more",
    ),
    "cores without an amount": (
        pod({CORES: None, MEMORY: "16"}, {}),
        f"{SECOND}[{CORES}]: 0 units; leave it out, or ask for 1 or more",
    ),
    "an annotation without a value": (
        pod(GOOD, {"topoalign.io/gpus": None}),
        "metadata.annotations[topoalign.io/gpus]: '' is not a number of GPUs; "
        "write over how many GPUs the units of each container are spread, 1 to 999",
    ),
    "memory of 0": (pod(units("20", "0"), {}), f"{SECOND}[{MEMORY}]: 0 units; leave it out, or ask for 1 or more"),
    "no memory": (
        pod(units("20"), {}),
        f"{SECOND}[{MEMORY}]: no memory of the GPU is asked for with 20 units of its computing time; "
        "write how many blocks of memory are needed, or ask for the whole GPU",
    ),
    "below 0": (pod(units("-1", "16"), {}), f"{SECOND}[{CORES}]: '-1' is no amount; write a whole number, 0 or more"),
    "with a unit": (
        pod(units("20", "1.5"), {}),
        f"{SECOND}[{MEMORY}]: '1.5' is no amount; write a whole number, 0 or more",
    ),
    **{
        f"{cores} cores": (
            pod(units(cores, "16"), {}),
            f"{SECOND}[{CORES}]: {cores} units of computing time, of which a GPU has 100; "
            "ask for at most 100, or for a multiple of 100 to get whole GPUs",
        )
        for cores in ("101", "150")
    },
    "memory above a GPU": (
        pod(units("20", f"{MOST + 1}"), {}),
        f"{SECOND}[{MEMORY}]: {MOST + 1} blocks of memory are asked for of one GPU, and a GPU has "
        f"{MOST} blocks of memory; ask for less memory, for memory of several GPUs, or choose a node with larger GPUs",
    ),
    "memory above two whole GPUs": (
        pod(units("200", f"{2 * MOST + 1}"), {}, "initContainers"),
        f"spec.initContainers[0].resources.limits[{MEMORY}]: {MOST + 1} blocks of memory are asked for of one GPU, and a "
        f"GPU has {MOST} blocks of memory; ask for less memory, for memory of several GPUs, or choose a node with larger "
        "GPUs",
    ),
    "both kinds": (
        pod({**GOOD, "nvidia.com/gpu": "1"}, {}),
        f"{SECOND}[nvidia.com/gpu]: GPUs in two ways, for {CORES} and {MEMORY} are asked for as well; "
        "ask for a share of a GPU or for whole devices, each in a container of its own",
    ),
    "weights": (
        pod(GOOD, {WEIGHTS: "slot=-1"}),
        f"metadata.annotations[{WEIGHTS}]: {NO_EFFECT}; {CHOOSE}",
    ),
    "a model": (pod(GOOD, {TYPES: "A1000000"}), f"metadata.annotations[{TYPES}]: {NO_EFFECT}; {CHOOSE}"),
    "a uuid": (pod(GOOD, {UUIDS: "GPU-nobody"}), f"metadata.annotations[{UUIDS}]: {NO_EFFECT}; {CHOOSE}"),
    "a word": (
        pod(GOOD, {"topoalign.io/gang": "g", "topoalign.io/gang-size": "some"}),
        "metadata.annotations[topoalign.io/gang-size]: 'some' is not a number of pods; "
        "write how many pods the gang has, 1 to 9999",
    ),
    "a part of a GPU by Koordinator's name": (
        pod({**GOOD, "koordinator.sh/gpu": "50"}, {HINT: "{}"}),
        f"{SECOND}[koordinator.sh/gpu]: {PASSED_OVER}",
    ),
    "whole GPUs by Koordinator's name": (
        pod({"koordinator.sh/gpu": "200", "topoalign.io/nic": "1"}, {HINT: "{}"}, "initContainers"),
        f"spec.initContainers[0].resources.limits[koordinator.sh/gpu]: {PASSED_OVER}",
    ),
    "nothing but Koordinator's names": (
        pod({"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}, {HINT: "{}"}),
        f"{SECOND}[koordinator.sh/gpu-core]: {PASSED_OVER}",
    ),
    "150 hundredths by Koordinator's name": (
        pod({**GOOD, "koordinator.sh/gpu": "150"}, {HINT: "{}"}),
        f"{SECOND}[koordinator.sh/gpu]: invalid resource unit koordinator.sh/gpu: 150; "
        "ask for up to 100 units of one device, or for whole devices in multiples of 100",
    ),
    "computing time alone by Koordinator's name": (
        pod({**GOOD, "koordinator.sh/gpu-core": "50"}, {HINT: "{}"}),
        f"{SECOND}: invalid resource device requests: [koordinator.sh/gpu-core]; ask for whole GPUs, or for gpu-core with "
        "either gpu-memory or gpu-memory-ratio, evenly over gpu.shared",
    ),
    "an unknown key": (
        pod(GOOD, {"scheduling.koordinator.sh/device-alocate-hint": "{}"}),
        "metadata.annotations[scheduling.koordinator.sh/device-alocate-hint]: is not known; use one of "
        "'scheduling.koordinator.sh/device-joint-allocate', 'scheduling.koordinator.sh/device-allocate-hint', "
        "'scheduling.koordinator.sh/gpu-partition-spec', or leave it out",
    ),
}


GPUS, MIB, PERCENT, COMPUTE = (
    "nvidia.com/gpu",
    "nvidia.com/gpumem",
    "nvidia.com/gpumem-percentage",
    "nvidia.com/gpucores",
)
BAD_IN_SLOTS: dict[str, tuple[dict[str, Any], str]] = {
    "16Gi": (
        pod({GPUS: "1", MIB: "16Gi"}, {}),
        f"{SECOND}[{MIB}]: {16 << 30} is above 40960, which is what the largest",
    ),
    "memory above a GPU": (pod({GPUS: "1", MIB: "40961"}, {}), f"{SECOND}[{MIB}]: 40961 is above 40960"),
    "percentage 150": (pod({GPUS: "1", PERCENT: "150"}, {}), f"{SECOND}[{PERCENT}]: 150 is above 100"),
    "101 cores": (pod({GPUS: "1", COMPUTE: "101"}, {}), f"{SECOND}[{COMPUTE}]: 101 is above 100"),
    "150 cores": (pod({GPUS: "1", COMPUTE: "150"}, {}), f"{SECOND}[{COMPUTE}]: 150 is above 100"),
    **{
        f"0 cores with {', '.join(others) or 'nothing'}": (
            pod({**others, COMPUTE: "0"}, {}),
            f"{SECOND}[{COMPUTE}]: 0 cores; leave it out where an amount of memory is given ({MIB}): the",
        )
        for others in ({GPUS: "1"}, {GPUS: "1", MIB: "9"}, {GPUS: "1", PERCENT: "50"}, {})
    },
    "cores without an amount": (pod({GPUS: "1", COMPUTE: None}, {}), f"{SECOND}[{COMPUTE}]: 0 cores; leave it out"),
    "Koordinator's annotation": (
        pod({GPUS: "1", MIB: "9"}, {HINT: "{}"}),
        f"metadata.annotations[{HINT}]: has no effect on slots of GPUs; leave it out, or ask for whole GPUs",
    ),
    "Koordinator's annotation and a whole GPU": (
        pod(
            {GPUS: "1", COMPUTE: "100"}, {"scheduling.koordinator.sh/device-joint-allocate": '{"deviceTypes": ["gpu"]}'}
        ),
        "metadata.annotations[scheduling.koordinator.sh/device-joint-allocate]: has no effect on slots of GPUs",
    ),
    "-1 cores": (pod({GPUS: "1", COMPUTE: "-1"}, {}), f"{SECOND}[{COMPUTE}]: '-1' is no amount"),
    "0 GPUs": (pod({GPUS: "0", MIB: "9"}, {}), f"{SECOND}[{MIB}]: 9 of no GPU, as {GPUS} is missing"),
    "both kinds": (pod({GPUS: "1", MIB: "9", **GOOD}, {}), f"{SECOND}[{GPUS}]: GPUs in two ways, for {CORES} and"),
    "weights": (pod({GPUS: "1", COMPUTE: "5"}, {WEIGHTS: "slot=-1"}), f"metadata.annotations[{WEIGHTS}]: not weights"),
    **{
        f"{key} {text[:20]}": (pod({GPUS: "1", COMPUTE: "5"}, {key: text}), f"metadata.annotations[{key}]: {begin}")
        for key, text, begin in (
            (POLICIES, "bestfit", "'bestfit' is no policy; write one of binpack, spread, mutex, topology-aware"),
            (POLICIES, "binpack,spread", "'binpack,spread' is no policy"),
            (POLICIES, "", "'' is no policy"),
            (TYPES, " ", "an empty list"),
            (TYPES, "A100,,H100", "an entry of the list is empty"),
            (TYPES, "A" * 101, "more than 256 entries, or one of more than 100 characters"),
            ("nvidia.com/nouse-gputype", ",".join(["A100"] * 257), "more than 256 entries"),
            (UUIDS, ",", "an empty list"),
            (UUIDS, "GPU-1,0", "'0': no uuid of a GPU"),
            ("nvidia.com/nouse-gpuuuid", "MIG-5", "'MIG-5': no uuid of a GPU"),
            ("nvidia.com/numa-bind", "yes", "'yes' is neither true nor false"),
            ("nvidia.com/vgpu-mode", "hard", "'hard' is no mode; write one of hami-core, mig, mps"),
        )
    },
}
"""Pods, and how what is said of them begins."""


async def test_three_entries_refuse_in_the_same_words(tmp_path: Path) -> None:
    """By one function; on a node that offers nothing in units, too, as no other one takes the pod."""
    node = cluster()
    webhook = Webhook("", lambda resource: resource in node.view.offers.names, node.scheduler.checks.check)
    async with (
        serving(node.scheduler, more=webhook.routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (given, text) in BAD.items():
            for path in ("/webhook", "/webhook/validate"):
                assert text == await said(http, given, path), name
            for _ in range(2):
                assert {text} == await filtered(http, given), name
            assert text == what_if(node, given, tmp_path), name
        assert "" == await said(http, pod(GOOD, {}), "/webhook")
        assert {"", "a resource that the node does not offer; correct the name or label the nodes"} == (
            await filtered(http, pod(GOOD, {}))
        )
        assert "" == what_if(node, pod(GOOD, {}), tmp_path)


async def test_amounts_of_slots_are_refused_in_the_same_words(tmp_path: Path) -> None:
    node = cluster(in_slots(DGX))
    offers, checks = node.view.offers, node.scheduler.checks
    webhook = Webhook("", lambda resource: resource in offers.names, checks.check, offers.left_out)
    async with (
        serving(node.scheduler, more=webhook.routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (given, begin) in BAD_IN_SLOTS.items():
            text = await said(http, given, "/webhook")
            assert text.startswith(begin) and "; " in text, name
            assert {text} == await filtered(http, given), name
            assert text == what_if(node, given, tmp_path), name
    assert f"{SECOND}[{GPUS}]: GPUs in two ways" in what_if(node, pod({GPUS: "1", **GOOD}, {}), tmp_path)


async def test_memory_of_0_in_slots_is_none_that_is_asked_for(tmp_path: Path) -> None:
    """As HAMi reads it: the memory is then by the other name, or all of a GPU's."""
    node = cluster(in_slots(DGX))
    offers = node.view.offers
    webhook = Webhook("", lambda resource: resource in offers.names, node.scheduler.checks.check, offers.left_out)
    async with serving(node.scheduler, more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for amounts in ({MIB: "0"}, {PERCENT: "0"}, {MIB: "0", PERCENT: "50"}, {MIB: "9", PERCENT: "0"}):
            given = pod({GPUS: "1", **amounts}, {})

            assert "" == await said(http, given, "/webhook")
            assert "" in await filtered(http, given)
            assert "" == what_if(node, given, tmp_path)


@pytest.mark.parametrize("policy", [None, "Always"], ids=["init", "sidecar"])
@pytest.mark.parametrize("way", [(in_units(DGX), BAD), (in_slots(DGX), BAD_IN_SLOTS)], ids=["units", "slots"])
async def test_init_containers_and_sidecars_are_refused_as_app_containers(
    way: tuple[Topology, dict[str, tuple[dict[str, Any], str]]], policy: str | None, tmp_path: Path
) -> None:
    """By all three, with the path of the container that asks."""
    hardware, cases = way
    node = cluster(hardware)
    offers = node.view.offers
    webhook = Webhook("", lambda resource: resource in offers.names, node.scheduler.checks.check, offers.left_out)
    apps = {name: case for name, case in cases.items() if "initContainers" not in case[0]["spec"]}
    async with (
        serving(node.scheduler, more=webhook.routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (given, begin) in apps.items():
            asked = first_in_order(given, policy)
            text = await said(http, asked, "/webhook")
            assert text.startswith(begin.replace("spec.containers[1]", "spec.initContainers[0]")), name
            assert {text} == await filtered(http, asked), name
            assert text == what_if(node, asked, tmp_path), name

    assert len(apps) > 15


@pytest.mark.parametrize("key", ["tencent.com/vcuda-core-limit"])
@pytest.mark.parametrize(
    ("hardware", "limits"), [(in_slots(DGX), {GPU: "1", MIB: "9"}), (in_units(DGX), GOOD)], ids=["slots", "units"]
)
async def test_wishes_without_effect_are_warnings(
    hardware: Topology, limits: dict[str, str], key: str, tmp_path: Path
) -> None:
    """They keep no pod from running: filter and what-if let it pass, and the webhook says so in a warning."""
    it, given = OneNode(RULES, hardware), pod(limits, {key: "50"})
    it.tell(it.says.all())
    it.view.renew()
    offers, checks = it.view.offers, it.scheduler.checks
    webhook = Webhook(
        "", lambda resource: resource in offers.names, checks.check, offers.left_out, warn=checks.warnings
    )
    async with serving(it.scheduler, more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/webhook", "/webhook/validate"):
            answer = await review(http, given, path)
            assert answer["allowed"]
            (warning,) = answer["warnings"]
            assert warning.startswith(f"metadata.annotations[{key}]: has no effect")
        assert "" in await filtered(http, given)
    assert "" == what_if(it, given, tmp_path)


@pytest.mark.parametrize(
    ("limiter", "mode", "fits"),
    [
        ("hami-core", "hami-core", True),
        ("hami-core", "hami-core,mig", True),
        ("hami-core", "mig", False),
        ("none", "hami-core", False),
        ("none", "mps", False),
    ],
)
async def test_a_pod_gets_only_gpus_in_the_mode_that_it_names(
    limiter: Limiter, mode: str, fits: bool, tmp_path: Path
) -> None:
    """HAMi's rule; where nothing limits containers there is no mode."""
    (offer,) = in_slots(DGX).offered
    hardware = msgspec.structs.replace(DGX, offers=(msgspec.structs.replace(offer, limiter=limiter),))
    node, given = cluster(hardware), pod({GPU: "1", MIB: "9"}, {"nvidia.com/vgpu-mode": mode})
    async with serving(node.scheduler) as url, httpx.AsyncClient(base_url=url) as http:
        asked = {"Pod": given, "NodeNames": ["node-1"]}
        answer = (await http.post("/scheduler/filter", json=asked)).json()

    assert (["node-1"] if fits else []) == (answer["NodeNames"] or [])
    text = what_if(node, given, tmp_path)
    assert fits == (text == "")
    assert fits or "no GPU of the node may be chosen: 8 in another mode (nvidia.com/vgpu-mode)" in text
    assert fits or "`sharing.limiter: hami-core`" in text


@pytest.mark.parametrize("hardware", [in_units(DGX), in_slots(DGX)], ids=["units", "slots"])
async def test_a_privileged_container_gets_no_share(hardware: Topology) -> None:
    """It has all devices of its node, whatever it asks for. One beside a container that asks is no better."""
    node = cluster(hardware)
    webhook = Webhook("", lambda resource: resource in node.view.offers.names, node.scheduler.checks.check)
    limits = GOOD if node.view.offers.units else {GPUS: "1", MIB: "1000"}
    async with serving(node.scheduler, more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for place in (0, 1):
            given = pod(limits, {})
            given["spec"]["containers"][place]["securityContext"] = {"privileged": True}
            answer = await review(http, given, "/webhook")

            assert (403, False) == (answer["status"]["code"], answer["allowed"])
            field = f"spec.containers[{place}].securityContext.privileged"
            finding = "a privileged container has all devices of its node; add the capabilities it needs"
            assert f"topoalign: {field}: {finding}" == answer["status"]["message"]


async def test_what_one_kind_of_node_can_serve_is_let_pass() -> None:
    """Memory above the GPUs of one node, and not above those of another; and words for other ways to ask for GPUs."""
    node = cluster()
    large = msgspec.structs.replace(
        DGX, gpus=tuple(msgspec.structs.replace(gpu, memory=2 * (gpu.memory or 0)) for gpu in DGX.gpus)
    )
    other = (ResourceName("example.com/time"), ResourceName("example.com/bytes"))
    tell_all(node.cluster, Says("large", in_units(large), RULES).all())
    tell_all(node.cluster, Says("other", in_units(DGX, 8, *other), RULES).all())
    node.view.renew()
    webhook = Webhook("", lambda resource: resource in node.view.offers.names, node.scheduler.checks.check)
    above, gpus = pod(units("20", f"{MOST + 1}"), {}), pod({"nvidia.com/gpu": "1"}, {WEIGHTS: "slot=-1"})
    async with serving(node.scheduler, more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        assert "" == await said(http, above, "/webhook")
        assert {
            "more memory than a GPU has; ask for less",
            "a resource that the node does not offer; correct the name or label the nodes",
        } == await filtered(http, above)
        assert "" == await said(http, gpus, "/webhook")
        assert "150 units" in await said(http, pod({str(other[0]): "150"}, {}), "/webhook")
        assert f"and a GPU has {2 * MOST}" in await said(http, pod(units("20", f"{2 * MOST + 1}"), {}), "/webhook")
