-- Who may call what. Applied last: a function made without a line here can be executed by its owner only.

do $$
declare
    v_function regprocedure;
    v_relation regclass;
begin
    -- Whatever others have put into the schema is theirs.
    for v_function in select p.oid from pg_proc p where p.pronamespace = 'flowforge'::regnamespace and pg_has_role(p.proowner, 'member') loop
        execute format('revoke all on function %s from public, flowforge_client, flowforge_worker, flowforge_scheduler, flowforge_publisher, flowforge_operator, flowforge_reader', v_function);
    end loop;
    for v_relation in select c.oid from pg_class c where c.relnamespace = 'flowforge'::regnamespace and c.relkind in ('r', 'v', 'S') and pg_has_role(c.relowner, 'member') loop
        execute format('revoke all on %s %s from public, flowforge_client, flowforge_worker, flowforge_scheduler, flowforge_publisher, flowforge_operator, flowforge_reader',
            case when (select c.relkind = 'S' from pg_class c where c.oid = v_relation) then 'sequence' else 'table' end, v_relation);
    end loop;
end
$$;
revoke all on schema flowforge from public;
grant usage on schema flowforge to flowforge_client, flowforge_worker, flowforge_scheduler, flowforge_publisher, flowforge_operator, flowforge_reader;
grant execute on function flowforge.schema_version() to flowforge_client, flowforge_worker, flowforge_scheduler, flowforge_publisher, flowforge_operator, flowforge_reader;

grant execute on function
    flowforge.define_workflow(jsonb),
    flowforge.trigger(text, jsonb, text, bigint, bigint, interval, jsonb),
    flowforge.trigger_many(text, jsonb[], text[]),
    flowforge.cancel_run(bigint, text),
    flowforge.run_result(bigint),
    flowforge.task_output(bigint, text)
to flowforge_client, flowforge_operator;

grant execute on function
    flowforge.settle_finished(bigint, boolean), flowforge.expand_map(boolean), flowforge.dispatch_ready(bigint), flowforge.reap_expired_leases(bigint, boolean),
    flowforge.redispatch_lost(bigint), flowforge.fail_undeliverable(bigint), flowforge.cancel_leftovers(bigint, boolean),
    flowforge.sweep_outbox(bigint), flowforge.advance_frontiers(), flowforge.declare_scheduler(boolean), flowforge.next_due()
to flowforge_scheduler;

grant execute on function
    flowforge.fetch_outbox(bigint), flowforge.mark_published(bigint[]), flowforge.mark_refused(bigint[], text[]),
    flowforge.mark_unpublishable(bigint, text), flowforge.queue_names(), flowforge.redispatch(text)
to flowforge_publisher;

grant execute on function
    flowforge.announce_worker(text, text[], bigint),
    flowforge.claim_task_run(bigint, uuid, text, uuid, interval), flowforge.claim_task_runs(bigint[], uuid[], text, uuid, interval),
    flowforge.claim_next(text[], text, uuid, interval, bigint), flowforge.renew_leases(bigint[], bigint[], interval),
    flowforge.finish_task_run(bigint, bigint, text, jsonb, text, boolean),
    flowforge.finish_task_runs(bigint[], bigint[], text[], jsonb[], text[], boolean[]),
    flowforge.release_task_run(bigint, bigint, text), flowforge.report_progress(bigint, bigint, double precision, text),
    flowforge.assert_lease(bigint, bigint), flowforge.traceparents(bigint[], bigint[])
to flowforge_worker;

grant execute on function
    flowforge.retry_run(bigint, text, text), flowforge.activate_version(text, bigint), flowforge.pause_queue(text),
    flowforge.resume_queue(text), flowforge.configure_queue(text, bigint, interval), flowforge.redispatch(text),
    flowforge.prune(interval, bigint), flowforge.set_limit(text, bigint), flowforge.violations(), flowforge.ready_tasks(bigint)
to flowforge_operator;

grant select on
    flowforge.workflow_status, flowforge.workflow_version_status, flowforge.run_status, flowforge.run_input, flowforge.task_run_status, flowforge.attempt_status, flowforge.dead_letters,
    flowforge.queue_status, flowforge.worker_status, flowforge.unknown_handlers, flowforge.health, flowforge.limits
to flowforge_reader, flowforge_operator;
-- The views read the clock, with the rights of whoever reads them.
grant execute on function flowforge._clock(), flowforge._reading() to flowforge_reader, flowforge_operator;
