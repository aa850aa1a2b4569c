"""Scenarios of time: retries that must not come back all at once, and nights on which clocks change. Ids as
in docs/scenarios.md."""

import json
from datetime import UTC, datetime

import pytest

from tests.python.cluster import Cluster
from tests.services.database import Clock
from tests.services.process import wait_until

WAVE, DELAY, FACTOR, CAP, JITTER = 500, 1.0, 2.0, 3.0, 0.25
# The waits that the database decided on, each with the moment from which it counts.
NOTE_WAITS = """
    create table public.wait (task_run_id bigint, attempt bigint, seconds float8, due timestamptz);
    create function public.note_wait() returns trigger language plpgsql security definer as $$
    begin
        insert into public.wait
        select new.task_run_id, new.attempt, extract(epoch from new.available_at - a.ended_at),
            new.available_at
        from flowforge.attempt a where a.task_run_id = new.task_run_id and a.attempt = new.attempt - 1;
        return new;
    end $$;
    create trigger note_wait after update on flowforge.task_run for each row
        when (new.state = 'pending' and new.attempt > old.attempt) execute function public.note_wait();
    create table public.start (task_run_id bigint, attempt bigint, at timestamptz default clock_timestamp());
    create function public.note_start() returns trigger language plpgsql security definer as
        'begin insert into public.start values (new.task_run_id, new.attempt); return new; end';
    create trigger note_start after update on flowforge.task_run for each row
        when (new.state = 'ready' and old.state = 'pending') execute function public.note_start();
"""


def test_hd_30_failures_do_not_come_back_together(cluster: Cluster) -> None:
    """Five hundred task runs fail while something is down, all at once, and again: each wave comes back
    spread, none of it early, the delay grows up to its cap, also at attempt 200."""
    down = cluster.directory / "down"
    retry = {"delay": DELAY, "backoff": FACTOR, "max_delay": CAP, "jitter": JITTER, "max_attempts": 1000}
    spec = {"name": "failing", "tasks": [{"name": "work", "handler": "one.work", "retry": retry}]}
    cluster.value("select version from flowforge.define_workflow(%s)", json.dumps(spec))
    cluster.execute("select flowforge.configure_queue('default', %s)", WAVE)
    cluster.execute(NOTE_WAITS)
    down.touch()
    runs = cluster.trigger_many("failing", [{"work": {"fail": str(down)}}] * WAVE)
    seasoned = cluster.task(runs[0], "work")["task_run_id"]
    cluster.execute("alter table flowforge.task_run disable trigger user")
    cluster.execute(
        "update flowforge.task_run set attempt = 200, failures = 199 where task_run_id = %s", seasoned
    )
    cluster.execute("alter table flowforge.task_run enable trigger user")
    cluster.start("scheduler", "worker", FLOWFORGE_CONCURRENCY="16")
    waves = "select count(*) from public.wait where attempt in (2, 3)"
    wait_until(lambda: cluster.value(waves) == 2 * (WAVE - 1), "two waves of failures")
    down.unlink()
    assert set(cluster.wait_ended(*runs)) == {"succeeded"}
    for attempt, delay in ((2, DELAY), (3, DELAY * FACTOR)):
        waits = [
            seconds
            for (seconds,) in cluster.rows("select seconds from public.wait where attempt = %s", attempt)
        ]
        assert len(waits) == WAVE - 1
        assert min(waits) >= delay
        assert max(waits) <= delay * (1 + JITTER)
        assert max(waits) - min(waits) >= 0.2 * delay
    ((late,),) = cluster.rows("select seconds from public.wait where attempt = 201")
    assert CAP <= late <= CAP * (1 + JITTER)
    early = """
        select count(*) from public.wait w join public.start s using (task_run_id, attempt) where s.at < w.due
    """
    assert cluster.value(early) == 0
    assert cluster.value("select count(*) from public.start where attempt > 1") >= 2 * (WAVE - 1)
    cluster.check()


# The nights of 2026 on which clocks in Berlin change, each half an hour before: the spring night has no
# 02:30, the autumn night has it twice.
NIGHTS = {
    "spring": datetime(2026, 3, 29, 0, 30, tzinfo=UTC),
    "autumn": datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
}


@pytest.mark.parametrize("night", NIGHTS)
def test_hd_47_nights_on_which_clocks_change(cluster: Cluster, clock: Clock, night: str) -> None:
    """Delays, retries and leases given before the change are exact durations; a scheduler that is started
    again inside the hour that comes twice does nothing twice."""
    cluster.execute(f"alter database {cluster.db.name} set timezone = 'Europe/Berlin'")
    cluster.reconnect()
    clock.set(NIGHTS[night])
    offsets = "select extract(timezone from reading), extract(timezone from reading + interval '2 h')"
    ((before, after),) = cluster.rows(f"{offsets} from flowforge_test.clock")
    assert after - before == (3600 if night == "spring" else -3600), "no clock changes on that night"
    retry = {"delay": 86400, "max_delay": 86400, "max_attempts": 2, "jitter": 0}
    spec = {"name": "retried", "tasks": [{"name": "work", "handler": "one.work", "retry": retry}]}
    cluster.value("select version from flowforge.define_workflow(%s)", json.dumps(spec))
    (scheduler, worker) = cluster.start("scheduler", "worker")
    hourly = cluster.trigger("one", delay="1 hour")
    daily = cluster.trigger("one", delay="1 day")
    retried = cluster.trigger("retried", {"work": {"attempts": 2}})
    wait_until(lambda: cluster.task(retried, "work")["attempt"] == 2, "the failure")
    seconds = """
        select extract(epoch from tr.available_at - c.reading)
        from flowforge.task_run tr, flowforge_test.clock c
        where tr.run_id = %s
    """
    assert [cluster.value(seconds, run) for run in (hourly, daily, retried)] == [3600, 86400, 86400]
    # One second before it is due, in the hour that comes twice (or never came), another scheduler.
    clock.advance("3599 s")
    assert scheduler.stop() == 0
    (scheduler,) = cluster.start("scheduler")
    marker = cluster.trigger("one")
    assert cluster.wait_ended(marker) == ["succeeded"]
    assert cluster.states(hourly) == {"work": "pending"}
    clock.advance("1 s")
    assert cluster.wait_ended(hourly) == ["succeeded"]
    assert scheduler.stop() == 0
    cluster.start("scheduler")
    clock.advance(f"{86400 - 3600 - 1} s")
    marker = cluster.trigger("one")
    assert cluster.wait_ended(marker) == ["succeeded"]
    assert cluster.states(daily) == cluster.states(retried) == {"work": "pending"}
    clock.advance("1 s")
    assert cluster.wait_ended(daily, retried) == ["succeeded"] * 2
    assert worker.running()
    assert len(cluster.executions()) == 2 + 2 + 2
    without_zone = """
        select c.relname, a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'flowforge'::regnamespace and c.relname !~ 'yoyo' and a.atttypid in
            ('timestamp'::regtype, 'time'::regtype, 'date'::regtype)
    """
    assert cluster.rows(without_zone) == []
    cluster.check()
