"""Evaluates label selectors of Kubernetes. Hints use them to select devices and groups of virtual functions."""

import re
from collections.abc import Callable, Mapping

import msgspec

from topoalign.core.model.errors import quoted

Labels = Mapping[str, str]

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST_DOMAIN = 253

OPERATORS: dict[str, Callable[[str | None, tuple[str, ...]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
}
"""(value of the label, None if it is absent; values of the expression) -> whether they match."""
NEED_VALUES = ("In", "NotIn")


class Expression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One condition of a selector: an operator of `OPERATORS`, applied to the label `key`."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Matches labels that meet all of its conditions. A selector without conditions matches everything."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Expression, ...] = ()


def selector_matches(selector: LabelSelector | None, labels: Labels) -> bool:
    """Whether labels meet all conditions of a selector. Without a selector, everything matches."""
    return selector is None or (
        all(labels.get(key) == value for key, value in selector.match_labels.items())
        and all(OPERATORS[each.operator](labels.get(each.key), each.values) for each in selector.match_expressions)
    )


def selector_fault(selector: LabelSelector, *, compat: bool) -> str | None:
    """Returns why a selector is invalid, or None. Koordinator does not validate `matchLabels` without expressions."""
    if compat and not selector.match_expressions:
        return None
    for key, value in selector.match_labels.items():
        if found := _key_fault(key) or _value_fault(value):
            return found
    return next(filter(None, map(_expression_fault, selector.match_expressions)), None)


def _expression_fault(expression: Expression) -> str | None:
    operator = expression.operator
    values = expression.values
    if operator not in OPERATORS:
        return f"{quoted([operator])} is not a valid label selector operator; use one of {', '.join(OPERATORS)}"
    if operator in NEED_VALUES and not values:
        return f"operator {operator} needs values"
    if operator not in NEED_VALUES and values:
        return f"operator {operator} takes no values"
    return _key_fault(expression.key) or next(filter(None, map(_value_fault, values)), None)


def _key_fault(key: str) -> str | None:
    domain, slash, name = key.rpartition("/")
    sound = _NAME.fullmatch(name) and (not slash or (len(domain) <= _LONGEST_DOMAIN and _DOMAIN.fullmatch(domain)))
    return None if sound else f"{quoted([key])} is not a label key such as `type` or `example.com/type`"


def _value_fault(value: str) -> str | None:
    sound = not value or _NAME.fullmatch(value)
    return None if sound else f"{quoted([value])} is not a label value: up to 63 letters, digits, `-`, `_` and `.`"
