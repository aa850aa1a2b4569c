"""Scenarios of one session: what a mistake breaks without any race."""

from tests.sql.explore import Body
from tests.sql.programs import claim, finish, renew
from tests.sql.stepping import Laboratory, call, table


def stale_finish(lab: Laboratory) -> Body:
    """An owner whose lease was reaped finishes after the next one has claimed: fenced, nothing changed."""
    run = lab.start("one")
    first = lab.claim(run["a"])
    lab.expire()
    assert lab.value("select flowforge.reap_expired_leases()") == 1
    second = lab.claim(run["a"])
    (answer,) = yield [finish(first)]
    assert answer == "fenced"
    assert (run["a"].state, run["a"].fencing_token) == ("running", second.fencing_token)


def late_finish(lab: Laboratory) -> Body:
    """A second, other answer under the same token changes nothing."""
    run = lab.start("one")
    owner = lab.claim(run["a"])
    lab.finish(owner, "succeeded", "first")
    (answer,) = yield [finish(owner, "succeeded", "second")]
    assert (answer, run["a"].output) == ("repeated", "first")


def old_message(lab: Laboratory) -> Body:
    """A message of an earlier attempt wins nothing."""
    run = lab.start("again")
    message = run["a"]
    owner = lab.claim(message)
    lab.value(
        "select flowforge.finish_task_run(%s, %s, 'failed', null, 'no')",
        *(owner.task_run_id, owner.fencing_token),
    )
    lab.tick()
    (answer,) = yield [claim(message)]
    assert answer.outcome == "superseded"
    assert (run["a"].state, run["a"].attempt) == ("ready", 2)


def claim_past_the_reaper(lab: Laboratory) -> Body:
    """A lease that has run out is the reaper's to take, and to count: a message does not."""
    run = lab.start("one")
    lab.claim(run["a"])
    lab.expire()
    (answer,) = yield [claim(run["a"], "w2")]
    assert (answer.outcome, run["a"].fencing_token) == ("running", 1)


def renewal_of_what_runs(lab: Laboratory) -> Body:
    """A renewal extends what it names, and not what its worker claimed without ever learning of it."""
    run = lab.start("two")
    known, _ = lab.claim(run["a"]), lab.claim(run["b"])
    lost = run["b"].lease_expires_at
    lab.clock.advance("20 s")
    (outcome,) = yield [renew(known)]
    assert outcome == "held"
    assert run["a"].lease_expires_at > lost
    assert run["b"].lease_expires_at == lost


def renewal_at_the_limit(lab: Laboratory) -> Body:
    """No renewal extends past the time limit."""
    run = lab.start("limited")
    owner = lab.claim(run["a"])
    lab.clock.advance("50 s")
    (outcome,) = yield [renew(owner)]
    assert outcome == "held"
    assert run["a"].lease_expires_at == run["a"].deadline


def crash_loop(lab: Laboratory) -> Body:
    """A handler that kills its process is given up after max_reaps and one executions."""
    run = lab.start("one")
    for _ in range(2):
        owner = lab.claim(run["a"])
        release = "select flowforge.release_task_run(%s, %s, 'crashed')"
        assert lab.value(release, owner.task_run_id, owner.fencing_token) == "released"
    owner = lab.claim(run["a"])
    (answer,) = yield [call("release_task_run", owner.task_run_id, owner.fencing_token, "crashed")]
    assert (answer, run["a"].state) == ("failed", "failed")


def reap_loop(lab: Laboratory) -> Body:
    """A task run whose workers vanish is given up likewise."""
    run = lab.start("one")
    for _ in range(3):
        lab.claim(run["a"])
        lab.expire()
        lab.value("select flowforge.reap_expired_leases()")
    (again,) = yield [claim(run["a"])]
    assert (again.outcome, run["a"].state, run["a"].reaps) == ("finished", "failed", 3)


def lost_message(lab: Laboratory) -> Body:
    """What was published, and forgotten by the broker, is armed again in time."""
    lab.start("one")
    lab.value("select flowforge.mark_published(array(select f.outbox_id from flowforge.fetch_outbox(1) f))")
    lab.expire()
    (armed,) = yield [call("redispatch_lost")]
    assert armed == 1


def unpublishable_since(lab: Laboratory) -> Body:
    """What was published once, given back, and can't be published any more, fails."""
    run = lab.start("one")
    lab.value("select flowforge.mark_published(array(select f.outbox_id from flowforge.fetch_outbox(1) f))")
    owner = lab.claim(run["a"])
    release = "select flowforge.release_task_run(%s, %s, 'shutdown')"
    assert lab.value(release, owner.task_run_id, owner.fencing_token) == "released"
    (order,) = lab.rows("select * from flowforge.fetch_outbox(1)")
    lab.value("select flowforge.mark_unpublishable(%s, 'too large by now')", order.outbox_id)
    assert lab.value("select flowforge.sweep_outbox()") == 0
    (failed,) = yield [call("fail_undeliverable")]
    assert (failed, run["a"].state) == (1, "failed")


def fetch_of_a_cancelled_run(lab: Laboratory) -> Body:
    """An order that a cancel under way has overlooked is not fetched."""
    run = lab.start("two")
    lab.claim(run["b"])
    lab.value(
        "update flowforge.run set cancel_requested_at = flowforge._clock() where run_id = %s returning true",
        run.id,
    )
    (orders,) = yield [table("fetch_outbox", 10)]
    assert orders == []
    yield None
    assert run.states() == {"a": "cancelled", "b": "succeeded"}


def map_expanded_again(lab: Laboratory) -> Body:
    """A map that a retry expands again joins the elements of its new expansion only."""
    run = lab.start("map")
    for output, element in ([1, 2], "old"), ([3, 4], "new"):
        lab.finish(lab.claim(run["a"]), "succeeded", output)
        lab.tick()
        lab.tick()
        for row in run.rows("m"):
            if row.state == "ready":
                lab.finish(lab.claim(row), "succeeded", element)
        lab.tick()
        if element == "old":
            lab.finish(lab.claim(run["z"]))
            assert lab.value("select flowforge.retry_run(%s, 'a')", run.id) == 3
            lab.tick()
    assert run["m"].output == ["new", "new"]
    (settled,) = yield [call("settle_finished")]
    assert settled == 0


def rules_judged(lab: Laboratory) -> Body:
    """What waited is judged by the settle that finds nothing more to wait for."""
    run = lab.start("rules")
    b, c = lab.claim(run["b"]), lab.claim(run["c"])
    lab.finish(b)
    lab.finish(c)
    (settled,) = yield [call("settle_finished")]
    # b, c, and bad, which is skipped at once.
    assert settled == 3
    assert run.states() == {
        "b": "succeeded",
        "c": "succeeded",
        "bad": "skipped",
        "good": "pending",
        "end": "pending",
    }
    assert (run["good"].stage, run["end"].unmet) == ("eligible", 1)
