"""Label selectors are sound, and match, as in Kubernetes."""

import pytest

from topoalign.core.deviceshare.labels import Expression, LabelSelector, selector_fault, selector_matches


def selecting(key: str, operator: str, *values: str) -> LabelSelector:
    return LabelSelector(match_expressions=(Expression(key=key, operator=operator, values=values),))


@pytest.mark.parametrize(
    "key",
    ["a", "A-b_c.9", "x" * 63, "example.com/a", "e/a", "1-2.x/9", f"{'d' * 253}/a"],
)
def test_keys_as_kubernetes_takes_them_are_sound(key: str) -> None:
    """A domain of up to 253 characters, a slash, a name of up to 63; the domain may be missing."""
    assert selector_fault(LabelSelector(match_labels={key: "b"}), compat=False) is None
    assert selector_fault(selecting(key, "Exists"), compat=False) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "a b",
        "-a",
        "a.",
        "x" * 64,
        "/a",
        "example.com/",
        "a/b/c",
        "Example.com/a",
        ".com/a",
        "a..b/a",
        "-a/a",
        f"{'d' * 254}/a",
    ],
)
def test_keys_that_kubernetes_refuses_are_faults(key: str) -> None:
    assert "is not a label key" in (selector_fault(LabelSelector(match_labels={key: "b"}), compat=False) or "")
    assert "is not a label key" in (selector_fault(selecting(key, "Exists"), compat=True) or "")


@pytest.mark.parametrize(
    ("value", "sound"), [("", True), ("x" * 63, True), ("x" * 64, False), ("a b", False), ("-", False)]
)
def test_values_are_sound_as_kubernetes_takes_them(value: str, sound: bool) -> None:
    for selector in (LabelSelector(match_labels={"a": value}), selecting("a", "In", "b", value)):
        assert sound is (selector_fault(selector, compat=False) is None)


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        (selecting("a", "In"), "operator In needs values"),
        (selecting("a", "NotIn"), "operator NotIn needs values"),
        (selecting("a", "Exists", "b"), "operator Exists takes no values"),
        (selecting("a", "DoesNotExist", "b"), "operator DoesNotExist takes no values"),
        (selecting("a", "in", "b"), "use one of In, NotIn, Exists, DoesNotExist"),
    ],
)
def test_an_operator_has_values_or_has_none(selector: LabelSelector, said: str) -> None:
    assert said in (selector_fault(selector, compat=False) or "")
    assert said in (selector_fault(selector, compat=True) or "")


def test_koordinator_looks_at_match_labels_only_beside_expressions() -> None:
    odd = LabelSelector(match_labels={"a b": ""})
    beside = LabelSelector(match_labels={"a b": ""}, match_expressions=(Expression(key="a", operator="Exists"),))

    assert (True, False) == (selector_fault(odd, compat=True) is None, selector_fault(odd, compat=False) is None)
    assert selector_fault(beside, compat=True) is not None


@pytest.mark.parametrize(
    ("selector", "there", "elsewhere", "absent"),
    [
        (LabelSelector(match_labels={"a": "b"}), True, False, False),
        (selecting("a", "In", "b", "c"), True, False, False),
        (selecting("a", "NotIn", "b", "c"), False, True, True),
        (selecting("a", "Exists"), True, True, False),
        (selecting("a", "DoesNotExist"), False, False, True),
        (LabelSelector(), True, True, True),
        (None, True, True, True),
    ],
)
def test_a_selector_matches_labels_as_in_kubernetes(
    selector: LabelSelector | None, there: bool, elsewhere: bool, absent: bool
) -> None:
    """`NotIn` matches where the key is absent, too. All conditions must be met."""
    assert (there, elsewhere, absent) == tuple(
        selector_matches(selector, labels) for labels in ({"a": "b"}, {"a": "x"}, {"z": "b"})
    )
    if selector is not None:
        both = LabelSelector(
            match_labels={**selector.match_labels, "k": "v"},
            match_expressions=(*selector.match_expressions, Expression(key="k", operator="Exists")),
        )
        assert not selector_matches(both, {"a": "b"})
        assert there == selector_matches(both, {"a": "b", "k": "v"})
