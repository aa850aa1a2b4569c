"""Connections: what they are set to, which errors pass, what a call answers."""

import datetime
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import NoReturn

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from flowforge import db as database
from flowforge.errors import (
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    Fenced,
    InvalidArgument,
    MissingPrivilege,
    NotFound,
    NotStorable,
    SchemaError,
    from_database,
)
from tests.python.shell import Shell
from tests.python.workbench import LossyProxy
from tests.services.database import Database
from tests.services.process import free_port

TIMEOUT = 30.0


@pytest.fixture
def conn(db: Database) -> Iterator[database.Connection]:
    with database.connect(db.dsn, application_name="test") as conn:
        yield conn


def error(conn: database.Connection, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(statement.encode())
    return caught.value


def test_a_connection_is_autocommit_and_watched(db: Database) -> None:
    with database.connect(db.dsn, application_name="flowforge test") as conn:
        assert conn.autocommit
        parameters = conn.info.get_parameters()
        assert parameters["application_name"] == "flowforge test"
        assert parameters["target_session_attrs"] == "read-write"
        assert (parameters["keepalives"], parameters["keepalives_idle"]) == ("1", "10")
        assert parameters["tcp_user_timeout"] == "20000"
    with database.connect(f"{db.dsn} keepalives_idle=3 application_name=mine", application_name="x") as conn:
        assert conn.info.get_parameters()["keepalives_idle"] == "3"
        assert conn.info.get_parameters()["application_name"] == "mine"


def with_other_styles(db: Database) -> None:
    """As a server, a database or a login may be set."""
    with db.connect() as conn:
        for setting in ("intervalstyle = 'sql_standard'", "datestyle = 'SQL, DMY'"):
            conn.execute(f"alter database {db.name} set {setting}".encode())


def test_times_and_intervals_are_read_whatever_the_style_of_the_database(db: Database) -> None:
    with_other_styles(db)
    shell = Shell(db.dsn)
    with db.connect() as conn:
        conn.execute("""select flowforge.define_workflow('{"name": "w", "tasks": [{"name": "t"}]}')""")
    with database.connect(db.dsn, application_name="test") as conn:
        query = "select now(), interval '-1 day 2 hours', timestamptz '2025-01-31 00:00Z'"
        row = conn.execute(query.encode()).fetchone()
        assert row is not None
        assert row[1:] == (datetime.timedelta(hours=-22), datetime.datetime(2025, 1, 31, tzinfo=datetime.UTC))
    run = shell("trigger", "w").stdout.strip()
    assert shell.document("runs")["run_id"] == int(run)
    shell("runs")
    shell("show", run)


def test_a_string_that_is_none_is_refused_without_quoting_it() -> None:
    with pytest.raises(ConfigError, match="FLOWFORGE_DATABASE_URL is not set"):
        database.connect("", application_name="test")
    with pytest.raises(ConfigError) as caught:
        database.connect("s3cret", application_name="test")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p@S3CRET@127.0.0.1:1/db",
        "postgres://u:p@S3CRET@127.0.0.1:1/db",
        "postgresql://u:p/S3CRET@127.0.0.1/db",
        "postgresql://u:12/S3CRET@127.0.0.1/db",
        "postgresql://u:p@1/S3CRET@127.0.0.1/db",
        "postgresql://u:a@b:S3CRET@127.0.0.1:1/db",
        "postgresql://u@x:S3CRET@127.0.0.1/db",
        "postgresql://u:S3CRET/x",
        "postgresql://u:S3CRET%@127.0.0.1/db",
        "postgresql://u:S3C RET@127.0.0.1/db",
        "host=p@S3CRET",
        "host=h port=S3CRET",
        "host=h password=p S3CRET",
    ],
)
def test_a_string_that_is_read_otherwise_than_meant_is_refused_with_how_to_escape(dsn: str) -> None:
    """What libpq takes for host, port or database may be the rest of a password, and would be quoted."""
    with pytest.raises(ConfigError, match="%40 for @") as caught:
        database.connect(dsn, application_name="test")
    assert "S3C" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "value",
    ["sslmode=bogus", "ssl_min_protocol_version=bogus", "connect_timeout=abc", "keepalives=abc",
     "port=99999999", "target_session_attrs=bogus", "require_auth=md5,!md5", "hostaddr=bogus",
     "sslmode=require sslrootcert=system", "service=nosuch"],
)  # fmt: skip
def test_a_value_that_nothing_can_be_done_with_is_a_mistake_and_no_outage(value: str) -> None:
    """Else a daemon would wait for ever for a database."""
    with pytest.raises(ConfigError, match="the database's connection string cannot be used: "):
        database.connect(f"host=127.0.0.1 port=1 {value}", application_name="test")


