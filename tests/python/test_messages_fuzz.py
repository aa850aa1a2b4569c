"""Whatever arrives as a message: every delivery is settled once, as what it is, and claiming goes on.

What the broker does with it is test_worker_messages.py's. FLOWFORGE_TEST_EXAMPLES=1000 tries so many sets of
messages, others each time.
"""

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowforge.broker import Delivery
from flowforge.config import Config
from flowforge.worker.claiming import Parts
from flowforge.worker.messages import MessageClaimer
from tests.services.database import Database

EXAMPLES = 60
SLOTS = 4

# Each with what is to become of it: "ack" or "reject".
Fate = str


class Dispatch(NamedTuple):
    """A task run that can be claimed."""

    task_run_id: int
    dispatch_id: uuid.UUID


class Channel:
    """Notes how deliveries are settled; what was given back comes again."""

    def __init__(self) -> None:
        self.settled: dict[int, list[Fate]] = {}

    def _note(self, deliveries: Iterable[Delivery], fate: Fate) -> None:
        for each in deliveries:
            self.settled.setdefault(each.tag, []).append(fate)

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        self._note(deliveries, "ack")

    def reject(self, deliveries: Iterable[Delivery]) -> None:
        self._note(deliveries, "reject")

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        self._note(deliveries, "give back")

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def set_prefetch(self, prefetch: int) -> None:
        pass


class Executions:
    """Executor, keeper and finisher in one, which hold what was won for ever."""

    def __init__(self) -> None:
        self.won: list[Any] = []
        self.free = 10 * SLOTS

    def reserve(self, most: int, timeout: float) -> int:
        slots = min(most, SLOTS, self.free)
        self.free -= slots
        return slots

    def give_back(self, slots: int) -> None:
        self.free += slots

    def knows(self, handler: str) -> bool:
        return True

    def start(self, executions: list[Any]) -> None:
        self.won += [execution.claim for execution in executions]

    def hold(self, executions: list[Any]) -> None:
        pass

    def forget(self, executions: list[Any]) -> None:
        pass

    def wait_below(self, most: int, timeout: float) -> bool:
        return True


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([2**63, -1, 0, 10**4000, "1", "x" * 10_000, "\ud800", uuid.UUID(int=0).hex[:-1]]),
)  # fmt: skip
_json = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
_no_id = _scalars.filter(lambda value: type(value) is not int or not 0 < value < 2**63) | _json.filter(
    lambda value: isinstance(value, list | dict)
)
_ids = st.integers(1, 2**63 - 1)
_uuids = st.uuids().map(str)
_encodings = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32"])


def _bytes(value: Any, encoding: str = "utf-8") -> bytes:
    return json.dumps(value).encode(encoding)


# A body that names no dispatch.
_unreadable = st.one_of(
    st.binary(max_size=100).filter(lambda body: b"task_run_id" not in body),
    st.builds(_bytes, _json.filter(lambda value: not isinstance(value, dict)), _encodings),
    st.builds(
        lambda value, other: _bytes({**other, "task_run_id": value}),
        _ids,
        st.dictionaries(st.just("x"), _json),
    ),
    st.builds(lambda value: _bytes({"dispatch_id": value}), _uuids),
    st.builds(lambda bad, good: _bytes({"task_run_id": bad, "dispatch_id": good}), _no_id, _uuids),
    st.builds(
        lambda good, bad: _bytes({"task_run_id": good, "dispatch_id": bad}),
        *(_ids, _json.filter(lambda value: not isinstance(value, str) or len(value) < 32)),
    ),
    st.builds(
        lambda good, at: _bytes({"task_run_id": 1, "dispatch_id": good})[:at], _uuids, st.integers(0, 40)
    ),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"task_run_id": 1e400}']),
)


