"""Scenarios of what comes into line: definitions, triggers, dispatch, and the elements of maps."""

import itertools

from psycopg.types.json import Jsonb

from tests.sql.explore import Body, meets
from tests.sql.programs import claim_next, finish, finish_and_settle, publish, refusable
from tests.sql.stepping import COMMIT, Laboratory, Program, Run, call

_NUMBERS = itertools.count()


def _mapped(lab: Laboratory, output: list[int]) -> Run:
    """A run of the map whose upstream has succeeded with this output, and is settled."""
    run = lab.start("map")
    lab.finish(lab.claim(run["a"]), "succeeded", output)
    lab.value("select flowforge.settle_finished()")
    assert run["m"].stage == "expand"
    return run


# --- dispatch ---


@meets("dispatch_ready", "dispatch_ready")
def dispatch_dispatch(lab: Laboratory) -> Body:
    """Two schedulers do not overfill a window."""
    lab.value("select flowforge.configure_queue('default', 2)")
    run = lab.trigger("three")
    counts = yield [call("dispatch_ready"), call("dispatch_ready")]
    assert sum(counts) == 2
    assert [row.state for row in run.rows()] == ["ready", "ready", "pending"]
    assert lab.value("select count(*) from flowforge.outbox") == 2
    lab.value("select flowforge.configure_queue('default', 0)")


@meets("dispatch_ready", "cancel_run")
def dispatch_cancel(lab: Laboratory) -> Body:
    """What is dispatched as its run is cancelled is cancelled too, and its message not published."""
    run = lab.trigger("two")
    _, cancelled = yield [call("dispatch_ready"), call("cancel_run", run.id)]
    assert cancelled is True
    assert not lab.rows("select * from flowforge.fetch_outbox(10)")
    yield None
    assert run.states() == {"a": "cancelled", "b": "cancelled"}
    assert run.state == "cancelled"


@meets("dispatch_ready", "cancel_run", "fetch_outbox mark_published")
def dispatch_cancel_publish(lab: Laboratory) -> Body:
    """The same with a publisher: what it fetched before the cancel finds its claim refused."""
    run = lab.trigger("one")
    _, cancelled, _ = yield [call("dispatch_ready"), call("cancel_run", run.id), publish()]
    assert cancelled is True
    assert run.state == "cancelled"


@meets("dispatch_ready", "pause_queue")
def dispatch_pause(lab: Laboratory) -> Body:
    """Once a pause has returned, nothing more is dispatched; what was dispatched before stays."""
    run = lab.trigger("two")
    dispatched, paused = yield [call("dispatch_ready"), call("pause_queue", "default")]
    assert paused is True
    assert dispatched in (0, 2)
    assert not (dispatched and lab.before("2: commit", "1: _fill_window 1"))
    assert lab.value("select flowforge.dispatch_ready()") == 0
    assert [row.state for row in run.rows()] == ["ready" if dispatched else "pending"] * 2
    lab.value("select flowforge.resume_queue('default')")


@meets("dispatch_ready", "retry_run")
def dispatch_retry(lab: Laboratory) -> Body:
    """A retry of what lies above a task that is just dispatched is refused, or takes it back before."""
    run = lab.start("chain")
    lab.finish(lab.claim(run["a"]))
    lab.value("select flowforge.settle_finished()")
    dispatched, reset = yield [call("dispatch_ready"), refusable(call("retry_run", run.id, "a"), "WF007")]
    # What is dispatched after the retry is the upper one.
    assert (dispatched, reset) in [(1, "WF007"), (0, 1), (1, 1)]
    assert run.states()["b" if reset == "WF007" else "a"] == ("ready" if dispatched else "pending")
    yield None
    assert run.state == "succeeded"


@meets("dispatch_ready", "reap_expired_leases")
def dispatch_reap(lab: Laboratory) -> Body:
    """A reap and a dispatch fill one window: each has its own row, and its own order."""
    run = lab.start("one")
    lab.claim(run["a"])
    other = lab.trigger("one")
    lab.expire()
    dispatched, reaped = yield [call("dispatch_ready"), call("reap_expired_leases")]
    assert (dispatched, reaped) == (1, 1)
    assert (run["a"].state, other["a"].state) == ("ready", "ready")


# --- maps ---


@meets("expand_map", "expand_map")
def expand_expand(lab: Laboratory) -> Body:
    """Two schedulers expand one map once."""
    run = _mapped(lab, [1, 2])
    counts = yield [call("expand_map"), call("expand_map")]
    assert sum(counts) == 1
    assert len(run.rows("m")) == 3


