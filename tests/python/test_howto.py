"""The how-to pages: their examples run, and what they say of them holds."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowforge import Client, Context, Retry, Workflow
from flowforge.loading import load_workflows
from tests.python.test_docs import ROOT, blocks, module_of
from tests.python.workbench import Bench, Gate
from tests.services import postgres
from tests.services.database import Database
from tests.services.postgres import PostgresServer
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker


class Payments:
    """Charges once for each key. The answer to the first request gets lost."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def charge(self, amount: int, idempotency_key: str) -> dict[str, str]:
        self.requests.append(idempotency_key)
        if len(self.requests) == 1:
            raise TimeoutError("no answer")
        return {"id": f"{amount} by {idempotency_key}"}


def test_a_charge_whose_answer_is_lost_is_asked_for_under_the_same_key(bench: Bench) -> None:
    module = module_of("idempotent-handlers.md", *blocks("docs/howto/idempotent-handlers.md", "python"))
    module.__dict__["payments"] = payments = Payments()
    with bench.worker(module.orders), Client(bench.db.dsn) as client:
        client.define(module.orders)
        result = client.wait(client.trigger("orders", {"amount": 5}), timeout=60)
    first, second = payments.requests
    assert result.outputs == {"charge": f"5 by {first}"}
    assert first == second


def test_what_is_taken_is_taken_with_the_end_of_the_task(bench: Bench) -> None:
    module = module_of("transactions.md", *blocks("docs/howto/transactions.md", "python"))
    [table] = blocks("docs/howto/transactions.md", "sql")
    with bench.db.connect() as conn, conn.transaction(force_rollback=True):  # the role must not stay
        conn.execute(f"create role shop_worker; {table}".encode())
    bench.execute(table.partition(";")[0])
    bench.execute("insert into item values ('ball', 5)")
    with bench.worker(module.stock), Client(bench.db.dsn) as client:
        client.define(module.stock)
        runs = [client.trigger("stock", {"item": "ball", "count": count}) for count in (3, 9)]
        taken, refused = [client.wait(run, timeout=60) for run in runs]
    assert taken.succeeded or refused.succeeded
    assert {taken.state, refused.state} == {"succeeded", "failed"}
    assert bench.all("select left_over from item") == [(2,)], "what failed has kept nothing"
    assert taken.outputs == {"take": {"left": 2}}
    assert "not so many" in refused.errors["take"]


def test_a_map_is_joined_and_its_failure_reported(bench: Bench) -> None:
    module = module_of("fan-out.md", *blocks("docs/howto/fan-out.md", "python"))
    with bench.worker(module.crawl, queues=sorted(module.crawl.queues)), Client(bench.db.dsn) as client:
        client.define(module.crawl)
        whole = client.wait(client.trigger("crawl", {"pages": 3}), timeout=60)
        holed = client.wait(client.trigger("crawl", {"pages": 3, "missing": 2}), timeout=60)
    assert (whole.state, whole.outputs) == ("succeeded", {"total": 600})
    assert (holed.state, holed.outputs) == ("failed", {"report": {"fetch": "failed"}})
    states = bench.all(
        "select state from flowforge.task_run_status where run_id = %s and map_index is not null order by 1",
        holed.run_id,
    )
    assert states == [("failed",), ("succeeded",), ("succeeded",)], "each element for itself"