def _bodies(live: list[Dispatch]) -> st.SearchStrategy[tuple[bytes, Fate]]:
    """Bodies that can be read, of dispatches that are there, or stale, or another database's, and others."""
    dispatches = st.one_of(
        st.sampled_from(live).map(lambda each: (each.task_run_id, str(each.dispatch_id))),
        st.tuples(st.sampled_from(live).map(lambda each: each.task_run_id), _uuids),
        st.tuples(_ids, st.sampled_from(live).map(lambda each: str(each.dispatch_id))),
        st.tuples(_ids, _uuids),
    )
    spelled = st.sampled_from(
        [str, str.upper, lambda text: f"{{{text}}}", lambda text: text.replace("-", "")]
    )
    readable = st.builds(
        lambda pair, spell, more, encoding: _bytes(
            {**more, "task_run_id": pair[0], "dispatch_id": spell(pair[1])}, encoding
        ),
        *(
            dispatches,
            spelled,
            st.dictionaries(st.sampled_from(["attempt", "handler", "x"]), _json),
            _encodings,
        ),
    )
    return st.tuples(readable, st.just("ack")) | st.tuples(_unreadable, st.just("reject"))


_properties = st.tuples(
    st.none() | st.text(max_size=20) | st.just(b"\xff"),
    st.booleans(),
    st.dictionaries(st.text(max_size=5), _json, max_size=2),
)


def test_every_message_is_settled_once_as_what_it_is(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(database_url=db.dsn, amqp_urls=("amqp://nowhere",), concurrency=SLOTS, lease=30)
    with db.connect() as connection:
        connection.execute(
            "select flowforge.define_workflow(%s)",
            [json.dumps({"name": "w", "tasks": [{"name": name} for name in "abc"]})],
        )
        connection.execute("select flowforge.trigger('w')")
        connection.execute("select flowforge.dispatch_ready()")
        live = [
            Dispatch(*row)
            for row in connection.execute("select task_run_id, dispatch_id from flowforge.outbox").fetchall()
        ]
        longer = os.environ.get("FLOWFORGE_TEST_EXAMPLES")

        @settings(
            max_examples=int(longer) if longer else EXAMPLES,
            derandomize=not longer,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(st.tuples(_bodies(live), _properties), min_size=1, max_size=12))
        def settled(messages: list[tuple[tuple[bytes, Fate], tuple[Any, bool, dict[str, Any]]]]) -> None:
            # Whoever has claimed them before has lost them.
            connection.execute(
                "select flowforge.release_task_run(task_run_id, fencing_token, 'unstarted')"
                " from flowforge.task_run where state = 'running'"
            )
            deliveries = [
                Delivery(1, tag, "default", message_id, message_id, body, redelivered, headers)
                for tag, ((body, _), (message_id, redelivered, headers)) in enumerate(messages)
            ]
            _arrive(claimer, deliveries, channel, executions)
            assert channel.settled == {tag: [fate] for tag, ((_, fate), _) in enumerate(messages)}
            won = [(claim.task_run_id, claim.fencing_token) for claim in executions.won]
            assert len({task_run_id for task_run_id, _ in won}) == len(won)
            assert executions.free == 10 * SLOTS - len(won)
            held = connection.execute(
                "select task_run_id, fencing_token from flowforge.task_run where state = 'running'"
            ).fetchall()
            assert sorted(held) == sorted(won)

        channel, executions = Channel(), Executions()
        monkeypatch.setattr("flowforge.worker.messages.ConsumeChannel", lambda *_, **__: channel)
        parts: Any = SimpleNamespace(
            config=config, worker="w", executor=executions, keeper=executions, finisher=executions
        )
        claimer = MessageClaimer(
            Parts(config, "w", parts.executor, parts.keeper, parts.finisher, Counter(), lambda _: None)
        )
        try:
            settled()
        finally:
            claimer.session.close()


def _arrive(
    claimer: MessageClaimer, deliveries: list[Delivery], channel: Channel, executions: Executions
) -> None:
    """Have the messages arrive, and the claimer take its turns until none waits: one each at most."""
    channel.settled.clear()
    executions.won.clear()
    executions.free = 10 * SLOTS
    for delivery in deliveries:
        claimer._arrived.put(delivery)
    turns = 0
    while claimer._waiting or not claimer._arrived.empty():
        claimer._turn()
        turns += 1
        assert turns <= len(deliveries) + 1
