"""CEL rules of the custom resource definition: checks of one field, the spec against the status. Of edits: :mod:`.refused_edits`.

They have the same fields and messages as the checks of :mod:`scalerl_api`. Checks across fields are the ``rules`` of its models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from scalerl_api.autoscaling import MOMENT, on_the_calendar, timestamp_input
from scalerl_api.dataset_source import DatasetSource
from scalerl_api.environment import PythonEnvironment
from scalerl_api.fields import (
    A_DECIMAL,
    DECIMAL_FORM,
    InRange,
    Matches,
    Rule,
    SizeInRange,
    Unique,
    decimal_input,
    quantity_input,
)
from scalerl_api.model_source import ModelSpec
from scalerl_api.plugins import free_value
from scalerl_api.pods import COUNT, SLICE_SIZE, enough_memory, slice_size, text_value
from scalerl_api.reasons import Reason
from scalerl_api.reserved_in_pods import (
    PLAIN_PATH,
    PLAIN_PATH_MESSAGE,
    RESERVED_LABELS,
    RESERVED_MOUNT_MESSAGE,
    RESERVED_PATH_MESSAGE,
    RESERVED_PATHS,
    RESERVED_VOLUMES,
    ROLE_CONTAINER_MESSAGE,
    ROLE_CONTAINERS,
    SYSTEM_PATH_MESSAGE,
    SYSTEM_PATHS,
    Named,
    other_container,
    own_path,
    unreserved,
)
from scalerl_api.source import JsonlSource
from scalerl_api.verifier import PythonVerifier, parameter_value
from scalerl_api.vllm_options import (
    ALLOWED_OPTIONS,
    BREAKING_OPTIONS,
    BREAKS_MESSAGE,
    HEAD_MESSAGE,
    HEAD_TYPE,
    SET_MESSAGE,
    SET_OPTIONS,
    UNKNOWN_MESSAGE,
    free_option,
)

_ABSOLUTE: Final = Rule(
    "self.startsWith('/')", "must be absolute on a cluster: a pod has no folder that it could be relative to"
)


def _not_below(
    limit: str, used: str, what: str, *, number: str = "{}", shown: tuple[str, str] = ("%d", "%d")
) -> Rule:
    """A limit of the budget is not set below what the run has used.

    Args:
        limit: field of ``spec.budget``.
        used: path in ``status``.
        number: CEL of a number to compare; ``{}`` is the field.
        shown: formats of both values in the message.
    """
    now, before, amount = f"self.spec.budget.{limit}", f"oldSelf.spec.budget.{limit}", f"self.status.{used}"
    parts = used.split(".")
    absent = [f"!has(self.status.{'.'.join(parts[: n + 1])})" for n in range(len(parts))]
    missing = " || ".join([f"!has({now})", "!has(self.status)", *absent])
    advice = (
        f"which the run has {what} already; to end the run now, suspend it first, or the amount goes on to rise, "
        "then set the limit to the amount and resume the run"
    )
    return Rule(
        # The status may exceed an unchanged limit: only a new limit is refused.
        f"{missing} || {number.format(now)} >= {number.format(amount)} || (has({before}) && {before} == {now})",
        f"{limit} is below status.{used}, {advice}",
        field=f"spec.budget.{limit}",
        # Not `+ string(…)`: an API server estimates the length of a converted integer as unbounded.
        expression=f"'{limit} {shown[0]} is below status.{used}, {shown[1]}, {advice}'.format([{now}, {amount}])",
        changes=True,
    )


OF_THE_OBJECT: Final = (
    _not_below("maxSteps", "step", "trained"),
    _not_below("maxDeviceHours", "usage.deviceHours", "used", number="double({})", shown=("%s", "%s")),
    _not_below("maxSeconds", "usage.elapsedSeconds", "taken", number="double({})", shown=("%d", "%s")),
    _not_below("maxComputeTokens", "usage.computeTokens", "used"),
    Rule(
        # A size that the claim could not be enlarged to may be lowered again: the claim itself does not shrink.
        "!isQuantity(string(self.spec.storage.size)) || !isQuantity(string(oldSelf.spec.storage.size)) || "
        "quantity(string(self.spec.storage.size)).compareTo(quantity(string(oldSelf.spec.storage.size))) >= 0 || "
        "(has(self.status) && has(self.status.conditions) && "
        f"self.status.conditions.exists(c, c.type == 'Degraded' && c.reason == '{Reason.CLAIM_NOT_ENLARGED}'))",
        "storage.size can only be raised: Kubernetes does not shrink claims. Create another run with another claim",
        field="spec.storage.size",
        expression="'storage.size can only be raised, from ' + string(oldSelf.spec.storage.size) + ' not to ' + "
        "string(self.spec.storage.size) + ': Kubernetes does not shrink claims. Create another run with another claim'",
        changes=True,
    ),
    Rule(
        "self.spec.storage.mountedBy != 'Coordinator' || !has(self.spec.checkpoint.to) || !has(oldSelf.spec.checkpoint.to) || "
        "self.spec.checkpoint.to == oldSelf.spec.checkpoint.to",
        "checkpoint.to cannot change with storage.mountedBy Coordinator: the model and the checkpoints are there alone. Create "
        "another run",
        field="spec.checkpoint.to",
        changes=True,
    ),
)
"""Rules for the spec that depend on the status, or on the earlier spec."""

OF_FIELDS: Final[Mapping[tuple[type[BaseModel], str], tuple[Rule, ...]]] = {
    (ModelSpec, "path"): (_ABSOLUTE,),
    (JsonlSource, "path"): (_ABSOLUTE,),
    (PythonVerifier, "path"): (_ABSOLUTE,),
    (PythonEnvironment, "path"): (_ABSOLUTE,),
    (DatasetSource, "files"): (
        Rule(
            "self.all(path, path.startsWith('/'))",
            "must be absolute on a cluster: a pod has no folder that they could be relative to",
        ),
    ),
}
"""Rules for one field, by its model and its name in Python."""


# --- checks of one field -------------------------------------------------------------------------

_INT_OR_STRING: Final = {"x-kubernetes-int-or-string": True}
_AMOUNT: Final = "quantity(string(self))"


def add(schema: dict[str, Any], rules: Iterable[Rule]) -> None:
    """Appends rules to a schema's ``x-kubernetes-validations``."""
    if entries := _entries(*rules):
        schema.setdefault("x-kubernetes-validations", []).extend(entries)


