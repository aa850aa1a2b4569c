"""renew_leases, assert_lease, report_progress and traceparents: what a worker calls for what it claimed."""

import uuid
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.sql.helpers import Claim, Engine, failing, task


def renew(engine: Engine, *pairs: tuple[Any, Any], lease: str = "30 s") -> list[Any]:
    ids, tokens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    answers = engine.table("renew_leases", ids, tokens, lease)
    assert [each.position for each in answers] == list(range(1, len(pairs) + 1))
    assert [each.task_run_id for each in answers] == ids
    return answers


def held(claim: Claim) -> tuple[int, int]:
    return claim.task_run_id, claim.fencing_token


def remaining(engine: Engine, run_id: int, name: str = "a") -> float:
    row = engine.task_run(run_id, name)
    now = engine.value("select flowforge._clock()")
    return float((row.lease_expires_at - now).total_seconds())


# renew_leases


def test_extends_from_now(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    engine.advance("20 s")
    (answer,) = renew(engine, held(claim), lease="50 s")
    assert (answer.outcome, remaining(engine, run_id)) == ("held", 50)
    assert answer.lease_expires_at == engine.task_run(run_id, "a").lease_expires_at
    assert engine.task_run(run_id, "a").lease_length.total_seconds() == 50


def test_the_lease_of_the_definition_wins(engine: Engine) -> None:
    run_id = engine.start(task("a", lease=45))
    renew(engine, held(engine.claim_one()), lease="10 s")
    assert remaining(engine, run_id) == 45


def test_nothing_extends_past_the_time_limit(engine: Engine) -> None:
    run_id = engine.start(task("a", time_limit=50))
    claim = engine.claim_one()
    engine.advance("40 s")
    renew(engine, held(claim))
    assert remaining(engine, run_id) == 10
    engine.advance("20 s")
    renew(engine, held(claim))
    assert remaining(engine, run_id) == -10


def test_after_the_leases_end_but_before_the_reaper_it_is_still_held(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    engine.advance("31 s")
    assert renew(engine, held(claim))[0].outcome == "held"
    assert (engine.reap(), remaining(engine, run_id)) == (0, 30)


def test_learns_of_a_cancel_and_extends_nevertheless(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    engine.call("cancel_run", run_id)
    engine.advance("20 s")
    (answer,) = renew(engine, held(claim))
    assert (answer.outcome, remaining(engine, run_id)) == ("cancel", 30)


def test_what_is_not_held_is_lost_and_unchanged(engine: Engine) -> None:
    engine.start(*(task(name) for name in ("done", "failed", "reaped", "taken", "other")))
    claims = {claim.task: claim for claim in engine.claim_next()}
    engine.finish(claims["done"])
    engine.finish(claims["failed"], "failed")
    renew(engine, held(claims["other"]), lease="1 day")
    engine.advance("31 s")
    assert engine.reap() == 2
    while engine.claim_one().task != "taken":
        pass
    lost = [held(claims[name]) for name in ("done", "failed", "reaped", "taken")]
    wrong = [(claims["other"].task_run_id, token) for token in (0, 2, None, 2**63 - 1)]
    with engine.changes_nothing():
        answers = renew(engine, *lost, *wrong, (None, 1), (-1, 1))
    assert {(answer.outcome, answer.lease_expires_at) for answer in answers} == {("lost", None)}


def test_a_batch_in_any_order_with_repeats(engine: Engine) -> None:
    engine.start(task("a"), task("b"))
    a, b = engine.claim_next()
    answers = renew(engine, held(b), (a.task_run_id, 0), held(a), held(b))
    assert [answer.outcome for answer in answers] == ["held", "lost", "held", "held"]
    assert renew(engine) == []


def test_a_row_that_its_own_handler_holds_is_busy_and_safe(db: Database, committing: Engine) -> None:
    """A handler inside its transaction is not lost, and the reaper cannot touch it."""
    run_id = committing.start(task("a"))
    claim = committing.claim_one()
    with db.connect(autocommit=False) as handler:
        handler.execute("select flowforge.assert_lease(%s, %s)", held(claim))
        with committing.changes_nothing():
            assert renew(committing, held(claim))[0].outcome == "busy"
        committing.advance("1 min")
        assert committing.reap() == 0
    assert committing.reap() == 1
    assert committing.task_run(run_id, "a").state == "ready"


@pytest.mark.parametrize(
    "arguments",
    [
        (None, [1], "30 s"),
        ([1], None, "30 s"),
        ([1], [1, 2], "30 s"),
        ([1], [1], None),
        ([1], [1], "0 s"),
        ([1], [1], "8 days"),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[Any, ...]) -> None:
    with engine.refuses("WF001"):
        engine.table("renew_leases", *arguments)


# assert_lease


def test_assert_lease_extends_and_stands_for_as_long_as_the_token_does(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    engine.advance("20 s")
    engine.call("assert_lease", *held(claim))
    assert remaining(engine, run_id) == 30
    renew(engine, held(claim), lease="1 day")
    engine.call("assert_lease", *held(claim))
    assert remaining(engine, run_id) == 86400  # never shortened
    engine.call("cancel_run", run_id)
    engine.call("assert_lease", *held(claim))  # a success is still accepted
    assert engine.finish(claim) == "accepted"
    with engine.refuses("WF006", f"task run {claim.task_run_id}", "token 1"):
        engine.call("assert_lease", *held(claim))


@pytest.mark.parametrize("pair", [(0, 1), (0, -1), (1, 0), (-10, 0)])
def test_assert_lease_refuses_other_tokens_and_task_runs(engine: Engine, pair: tuple[int, int]) -> None:
    engine.start(task("a"))
    claim = engine.claim_one()
    with engine.refuses("WF006"):
        engine.call("assert_lease", claim.task_run_id + pair[0], claim.fencing_token + pair[1])


def test_assert_lease_refuses_past_the_time_limit(engine: Engine) -> None:
    run_id = engine.start(task("a", time_limit=40))
    claim = engine.claim_one()
    engine.advance("39 s")
    engine.call("assert_lease", *held(claim))
    assert remaining(engine, run_id) == 1
    engine.advance("1 s")
    with engine.refuses("WF006"):
        engine.call("assert_lease", *held(claim))


def test_side_effects_commit_only_under_a_live_lease(db: Database, committing: Engine) -> None:
    committing.rows("create table public.effect (task_run_id bigint)")
    committing.start(task("a"))
    stale = committing.claim_one()
    committing.advance("31 s")
    committing.reap()
    live = committing.claim_one()

    def work(claim: Claim) -> None:
        with db.connect() as handler, handler.transaction():
            handler.execute("select flowforge.assert_lease(%s, %s)", held(claim))
            handler.execute("insert into public.effect values (%s)", (claim.fencing_token,))
            handler.execute("select flowforge.finish_task_run(%s, %s, 'succeeded')", held(claim))

    with pytest.raises(psycopg.Error) as caught:
        work(stale)
    assert caught.value.sqlstate == "WF006"
    work(live)
    assert committing.rows("select * from public.effect") == [(live.fencing_token,)]


@pytest.mark.parametrize("pair", [(None, 1), (1, None)])
def test_assert_lease_refuses_null(engine: Engine, pair: tuple[Any, Any]) -> None:
    with engine.refuses("WF001"):
        engine.call("assert_lease", *pair)


# report_progress


def test_progress_is_reported_under_the_token(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2, "delay": 0}))
    first = engine.claim_one()
    shown = "select progress, progress_message from flowforge.task_run_status"
    assert engine.call("report_progress", *held(first), 0.25) is True
    assert engine.call("report_progress", *held(first), 0.5, "half") is True
    assert engine.row(shown) == (0.5, "half")
    assert engine.call("report_progress", *held(first), None, "no idea") is True
    engine.finish(first, "failed")
    engine.schedule()
    second = engine.claim_one()
    assert engine.row(shown) == (None, None)  # that was another execution's
    engine.call("report_progress", *held(second), 0.1)
    with engine.changes_nothing():
        assert engine.call("report_progress", *held(first), 0.9) is False
        assert engine.call("report_progress", -1, 1, 0.9) is False


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((None, 1, 0.5), "WF001"),
        ((1, None, 0.5), "WF001"),
        ((1, 1, -0.01), "WF001"),
        ((1, 1, 1.01), "WF001"),
        ((1, 1, float("nan")), "WF001"),
        ((1, 1, float("inf")), "WF001"),
        ((1, 1, 0.5, "x" * 1001), "WF005"),
    ],
)
def test_wrong_progress_is_refused(engine: Engine, arguments: tuple[Any, ...], code: str) -> None:
    engine.start(task("a"))
    engine.work(failing())
    with engine.refuses(code):
        engine.call("report_progress", *arguments)


def test_a_transaction_under_a_lease_is_looked_after_by_the_server(engine: Engine) -> None:
    """Else a host that vanishes inside it would hold the row of the task run for ever."""
    engine.start(task("a"))
    claim = engine.claim_one()
    show = "select current_setting('idle_in_transaction_session_timeout')"
    assert engine.value(show) == "0"
    engine.call("assert_lease", claim.task_run_id, claim.fencing_token)
    assert engine.value(show) == "5min"
    assert engine.value("select current_setting('statement_timeout')") == "0", "there is no time limit"
    engine.rows("set local idle_in_transaction_session_timeout = '7min'")
    engine.call("assert_lease", claim.task_run_id, claim.fencing_token)
    assert engine.value(show) == "7min"


def test_a_time_limit_of_a_month_is_longer_than_any_time_out(engine: Engine) -> None:
    engine.start(task("a", time_limit=30 * 86_400))
    claim = engine.claim_one()
    engine.call("assert_lease", claim.task_run_id, claim.fencing_token)
    assert engine.value("select current_setting('statement_timeout')") == "2147483647ms"


def test_a_host_that_vanishes_is_noticed_over_tcp(db: Database) -> None:
    """There the settings are the system's, of hours, unless the session says otherwise."""
    with db.connect() as owner, psycopg.connect(db.server.dsn(db.name, tcp=True)) as handler:
        owner.execute("""select flowforge.define_workflow('{"name": "w", "tasks": [{"name": "a"}]}')""")
        owner.execute("select flowforge.trigger('w'), flowforge.dispatch_ready()")
        claim = "select task_run_id, fencing_token from flowforge.claim_next('{default}', 'w', %s, '1 h')"
        pair = owner.execute(claim, [uuid.uuid4()]).fetchone()
        handler.execute("select flowforge.assert_lease(%s, %s)", pair)
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        found = [handler.execute("select current_setting(%s)", [name]).fetchone() for name in names]
        assert found == [("10",), ("5",), ("3",)]


@pytest.mark.parametrize("own", [None, "1 h", "2 s"])
def test_nor_may_it_last_longer_than_the_time_limit(engine: Engine, own: str | None) -> None:
    """A locked row cannot be reaped, so the server ends what would hold it beyond its time."""
    engine.start(task("a", time_limit=60))
    claim = engine.claim_one()
    engine.advance("20 s")
    names = ["idle_in_transaction_session_timeout", "statement_timeout"]
    if engine.value("select current_setting('server_version_num')::int") >= 170000:
        names.append("transaction_timeout")
    for name in names[:2]:
        if own:
            engine.rows(f"set local {name} = '{own}'")
    engine.call("assert_lease", claim.task_run_id, claim.fencing_token)
    found = {name: engine.value("select current_setting(%s)", name) for name in names}
    short = {None: "40s", "1 h": "40s", "2 s": "2s"}[own]
    assert found == dict.fromkeys(names[:2], short) | dict.fromkeys(names[2:], "40s")


# traceparents

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_traceparents_of_what_is_held_by_position(engine: Engine) -> None:
    engine.define(task("a"))
    engine.trigger(labels=Jsonb({"traceparent": PARENT, "team": "billing"}))
    engine.start(task("b"))
    a, b = sorted((engine.claim_one() for _ in range(2)), key=lambda claim: claim.task)
    wrong = [(a.task_run_id, a.fencing_token + 1), (a.task_run_id, None), (None, 1), (-1, 1)]
    pairs = [held(b), held(a), *wrong, held(a)]
    with engine.changes_nothing():
        answers = engine.table("traceparents", [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        assert engine.table("traceparents", [], []) == []
    assert answers == list(enumerate([None, PARENT, *[None] * 4, PARENT], 1))
    engine.finish(a)
    assert engine.table("traceparents", *map(list, zip(held(a), strict=True))) == [(1, None)]


@pytest.mark.parametrize(
    ("ids", "tokens", "code"),
    [
        (None, [1], "WF001"),
        ([1], None, "WF001"),
        ([1], [1, 2], "WF001"),
        ([1] * 10_001, [1] * 10_001, "WF005"),
    ],
)
def test_wrong_batches_of_traceparents_are_refused(engine: Engine, ids: Any, tokens: Any, code: str) -> None:
    with engine.refuses(code, "traceparents"):
        engine.table("traceparents", ids, tokens)
