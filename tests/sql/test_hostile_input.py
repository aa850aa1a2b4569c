"""Hostile names and values: stored and returned byte for byte, or refused by one documented rule (HD-38)."""

import json
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.helpers import Engine, task

NAMES = [
    "it's",
    'say "hi"',
    "back\\slash",
    "$$",
    "$1",
    "'; drop table flowforge.run; --",
    "%s %I %L %%",
    "{}",
    "{0}",
    "a,b",
    "select",
    "user",
    "null",
    "x" * 64,
    "n" * 200,
    "é" * 100,
    "👩‍🚀",
    "\u202eright to left",
    "zero\u200bwidth",
    "\ufeffmark",
    "\u00a0blank of another kind",
    "two  blanks",
    "\U0010ffff",
    "queue.name#*",
    "../../etc/passwd",
    "<script>",
]

REFUSED = [
    ("", "WF001"),
    (" ", "WF001"),
    (" before", "WF001"),
    ("after ", "WF001"),
    ("new\nline", "WF001"),
    ("carriage\rreturn", "WF001"),
    ("tab\t", "WF001"),
    ("escape\x1b[31m", "WF001"),
    ("delete\x7f", "WF001"),
    ("c1\x85", "WF001"),
    ("c1\x9f", "WF001"),
    ("x" * 256, "WF005"),
    ("é" * 129, "WF005"),
    ("x" * 1_000_000, "WF005"),
]


def ids(name: Any) -> str:
    return ascii(name)[1:20]


@pytest.mark.parametrize("name", NAMES, ids=ids)
def test_a_name_goes_everywhere_and_comes_back_byte_for_byte(engine: Engine, name: str) -> None:
    engine.define(task(name, queue=name, handler=name), task("b", name, queue=name), name=name)
    run_id = engine.trigger(name, input=Jsonb({name: name}), idempotency_key=name, labels=Jsonb({name: name}))
    assert engine.trigger(name, input=Jsonb({name: name}), idempotency_key=name) == run_id
    engine.schedule()
    (order,) = engine.table("fetch_outbox", 10)
    assert (order.queue, order.handler) == (name, name)
    engine.call("mark_refused", [order.outbox_id], [name])
    assert engine.messages()[0].last_error == name
    assert engine.call("announce_worker", name, [name], 1) == ""
    (claim,) = engine.table("claim_next", [name], name, "00000000-0000-0000-0000-000000000001", "30 s", 5)
    assert (claim.workflow, claim.task, claim.handler, claim.input) == (name, name, name, {name: name})
    engine.call("report_progress", claim.task_run_id, claim.fencing_token, 0.5, name)
    shown = engine.row("select * from flowforge.task_run_status where task = %s", name)
    assert (shown.workflow, shown.queue, shown.handler) == (name, name, name)
    assert (shown.worker, shown.progress_message) == (name, name)
    assert engine.finish(claim, output=Jsonb({name: name})) == "accepted"
    assert engine.call("task_output", run_id, name) == {name: name}
    engine.schedule()
    (b,) = engine.claim_next(queues=(name,))
    assert (b.upstream_outputs, b.upstream_states) == ({name: {name: name}}, {name: "succeeded"})
    engine.finish(b, "failed", error=name)
    engine.schedule()
    assert engine.value("select error from flowforge.dead_letters") == name
    assert engine.value("select errors from flowforge.run_result(%s)", run_id) == {"b": name}
    assert engine.call("retry_run", run_id, name, name) == 2
    assert engine.call("pause_queue", name) is True
    assert engine.call("redispatch", name) == 0
    engine.call("cancel_run", run_id, name)
    run = engine.row("select * from flowforge.run_status")
    assert (run.workflow, run.idempotency_key, run.cancel_reason) == (name, name, name)
    assert run.labels == {name: name}
    worker = engine.row("select * from flowforge.worker_status")
    assert (worker.worker, worker.queues) == (name, [name])
    assert [row.queue_names for row in engine.rows("select flowforge.queue_names()")] == [name]


@pytest.mark.parametrize(("name", "code"), REFUSED, ids=ids)
def test_one_rule_refuses_a_name_wherever_it_is_given(engine: Engine, name: str, code: str) -> None:
    """Handlers and keys may be a little longer than other names; all that is refused here is longer still."""
    engine.define(task("a"))
    run_id = engine.trigger()
    for definition in (
        {"name": name, "tasks": [task("a")]},
        {"name": "x", "tasks": [task(name)]},
        {"name": "x", "tasks": [task("a", queue=name)]},
        {"name": "x", "tasks": [task("a", handler=name)]},
    ):
        with engine.refuses(code):
            engine.rows("select flowforge.define_workflow(%s)", definition)
    for function, arguments in [
        ("trigger", (name,)),
        ("trigger", ("w", Jsonb({}), name)),
        ("trigger_many", ("w", [Jsonb({})], [name])),
        ("announce_worker", (name, ["q"], 1)),
        ("announce_worker", ("w", [name], 1)),
        ("claim_next", (["default"], name, "00000000-0000-0000-0000-000000000001", "30 s")),
        ("retry_run", (run_id, None, name)),
    ]:
        with engine.refuses(code):
            engine.call(function, *arguments)


