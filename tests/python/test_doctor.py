"""The command doctor: of each broken set-up it names the fault, and following what it says mends it."""

import json
import re
import shlex
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowforge import db, exits, listen
from flowforge.doctor import Finding, database, setup
from flowforge.doctor.setup import Setup
from tests.python.patient import Patient
from tests.python.proxy import Proxy
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import wait_until


@pytest.fixture
def patient(db: Database) -> Patient:
    """As an operator sees it."""
    return Patient(db, db.create_login("flowforge_operator"))


# -- what is printed


def test_a_new_set_up_has_no_problem(patient: Patient) -> None:
    found = patient.examine()
    for check in ("settings", "database", "version", "writable", "login", "schema", "notifications", "clock"):
        assert found[check]["status"] == "ok", found[check]
    assert "FLOWFORGE_DATABASE_URL" in found["settings"]["detail"]
    assert (found["broker"]["status"], found["broker alarm"]["detail"]) == (
        "skipped",
        "no broker is configured",
    )
    assert found["scheduler"] == {
        "status": "warning",
        "detail": "none has ever run here",
        "remedy": "start one: flowforge scheduler, with the scheduler's login",
    }
    lines = patient.shell("doctor").stdout.splitlines()
    assert any(re.match(r"ok +schema +version \d", line) for line in lines)
    at = next(index for index, line in enumerate(lines) if re.match(r"warning +scheduler +none", line))
    assert lines[at + 1].strip() == "-> start one: flowforge scheduler, with the scheduler's login"
    assert re.fullmatch(r"0 problems, \d+ warnings?, \d+ skipped, \d+ ok", lines[-1])