def test_attempts_their_record_and_the_operators_retry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, by_client = blocks("docs/howto/retries.md", "python")
    record, many = blocks("docs/howto/retries.md", "sql")
    module = module_of("retries.md", flow)
    answers = [500, 500, 200]
    module.__dict__["service"] = SimpleNamespace(
        get=lambda path: SimpleNamespace(status=answers.pop(0) if answers else 404, rows=[1, 2])
    )
    monkeypatch.setenv("FLOWFORGE_DATABASE_URL", bench.db.dsn)
    with bench.worker(module.sync), Client() as client:
        client.define(module.sync)
        run = client.trigger("sync", {"path": "/"})
        assert client.wait(run, timeout=60).outputs == {"store": 2}
        recorded = bench.all(record.replace("= 1", f"= {run}"))
        assert [row[:3] for row in recorded] == [("fetch", 1, "failed"), ("fetch", 2, "failed")]

        run = client.trigger("sync", {"path": "/"})
        assert client.wait(run, timeout=60).state == "failed"
        assert bench.all("select task, attempt from flowforge.dead_letters") == [("fetch", 1)], (
            "no second one"
        )
        answers[:] = [200]
        exec(compile(by_client, "retries.md", "exec"), {"run": run})  # noqa: S102 - that is the test
        assert client.wait(run, timeout=60).outputs == {"store": 2}
        attempts = "select attempt from flowforge.task_run_status where run_id = %s order by task"
        assert bench.all(attempts, run) == [(2,), (2,)], "fetch once more, store once more"

        run = client.trigger("sync", {"path": "/"})
        assert client.wait(run, timeout=60).state == "failed"
        answers[:] = [200]
        assert bench.all(many) == [(run, 2)]
        assert client.wait(run, timeout=60).succeeded


