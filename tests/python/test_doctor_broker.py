"""The command doctor where RabbitMQ is configured: it names the fault, and what it says mends it."""

import re
import shlex
import socket

import pika
import pytest

from flowforge import exits
from flowforge.broker import Names
from tests.python.patient import Patient
from tests.services.database import Database
from tests.services.process import free_port, wait_until
from tests.services.rabbitmq import Broker, RabbitServer


@pytest.fixture
def patient(db: Database, rabbit: Broker, amqp_namespace: str) -> Patient:
    """As an operator sees it, with the settings of the publisher."""
    patient = Patient(db, db.create_login("flowforge_operator"))
    patient.set(FLOWFORGE_AMQP_URL=rabbit.url, FLOWFORGE_NAMESPACE=amqp_namespace)
    return patient


def test_no_publisher_and_then_no_consumer(patient: Patient, rabbit: Broker) -> None:
    patient.work()
    patient.sql("select flowforge.dispatch_ready()")
    assert (
        patient.warning("publisher")["remedy"] == "start one: flowforge publisher, with the publisher's login"
    )
    patient.sql("update flowforge.outbox set next_attempt_at = now() - interval '5 min'")
    found = patient.examine(code=exits.EXIT_FAILED)
    assert found["publisher"]["status"] == "problem"
    assert re.match(
        r"none is connected; 1 to be published, the oldest for 0:05:0", found["publisher"]["detail"]
    )
    assert found["publisher"]["remedy"] == "start one: flowforge publisher, with the publisher's login"
    name = Names(patient.config.namespace).queue("default")
    assert found["broker queues"]["detail"] == f"missing: {name}"
    assert "flowforge publisher" in found["broker queues"]["remedy"]
    assert found["broker alarm"]["status"] == "skipped", "there is nothing yet to publish to"
    with patient.publisher():
        for check in ("publisher", "broker queues", "broker dead letters", "broker alarm"):
            patient.well(check)
    consumers = patient.problem("broker consumers")
    assert f"{name} (1)" in consumers["detail"]
    assert "flowforge worker MODULE" in consumers["remedy"]
    with rabbit.channel() as channel:
        channel.basic_consume(name, lambda *_: None)
        patient.well("broker consumers")


def test_what_a_login_may_not_see_says_what_to_grant(patient: Patient) -> None:
    patient.set(FLOWFORGE_DATABASE_URL=patient.db.create_login("flowforge_worker"))
    found = patient.seen("broker queues")
    assert found["status"] == "skipped"
    assert f': grant flowforge_operator to "{patient.login}"' in found["detail"]
    patient.set(FLOWFORGE_DATABASE_URL=patient.db.create_login())
    found = patient.seen("autovacuum")
    assert f': grant flowforge_operator to "{patient.login}"' in found["detail"]


def test_looking_makes_nothing_on_the_broker(patient: Patient, rabbit: Broker) -> None:
    patient.work()
    patient.examine(code=exits.EXIT_FAILED)
    names = Names(patient.config.namespace)
    assert rabbit.counts(names.queue("default")) is rabbit.counts(names.dead) is None


def test_a_queue_with_other_arguments(patient: Patient, rabbit: Broker) -> None:
    patient.work()
    name = Names(patient.config.namespace).queue("default")
    dead = Names(patient.config.namespace).dead
    rabbit.declare(name, arguments={"x-queue-type": "classic", "x-dead-letter-exchange": dead})
    found = patient.problem("broker queues")
    assert f"queue '{name}' exists with other arguments: x-queue-type should be 'quorum'" in found["detail"]
    assert f"rabbitmqctl delete_queue {name}" in found["remedy"]
    assert patient.seen("publisher")["remedy"].startswith("see broker queues first, ")
    rabbit.delete_queue(name)
    with patient.publisher():
        patient.well("broker queues")


def test_a_message_in_the_dead_letter_queue(patient: Patient, rabbit: Broker) -> None:
    patient.work()
    with patient.publisher():
        patient.well("broker dead letters")
    name = Names(patient.config.namespace).dead
    with rabbit.channel() as channel:
        channel.basic_publish("", name, b"unreadable")
    wait_until(lambda: rabbit.counts(name) == (1, 0), "the message")
    assert f"rabbitmqctl purge_queue {name}" in patient.warning("broker dead letters")["remedy"]
    rabbit.purge(name)
    patient.well("broker dead letters")


def test_a_broker_that_takes_connections_and_says_nothing(patient: Patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        patient.set(FLOWFORGE_AMQP_URL=f"amqp://guest:guest@127.0.0.1:{port}/")
        found = patient.problem("broker")
    assert "Timeout during AMQP handshake" in found["detail"]
    assert found["remedy"].startswith("start RabbitMQ there")


def test_what_is_no_name_of_a_broker_s_host(patient: Patient) -> None:
    patient.set(FLOWFORGE_AMQP_URL="amqp://guest:guest@a..b/")
    found = patient.problem("broker")
    assert "label" in found["detail"]
    assert "correct FLOWFORGE_AMQP_URL" in found["remedy"]


def test_a_wrong_broker_password_host_and_virtual_host(patient: Patient, rabbit_server: RabbitServer) -> None:
    patient, url = patient, rabbit_server.url
    password = str(pika.URLParameters(url).credentials.password)
    patient.set(FLOWFORGE_AMQP_URL=url.replace(password, "s3cret"))
    found = patient.problem("broker")
    assert found["remedy"].startswith("correct user or password in FLOWFORGE_AMQP_URL")
    assert "s3cret" not in patient.shell("doctor", code=1).output
    patient.set(FLOWFORGE_AMQP_URL=url.replace(str(rabbit_server.port), str(free_port())))
    assert patient.problem("broker")["remedy"].startswith("start RabbitMQ there")
    patient.set(FLOWFORGE_AMQP_URL=url.replace("%2F", patient.config.namespace))
    found = patient.problem("broker")
    assert f"vhost {patient.config.namespace} not found" in found["detail"]
    commands = re.findall(r"rabbitmqctl ([^;]+)", found["remedy"])
    assert len(commands) == 2
    for command in commands:
        rabbit_server.ctl(*shlex.split(command))
    patient.well("broker")
    rabbit_server.ctl("delete_vhost", patient.config.namespace)
    patient.set(FLOWFORGE_AMQP_URL=f"amqp://127.0.0.1:{free_port()},{url}")
    assert patient.warning("broker")["detail"].startswith("amqp://flowforge:***@")


def test_an_alarm_of_the_broker(patient: Patient, rabbit_server: RabbitServer) -> None:
    with patient.publisher():
        patient.well("broker alarm")
    rabbit_server.set_memory_watermark(0)
    try:
        wait_until(lambda: patient.seen("broker alarm")["status"] == "problem", "the alarm")
        found = patient.problem("broker alarm")
        assert "a memory or disk alarm is in force" in found["detail"]
        assert "free memory or disk" in found["remedy"]
    finally:
        rabbit_server.set_memory_watermark(0.4)
    patient.well("broker alarm")
