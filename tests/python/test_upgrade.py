"""From the last release to this checkout: its daemons go on, ours refuse what is too old, and what comes of
it is what a fresh installation has.

The last release is the wheel in releases/; CONTRIBUTING.md says how it gets there."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
import pytest
from psycopg.types.json import Jsonb

from flowforge.errors import MissingPrivilege
from flowforge.exits import EXIT_SCHEMA
from flowforge.migrate import SCHEMA_VERSION, migrate
from tests.python.cluster import PROGRAM, Process
from tests.python.installing import CHECKOUT, Installation
from tests.services import postgres
from tests.services.database import Database
from tests.services.postgres import PostgresServer
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker

(RELEASE,) = (CHECKOUT / "tests/python/releases").glob("*.whl")

JOBS = """
import pathlib, time
from flowforge import Context, Retry, Workflow

flow = Workflow("sums")

@flow.task
def split(ctx: Context) -> list[int]:
    return [1, 2, 3]

@flow.task(map=split, retry=Retry(max_attempts=2, delay=0))
def square(ctx: Context) -> int:
    while not pathlib.Path(ctx.input).exists():
        ctx.check_cancelled()
        time.sleep(0.02)
    if ctx.attempt == 1:
        raise RuntimeError("once")
    return ctx.item ** 2

@flow.task(after=[square])
def total(ctx: Context) -> int:
    return sum(ctx.upstream["square"])
"""

# Where a migrator is killed: before its so-manieth statement, from the first one again for what is left when
# some migrations have been applied.
KILL_AND_MIGRATE = """
import itertools, os, pathlib, signal, sys
import psycopg
from flowforge.migrate import migrate

dsn, directory, number = sys.argv[1], pathlib.Path(sys.argv[2]), 1
execute = psycopg.Cursor.execute
while True:
    if not (child := os.fork()):
        left = itertools.count(number, -1)
        def counted(*arguments, **options):
            if not next(left):
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(*arguments, **options)
        psycopg.Cursor.execute = counted
        migrate(dsn, directory=directory)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code != -signal.SIGKILL:
        break
    number = 1 if sys.stdin.readline() == "again\\n" else number + 4
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The last release, installed."""
    return Installation(tmp_path_factory.mktemp("released") / "venv", RELEASE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory with a module of workflows."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "jobs.py").write_text(JOBS)
    return directory


@pytest.fixture
def old(pg_server: PostgresServer, released: Installation, project: Path) -> Iterator[Database]:
    """A database of the last release, with the workflow."""
    database = Database(pg_server, "template1")
    environment = {"FLOWFORGE_DATABASE_URL": database.dsn}
    released.run("flowforge", "migrate", cwd=project, environment=environment)
    released.run("flowforge", "define", "jobs", cwd=project, environment=environment)
    yield database
    database.drop()


@pytest.fixture
def next_files(tmp_path: Path) -> Path:
    """This checkout's sql/ with one more migration and function: what an upgrade with much to do reads."""
    shutil.copytree(CHECKOUT / "sql", tmp_path / "sql")
    (tmp_path / "sql/migrations/9999.next.sql").write_text("create table flowforge.next (x bigint);\n")
    (tmp_path / "sql/functions/zz_next.sql").write_text(
        "create or replace function flowforge._next() returns bigint language sql as 'select 1';\n"
    )
    return tmp_path / "sql"


