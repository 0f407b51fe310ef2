"""Each reason has one text, which a pod's condition can hold without a loop of calls, and every code of the core has one."""

import importlib
import pkgutil
import re
from pathlib import Path

import topoalign.core
import topoalign.registry
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.errors import NoFit, RemoteNoFit
from topoalign.registry.scheduling.cluster_state import view
from topoalign.registry.scheduling.extender.extender_answers import BY_CODE, refusal_text

PRODUCT = ("topoalign.core", "topoalign.registry")


def misfits(kind: type[NoFit] = NoFit) -> set[str]:
    """The codes of every refusal of the core and the registry."""
    below = {code for each in kind.__subclasses__() if each is not RemoteNoFit for code in misfits(each)}
    return below | ({kind.code} if kind.__module__.startswith(PRODUCT) and kind is not NoFit else set())


def test_every_refusal_has_a_text() -> None:
    for package in (topoalign.core, topoalign.registry):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    codes = misfits() | {code for name, code in vars(view).items() if name.isupper() and isinstance(code, str)}

    assert len(codes) > 20
    assert set() == codes - BY_CODE.keys()


def test_a_text_is_a_code_with_a_finding_and_a_remedy() -> None:
    """No figure, name or comma: kube-scheduler counts nodes by text and joins texts by commas; a new text wakes the pod."""
    form = re.compile(r"([A-Za-z]+): [A-Za-z .()-]+; [A-Za-z ./-]+")

    texts = [(code, refusal_text(code, resolvability)) for code in BY_CODE for resolvability in (None, *Resolvability)]

    assert [] == [text for code, text in texts if (found := form.fullmatch(text)) is None or found[1] != code]
    assert [] == [text for _, text in texts if len(text) > 145]


def test_nobody_is_advised_to_wait_where_the_end_of_pods_does_not_help() -> None:
    texts = [
        refusal_text(code, resolvability)
        for code in BY_CODE
        for resolvability in (Resolvability.NEVER, Resolvability.UNHEALTHY)
    ]
    waits = [text for text in texts if "wait until pods end" in text]

    assert [] == waits
    assert (
        "NotEnoughDevices: too few free devices even on an empty node; the pod never fits so ask topoalign why" in texts
    )


def test_a_code_that_is_not_known_has_a_text_as_well() -> None:
    assert "NewReason: would refuse the pod; ask topoalign why" == refusal_text("NewReason")


def test_what_annotations_bring_about_is_told_with_them() -> None:
    """A pod that limits its GPUs may wait for ever where its kubelet aligns it to others: no pod's end helps it."""
    assert all("annotations" in refusal_text(code) for code in ("ShareSplit", "InvalidShare"))


def test_the_page_of_errors_explains_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()

    assert [] == [code for code in BY_CODE if f"| `{code}` |" not in page]