@meets("expand_map", "cancel_run")
def expand_cancel(lab: Laboratory) -> Body:
    """A map is cancelled before it is expanded, or whole."""
    run = _mapped(lab, [1, 2])
    expanded, cancelled = yield [call("expand_map"), call("cancel_run", run.id)]
    assert cancelled is True
    assert len(run.rows("m")) == 1 + 2 * expanded
    assert run.state == "cancelled"


@meets("expand_map", "settle_finished")
def expand_settle(lab: Laboratory) -> Body:
    """A map is expanded while something else of its run is settled."""
    run = lab.start("maps")
    a, b = lab.claim(run["a"]), lab.claim(run["b"])
    lab.finish(a, "succeeded", [1, 2])
    lab.value("select flowforge.settle_finished()")
    lab.finish(b)
    expanded, settled = yield [call("expand_map"), call("settle_finished")]
    # Either passes over a run that the other has locked.
    assert expanded + settled > 0
    yield None
    assert run.state == "succeeded"


@meets("expand_map", "retry_run")
def expand_retry(lab: Laboratory) -> Body:
    """A retry of what is mapped over is refused once the map is under way, and else expands it anew."""
    run = _mapped(lab, [1, 2, 3])
    expanded, reset = yield [call("expand_map"), refusable(call("retry_run", run.id, "a"), "WF007")]
    assert (expanded, reset) in [(1, "WF007"), (0, 1)]
    yield None
    assert len(run.rows("m")) == 1 + (3 if expanded else 2)
    assert run.state == "succeeded"


@meets("expand_map", "claim_next dispatch_ready finish_task_run settle_finished")
def expand_elements(lab: Laboratory) -> Body:
    """Elements are dispatched, run and settled as soon as they are there, while the expansion goes on."""
    run = _mapped(lab, [1, 2])

    def expand() -> Program:
        yield from call("expand_map")
        yield COMMIT
        yield from call("expand_map")

    def run_one() -> Program:
        yield from call("dispatch_ready")
        yield COMMIT
        for element in (yield from claim_next()):
            yield COMMIT
            yield from finish_and_settle(element)

    yield [expand(), run_one()]
    yield None
    assert len(run.rows("m")) == 3
    assert (run["m"].state, run.state) == ("succeeded", "succeeded")


@meets("finish_task_run settle_finished", "finish_task_run settle_finished")
def elements_finish(lab: Laboratory) -> Body:
    """The last two elements finish together, each followed by a settle: the map ends once, in order."""
    run = _mapped(lab, [1, 2])
    lab.tick()
    _, first, second = run.rows("m")
    claims = [lab.claim(first), lab.claim(second)]

    def finishing(claimed: object, output: str) -> Program:
        yield from finish(claimed, "succeeded", output)
        yield COMMIT
        yield from call("settle_finished")

    yield [finishing(claims[1], "y"), finishing(claims[0], "x")]
    lab.value("select flowforge.settle_finished()")
    assert (run["m"].state, run["m"].output) == ("succeeded", ["x", "y"])
    assert run["z"].stage == "eligible"


@meets("finish_task_run settle_finished", "cancel_run")
def elements_cancel(lab: Laboratory) -> Body:
    """An element finishes, another waits, and the run is cancelled."""
    run = _mapped(lab, [1, 2])
    lab.tick()
    element = lab.claim(run.rows("m")[1])
    answer, cancelled = yield [finish_and_settle(element), call("cancel_run", run.id)]
    assert (answer, cancelled) == ("accepted", True)
    yield None
    assert [row.state for row in run.rows("m")] == ["cancelled", "succeeded", "cancelled"]
    assert (run["z"].state, run.state) == ("cancelled", "cancelled")


@meets("finish_task_run settle_finished", "retry_run")
def elements_retry(lab: Laboratory) -> Body:
    """A map of which an element failed ends while it is retried: refused, or only that element again."""
    run = _mapped(lab, [1, 2])
    lab.tick()
    _, first, second = run.rows("m")
    lab.finish(lab.claim(first), "failed")
    last = lab.claim(second)
    answer, reset = yield [finish_and_settle(last), refusable(call("retry_run", run.id), "WF007")]
    assert answer == "accepted"
    # The map's own row, its element, and what was skipped below; nothing while it has not failed.
    assert reset in (0, 3, "WF007")
    yield None
    assert [row.attempt for row in run.rows("m")] == [1, 2 if reset == 3 else 1, 1]
    assert run.state == ("succeeded" if reset == 3 else "failed")


# --- definitions ---


