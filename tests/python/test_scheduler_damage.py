"""A run that cannot be moved on holds up no other one."""

import logging

import pytest

from flowforge.config import Config
from flowforge.scheduler import Scheduler
from tests.python.daemons import Flow, Running
from tests.services.database import Database
from tests.services.process import wait_until


def test_a_damaged_run_is_told_of_and_the_others_end(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(database_url=db.create_login("flowforge_scheduler"))
    flow = Flow(db, {"name": "a"}, {"name": "b", "after": ["a"]})
    damaged = flow.trigger()
    flow.conn.execute("select flowforge.dispatch_ready()")
    flow.finish(flow.claim())
    # What the scheduler is to do next for this run, the database will not do.
    flow.conn.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as
            'begin raise exception ''damaged''; end';
        create trigger refuse before update on flowforge.task_run for each row
            when (new.run_id = {damaged}) execute function public.refuse();
        """.encode()
    )
    with Running(Scheduler(config), config) as running, caplog.at_level(logging.ERROR):
        healthy = [flow.trigger() for _ in range(3)]
        flow.work_until(*healthy)
        assert [flow.run_state(run) for run in healthy] == ["succeeded"] * 3
        running.until("error")
        told = f"run {damaged} cannot be settled: damaged"
        said = [vars(each)["keys"].get("error") for each in caplog.records if "keys" in vars(each)]
        assert said.count(told) == 1
        assert flow.run_state(damaged) == "running"
        # Once it is mended it goes on by itself.
        flow.conn.execute("drop trigger refuse on flowforge.task_run")
        flow.work_until(damaged)
        wait_until(lambda: flow.run_state(damaged) == "succeeded", "the end of the mended run")
        running.until("ok")
    flow.healthy()
    flow.close()