def test_a_long_task_tells_how_far_it_is_and_stops_when_it_is_cancelled(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "video.py").write_text(*blocks("docs/howto/long-tasks.md", "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    [video] = load_workflows(["video"])
    monkeypatch.delitem(sys.modules, "video")
    with bench.worker(video, sources=["video"], lease=3), Client(bench.db.dsn) as client:
        client.define(video)
        run = client.trigger(video, {"frames": 3})
        assert client.wait(run, timeout=60).outputs == {"check": 3}
        run = client.trigger(video, {"frames": 10**12})
        query = "select progress_message from flowforge.task_run_status where run_id = %s and progress > 0"
        wait_until(lambda: bench.all(query, run) != [], "progress")
        client.cancel(run)
        assert client.wait(run, timeout=60).state == "cancelled"


def test_runs_of_two_versions_are_served_together(bench: Bench) -> None:
    activate, under_way = blocks("docs/howto/upgrading.md", "sql")
    versions = []
    for tasks in (["pack"], ["pack", "send"]):
        shop = Workflow("shop")
        for before, name in zip([None, *tasks], tasks, strict=False):
            shop.task(name=name, after=[before] if before else [])(lambda ctx: ctx.task)
        versions.append(shop)
    with Client(bench.db.dsn) as client:
        runs = []
        for version in versions:
            client.define(version)
            runs.append(client.trigger("shop"))
        assert sorted(bench.all(under_way)) == [(1, 1), (2, 1)]
        assert bench.all(activate) == [(True,)]
        runs.append(client.trigger("shop"))
        with bench.worker(versions[-1]):
            ended = [client.wait(run, timeout=60).outputs for run in runs]
    assert ended == [{"pack": "pack"}, {"send": "send"}, {"pack": "pack"}]
    assert bench.all(under_way) == []


def test_the_connections_are_as_many_as_the_page_says(rabbit_bench: Bench) -> None:
    bench, gates, flow = rabbit_bench, (Gate(), Gate()), Workflow("held")
    told = dict(re.findall(r"^\| (\w+) \| (\d)", (ROOT / "docs/howto/sizing.md").read_text(), re.MULTILINE))

    @flow.task
    def hold(ctx: Context) -> None:
        with ctx.transaction() as tx:
            gates[ctx.input].wait()
            tx.finish(None)

    @flow.task(after=[hold])
    def after(ctx: Context) -> None:
        pass

    bench.define(flow)
    for statement in ";".join(blocks("docs/howto/sizing.md", "sql")).split(";"):
        if code := re.sub("--.*", "", statement).strip():
            assert bench.all(code), code
    with bench.worker(flow), Client(bench.db.dsn) as client:
        gates[0].open()
        client.wait(client.trigger(flow, 0), timeout=60)  # the worker has had something to report
        for _ in range(3):
            client.trigger(flow, 1)
        gates[1].await_arrivals(3)
        found = bench.all(
            "select split_part(application_name, ' ', 2) from pg_stat_activity"
            " where datname = current_database() and application_name like 'flowforge%%'"
        )
        gates[1].open()
    counts = {name: sum(row == (name,) for row in found) for name in told}
    counts["worker"] -= 3
    assert counts == {name: int(count) for name, count in told.items()}, found


class Restored(Database):
    """A database that the commands of the page make."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name, self._logins = server, name, []


def test_a_restored_database_goes_on_from_the_backup(
    db: Database,
    rabbit: Broker,
    amqp_namespace: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Backed up with runs that have ended, are under way and wait, and daemons at work, which go on for a
    while. The broker is not restored: messages of before and of after the backup lie there, and others have
    been consumed."""
    page = (ROOT / "docs/howto/backing-up.md").read_text()
    commands = re.findall(r"^ *((?:pg_dump|createdb|dropdb|pg_restore|flowforge) .*)", page, re.MULTILINE)
    flow, backup, end_of_the_old = Workflow("shop"), Gate(), Gate()

    @flow.task
    def begin(ctx: Context) -> list[int]:
        if ctx.input >= 4:
            (backup if ctx.input < 20 else end_of_the_old).wait()
        return [ctx.input, 1]

    @flow.task(map=begin, retry=Retry(max_attempts=2, delay=0.1))
    def each(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise RuntimeError("not yet")
        return int(ctx.item)

    @flow.task(after=[each])
    def end(ctx: Context) -> int:
        return sum(ctx.upstream["each"])

    def shell(command: str, name: str) -> None:
        programs, library_path = postgres.binaries(request.config.getoption("--pg"))
        path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PGHOST": db.server.host, "PGPORT": str(db.server.port)}
        environment |= {"PGUSER": "postgres", "PGDATABASE": name, "LD_LIBRARY_PATH": library_path}
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=environment)  # noqa: S602 - the page's

    before = Bench(db, rabbit.url, amqp_namespace)
    before.start()
    before.define(flow)
    before.never_redispatch()  # so that it is the page's command that brings back what was consumed
    try:
        with before.worker(flow, lease=3, concurrency=4) as worker:
            runs = [before.trigger(flow, number) for number in range(4)]
            before.wait_run(*runs)
            runs += [before.trigger(flow, number) for number in range(4, 30)]
            backup.await_arrivals(4)
            counted = "select count(*) from flowforge.task_run where state = 'ready'"
            wait_until(lambda: before.one(counted) == 22, "the rest at the broker")
            shell(commands[0], db.name)
            backup.open()
            end_of_the_old.await_arrivals(4)  # the messages of runs 4 to 23 have been consumed
            worker.asked.request()
            end_of_the_old.open()
        lost = before.trigger(flow, 100)
        sent = """
            select count(o.published_at) from flowforge.outbox o join flowforge.task_run using (task_run_id)
            where run_id = %s
        """
        wait_until(lambda: before.one(sent, lost) == 1, "its message")
    finally:
        before.close()

    restored = Restored(db.server, f"{db.name}_restored")
    for command in commands[1:-1]:
        shell(command, restored.name)
    after = Bench(restored, rabbit.url, amqp_namespace)
    states = dict(after.all("select state::text, count(*) from flowforge.task_run group by 1"))
    assert (states["running"], states["ready"]) == (4, 22)
    waiting, _ = rabbit.counts(f"{amqp_namespace}.flowforge.default") or (0, 0)
    assert waiting >= 7, "six messages of before the backup, and those of after it"
    after.start()
    try:
        with after.worker(flow, lease=3):
            shell(commands[-1], restored.name)
            assert after.wait_run(*runs) == ["succeeded"] * 30
        assert after.violations() == []
        outputs = after.all(
            "select (flowforge.task_output(run_id, 'end'))::int from flowforge.run order by run_id"
        )
        assert outputs == [(number + 1,) for number in range(30)]
        assert after.all("select 1 from flowforge.run where run_id = %s", lost) == []
    finally:
        after.close()
        restored.drop()