@meets("trigger", "define_workflow")
def trigger_define(lab: Laboratory) -> Body:
    """A run has all tasks of one version, however the current one changes meanwhile."""
    number = next(_NUMBERS)
    lab.define(f"evolving {number}", {"name": "a"})
    newer = {"name": f"evolving {number}", "tasks": [{"name": "a"}, {"name": "b", "after": ["a"]}]}
    triggered, defined = yield [
        call("trigger", f"evolving {number}"),
        call("define_workflow", Jsonb(newer)),
    ]
    assert (defined.version, defined.created) == (2, True)
    assert len(Run(lab, triggered).rows()) == lab.value(
        "select version from flowforge.run_result(%s)", triggered
    )


@meets("trigger", "trigger")
def trigger_repeated(lab: Laboratory) -> Body:
    """A trigger repeated under its idempotency key while it is under way: one run."""
    key = f"key {next(_NUMBERS)}"
    first, second = yield [
        call("trigger", "chain", Jsonb({}), key),
        call("trigger", "chain", Jsonb({}), key),
    ]
    assert first == second
    assert len(Run(lab, first).rows()) == 2


@meets("trigger", "prune")
def trigger_prune(lab: Laboratory) -> Body:
    """A trigger under the key of a run that is just pruned gets that run, or a new one."""
    key = f"key {next(_NUMBERS)}"
    old = lab.value("select flowforge.trigger('one', '{}', %s)", key)
    lab.drive()
    lab.clock.advance("1 hour")
    triggered, pruned = yield [
        refusable(call("trigger", "one", Jsonb({}), key), "40001"),
        call("prune", "30 min"),
    ]
    assert pruned >= 1
    if triggered not in (old, "40001"):
        assert [row.state for row in Run(lab, triggered).rows()] == ["pending"]


@meets("trigger_many", "trigger_many", "trigger")
def trigger_many_across(lab: Laboratory) -> Body:
    """Two calls with the same keys in crossing order wait for one of the keys: no deadlock, a run each."""
    keys = [f"key {next(_NUMBERS)}" for _ in range(3)]
    inputs = [Jsonb({})] * 3
    first, second, third = yield [
        call("trigger_many", "one", inputs, keys),
        call("trigger_many", "one", inputs, keys[::-1]),
        call("trigger", "one", Jsonb({}), keys[1]),
    ]
    assert first == second[::-1]
    assert first[1] == third
    assert len(set(first)) == 3


@meets("define_workflow", "define_workflow")
def define_define(lab: Laboratory) -> Body:
    """Two deployments register the same new content at once: one version, created once."""
    name = lab.define(f"twice {next(_NUMBERS)}", {"name": "a"})
    content = Jsonb({"name": name, "tasks": [{"name": "b"}]})
    answers = yield [call("define_workflow", content), call("define_workflow", content)]
    assert sorted((each.version, each.created) for each in answers) == [(2, False), (2, True)]


def _versions(lab: Laboratory) -> str:
    """A workflow of two versions, of one task and of two, whose first one is current."""
    name = lab.define(f"versions {next(_NUMBERS)}", {"name": "a"})
    lab.define(name, {"name": "a"}, {"name": "b"})
    lab.value("select flowforge.activate_version(%s, 1)", name)
    return name


@meets("activate_version", "activate_version")
def activate_activate(lab: Laboratory) -> Body:
    """Two operators activate the same version: one of them changed something."""
    name = _versions(lab)
    changed = yield [call("activate_version", name, 2), call("activate_version", name, 2)]
    assert sorted(changed) == [False, True]


@meets("activate_version", "define_workflow")
def activate_define(lab: Laboratory) -> Body:
    """An operator goes back to a version as another one is deployed: the later one's is current."""
    name = _versions(lab)
    content = Jsonb({"name": name, "tasks": [{"name": "a"}, {"name": "b"}, {"name": "c"}]})
    changed, defined = yield [call("activate_version", name, 1), call("define_workflow", content)]
    assert (defined.version, defined.created) == (3, True)
    current = lab.value("select current_version from flowforge.workflow where name = %s", name)
    assert current == (1 if changed else 3)


@meets("activate_version", "trigger")
def activate_trigger(lab: Laboratory) -> Body:
    """A run has all tasks of one version, whichever is current."""
    name = _versions(lab)
    changed, triggered = yield [call("activate_version", name, 2), call("trigger", name)]
    assert changed is True
    tasks = len(Run(lab, triggered).rows())
    assert tasks == lab.value("select version from flowforge.run_result(%s)", triggered)
    assert tasks == 1 or lab.before("1: commit", "2: commit")