def _entries(*rules: Rule) -> list[dict[str, Any]]:
    entries = [rule.as_validation() for rule in rules]
    return [
        entry | {key: compact(entry[key]) for key in ("rule", "messageExpression") if key in entry}
        for entry in entries
    ]


def compact(cel: str) -> str:
    """CEL without the spaces around operators, outside of its strings.

    >>> compact("self.a >= 1 || !(self.b in ['a || b', 'c'])")
    "self.a>=1||!(self.b in ['a || b','c'])"
    """
    parts = re.split(r"('(?:[^'\\]|\\.)*')", cel)
    return "".join(p if at % 2 else re.sub(r" *([-|&<>=!?:,+*]+) *", r"\1", p) for at, p in enumerate(parts))


def add_check(schema: dict[str, Any], check: Callable[..., Any]) -> None:
    """Adds the rules of a validator function to the schema of its field.

    Raises:
        ValueError: there are no rules for the function.
    """
    match check:
        case _ if check in (decimal_input, quantity_input):
            del schema["type"]
            schema |= _INT_OR_STRING | {"maxLength": schema.pop("maxLength")}
            schema |= {"description": DECIMAL_FORM} if check is decimal_input else {}
        case Matches():
            # The error of the schema's `pattern` shows the pattern, not the message. `string(self)` only for a value that
            # may be an integer, since the API server estimates the cost of matching a converted value as unbounded.
            value = "self" if schema.get("type") == "string" else "string(self)"
            add(schema, [Rule(_matches(check, value), check.message)])
        case InRange():
            # One rule, with the check of the form: its regular expression would otherwise stand here twice, for each decimal.
            schema["x-kubernetes-validations"] = _entries(_in_range(check))
        case SizeInRange():
            for limit, sign, text in ((check.least, ">=", "at least"), (check.most, "<=", "at most")):
                holds = f"{_AMOUNT}.compareTo(quantity('{limit}')) {sign} 0"
                if limit is not None:
                    add(schema, [Rule(f"!isQuantity(string(self)) || {holds}", f"must be {text} {limit}")])
        case Unique(key=key):
            schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        case Named():
            schema |= {"required": ["name"], "properties": {"name": _named(check)}}
        case _ if check is text_value:
            schema["properties"] |= {"value": _VARIABLE_VALUE}
        case _ if check is own_path:
            schema |= {"required": ["name", "mountPath"], "properties": _MOUNT}
        case _ if check in _OF_FUNCTIONS:
            add(schema, _OF_FUNCTIONS[check])
        case _:
            raise ValueError(f"no rule in {__name__} for the check {check!r}")


def _matches(check: Matches, text: str) -> str:
    return f"{text}.matches('{_escaped(check.pattern)}')"


def _escaped(pattern: str) -> str:
    return pattern.replace("\\", "\\\\")


def _in_range(bounds: InRange) -> Rule:
    """Bounds of a decimal, which is a string or an integer."""
    stated = [
        (bounds.above, ">", "greater than"),
        (bounds.least, ">=", "at least"),
        (bounds.most, "<=", "at most"),
        (bounds.below, "<", "less than"),
    ]
    given = [(limit, sign, text) for limit, sign, text in stated if math.isfinite(limit)]
    holds = " && ".join(f"double(self) {sign} {float(limit)!r}" for limit, sign, _ in given)
    message = " and ".join(f"{text} {limit:g}" for limit, _, text in given)
    form = A_DECIMAL.message.removeprefix("must be ")
    return Rule(f"{_matches(A_DECIMAL, 'string(self)')} && {holds}", f"must be {message}: {form}")


