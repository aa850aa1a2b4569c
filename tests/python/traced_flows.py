"""Handlers that are traced, in threads and in processes.

`set_up` is what a user's module does with OpenTelemetry's SDK when it is imported; here it does so only where
the environment variable TEST_SPANS names a file for the spans, a line of JSON each.
"""

import asyncio
import json
import os
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from flowforge import Context, Workflow

flow = Workflow("traced")
tracer = trace.get_tracer("handlers")


@flow.task
def sync(_: Context) -> int:
    with tracer.start_as_current_span("in sync"):
        return os.getpid()


@flow.task
async def coroutine(_: Context) -> None:
    def call() -> None:
        with tracer.start_as_current_span("in to_thread"):
            pass

    with tracer.start_as_current_span("in coroutine"):
        await asyncio.sleep(0)
        await asyncio.to_thread(call)


class _Unmarked:
    """Async without looking like it."""

    __name__, __qualname__, __module__ = "unmarked", "unmarked", __name__

    def __call__(self, _: Context) -> object:
        async def inner() -> None:
            with tracer.start_as_current_span("in unmarked"):
                await asyncio.sleep(0)

        return inner()


flow.task(name="unmarked")(_Unmarked())


@flow.task(name="fails")
def fails(_: Context) -> None:
    raise LookupError("no such thing")


class _ToFile(SpanExporter):
    def __init__(self, path: str) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(self._path, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.writelines(
                json.dumps({**json.loads(each.to_json()), "pid": os.getpid()}) + "\n" for each in spans
            )
        return SpanExportResult.SUCCESS


def set_up() -> None:
    if path := os.environ.get("TEST_SPANS"):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_ToFile(path)))
        trace.set_tracer_provider(provider)


set_up()