@pytest.mark.parametrize("value", ["-c bogus=1", "-c work_mem=bogus"])
def test_a_parameter_that_the_server_refuses_is_a_mistake_too(db: Database, value: str) -> None:
    with pytest.raises(ConfigError, match="the database's connection string cannot be used: "):
        database.connect(f"{db.dsn} options='{value}'", application_name="test")


def test_what_a_connection_string_may_hold_is_not_refused(db: Database) -> None:
    nowhere = [
        f"postgresql://u:p%40ss@127.0.0.1:{free_port()}/db",
        "postgresql://u@%2Fno%2Fsuch%20place/db",
        f"postgresql://[::1]:{free_port()},127.0.0.1:{free_port()}/?user=me@there",
        "host=/no/such@place,@none",
    ]
    for dsn in nowhere:
        with pytest.raises(psycopg.OperationalError):
            database.connect(dsn, application_name="test")


def test_a_password_that_a_message_quotes_is_masked(db: Database) -> None:
    """And not where it is a word of the message, by which a refusal is known."""
    dsn = make_conninfo(db.server.dsn(), dbname="no password=S3CRET x://u:S3CRET@", password="S3CRET")
    masked = r'"no password=\*\*\* x://u:\*\*\*@" does not exist'
    with pytest.raises(psycopg.OperationalError, match=masked) as caught:
        database.connect(dsn, application_name="test")
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))
    assert database.refusal(caught.value) == "the database does not exist"
    dsn = make_conninfo(dsn, dbname="x _key=KEY5 KEY5", password="p", scram_client_key="KEY5")
    masked = database._masked('"x _key=KEY5", "KEY5"', database._parsed(dsn))
    assert masked == '"x _key=***", "***"'
    with pytest.raises(psycopg.OperationalError, match=r"database .* does not exist"):
        database.connect(db.server.dsn("no_such") + " password=database", application_name="test")
    for password in ("s", "no_such"):  # nor a part of a name, or one, which the hole would tell
        with pytest.raises(psycopg.OperationalError, match='"no_such" does not exist'):
            database.connect(f"{db.server.dsn('no_such')} password={password}", application_name="test")