def _named(check: Named) -> dict[str, Any]:
    """The name of an entry of a raw list."""
    rules = [
        Rule(
            f"!self.startsWith('{check.reserved}')",
            f"names that start with {check.reserved} are the operator's; choose another",
        )
    ]
    if check.taken:
        rules.append(Rule(f"!(self in {list(check.taken)})", "the operator itself sets it; leave it out"))
    return {
        "type": "string",
        "description": f"Name of the {check.what}.",
        "minLength": 1,
        "maxLength": 253,
        "x-kubernetes-validations": _entries(*rules),
    }


_VARIABLE_VALUE: Final = {
    "type": "string",
    "description": "Its value; a number or a boolean has to be quoted.",
    "maxLength": 32_768,
}

_MOUNT: Final[dict[str, Any]] = {
    "name": {
        "type": "string",
        "description": "Name of a volume.",
        "minLength": 1,
        "maxLength": 253,
        "x-kubernetes-validations": _entries(
            Rule(f"!self.startsWith('{RESERVED_VOLUMES}')", RESERVED_MOUNT_MESSAGE)
        ),
    },
    "mountPath": {
        "type": "string",
        "description": "Absolute path in the container.",
        "minLength": 1,
        "maxLength": 1024,
        "x-kubernetes-validations": _entries(
            Rule("self.startsWith('/')", "must be absolute"),
            # A relative path is refused by the rule above.
            Rule(
                f"!self.startsWith('/') || self.matches('^{_escaped(PLAIN_PATH.pattern)}$')",
                PLAIN_PATH_MESSAGE,
            ),
            Rule(
                f"!{list(RESERVED_PATHS)}.exists(taken, (self + '/').startsWith(taken + '/') || "
                "taken.startsWith(self.endsWith('/') ? self : self + '/'))",
                RESERVED_PATH_MESSAGE,
            ),
            Rule(
                f"!{list(SYSTEM_PATHS)}.exists(taken, self == taken || self == taken + '/')",
                SYSTEM_PATH_MESSAGE,
            ),
        ),
    },
}

# --- functions of the models ---------------------------------------------------------------------

_OPTION: Final = "[self.split('=')[0].split('.')[0].replace('_', '-')]"
"""A list of one, whose macros name it: computed for each name of a list, it would exceed the API server's budget."""

_OF_FUNCTIONS: Final[Mapping[Callable[..., Any], tuple[Rule, ...]]] = {
    free_option: (
        Rule(f"!self.contains('{HEAD_TYPE}')", HEAD_MESSAGE),
        Rule(
            # vLLM's parser replaces underscores in names that begin with --.
            "!self.startsWith('-') || self.matches('^-[0-9]+$') || (!self.startsWith('-_') && "
            f"{_OPTION}.all(name, name in {list(ALLOWED_OPTIONS)}))",
            f"this {UNKNOWN_MESSAGE}",
            expression=f"{_OPTION}.exists(name, name in {list(SET_OPTIONS)}) ? 'this option {SET_MESSAGE}' : "
            f"{_OPTION}.exists(name, name in {list(BREAKING_OPTIONS)}) ? 'this option {BREAKS_MESSAGE}' : "
            f"'this {UNKNOWN_MESSAGE}'",
        ),
    ),
    unreserved: (
        Rule(
            f"self.all(name, !{list(RESERVED_LABELS)}.exists(taken, name.startsWith(taken)))",
            f"names that start with {', '.join(RESERVED_LABELS)} are the operator's; choose another prefix",
        ),
    ),
    slice_size: (
        Rule(
            f"!('{SLICE_SIZE}' in self) || self['{SLICE_SIZE}'].matches('^{COUNT.pattern}$')",
            f"{SLICE_SIZE} must be a positive number of pods",
        ),
    ),
    other_container: (Rule(f"!(self in {list(ROLE_CONTAINERS)})", ROLE_CONTAINER_MESSAGE),),
    enough_memory: (
        Rule(
            "!('memory' in self) || !isQuantity(string(self['memory'])) || "
            "quantity(string(self['memory'])).compareTo(quantity('1Mi')) >= 0",
            "memory must be at least 1Mi: a number without a unit is bytes",
        ),
    ),
    free_value: (),
    parameter_value: (),  # of any type: only the operator checks it
    timestamp_input: (),
    on_the_calendar: (
        Rule(
            f"!{_matches(MOMENT, 'self')} || timestamp(self) > timestamp('0001-01-01T00:00:00Z')",
            "must be a day that the calendar has",
        ),
    ),
}