@pytest.mark.parametrize("name", ["'; drop table flowforge.run; --", "%s", "x" * 1_000_000], ids=ids)
def test_an_unknown_name_is_quoted_in_the_message_and_cut(engine: Engine, name: str) -> None:
    run_id = engine.start(task("a"))
    for function, arguments in [
        ("pause_queue", (name,)),
        ("resume_queue", (name,)),
        ("configure_queue", (name,)),
        ("redispatch", (name,)),
        ("set_limit", (name, 1)),
        ("activate_version", (name, 1)),
        ("task_output", (run_id, name)),
    ]:
        with engine.refuses("WF002", "'" + name[:20].replace("'", "''")) as caught:
            engine.call(function, *arguments)
        assert len(str(caught.value)) < 500


# Values in JSON: HD-28


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (r'"a\u0000b"', "22P05"),
        (r'"\ud800"', "22P02"),
        (r'"\udc00\ud800"', "22P02"),
        ("NaN", "22P02"),
        ("-Infinity", "22P02"),
        ("[1,]", "22P02"),
        ("", "22P02"),
        ("[" * 100_000 + "]" * 100_000, "54001"),
    ],
    ids=ids,
)
def test_what_jsonb_cannot_hold_is_refused_before_any_row_exists(
    engine: Engine, text: str, code: str
) -> None:
    engine.define(task("a"))
    with engine.refuses(code):
        engine.rows("select flowforge.trigger('w', %s::jsonb)", text)
    run_id = engine.trigger()
    engine.schedule()
    claim = engine.claim_one()
    finish = "select flowforge.finish_task_run(%s, 1, 'succeeded', %s::jsonb)"
    with engine.refuses(code):
        engine.rows(finish, claim.task_run_id, text)
    # The worker then reports it as a failure that no repeat can mend.
    assert engine.finish(claim, "failed", error="result not storable", retryable=False) == "accepted"
    assert engine.task_run(run_id, "a").state == "failed"


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(10**300),
        0.1,
        1e-320,
        "\U0010ffff\u200e",
        "\x01\x7f",
        json.loads("[" * 300 + "]" * 300),
        {"": {"": [None, True, ""]}},
    ],
    ids=ids,
)
def test_what_jsonb_can_hold_comes_back(engine: Engine, value: Any) -> None:
    engine.define(task("a"), task("m", map="a"))
    run_id = engine.trigger(input=Jsonb(value))
    engine.schedule()
    claim = engine.claim_one()
    assert claim.input == value
    engine.finish(claim, output=Jsonb([value]))
    engine.schedule()
    element = engine.claim_one()
    assert element.item == value
    engine.finish(element, output=Jsonb(value))
    engine.schedule()
    assert engine.call("task_output", run_id, "m") == [value]


def test_nul_never_leaves_the_client(engine: Engine) -> None:
    engine.define(task("a"))
    with pytest.raises(psycopg.DataError):
        engine.trigger("w\0")
    with pytest.raises(psycopg.DataError):
        engine.trigger(idempotency_key="\0")


def test_a_payload_beyond_the_limit_is_refused_and_an_error_text_is_cut(engine: Engine) -> None:
    engine.start(task("a"))
    large = Jsonb("x" * 16_777_216)
    with engine.refuses("WF005", "max_payload_bytes"):
        engine.trigger(input=large)
    claim = engine.claim_one()
    with engine.refuses("WF005", "max_payload_bytes"):
        engine.finish(claim, output=large)
    assert engine.finish(claim, "failed", error="x" * 16_777_216) == "accepted"
    assert engine.value("select length(error) from flowforge.dead_letters") < 10_100


# Intervals and arrays


@pytest.mark.parametrize("interval", ["infinity", "-infinity", "178000000 years", "-178000000 years"])
def test_an_interval_beyond_all_bounds_is_refused(engine: Engine, interval: str) -> None:
    run_id = engine.start(task("a"))
    claim_id = "00000000-0000-0000-0000-000000000001"
    # PostgreSQL before 17 has no infinite intervals, and says so itself.
    unknown = "infinity" in interval and engine.connection.info.server_version < 170_000
    for function, arguments in [
        ("trigger", ("w", Jsonb({}), None, None, 0, interval)),
        ("claim_next", (["default"], "w", claim_id, interval)),
        ("claim_task_run", (run_id, claim_id, "w", claim_id, interval)),
        ("renew_leases", ([1], [1], interval)),
        ("configure_queue", ("default", None, interval)),
        ("prune", (interval,)),
    ]:
        with engine.refuses("22007" if unknown else "WF001"):
            engine.call(function, *arguments)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("shape", ["[0:0]={%s}", "{{%s}}"])
def test_arrays_of_another_shape_are_refused(engine: Engine, position: int, shape: str) -> None:
    """Not read at the wrong place."""
    engine.start(task("a"))
    claim = engine.claim_one()
    values = [str(claim.task_run_id), "1", "succeeded", '"{}"', "error", "true"]
    shapes = ["{%s}"] * position + [shape] + ["{%s}"] * (5 - position)
    texts = [each % value for each, value in zip(shapes, values, strict=True)]
    types = ["bigint[]", "bigint[]", "text[]", "jsonb[]", "text[]", "boolean[]"]
    places = ", ".join(f"%s::{each}" for each in types)
    with engine.refuses("WF001"):
        engine.rows(f"select flowforge.finish_task_runs({places})", *texts)


@pytest.mark.parametrize(
    "arrays", [("[0:0]={1}", "{k}"), ("{1}", "[0:0]={k}"), ("{{1}}", "{k}"), ("{1}", "{{k}}")]
)
def test_inputs_and_keys_of_another_shape_are_refused(engine: Engine, arrays: tuple[str, str]) -> None:
    engine.define(task("a"))
    with engine.refuses("WF001"):
        engine.rows("select flowforge.trigger_many('w', %s::jsonb[], %s::text[])", *arrays)