def test_an_interrupted_call_ends_as_interrupted(
    conn: database.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as whatever psycopg says of a pipeline that it leaves half way."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    @contextmanager
    def pipeline() -> Iterator[None]:
        try:
            yield
        finally:
            raise psycopg.ProgrammingError("cannot exit pipeline mode while busy")

    monkeypatch.setattr(conn, "pipeline", pipeline)
    monkeypatch.setattr(conn, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        database.call(conn, "select 1")
    assert conn.closed


def test_a_call_in_what_handles_an_interruption_has_errors_of_its_own(conn: database.Connection) -> None:
    """Such as a cancel after Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(psycopg.errors.DivisionByZero):
            database.call(conn, "select 1 / 0")
    assert database.call(conn, "select 1") == [(1,)]


def test_what_is_no_name_of_a_host_is_told_as_a_fault_of_the_connection_string() -> None:
    with pytest.raises(ConfigError, match=r"host 'a\.\.b': .*label"):
        database.connect("host=a..b", application_name="test")


def test_no_host_is_waited_for_beyond_what_is_left() -> None:
    """Whatever the connection string says."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} connect_timeout="
        for timeout in ("0", "-1", "600"):
            with pytest.raises(psycopg.OperationalError, match="timeout"):
                database.connect(f"{dsn}{timeout}", application_name="test", within=0.1)


def test_a_call_is_read_committed_with_a_lock_timeout_of_its_own(
    db: Database, conn: database.Connection
) -> None:
    conn.execute("set default_transaction_isolation = serializable")
    settings = "select current_setting('transaction_isolation'), current_setting('lock_timeout')"
    assert database.call(conn, settings, lock_timeout=1.5) == [("read committed", "1500ms")]
    assert database.call(conn, "select %s::bigint[], %s", [[1, 2], "it's %s"]) == [([1, 2], "it's %s")]
    with database.begin(conn, lock_timeout=2) as tx:
        assert tx.execute(settings).fetchall() == [("read committed", "2s")]

    def fail() -> None:
        with database.begin(conn) as tx:
            tx.execute("create table t ()")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert conn.execute("select to_regclass('t')").fetchall() == [(None,)]
    # Nothing of it stays in the session, which behind a pooler may be somebody else's next.
    assert conn.execute("show lock_timeout").fetchall() == [("0",)]
    with db.connect() as other, other.transaction():
        other.execute("lock table flowforge.run")
        with pytest.raises(psycopg.errors.LockNotAvailable) as caught:
            database.call(conn, "select count(*) from flowforge.run", lock_timeout=0.1)
    assert database.is_transient(caught.value)
    assert not database.connection_useless(conn, caught.value)


def test_a_call_that_fails_leaves_nothing(conn: database.Connection) -> None:
    conn.execute("create table t (x bigint)")
    with pytest.raises(psycopg.errors.DivisionByZero):
        database.call(conn, "with a as (insert into t values (1) returning x) select 1 / (x - 1) from a")
    assert database.call(conn, "select count(*) from t") == [(0,)]


@pytest.mark.parametrize("prepared", [True, False])
def test_after_a_failed_call_the_connection_serves_the_next_one(db: Database, prepared: bool) -> None:
    with database.connect(db.dsn, application_name="test", prepared_statements=prepared) as conn:
        conn.execute("create table t (x bigint unique deferrable initially deferred)")
        conn.execute("insert into t values (0)")
        insert = "insert into t values (%s / (%s - 7)) returning x"
        failures: list[tuple[str, list[object], type[psycopg.Error]]] = [
            (insert, [1, 7], psycopg.errors.DivisionByZero),
            ("select no_such_function(%s)", [1], psycopg.errors.UndefinedFunction),
            ("select %s", ["a\0b"], psycopg.DataError),  # refused here, with the transaction begun
            ("insert into t values (0)", [], psycopg.errors.UniqueViolation),  # refused by the commit
        ]
        for round_ in range(8):  # before and after statements get prepared
            for query, params, kind in failures:
                with pytest.raises(kind):
                    database.call(conn, query, params)
                assert conn.info.transaction_status == TransactionStatus.IDLE
            x = 10 * (round_ + 1)
            assert database.call(conn, insert, [x * 10, 17]) == [(x,)]
        assert database.call(conn, "select count(*) from t") == [(9,)]
        counts = [database.call(conn, "select count(*) from pg_prepared_statements") for _ in range(8)]
        assert (counts[-1] > counts[0]) == prepared


def test_a_call_whose_function_appears_later_works_then(conn: database.Connection) -> None:
    for _ in range(8):
        with pytest.raises(psycopg.errors.UndefinedFunction):
            database.call(conn, "select later(%s::bigint)", [1])
    conn.execute("create function later(x bigint) returns bigint return x")
    for _ in range(8):
        assert database.call(conn, "select later(%s::bigint)", [1]) == [(1,)]


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_call_whose_answer_is_lost_is_told_from_a_refused_one(db: Database, lost: str) -> None:
    proxy = LossyProxy(db.dsn)
    try:
        with database.connect(proxy.dsn, application_name="test") as conn:
            conn.execute("create table t (x bigint)")
            proxy.lose("insert into t", sent=lost == "after")
            with pytest.raises(psycopg.OperationalError) as caught:
                database.call(conn, "insert into t values (%s) returning x", [1])
            assert caught.value.sqlstate is None
            assert database.connection_lost(conn)
            assert database.connection_useless(conn, caught.value)
    finally:
        proxy.close()


def test_no_value_shows_in_the_statement(conn: database.Connection) -> None:
    # The very text that an error or a long wait would write to the server's log.
    query = "select query, %s::jsonb from pg_stat_activity where pid = pg_backend_pid()"
    for _ in range(8):
        [(text, value)] = database.call(conn, query, ['"s3cret"'])
        assert value == "s3cret"
        assert text == query.replace("%s", "$1")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a\0b", r"U\+0000"),
        ({"k\0": 1}, r"U\+0000"),
        ("\\\0", r"U\+0000"),
        ("\ud800", "lone surrogate"),
        (float("nan"), "not JSON"),
        (float("inf"), "not JSON"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
    ],
)
def test_what_json_cannot_say_is_refused_before_it_is_sent(
    conn: database.Connection, value: object, reason: str
) -> None:
    with pytest.raises(NotStorable, match=reason):
        conn.execute("select %s", [Jsonb(value)])
    assert conn.execute("select 1").fetchall() == [(1,)]


def test_deep_nesting_is_refused_on_either_side(conn: database.Connection) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotStorable, match="nested too deeply"):
        database.json_text(deep)
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("select (%s::text)::jsonb", ["[" * 100_000 + "]" * 100_000])
    assert isinstance(from_database(caught.value), NotStorable)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": [1, {"b": datetime.datetime.now(datetime.UTC)}]},
            "['a'][1]['b'] is not storable: datetime is",
        ),
        (
            MappingProxyType({"x": MappingProxyType({"y": {1}})}),
            "['x']['y'] is not storable: set is not JSON",
        ),
        ([0, ("a\0b",)], "[1][0] is not storable: text with the character U+0000"),
        ({"n": float("nan")}, "['n'] is not storable: Out of range"),
        ({(1, 2): 1}, "not storable: keys must be"),
    ],
)
def test_the_part_that_cannot_be_stored_is_named(value: object, message: str) -> None:
    with pytest.raises(NotStorable) as caught:
        database.json_text(value)
    assert str(caught.value).startswith(message)