class Fleet:
    """Daemons of both releases on one database. Leaving the block stops them; all must end in order."""

    def __init__(self, database: Database, directory: Path, settings: dict[str, str]) -> None:
        self._directory, self._connection = directory, database.connect()
        self.settings = settings | {
            "FLOWFORGE_DATABASE_URL": database.dsn,
            "FLOWFORGE_LOG_FORMAT": "json",
            "FLOWFORGE_POLL_INTERVAL": "0.2",
        }
        self.processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        codes = {process.name: process.stop() for process in self.processes if process.running()}
        self._connection.close()
        if error is None:
            assert set(codes.values()) <= {0}, codes
        else:
            for process in self.processes:
                sys.stderr.write(f"--- {process.name}\n{process.log.read_text()[-4000:]}\n")

    def start(self, *names: str, release: Installation | None = None) -> list[Process]:
        """Start daemons of the last release, or of this checkout, and wait until they are well."""
        started = []
        for name in names:
            number = len(self.processes)
            settings = self.settings | {"FLOWFORGE_HEALTH_FILE": str(self._directory / f"health-{number}")}
            program = str(release.bin / "flowforge") if release else PROGRAM
            environment = release.environment(settings) if release else {**os.environ, **settings}
            started.append(
                Process(
                    f"{name} of {'the last release' if release else 'this checkout'}",
                    [program, name, *(["jobs"] if name == "worker" else [])],
                    environment, self._directory / f"log-{number}", self._directory,
                )
            )  # fmt: skip
            self.processes.append(started[-1])
        wait_until(lambda: all(each.health() == "ok" for each in started), "the daemons to be well")
        return started

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode(), parameters).fetchall()

    def trigger(self, gate: Path, count: int = 3) -> list[int]:
        return [
            self.rows("select flowforge.trigger('sums', %s)", json.dumps(str(gate)))[0][0]
            for _ in range(count)
        ]

    def succeed(self, runs: list[int]) -> None:
        """Wait for the end of the runs: each with its result, after one failed attempt of each element."""
        states = "select state::text from flowforge.run where run_id = any(%s) and state <> 'running'"
        wait_until(lambda: len(self.rows(states, runs)) == len(runs), "the ends of the runs")
        assert {state for (state,) in self.rows(states, runs)} == {"succeeded"}
        outputs = """
            select r.output from flowforge.task_run r join flowforge.task_run_status s using (task_run_id)
            where r.run_id = any(%s) and s.task = 'total'
        """
        assert self.rows(outputs, runs) == [(14,)] * len(runs)

    def complaints(self) -> list[dict[str, Any]]:
        """What was logged as wrong, but for the attempt that each element fails on purpose and for workers
        that were up sooner than the publisher."""
        expected = ("attempt failed", "more attempts failed", "queues are missing on the broker")
        return [
            entry
            for process in self.processes
            for entry in process.entries()
            if entry["level"] in ("warning", "error") and not entry["event"].startswith(expected)
        ]


@pytest.mark.parametrize("delivery", ["rabbitmq", "postgresql"])
def test_hd_35_the_last_releases_daemons_go_on_through_an_upgrade(
    request: pytest.FixtureRequest, old: Database, released: Installation, project: Path, delivery: str
) -> None:
    """Work is under way when five migrators of this checkout come at once; the daemons of the last release
    finish it, and what comes afterwards, alone and then beside those of this one."""
    daemons = ["scheduler", "worker"]
    settings: dict[str, str] = {}
    if delivery == "rabbitmq":
        broker: Broker = request.getfixturevalue("rabbit")
        namespace = request.getfixturevalue("amqp_namespace")
        daemons.append("publisher")
        settings = {"FLOWFORGE_AMQP_URL": broker.url, "FLOWFORGE_NAMESPACE": namespace}
    shut, open_ = project / "shut", project / "open"
    open_.touch()
    with Fleet(old, project, settings) as fleet:
        before = fleet.start(*daemons, release=released)
        fleet.succeed(fleet.trigger(open_))
        waiting = fleet.trigger(shut)
        running = "select count(*) from flowforge.task_run where state = 'running'"
        wait_until(lambda: fleet.rows(running)[0][0] == 8, "every slot of the worker at work")

        migrators = [
            subprocess.Popen(
                [PROGRAM, "migrate", "--json"], env={**os.environ, **fleet.settings}, stdout=subprocess.PIPE
            )
            for _ in range(5)
        ]
        outputs = [process.communicate(timeout=60)[0] for process in migrators]
        assert [process.returncode for process in migrators] == [0] * 5
        pending = {path.name for path in (CHECKOUT / "sql/migrations").glob("*.sql")} - set(packaged())
        assert sorted(name for output in outputs for name in json.loads(output)["applied"]) == sorted(pending)

        after = fleet.trigger(open_)
        shut.touch()
        fleet.succeed(waiting + after)
        told = released.run("flowforge", "doctor", "--json", cwd=project, environment=fleet.settings)
        schema = [each for each in map(json.loads, told.stdout.splitlines()) if each["check"] == "schema"]
        assert [each["status"] for each in schema] == ["ok"]
        for command in (
            ["trigger", "sums", "--input", json.dumps(str(open_)), "--wait"],
            *(["show", str(after[0])], ["pause", "default"], ["resume", "default"]),
            ["prune", "--older-than", "1d"],
        ):
            released.run("flowforge", *command, cwd=project, environment=fleet.settings)

        fleet.start(*daemons)
        fleet.succeed(fleet.trigger(open_))
        assert [process.stop() for process in before] == [0] * len(before)
        assert fleet.complaints() == []
        fleet.succeed(fleet.trigger(open_))
        assert fleet.rows("select * from flowforge.violations()") == []


