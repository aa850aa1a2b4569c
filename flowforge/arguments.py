"""What callers of the client give, checked.

The database checks what an argument may be; refused here is what it would be asked in other words, or not at
all, so that the error names the argument: InvalidArgument, or NotStorable."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from flowforge import db, definition
from flowforge.definition import Workflow
from flowforge.errors import InvalidArgument, InvalidDefinition, NotStorable


def workflow_name(workflow: object) -> str:
    if isinstance(workflow, Workflow):
        return workflow.name
    if not isinstance(workflow, str):
        raise InvalidArgument(f"workflow must be a Workflow or the name of one, not {shown(workflow)}")
    return workflow


def text(value: object, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{what} must be text, not {shown(value)}")
    return value


def whole(value: object, what: str) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]  # that is the question
            if -(2**63) <= number < 2**63:
                return number
            raise InvalidArgument(f"{what} is far too {'large' if number > 0 else 'small'}")
    raise InvalidArgument(f"{what} must be a whole number, not {shown(value)}")


def run_id(value: object) -> int:
    return whole(value, "run_id")


def labels(value: object) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument(f"labels must be a dictionary, not {shown(value)}")
    return dict(value or {})


def is_sequence(value: object) -> bool:
    """Whether it is a list of sorts. A dictionary or a text would be taken apart in a way nobody meant."""
    return isinstance(value, Iterable) and not isinstance(value, Mapping | str | bytes)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def seconds(value: object, what: str) -> int | float:
    if isinstance(value, int | float | timedelta):
        with suppress(InvalidDefinition):  # whose words are those of a definition
            length = definition.seconds(value, what)
            if length >= 0:
                return length
    raise InvalidArgument(f"{what} must be a number of seconds from 0, or a timedelta, not {shown(value)}")


def json_text(value: object, what: str) -> str:
    try:
        return db.json_text(value)
    except NotStorable as error:
        raise NotStorable(f"{what}{'' if error.path else ' is '}{error}", error.path) from None


def interval(delay: object) -> timedelta:
    length = seconds(delay, "delay")
    try:
        return timedelta(seconds=length)
    except OverflowError:
        raise InvalidArgument(f"delay is too long: {delay}") from None


def check_text(value: object) -> None:
    """Refuses text that no connection can carry."""
    if isinstance(value, list):
        for each in value:
            check_text(each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotStorable(f"not storable: text with a lone surrogate: {value[:50]!a}") from None
        if "\0" in value:
            raise NotStorable(f"not storable: text with the character U+0000: {value[:50]!a}")
