"""The checks of RabbitMQ, where it is configured."""

from __future__ import annotations

import shlex

from flowforge.broker.connection import unusable
from flowforge.broker.probe import Probe, QueueState, Unreachable
from flowforge.config import called
from flowforge.doctor.setup import Check, Setup, Verdict, length, ok, problem, skipped, some, warning

_LAG = 15.0  # seconds that a message may wait to be published


def _reachable(setup: Setup) -> Verdict:
    setup.lacking["broker"] = "the broker cannot be reached"
    if not setup.config.uses_broker:
        setup.lacking["broker"] = setup.lacking["configured broker"] = "no broker is configured"
        return skipped("none is configured: delivery is by PostgreSQL")
    setup.probe = Probe(setup.config)
    detail = "; ".join(f"{each.url}: {each.reason}" for each in setup.probe.unreachable)
    remedy = "; ".join(map(_remedy, setup.probe.unreachable))
    if not setup.probe.url:
        setup.keeps_publishers = "broker"
        return problem(detail, remedy)
    del setup.lacking["broker"]
    return warning(f"{setup.probe.url} answers, but {detail}", remedy) if detail else ok(setup.probe.url)


def _remedy(found: Unreachable) -> str:
    vhost, user = shlex.quote(found.vhost), shlex.quote(found.user)
    urls, authority = called("amqp_urls"), called("amqp_ca_file")
    remedies = {
        "login": f"correct user or password in {urls}, or: rabbitmqctl change_password {user} …",
        "vhost": f"correct the virtual host in {urls}, or: rabbitmqctl add_vhost {vhost}; "
        f"rabbitmqctl set_permissions -p {vhost} {user} '.*' '.*' '.*'",
        "file": "correct that file, or its name",
        "authority": f"name a file with the certificate of the broker's authority in {authority}",
        "name": f"name the broker in {urls} as its certificate does, or give it a certificate of that name",
        "certificate": "if the broker demands a certificate, name one that it trusts in "
        f"{called('amqp_cert_file')}",
        "plain": f"that port takes no TLS: give the port that does, or write amqp:// in {urls}",
        "other": f"that port does not speak AMQP in clear: if it takes TLS, write amqps:// in {urls}, or "
        "else correct the port",
        "silent": f"start RabbitMQ there, or correct {urls}",
    }
    return remedies[found.kind]


def _names(setup: Setup) -> list[str]:
    """The queues of the database, in whatever way this login may read them."""
    query = "select flowforge.queue_names()"
    if "views" not in setup.lacking:
        query = "select queue from flowforge.queue_status order by queue"
    return [str(name) for (name,) in setup.rows(query)]


def _queues(setup: Setup) -> Verdict:
    assert setup.probe is not None  # noqa: S101 -- without a broker no check gets here
    setup.lacking["queues"] = "the queues are not known"
    names = _names(setup)
    usable = [name for name in names if unusable(name) is None]
    setup.queues = [setup.probe.queue(name) for name in usable]
    del setup.lacking["queues"]
    wrong = [
        problem_ for problem_ in [setup.probe.exchanges(), *(each.wrong for each in setup.queues)] if problem_
    ]
    wrong += [f"{name}: {unusable(name)}" for name in names if name not in usable]
    missing = [each.name for each in setup.queues if each.missing]
    if wrong:
        setup.keeps_publishers = "broker queues"
        # The refusal itself says how to go on.
        detail, _, remedy = wrong[0].partition("; ")
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        return problem(detail + more, f"{remedy or 'name it otherwise in the definition'}{_deletions(setup)}")
    if missing:
        return problem(
            f"missing: {some(missing)}", f"a publisher makes them: {setup.by('publisher', 'publisher')}"
        )
    if any(each.unchecked for each in setup.queues):
        return skipped(
            "this user may not declare, so only that the queues exist is known: grant it configure on them "
            "(rabbitmqctl set_permissions)"
        )
    return ok(f"{len(usable)}, as the publisher declares them")


def _deletions(setup: Setup) -> str:
    names = [each.name for each in setup.queues if "other arguments" in each.wrong]
    commands = "; ".join(f"rabbitmqctl delete_queue {shlex.quote(name)}" for name in names)
    return f" ({commands}: the publisher makes it anew and publishes again what was lost)" if names else ""


def _publisher(setup: Setup) -> Verdict:
    lag, waiting = setup.figure("oldest_unpublished_seconds"), setup.count("unpublished")
    # The name is the publisher's own; a pooler may hide it, so alone it is no more than a hint.
    present = setup.rows(
        "select from pg_stat_activity where datname = current_database() "
        "and application_name like 'flowforge publisher%' limit 1"
    )
    start = f"start one: {setup.by('publisher', 'publisher')}"
    if setup.keeps_publishers:
        start = f"see {setup.keeps_publishers} first, which keeps a publisher from its work; then {start}"
    if lag is not None and lag > _LAG:
        detail = f"{waiting} to be published, the oldest for {length(lag)}"
        if not present:
            return problem(f"none is connected; {detail}", start)
        return problem(detail, "look at the log and the health file of the publisher, and at the broker")
    if not present:
        return warning("none is connected", start)
    return ok(f"connected; {waiting} to be published")


def _consumers(setup: Setup) -> Verdict:
    there = [each for each in setup.queues if not each.missing and not each.wrong]
    alone = [each for each in there if not each.consumers]
    start = f"start a worker that serves them: {setup.by('worker', 'worker MODULE')}"
    if waiting := [each for each in alone if each.messages]:
        return problem(
            f"none, but messages, on {some(f'{each.name} ({each.messages})' for each in waiting)}", start
        )
    if alone:
        return warning(f"none on {some(each.name for each in alone)}", start)
    return ok(f"{sum(each.consumers for each in there)} on {len(there)} queues")


def _dead(setup: Setup) -> Verdict:
    assert setup.probe is not None  # noqa: S101 -- as above
    found: QueueState = setup.probe.dead_letters()
    if found.wrong:
        detail, _, remedy = found.wrong.partition("; ")
        return problem(detail, remedy or f"grant what is missing to the user of {called('amqp_urls')}")
    if found.missing:
        return warning("there is none yet", f"a publisher makes it: {setup.by('publisher', 'publisher')}")
    if found.messages:
        return warning(
            f"{found.messages} messages that no worker could read, or that the broker gave up",
            f"look at them in RabbitMQ, and at who sends them; then: rabbitmqctl purge_queue "
            f"{shlex.quote(found.name)}",
        )
    return ok("empty")


def _alarm(setup: Setup) -> Verdict:
    assert setup.probe is not None  # noqa: S101 -- as above
    blocked = setup.probe.blocked()
    if isinstance(blocked, str):
        return skipped(blocked)
    if not blocked:
        return ok("none: the broker takes messages")
    return problem(
        "the broker takes no messages: a memory or disk alarm is in force",
        "free memory or disk on the broker; rabbitmqctl status tells which, and the limits",
    )


CHECKS: tuple[Check, ...] = (
    ("broker", (), _reachable),
    ("broker queues", ("broker", "database"), _queues),
    ("publisher", ("configured broker", "database", "views"), _publisher),
    ("broker consumers", ("broker", "database", "queues"), _consumers),
    ("broker dead letters", ("broker",), _dead),
    ("broker alarm", ("broker",), _alarm),
)