def test_hd_35_an_upgrade_gets_through_with_a_long_history_and_much_to_do(
    old: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While indexes are built over all that is kept, workers wait to write, and hold on to the table: what
    wants it for itself in the same transaction never gets it."""
    with old.connect() as conn:
        conn.execute(
            "select flowforge.define_workflow(%s)", (Jsonb({"name": "w", "tasks": [{"name": "a"}]}),)
        )
        conn.execute("select flowforge.trigger('w')")
        conn.execute(
            """
            insert into flowforge.task_run (run_id, task_id, queue_id, map_index, priority, unmet,
                available_at, stage, state, finished_at)
            select r.run_id, t.task_id, t.queue_id, n, 0, 0, now(), 'settled', 'succeeded', now()
            from flowforge.run r join flowforge.task t using (workflow_version_id)
            cross join generate_series(1, 200000) n
            """
        )
    stop, done, failures = threading.Event(), [0] * 6, []

    def repeat(number: int, *calls: str) -> None:
        try:
            with old.connect() as conn:
                while not stop.wait(0.01):
                    for call in calls:
                        conn.execute(call.encode())
                    done[number] += 1
        except psycopg.Error as error:
            failures.append(error)

    work = """
        select flowforge.finish_task_run(c.task_run_id, c.fencing_token, 'succeeded')
        from flowforge.claim_next(array['default'], 'w', gen_random_uuid(), '30 s', 1) c
    """
    schedule = [
        f"select flowforge.{each}()" for each in ("settle_finished", "dispatch_ready", "reap_expired_leases")
    ]
    loops = [("select flowforge.trigger('w')",), schedule, *[(work,)] * 4]
    threads = [threading.Thread(target=repeat, args=(n, *calls)) for n, calls in enumerate(loops)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: min(done) > 5, "everybody at work")
        monkeypatch.setattr("flowforge.migrate.LOCK_PATIENCE", 20)
        migrate(old.dsn)
        before = min(done)
        wait_until(lambda: bool(failures) or min(done) > before + 5, "everybody at work again")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def packaged(folder: str = "migrations") -> dict[str, str]:
    """The files of the last release's sql/, by name the SHA-256."""
    with zipfile.ZipFile(RELEASE) as archive:
        return {
            Path(name).name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if name.startswith(f"flowforge/_sql/{folder}/")
        }


def present(folder: str) -> dict[str, str]:
    files = (CHECKOUT / "sql" / folder).glob("*.sql")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_released_migrations_are_as_they_were_and_changes_have_a_version_of_their_own(old: Database) -> None:
    """A daemon tells by the version whether the functions are those that it was made for."""
    assert packaged().items() <= present("migrations").items()
    with old.connect() as conn:
        version = conn.execute("select flowforge.schema_version()").fetchone()
    assert version is not None
    changed = packaged() != present("migrations") or packaged("functions") != present("functions")
    assert version[0] + changed == SCHEMA_VERSION


def test_hd_35_this_releases_daemons_refuse_the_last_ones_schema(old: Database, project: Path) -> None:
    version = SCHEMA_VERSION - 1
    with old.connect() as conn:
        # What it is already, but right after a release, when nothing in sql/ has changed yet.
        conn.execute(
            "create or replace function flowforge.schema_version() returns bigint language sql "
            f"return {version}".encode()
        )
    environment = {
        **os.environ,
        "FLOWFORGE_DATABASE_URL": old.dsn,
        "FLOWFORGE_AMQP_URL": "amqp://nobody:nothing@127.0.0.1:1/",
    }
    for command in (["scheduler"], ["publisher"], ["worker", "jobs"]):
        done = subprocess.run(
            [PROGRAM, *command, "--log-format", "json"],
            cwd=project, env=environment, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == EXIT_SCHEMA
        entries = map(json.loads, done.stderr.splitlines())
        (line,) = [entry["event"] for entry in entries if entry["level"] == "error"]
        told = f"the schema has version {version}, this program needs {SCHEMA_VERSION}"
        assert line == f"{told}; run `flowforge migrate`"


def schema_of(server: PostgresServer, name: str) -> str:
    """The schema as pg_dump tells it, without the random key of its \\restrict."""
    done = subprocess.run(
        [server.programs / "pg_dump", "--schema-only", "--schema=flowforge", server.dsn(name)],
        env=server.environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return re.sub(r"^\\(un)?restrict .*$", "", done.stdout, flags=re.MULTILINE)


def test_an_upgraded_database_is_as_a_fresh_one(pg_server: PostgresServer, old: Database) -> None:
    """With all that pg_dump tells: columns in their order, comments, owners, privileges."""
    fresh = Database(pg_server, "template1")
    try:
        migrate(fresh.dsn)
        migrate(old.dsn)
        assert schema_of(pg_server, old.name) == schema_of(pg_server, fresh.name)
    finally:
        fresh.drop()


# What others may call or read: names and arguments, results, and who may.
SURFACE = """
    select 'function', p.proname::text, a.n::bigint, coalesce(p.proargnames[a.n], ''),
        coalesce(p.proargmodes[a.n]::text, 'i'), a.type::regtype::text
    from pg_proc p, unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) with ordinality a(type, n)
    where p.pronamespace = 'flowforge'::regnamespace and {granted}
    union all
    select 'result', p.proname::text, 0, '', p.proretset::text, p.prorettype::regtype::text
    from pg_proc p where p.pronamespace = 'flowforge'::regnamespace and {granted}
    union all
    select 'view', c.relname::text, a.attnum, a.attname::text, '', format_type(a.atttypid, a.atttypmod)
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
    where c.relnamespace = 'flowforge'::regnamespace and c.relkind = 'v'
    union all
    select 'grant', p.proname::text, 0, g.grantee::regrole::text, '', ''
    from pg_proc p, aclexplode(p.proacl) g
    where p.pronamespace = 'flowforge'::regnamespace and g.grantee <> p.proowner and g.grantee <> 0
""".replace(
    "{granted}",
    "exists (select from aclexplode(p.proacl) g where g.grantee <> p.proowner and g.grantee <> 0)",
)


def test_what_programs_of_the_last_release_call_and_read_is_still_there(old: Database) -> None:
    """Under the same names, with the same arguments, results and privileges. Arguments with defaults and
    columns of views may follow at the end, never columns of a function's result."""

    def surface() -> set[tuple[Any, ...]]:
        with old.connect() as conn:
            return set(conn.execute(SURFACE.encode()).fetchall())

    before = surface()
    assert len(before) > 100
    migrate(old.dsn)
    after = surface()
    assert before <= after, sorted(map(str, before - after))
    results = {row for row in after - before if row[0] == "function" and row[4] in ("o", "t")}
    assert not {row for row in results if row[1] in {each[1] for each in before}}, results


def test_migrators_that_upgrade_together_apply_each_migration_once(old: Database, next_files: Path) -> None:
    command = (
        "import sys, pathlib, yoyo; from flowforge.migrate import migrate; print(flush=True); "
        "sys.stdin.read(); "
        "print(*migrate(sys.argv[1], directory=pathlib.Path(sys.argv[2])).applied)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, old.dsn, str(next_files)],
            cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(5)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # they start
        process.stdin = None
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 5
    assert "9999.next.sql" in " ".join(outputs).split()
    assert [name for output in outputs for name in output.split()].count("9999.next.sql") == 1
    with old.connect() as conn:
        applied = conn.execute("select count(*) from flowforge.migration_file").fetchone()
    assert applied == (len(present("migrations")) + 1,)


def test_an_upgrade_behind_a_long_transaction_holds_up_no_daemon(
    old: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup, say: who waits for a table's lock holds up all who come after, so it is asked for again and
    again instead, and had when the transaction is over."""
    monkeypatch.setattr("flowforge.migrate.LOCK_PAUSE", 0.2)
    with old.connect(autocommit=False) as backup, old.connect() as daemon, ThreadPoolExecutor() as pool:
        backup.execute("select from flowforge.scheduler, flowforge.attempt, flowforge.health limit 1")
        upgrade = pool.submit(migrate, old.dsn)
        wait_until(lambda: "a table is locked" in caplog.text, "its notice")
        assert f"pid {backup.info.backend_pid} (" in caplog.records[-1].__dict__["keys"]["held_by"]
        daemon.execute("set lock_timeout = '20s'")
        for function in ("declare_scheduler(true)", "reap_expired_leases()", "dispatch_ready()"):
            daemon.execute(f"select flowforge.{function}".encode())
        assert not upgrade.done()
        backup.rollback()
        upgrade.result(60)


def test_a_migrator_killed_anywhere_leaves_a_whole_and_the_next_one_free(
    old: Database, next_files: Path
) -> None:
    """At each of its steps: the functions are all old or all new, a migration is applied and recorded or
    neither, and the next migrator goes on with no manual step."""

    def functions(conn: psycopg.Connection[Any]) -> Any:
        return conn.execute(
            """
            select md5(string_agg(prosrc || coalesce(pg_get_function_sqlbody(oid), ''), '' order by proname))
            from pg_proc where pronamespace = 'flowforge'::regnamespace
            """
        ).fetchone()

    seen, codes = [], []
    applied: Any = None
    with old.connect() as conn:
        before = functions(conn)
        with subprocess.Popen(
            [sys.executable, "-c", KILL_AND_MIGRATE, old.dsn, str(next_files)],
            cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                codes.append(int(line))
                made = conn.execute("select to_regclass('flowforge.next') is not null").fetchone()
                recorded = conn.execute(
                    "select exists (select from flowforge.migration_file where name = '9999.next.sql'), "
                    "exists (select from flowforge._yoyo_migration where migration_id = '9999.next')"
                ).fetchone()
                assert made is not None
                assert recorded == (*made, *made)
                seen.append((made[0], functions(conn)))
                before_it = applied
                applied = conn.execute("select count(*) from flowforge._yoyo_migration").fetchone()
                process.stdin.write("on\n" if applied == before_it else "again\n")
                process.stdin.flush()
        after = functions(conn)
    assert codes[-1] == 0
    assert len(codes) > 8
    assert {each for _, each in seen} == {before, after}
    assert {made for made, _ in seen} == {True, False}
    assert (True, before) in seen, "none was killed between the tables and the functions"


def test_an_owner_without_superuser_upgrades_and_another_role_needs_to_be_a_member(
    request: pytest.FixtureRequest, released: Installation, project: Path, next_files: Path
) -> None:
    with PostgresServer(*postgres.binaries(request.config.getoption("--pg"))) as server:
        server.create_database("shop")
        with server.connect() as conn:
            for name in ("deployer", "successor"):
                conn.execute(f"create role {name} login createrole".encode())
                conn.execute(f"grant create on database shop to {name}".encode())
        first, other = (server.dsn("shop", name) for name in ("deployer", "successor"))
        released.run("flowforge", "migrate", cwd=project, environment={"FLOWFORGE_DATABASE_URL": first})
        migrate(first)
        if server.version >= 16:  # before, CREATEROLE makes everyone a member of everything
            with pytest.raises(MissingPrivilege, match="as a member of flowforge_owner"):
                migrate(other, directory=next_files)
            with server.connect() as conn:
                conn.execute("grant flowforge_owner to successor")
        assert migrate(other, directory=next_files).applied == ("9999.next.sql",)
        with server.connect("shop") as conn:
            owners = conn.execute(
                """
                select relowner::regrole::text from pg_class where relnamespace = 'flowforge'::regnamespace
                union select proowner::regrole::text from pg_proc
                where pronamespace = 'flowforge'::regnamespace
                """
            ).fetchall()
        assert owners == [("flowforge_owner",)]
