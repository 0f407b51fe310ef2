"""The manifests of deploy/kubernetes as an API server gets them, rendered by kubectl."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from topoalign.cli.nats_config import nats_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
Manifest = dict[str, Any]

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


@cache
def rendered(overlay: str, folder: Path, *components: str) -> tuple[Manifest, ...]:
    """The objects of an overlay, in a copy below `folder` that has its secrets; skips where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl to render the manifests")
    copy = folder / "-".join([overlay, *components])
    shutil.copytree(DEPLOY, copy)
    place = copy / "overlays" / overlay
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (place / name).write_text(CERTIFICATE)
    keys_of_nats(place / "nats")
    file = place / "kustomization.yaml"
    lines = [line for line in file.read_text().splitlines() if not re.match(r"#\s+- |# components:", line)]
    if components:
        lines += ["components:", *(f"  - ../../components/{name}" for name in components)]
    file.write_text("\n".join(lines) + "\n")
    done = subprocess.run(["kubectl", "kustomize", str(place)], capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def keys_of_nats(directory: Path) -> None:
    """As docs/kubernetes.md has them made: one account for all nodes."""
    result = CliRunner().invoke(nats_config, ["--nodes", "-", "--out", str(directory)], input="*")
    assert 0 == result.exit_code, result.output


def one(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The object of this kind and name."""
    (found,) = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def values(container: Manifest) -> dict[str, str]:
    """The environment of a container, as far as it is written down."""
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