def test_what_is_skipped_for_one_reason_is_one_line() -> None:
    lines = Shell("nonsense")("doctor", code=exits.EXIT_FAILED).stdout.splitlines()
    assert re.match(r"problem +settings +FLOWFORGE_DATABASE_URL is not", lines[0])
    assert re.match(r"skipped +database +the settings are wrong; so are \d\d more checks$", lines[2])
    assert len(lines) == 4
    assert len(Shell("nonsense").documents("doctor", code=exits.EXIT_FAILED)) > 20


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_each_finding_is_told_before_the_next_check(
    monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    """Which may take as long as a server that says nothing is waited for."""

    def findings(*_: object) -> Iterator[Finding]:
        yield Finding("settings", "problem", "an early finding")
        assert b"an early finding" in sys.stdout.buffer.getvalue()  # type: ignore[union-attr]  # of the runner
        yield Finding("database", "skipped", "the end")

    # The package's attribute of that name is the command.
    monkeypatch.setattr(sys.modules["flowforge.cli.doctor"], "_findings", findings)
    assert "the end" in Shell("")("doctor", *form, code=exits.EXIT_FAILED).stdout


@pytest.mark.parametrize("group", ["reader", "worker", "client"])
def test_what_a_login_may_not_see_is_skipped_with_the_reason(db: Database, group: str) -> None:
    patient = Patient(db, db.create_login(f"flowforge_{group}"))
    found = patient.examine("--role", group)
    assert f"can be {group}" in found["login"]["detail"]
    assert found["scheduler"]["status"] == ("warning" if group == "reader" else "skipped")
    if group != "reader":
        assert "grant flowforge_reader to" in found["scheduler"]["detail"]
    assert "grant flowforge_operator to" in found["invariants"]["detail"]
    assert "grant pg_read_all_stats to" in found["long transactions"]["detail"]


def test_a_login_whose_tables_would_go_to_the_schema_of_the_engine(patient: Patient) -> None:
    """As those of a login that is called like it."""
    patient.sql(f"alter role {patient.login} set search_path = flowforge, public")
    found = patient.warning("login")
    assert "in flowforge first" in found["detail"]
    patient.follow(found["remedy"])
    patient.well("login")


@pytest.mark.parametrize("group", ["operator", "scheduler", "owner", "reader"])
def test_a_command_of_another_login_does_not_get_this_one(db: Database, group: str) -> None:
    patient = Patient(db, "")
    url = db.create_login(f"flowforge_{group}")
    patient.set(FLOWFORGE_DATABASE_URL=url)
    if group == "reader":
        patient.work()
        patient.sql("select flowforge.pause_queue('default')")
    elif group != "owner":
        patient.sql(
            "create or replace function flowforge.schema_version() returns bigint language sql return 0"
        )
    found = patient.all("--database-url", url)
    said = {each["check"]: each["remedy"] for each in found}
    own = f" --database-url {shlex.quote(url)}"
    if group == "reader":
        assert said["paused queues"] == "flowforge resume default, with an operator's login"
        assert said["scheduler"].endswith("flowforge scheduler, with the scheduler's login")
    elif group == "owner":
        assert said["scheduler"].endswith(f"flowforge scheduler{own}")
    else:
        assert said["schema"] == "flowforge migrate, with the login that migrates"


# -- settings


def test_a_mistake_in_the_settings_file(patient: Patient, tmp_path: Path) -> None:
    path = tmp_path / "flowforge.toml"
    path.write_text("databse_url = 'dbname=x'")
    patient.set(FLOWFORGE_CONFIG=str(path))
    found = patient.problem("settings")
    assert f"{path}: there is no setting 'databse_url'; did you mean database_url?" in found["detail"]
    path.write_text(f"database_url = {json.dumps(patient.db.dsn)}\nlease = 7")
    patient.set(FLOWFORGE_DATABASE_URL="")
    assert f"lease=7.0 (lease in {path})" in patient.examine()["settings"]["detail"]


def test_a_variable_that_means_nothing(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFORGE_LEESE", "7")
    assert "FLOWFORGE_LEESE" in patient.warning("settings")["detail"]
    monkeypatch.delenv("FLOWFORGE_LEESE")
    patient.well("settings")


# -- the database


def test_the_database_does_not_exist(patient: Patient) -> None:
    name = f"{patient.db.name}_x"
    patient.shell.environment["FLOWFORGE_DATABASE_URL"] = patient.db.server.dsn(name)
    found = patient.problem("database")
    assert "does not exist" in found["detail"]
    assert found["remedy"].startswith(
        "createdb it, then flowforge migrate, with the login that migrates, or correct FLOWFORGE_DATABASE_URL"
    )
    assert patient.examine(code=1)["schema"] == {
        "status": "skipped",
        "detail": "the database cannot be reached",
        "remedy": "",
    }
    patient.db.server.create_database(name)
    try:
        found = patient.problem("schema")
        assert "has no schema flowforge" in found["detail"]
        patient.shell(*shlex.split(found["remedy"])[1:])
        patient.well("schema")
    finally:
        patient.db.server.drop_database(name)


def test_a_wrong_password_which_is_not_shown(patient: Patient) -> None:
    right = patient.db.server.dsn(patient.db.name, tcp=True)
    patient.set(FLOWFORGE_DATABASE_URL=right.replace(patient.db.server.password, "s3cret"))
    found = patient.problem("database")
    assert "wrong login or password" in found["detail"]
    assert found["remedy"] == "correct FLOWFORGE_DATABASE_URL"
    assert "s3cret" not in patient.shell("doctor", code=1).output
    patient.set(FLOWFORGE_DATABASE_URL=right)
    patient.well("database")
    assert patient.db.server.password not in patient.shell("doctor").output


def test_no_connection_is_left(patient: Patient) -> None:
    patient.sql(f"alter role {patient.login} connection limit 0")
    found = patient.problem("database")
    assert "no connection is left: " in found["detail"]
    assert "the limit of the login" in found["remedy"]
    patient.sql(f"alter role {patient.login} connection limit -1")
    patient.well("database")


@pytest.mark.parametrize(
    ("variable", "check"), [("FLOWFORGE_DATABASE_URL", "database"), ("FLOWFORGE_AMQP_URL", "broker")]
)
def test_a_password_that_breaks_its_url(patient: Patient, variable: str, check: str) -> None:
    scheme = "amqp" if check == "broker" else "postgresql"
    patient.set(**{variable: f"{scheme}://someone:s3cret@x@127.0.0.1:1x/d"})
    assert "%40" in patient.problem(check)["remedy"]
    assert "s3cret" not in patient.shell("doctor", code=1).output


def test_a_server_that_takes_connections_and_answers_nothing(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MOMENT", 0.5)
    monkeypatch.setattr(setup, "_CHECK_SECONDS", float("inf"))
    server, connect = patient.db.server, Setup.connect
    with Proxy(server.port) as proxy:

        def then_silent(self: Setup) -> db.Connection:
            conn = connect(self)
            proxy.stalled = True
            return conn

        monkeypatch.setattr(Setup, "connect", then_silent)
        url = f"{server.dsn(patient.db.name, tcp=True)} port={proxy.port} sslmode=disable"
        patient.set(FLOWFORGE_DATABASE_URL=url)
        found = patient.examine(code=exits.EXIT_FAILED)
    assert found["database"]["status"] == "ok"
    assert "no question answered within 0.5 s" in found["server answers"]["detail"]
    assert found["server answers"]["remedy"].endswith("or correct FLOWFORGE_DATABASE_URL")
    assert found["version"]["detail"] == found["invariants"]["detail"] == "the server does not answer"


def test_the_server_is_down_then_a_standby(patient: Patient) -> None:
    server, signal_file = patient.db.server, patient.db.server.data / "standby.signal"
    server.stop()
    try:
        found = patient.problem("database")
        assert "no connection" in found["detail"]
        assert found["remedy"].startswith("start PostgreSQL at that address")
        signal_file.touch()
        server.start()
        standby = patient.examine(code=1)
        assert standby["writable"]["detail"] == "this is a standby, where nothing can be written"
        assert "name the primary in FLOWFORGE_DATABASE_URL" in standby["writable"]["remedy"]
        assert standby["notifications"]["detail"] == "the database takes no writes"
        assert standby["schema"]["status"] == "ok"
    finally:
        signal_file.unlink(missing_ok=True)
        server.restart()
    patient.well("writable")


def test_a_schema_that_is_too_old(patient: Patient) -> None:
    patient.sql("create or replace function flowforge.schema_version() returns bigint language sql return 0")
    found = patient.problem("schema")
    assert "the schema has version 0" in found["detail"]
    assert patient.examine(code=1)["workers"]["detail"] == "the schema is too old"
    patient.follow(found["remedy"])
    patient.well("schema")


def test_a_login_that_cannot_be_what_it_has_to_be(db: Database) -> None:
    patient = Patient(db, db.create_login("flowforge_worker"))
    patient.well("login", "--role", "worker")
    found = patient.problem("login", "--role", "publisher")
    assert "cannot be publisher" in found["detail"]
    assert "lacks EXECUTE on fetch_outbox" in patient.problem("schema", "--role", "publisher")["detail"]
    patient.follow(found["remedy"])
    patient.well("login", "--role", "publisher")
    patient.well("schema", "--role", "publisher")


def test_a_group_role_is_missing(patient: Patient) -> None:
    """Roles are the server's: it only has another name for a while."""
    patient.sql("alter role flowforge_client rename to renamed_client")
    try:
        found = patient.problem("login")
        assert found["detail"] == "group roles are missing: flowforge_client"
        patient.follow(found["remedy"])
        patient.well("login")
        patient.sql("drop owned by flowforge_client; drop role flowforge_client")
    finally:
        patient.sql("alter role renamed_client rename to flowforge_client")


@pytest.mark.parametrize(
    ("setting", "check", "status"),
    [
        ("default_transaction_read_only = on", "writable", "problem"),
        ("statement_timeout = '5s'", "time-outs", "warning"),
        ("default_transaction_isolation = 'repeatable read'", "time-outs", "warning"),
        ("synchronous_commit = off", "durability", "warning"),
    ],
)
@pytest.mark.parametrize("place", ["role", "database"])
def test_settings_that_hurt_are_undone_where_they_were_made(
    patient: Patient, setting: str, check: str, status: str, place: str
) -> None:
    patient.sql(f"alter {place} {patient.login if place == 'role' else patient.db.name} set {setting}")
    found = patient.problem(check) if status == "problem" else patient.warning(check)
    name = setting.partition(" ")[0]
    assert name in found["detail"]
    [remedy] = [each for each in found["remedy"].split("; ") if name in each]
    with patient.db.server.connect() as administrator:
        administrator.execute(remedy.encode())
    assert not [each for each in patient.all() if name in each["detail"]]


def test_autovacuum_is_off(patient: Patient) -> None:
    patient.sql("alter table flowforge.outbox set (autovacuum_enabled = off)")
    found = patient.warning("autovacuum")
    assert "flowforge.outbox" in found["detail"]
    patient.follow(found["remedy"])
    patient.well("autovacuum")


def test_a_transaction_is_open_for_long(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_LONG_TRANSACTION", 0.0)
    patient.set(FLOWFORGE_DATABASE_URL=patient.db.dsn)
    forgotten = patient.db.connect(autocommit=False, application_name="forgotten")
    forgotten.execute("select 1")
    found = patient.warning("long transactions")
    assert "(forgotten) has held back vacuum" in found["detail"]
    patient.follow(found["remedy"].partition("or: ")[2])
    patient.well("long transactions")
    forgotten.close()


def test_a_clock_that_is_wrong(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    late = types.SimpleNamespace(time=lambda: time.time() - 90)
    monkeypatch.setattr(database, "time", late)
    assert "the database's clock is 0:01:30 ahead" in patient.warning("clock")["detail"]


def test_behind_a_pooler_in_transaction_mode(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "SELF_TEST_SECONDS", 0.5)  # nothing comes, however long one waits
    server = patient.db.server
    direct = server.dsn(patient.db.name, tcp=True)
    with Proxy(server.port, pooled=True) as pooler:
        patient.set(FLOWFORGE_DATABASE_URL=f"{direct} port={pooler.port} sslmode=disable")
        found = patient.warning("notifications")
        assert "no notification arrived" in found["detail"]
        assert found["remedy"].startswith("name PostgreSQL itself in FLOWFORGE_DATABASE_URL")
        assert "FLOWFORGE_PREPARED_STATEMENTS=off" in patient.warning("prepared statements")["remedy"]
        patient.set(FLOWFORGE_PREPARED_STATEMENTS="off")
        patient.well("prepared statements")
        patient.set(FLOWFORGE_DATABASE_URL=direct)
        patient.well("notifications")


# -- the engine


def test_work_waits_and_there_is_no_scheduler(patient: Patient) -> None:
    patient.work()
    found = patient.problem("scheduler")
    assert found["detail"] == "none has ever run here, and 1 run waits"
    assert found["remedy"] == "start one: flowforge scheduler, with the scheduler's login"
    with patient.scheduler():
        patient.well("scheduler")


def test_a_lost_worker_s_lease_has_run_out_and_there_is_no_scheduler(patient: Patient) -> None:
    patient.work()
    patient.sql("select flowforge.dispatch_ready()")
    patient.sql("select flowforge.announce_worker('lost', '{default}', 1)")
    patient.sql("select flowforge.claim_next('{default}', 'lost', gen_random_uuid(), '0.1 s')")
    wait_until(
        lambda: bool(
            patient.sql("select 1 from flowforge.health where name = 'expired_leases' and value = 1")
        ),
        "the end of the lease",
    )
    patient.sql("update flowforge.worker set seen_at = now() - interval '5 min'")
    found = patient.problem("leases")
    assert found["detail"] == "1 have run out, and there is no scheduler to take the work back"
    assert found["remedy"] == "start one: flowforge scheduler, with the scheduler's login"
    with patient.scheduler():
        patient.well("leases")


def test_a_silent_worker_still_holds_leases(patient: Patient) -> None:
    patient.work()
    patient.sql("select flowforge.dispatch_ready()")
    patient.sql("select flowforge.announce_worker('w1', '{default}', 1)")
    patient.sql("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 h')")
    patient.sql("update flowforge.worker set seen_at = now() - interval '5 min'")
    assert "1 by w1" in patient.warning("leases")["detail"]
    patient.sql("select flowforge.announce_worker('w1', '{default}', 1)")
    patient.well("leases")


def test_a_paused_queue_with_waiting_work(patient: Patient) -> None:
    patient.work("re ports", 2)
    patient.shell("pause", "re ports")
    found = patient.warning("paused queues")
    assert found == {
        "check": "paused queues",
        "status": "warning",
        "detail": "re ports (2 waiting)",
        "remedy": "flowforge resume 're ports'",
    }
    patient.well("workers")
    patient.follow(found["remedy"])
    patient.well("paused queues")


def test_work_waits_and_there_is_no_worker(patient: Patient) -> None:
    patient.work("re ports")
    found = patient.problem("workers")
    assert "work waits in re ports" in found["detail"]
    assert "flowforge worker MODULE --queue 're ports'" in found["remedy"]
    patient.sql("select flowforge.announce_worker('w1', '{re ports}', 1)")
    patient.well("workers")


def test_workers_that_do_not_announce_themselves_are_no_problem(patient: Patient) -> None:
    """To announce oneself is optional; what is held, or was claimed lately, shows that somebody is there."""
    patient.work(count=2)
    patient.sql("select flowforge.dispatch_ready()")
    patient.problem("workers")
    patient.sql("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 h', 1)")
    found = patient.warning("workers")
    assert found["detail"].startswith("work of default is claimed, by workers that have not announced")
    patient.sql("select flowforge.finish_task_run(1, 1, 'succeeded')")
    patient.problem("workers")
    patient.sql("update flowforge.queue set drain_rate = 2, drained_at = now()")
    patient.warning("workers")
    patient.sql("update flowforge.queue set drained_at = now() - interval '3 min'")
    patient.problem("workers")


def test_handlers_that_no_worker_knows(patient: Patient) -> None:
    patient.work()
    patient.sql("select flowforge.announce_worker('w1', '{default}', 1)")
    patient.sql("select flowforge.dispatch_ready()")
    patient.sql("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 h')")
    patient.sql("select flowforge.release_task_run(1, 1, 'unknown_handler')")
    patient.sql("update flowforge.task_run set unknown_handler_since = now() - interval '3 min'")
    found = patient.warning("workers")
    assert found["detail"].startswith("no worker knows w.t0 (1 in default, for 0:03:0")
    patient.sql("select flowforge._promote_due(now() + interval '1 min', 10)")
    patient.sql("select flowforge.claim_next('{default}', 'w1', gen_random_uuid(), '1 h')")
    patient.well("workers")


def test_an_order_that_can_never_be_published(patient: Patient) -> None:
    patient.work()
    patient.sql("select flowforge.dispatch_ready()")
    patient.sql("select flowforge.mark_unpublishable(outbox_id, 'too large') from flowforge.outbox")
    found = patient.problem("orders")
    assert found["detail"] == "1 can never be published"
    assert "flowforge scheduler" in found["remedy"]
    with patient.scheduler():
        patient.well("orders")
    letters = patient.warning("dead letters")
    assert "failed for good: 1" in letters["detail"]
    assert "flowforge runs --state failed" in letters["remedy"]
    patient.shell("prune", "--older-than", "0s")
    patient.well("dead letters")


def damaged_counter(patient: Patient) -> None:
    patient.sql("update flowforge.task_run set unmet = 2 where unmet = 1")


def lost_order(patient: Patient) -> None:
    patient.sql("select flowforge.dispatch_ready()")
    patient.sql("delete from flowforge.outbox; update flowforge.task_run set redispatch_at = null")


@pytest.mark.parametrize("damage", [damaged_counter, lost_order])
def test_broken_invariants(patient: Patient, damage: Callable[[Patient], None]) -> None:
    tasks = [{"name": "a"}, {"name": "b", "after": ["a"]}]
    patient.sql(f"select flowforge.define_workflow('{json.dumps({'name': 'w', 'tasks': tasks})}')")
    patient.sql("select flowforge.trigger('w')")
    damage(patient)
    found = patient.problem("invariants")
    assert re.match(r"G\d \w+ in run 1: ", found["detail"])
    *commands, rest = found["remedy"].split("; ")
    assert rest == "and report how it came to this"
    with patient.scheduler():
        for command in commands:
            ends_badly = command.startswith("flowforge watch")
            Shell(patient.db.dsn)(*shlex.split(command)[1:], code=exits.EXIT_FAILED if ends_badly else 0)
        patient.well("invariants")
