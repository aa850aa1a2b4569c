"""Joins what handlers do to the trace of whoever triggered their run. The only module that imports
opentelemetry, whose API comes with the extra `otel`.

What becomes of a span is for OpenTelemetry's SDK, which is the program's own to configure. Whatever fails
there, no handler and no trigger fails of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flowforge import __version__, log
from flowforge.config import Config, called
from flowforge.errors import ConfigError, first_line
from flowforge.extras import installing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from flowforge.worker.execution import Execution

_log = log.of("tracing")

Spans = Callable[["Execution"], AbstractContextManager[object]]
"""Makes of an execution the span that its handler is to run in."""


def no_span(_: Execution) -> AbstractContextManager[object]:
    """Where nothing is traced."""
    return nullcontext()


def joined(labels: Mapping[str, Any]) -> Mapping[str, Any]:
    """The labels of a run, with the span that is current here as its `traceparent` unless they have one."""
    # Who has a span has imported this; nobody else pays for it.
    if "opentelemetry.trace" not in sys.modules or "traceparent" in labels:
        return labels
    carrier: dict[str, str] = {}
    with _harmless():
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return {**labels, "traceparent": carrier["traceparent"]} if "traceparent" in carrier else labels


def spans(config: Config) -> Spans:
    """As the configuration says. Raises ConfigError when OpenTelemetry is needed and not installed."""
    if not config.tracing:
        return no_span
    try:
        from opentelemetry import trace
    except ImportError:
        raise ConfigError(
            f"{called('tracing')} is on, and OpenTelemetry is not installed: {installing('otel')}"
        ) from None
    # Of the SDK that a module of handlers may set up later, too.
    return partial(_Span, trace.get_tracer("flowforge", __version__))


class _Span:
    """A span that is current within the block; it ends with the block, and tells what was raised there.

    Its parent is the claim's `traceparent`; without one, or with one that cannot be read, it begins a trace.
    """

    def __init__(self, tracer: Tracer, execution: Execution) -> None:
        self._tracer, self._execution = tracer, execution
        self._pid = os.getpid()
        self._span: Span | None = None
        self._token: Any = None

    def __enter__(self) -> None:
        with _harmless():
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            claim = self._execution.claim
            carrier = {} if claim.traceparent is None else {"traceparent": claim.traceparent}
            self._span = self._tracer.start_span(
                claim.handler,
                TraceContextTextMapPropagator().extract(carrier, context.Context()),
                trace.SpanKind.CONSUMER,
                _attributes(self._execution),
            )
            self._token = context.attach(trace.set_span_in_context(self._span))

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # a handler forked, and this is the child on its way out: the span is its parent's
        if self._token is not None:
            with _harmless():
                from opentelemetry import context

                context.detach(self._token)
        if (span := self._span) is None:
            return
        with _harmless():
            if (stop := self._execution.stop_reason) is not None:
                span.set_attribute("flowforge.stop_reason", stop.name.lower())
            if raised is not None:
                _tell_of(raised, span)
        with _harmless():
            span.end()


def _tell_of(raised: BaseException, span: Span) -> None:
    from opentelemetry.trace import StatusCode

    kind = type(raised)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    span.set_attribute("error.type", name)
    span.set_status(StatusCode.ERROR, name)
    span.record_exception(raised)


def _attributes(execution: Execution) -> dict[str, str | int]:
    """By OpenTelemetry's conventions for messaging, as far as they go."""
    claim = execution.claim
    found: dict[str, str | int] = {
        "messaging.system": "flowforge",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(claim.dispatch_id),
        "flowforge.workflow": claim.workflow,
        "flowforge.task": claim.task,
        "flowforge.run_id": claim.run_id,
        "flowforge.task_run_id": claim.task_run_id,
        "flowforge.attempt": claim.attempt,
        "flowforge.fencing_token": claim.fencing_token,
    }
    if claim.map_index is not None:
        found["flowforge.map_index"] = claim.map_index
    return found


_told: set[type[Exception]] = set()


@contextmanager
def _harmless() -> Generator[None]:
    """Whatever raises within the block ends it; each kind is told of once."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 -- processors and samplers are other people's
        if type(exc) not in _told:
            _told.add(type(exc))
            _log.warning(
                "OpenTelemetry fails; going on without it", error=f"{type(exc).__name__}: {first_line(exc)}"
            )
