"""The checks of RabbitMQ, where it is configured."""

from __future__ import annotations

import shlex

from flowforge.broker.connection import unusable
from flowforge.broker.probe import Probe, QueueState, Unreachable
from flowforge.doctor.setup import Check, Setup, Verdict, ok, problem, skipped, some, warning


def _reachable(setup: Setup) -> Verdict:
    setup.lacking["broker"] = "the broker cannot be reached"
    if not setup.config.uses_broker:
        setup.lacking["broker"] = "no broker is configured"
        return skipped("none is configured: delivery is by PostgreSQL")
    setup.probe = Probe(setup.config)
    detail = "; ".join(f"{each.url}: {each.reason}" for each in setup.probe.unreachable)
    remedy = "; ".join(map(_remedy, setup.probe.unreachable))
    if not setup.probe.url:
        return problem(detail, remedy)
    del setup.lacking["broker"]
    return warning(f"{setup.probe.url} answers, but {detail}", remedy) if detail else ok(setup.probe.url)


def _remedy(found: Unreachable) -> str:
    vhost, user = shlex.quote(found.vhost), shlex.quote(found.user)
    if found.kind == "login":
        return f"correct user or password in FLOWFORGE_AMQP_URL, or: rabbitmqctl change_password {user} …"
    if found.kind == "vhost":
        grant = f"rabbitmqctl set_permissions -p {vhost} {user} '.*' '.*' '.*'"
        return f"correct the virtual host in FLOWFORGE_AMQP_URL, or: rabbitmqctl add_vhost {vhost}; {grant}"
    if found.kind == "file":
        return "correct that file, or its name"
    return "start RabbitMQ there, or correct FLOWFORGE_AMQP_URL"


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
        # The refusal itself says how to go on.
        detail, _, remedy = wrong[0].partition("; ")
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        return problem(detail + more, f"{remedy or 'name it otherwise in the definition'}{_deletions(setup)}")
    if missing:
        return problem(f"missing: {some(missing)}", f"a publisher makes them: {setup.command('publisher')}")
    if any(each.unchecked for each in setup.queues):
        return skipped("this user may not declare, so only that the queues exist is known")
    return ok(f"{len(usable)}, as the publisher declares them")


def _deletions(setup: Setup) -> str:
    names = [each.name for each in setup.queues if "other arguments" in each.wrong]
    commands = "; ".join(f"rabbitmqctl delete_queue {shlex.quote(name)}" for name in names)
    return f" ({commands}: the publisher makes it anew and publishes again what was lost)" if names else ""


def _consumers(setup: Setup) -> Verdict:
    there = [each for each in setup.queues if not each.missing and not each.wrong]
    alone = [each for each in there if not each.consumers]
    start = f"start a worker that serves them: {setup.command('worker MODULE')}"
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
        return problem(detail, remedy or "grant what is missing to the user of FLOWFORGE_AMQP_URL")
    if found.missing:
        return warning("there is none yet", f"a publisher makes it: {setup.command('publisher')}")
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
    ("broker consumers", ("broker", "database", "queues"), _consumers),
    ("broker dead letters", ("broker",), _dead),
    ("broker alarm", ("broker",), _alarm),
)
