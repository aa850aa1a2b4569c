"""Traces: the spans of handlers hang below the span that triggered the run, wherever they are executed; and
whatever is wrong with tracing, work goes on."""

import contextvars
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from flowforge import Client, Context, Workflow, tracing
from flowforge.config import Config
from flowforge.worker.execution import StopReason
from flowforge.worker.session import Session
from tests.python import traced_flows as flows
from tests.python.slots import an_execution
from tests.python.workbench import Bench
from tests.services.database import Database
from tests.services.process import wait_until

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traces:
    """An SDK whose spans stay here."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self.memory = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = self.provider.get_tracer("test")

    def spans(self) -> dict[str, ReadableSpan]:
        """Those that have ended, by name, which each has for itself."""
        found = self.memory.get_finished_spans()
        assert len({each.name for each in found}) == len(found)
        return {each.name: each for each in found}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    traces = Traces()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces.provider)
    monkeypatch.setattr(flows, "tracer", traces.tracer)
    monkeypatch.setattr(tracing, "_told", set())
    return traces


@pytest.fixture
def client(db: Database) -> Iterator[Client]:
    with Client(db.dsn) as client:
        yield client


def parent_of(span: ReadableSpan) -> str:
    """As a traceparent, without its flags; nothing for the root of a trace."""
    if span.parent is None:
        return ""
    return f"00-{format_trace_id(span.parent.trace_id)}-{format_span_id(span.parent.span_id)}"


def whole(span: Any) -> str:
    """The traceparent that names the span."""
    context = span.get_span_context()
    trace_id, span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{context.trace_flags:02x}"


def identity(span: ReadableSpan) -> str:
    return whole(span)[:-3]


def labels_of(bench: Bench, run: int) -> Any:
    return bench.one("select labels from flowforge.run where run_id = %s", run)


# -- spans where they belong


def test_handlers_are_spans_below_the_one_that_triggered(
    any_bench: Bench, traces: Traces, client: Client
) -> None:
    """Current in sync and async handlers, in what looks like neither, and in asyncio.to_thread."""
    any_bench.define(flows.flow)
    with traces.tracer.start_as_current_span("request"):
        run = client.trigger(flows.flow, labels={"team": "billing"})
    with any_bench.worker(flows.flow, tracing=True):
        assert any_bench.wait_run(run) == ["failed"]
    spans = traces.spans()
    request = identity(spans["request"])
    assert labels_of(any_bench, run) == {"team": "billing", "traceparent": whole(spans["request"])}
    handlers = {name: spans.pop(f"traced.{name}") for name in ("sync", "coroutine", "unmarked", "fails")}
    assert {parent_of(each) for each in handlers.values()} == {request}
    assert {each.kind for each in handlers.values()} == {SpanKind.CONSUMER}
    inner = {name: parent_of(span) for name, span in spans.items()}
    assert inner == {
        "request": "",
        "in sync": identity(handlers["sync"]),
        "in coroutine": identity(handlers["coroutine"]),
        "in to_thread": identity(spans["in coroutine"]),
        "in unmarked": identity(handlers["unmarked"]),
    }

    task = any_bench.task(run, "fails")
    assert handlers["fails"].attributes == {
        "messaging.system": "flowforge",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": task["dispatch_id"],
        "flowforge.workflow": "traced",
        "flowforge.task": "fails",
        "flowforge.run_id": run,
        "flowforge.task_run_id": task["task_run_id"],
        "flowforge.attempt": 1,
        "flowforge.fencing_token": 1,
        "error.type": "LookupError",
    }
    assert handlers["fails"].status.status_code is StatusCode.ERROR
    (event,) = handlers["fails"].events
    assert (event.attributes or {})["exception.message"] == "no such thing"
    assert handlers["sync"].status.status_code is StatusCode.UNSET
    assert "tracing.py" not in any_bench.task(run, "fails")["error"]


def test_in_processes_spans_are_those_of_the_sdk_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.define(flows.flow)
    run = bench.one("select flowforge.trigger('traced', labels => %s)", json.dumps({"traceparent": GIVEN}))
    path = tmp_path / "spans"
    monkeypatch.setenv("TEST_SPANS", str(path))
    sources = ["tests.python.traced_flows"]
    with bench.worker(flows.flow, sources=sources, isolation="processes", tracing=True, concurrency=1):
        assert bench.wait_run(run) == ["failed"]
    spans = {each["name"]: each for each in map(json.loads, path.read_text().splitlines())}
    handlers = {name for name in spans if name.startswith("traced.")}
    assert len(handlers) == 4
    below = {name: spans[name]["parent_id"] for name in handlers}
    assert below == dict.fromkeys(handlers, "0xb7ad6b7169203331")
    assert {each["context"]["trace_id"] for each in spans.values()} == {"0x0af7651916cd43dd8448eb211c80319c"}
    assert {each["pid"] for each in spans.values()} == {bench.task(run, "sync")["output"]} != {os.getpid()}
    inner = {name: spans[name]["parent_id"] for name in ("in sync", "in coroutine", "in unmarked")}
    assert inner == {name: spans[f"traced.{name[3:]}"]["context"]["span_id"] for name in inner}


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"traceparent": "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"},
        {"traceparent": "nonsense\n" * 1000},
        {"traceparent": {"not": "text"}},
    ],
    ids=["none", "version ff", "zeros", "nonsense", "no text"],
)
def test_without_a_traceparent_that_can_be_read_a_trace_begins(
    bench: Bench, traces: Traces, labels: dict[str, Any]
) -> None:
    workflow = Workflow("w")
    workflow.task(name="only")(lambda _: "done")
    bench.define(workflow)
    run = bench.trigger(workflow)
    # Past the check of `trigger`, which refuses what has not the form.
    bench.execute("update flowforge.run set labels = %s", json.dumps(labels))
    with bench.worker(workflow, tracing=True):
        assert bench.wait_run(run) == ["succeeded"]
    (span,) = traces.spans().values()
    assert parent_of(span) == ""


def test_what_is_claimed_together_belongs_to_its_own_trace(
    bench: Bench, traces: Traces, client: Client
) -> None:
    workflow = Workflow("w")
    workflow.task(name="only")(lambda _: None)
    bench.define(workflow)
    runs = {}
    for name in ("one", "two", "three"):
        with traces.tracer.start_as_current_span(name):
            runs[client.trigger(workflow)] = name
    wait_until(
        lambda: bench.one("select count(*) from flowforge.task_run where state = 'ready'") == 3, "dispatch"
    )
    with bench.worker(workflow, tracing=True):
        bench.wait_run(*runs)
    found = traces.memory.get_finished_spans()
    triggers = {each.name: identity(each) for each in found if each.name in runs.values()}
    handlers = [each for each in found if each.name == "w.only"]
    assert len(handlers) == 3
    for each in handlers:
        run: Any = (each.attributes or {})["flowforge.run_id"]
        assert parent_of(each) == triggers[runs[run]]


def test_a_handler_that_is_told_to_stop_says_so(traces: Traces) -> None:
    execution = an_execution()
    with tracing.spans(Config(tracing=True))(execution):
        execution.stop(StopReason.TIME_LIMIT)
    assert not trace.get_current_span().get_span_context().is_valid
    assert (traces.spans()["h"].attributes or {})["flowforge.stop_reason"] == "time_limit"


# -- the client


def test_the_client_labels_runs_with_the_span_that_is_current(
    bench: Bench, traces: Traces, client: Client
) -> None:
    bench.define(flows.flow)
    assert labels_of(bench, client.trigger("traced", labels={"a": 1})) == {"a": 1}
    with traces.tracer.start_as_current_span("request") as span:
        given = {"traceparent": GIVEN}
        assert labels_of(bench, client.trigger("traced", labels=given)) == given
        mine: dict[str, Any] = {"a": 1}
        found = labels_of(bench, client.trigger("traced", labels=mine))
        assert found == {"a": 1, "traceparent": whole(span)}
        assert mine == {"a": 1}
        assert {labels_of(bench, run) == {} for run in client.trigger_many("traced", [1, 2])} == {True}
    # What is not sampled says so, so that those below it are not either.
    quiet = TracerProvider(sampler=ALWAYS_OFF).get_tracer("quiet")
    with quiet.start_as_current_span("request"):
        label = labels_of(bench, client.trigger("traced"))["traceparent"]
    assert int(label[-2:], 16) % 2 == 0


# -- no harm


class Broken(SpanExporter, SpanProcessor):
    """Fails at whatever it is asked for."""

    def export(self, *_: object) -> Any:
        raise OSError("no collector")

    def on_start(self, *_: object, **__: object) -> None:
        raise OSError("no memory left for spans")

    def on_end(self, *_: object) -> None:
        raise OSError("no memory left for spans")


@pytest.mark.parametrize(
    "processor", [Broken(), SimpleSpanProcessor(Broken())], ids=["processor", "exporter"]
)
def test_what_fails_in_the_sdk_hurts_no_handler(
    bench: Bench, traces: Traces, caplog: pytest.LogCaptureFixture, processor: SpanProcessor
) -> None:
    workflow = Workflow("w")

    @workflow.task
    def a(_: Context) -> list[int]:
        return [1, 2, 3]

    @workflow.task(map=a)
    async def b(ctx: Context) -> int:
        return int(ctx.item)

    bench.define(workflow)
    traces.provider.add_span_processor(processor)
    with bench.worker(workflow, tracing=True):
        assert bench.wait_run(bench.trigger(workflow)) == ["succeeded"]
    told = [each for each in caplog.records if each.getMessage().startswith("OpenTelemetry fails")]
    assert len(told) == (processor.__class__ is Broken), "the SDK itself tells of exporters"


def test_what_fails_in_the_sdk_hurts_no_trigger(
    bench: Bench, traces: Traces, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.define(flows.flow)
    inject = "opentelemetry.trace.propagation.tracecontext.TraceContextTextMapPropagator.inject"
    monkeypatch.setattr(inject, Broken.on_end)
    with traces.tracer.start_as_current_span("request"):
        assert labels_of(bench, client.trigger("traced", labels={"a": 1})) == {"a": 1}


def test_where_traceparents_are_not_answered_handlers_run(
    bench: Bench, traces: Traces, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    bench.define(flows.flow)
    with bench.worker(flows.flow, tracing=True) as worker:
        wait_until(lambda: worker.worker.health.state == "ok", "the worker, which has looked for it")
        bench.execute("drop function flowforge.traceparents(bigint[], bigint[])")
        with traces.tracer.start_as_current_span("request"):
            run = client.trigger(flows.flow)
        bench.wait_run(run)
    assert parent_of(traces.spans()["traced.sync"]) == ""
    assert any("traces that handlers belong to" in each.getMessage() for each in caplog.records)


def test_a_process_that_a_handler_forks_ends_no_span(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    def handler() -> None:
        with tracing.spans(Config(tracing=True))(an_execution()):
            monkeypatch.setattr(os, "getpid", lambda: -1)

    contextvars.copy_context().run(handler)  # in which the span stays
    assert traces.spans() == {}


@pytest.mark.parametrize("on", [True, False])
def test_off_it_makes_neither_spans_nor_calls(
    bench: Bench, traces: Traces, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    asked: list[str] = []
    call = Session.call

    def noted(self: Session, query: str, *rest: Any, **options: Any) -> Any:
        asked.append(query)
        return call(self, query, *rest, **options)

    monkeypatch.setattr(Session, "call", noted)
    current: list[bool] = []
    workflow = Workflow("w")

    @workflow.task
    def a(ctx: Context) -> list[int]:
        current.append(trace.get_current_span().get_span_context().is_valid)
        return [1, 2, 3]

    workflow.task(name="b", map=a)(lambda ctx: ctx.item)
    bench.define(workflow)
    with bench.worker(workflow, tracing=on, concurrency=3):
        assert bench.wait_run(bench.trigger(workflow)) == ["succeeded"]
    assert current == [on]
    calls, claims = (
        sum(f"flowforge.{name}(" in each for each in asked) for name in ("traceparents", "claim_next")
    )
    assert claims > 0
    assert (calls > 0, len(traces.memory.get_finished_spans())) == ((True, 4) if on else (False, 0))