def test_what_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append({"x": MappingProxyType({"y": endless})})
    with pytest.raises(NotStorable, match="not storable"):
        database.json_text(endless)


def test_any_mapping_is_an_object() -> None:
    states = MappingProxyType({"a": "succeeded", "b": MappingProxyType({})})
    assert database.json_text({"states": states}) == '{"states":{"a":"succeeded","b":{}}}'


def test_what_json_can_say_arrives_as_it_was(conn: database.Connection) -> None:
    value = ["\\u0000", "\\\\u0000", "ü\U0001f600", 2**70, 0.1, None, {"k": [True]}]
    assert conn.execute("select %s", [Jsonb(value)]).fetchall() == [(value,)]


def test_transient_errors_are_told_from_mistakes(db: Database, conn: database.Connection) -> None:
    for transient in ("40001", "40P01", "55P03", "57P01", "57P03", "25006", "08006", "53300", "57014"):
        raised = error(conn, f"do $$ begin raise exception using errcode = '{transient}'; end $$")
        assert database.is_transient(raised), transient
        assert isinstance(from_database(raised), DatabaseUnavailable)
    for mistake in ("42601", "23505", "XX000", "P0001", "42501", "42883", "WF001", "28P01", "3D000"):
        raised = error(conn, f"do $$ begin raise exception using errcode = '{mistake}'; end $$")
        assert not database.is_transient(raised), mistake
    conn.execute("set default_transaction_read_only = on")
    raised = error(conn, "create table t ()")
    assert database.is_transient(raised)
    assert database.connection_useless(conn, raised)
    with db.connect() as other:
        other.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
    raised = error(conn, "select 1")
    assert database.is_transient(raised)
    assert database.connection_useless(conn, raised)


def test_a_server_without_free_slots_or_without_a_listener_is_transient(db: Database) -> None:
    with db.connect() as conn:
        login = db.create_login()
        name = psycopg.conninfo.conninfo_to_dict(login)["user"]
        conn.execute(f"alter role {name} connection limit 0")
    nobody = f"host=127.0.0.1 port={free_port()} dbname=x user=x"
    for dsn in (login, nobody):
        with pytest.raises(psycopg.OperationalError) as caught:
            database.connect(dsn, application_name="test")
        assert database.is_transient(caught.value)
        assert database.refusal(caught.value) is None


def test_a_connection_refused_for_good_is_told_apart(db: Database) -> None:
    with db.connect() as conn:
        name = psycopg.conninfo.conninfo_to_dict(db.create_login())["user"]
        conn.execute(f"alter role {name} nologin")
        conn.execute(f"revoke connect on database {db.name} from public")
    refused = {
        db.server.dsn(db.name, tcp=True) + " password=s3cret": "wrong login or password",
        db.server.dsn(db.name, user="nobody_here"): "the login does not exist",
        db.server.dsn("no_such_database"): "the database does not exist",
        db.server.dsn(db.name, user=str(name)): "may not connect",
        db.create_login(): "may not connect",
    }
    for dsn, reason in refused.items():
        with pytest.raises(psycopg.OperationalError) as caught:
            database.connect(dsn, application_name="test")
        found = database.refusal(caught.value)
        assert found is not None, caught.value
        assert reason in found
        assert not database.is_transient(caught.value)
        assert "s3cret" not in str(from_database(caught.value))


def test_errors_of_the_database_become_this_projects_own(conn: database.Connection) -> None:
    expected = {
        "WF001": InvalidArgument,
        "WF002": NotFound,
        "WF006": Fenced,
        "42501": MissingPrivilege,
        "42883": SchemaError,
        "22P05": NotStorable,
        "22P02": NotStorable,
        "23505": DatabaseError,
    }
    for sqlstate, kind in expected.items():
        raised = error(conn, f"do $$ begin raise exception 'the words' using errcode = '{sqlstate}'; end $$")
        found = from_database(raised)
        assert type(found) is kind
        assert "the words" in str(found)
        if isinstance(found, DatabaseError):
            assert found.sqlstate == sqlstate


def test_backoff_grows_with_jitter_up_to_its_cap_and_starts_anew() -> None:
    backoff = database.Backoff(first=1.0, cap=8.0)
    for whole in (1, 2, 4, 8, 8, 8):
        assert whole / 2 <= backoff.next() <= whole
    backoff.reset()
    assert backoff.next() <= 1
    assert len({database.Backoff().next() for _ in range(50)}) > 1
    for _ in range(2000):
        assert backoff.next() <= 8
