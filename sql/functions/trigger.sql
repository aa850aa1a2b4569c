-- trigger, trigger_many: create runs.
--
-- Called by clients, in any transaction and at any isolation level. Locks nothing but what it inserts. Creates the run
-- and every task run as pending, and stops: dispatch is the scheduler's. Repeatable through the idempotency key.
-- Raises WF001, WF002, WF004, WF005.

create or replace function flowforge._trigger(
    p_workflow text, p_inputs jsonb[], p_keys text[], p_version bigint, p_priority bigint, p_delay interval, p_labels jsonb)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_created_at timestamptz;
    v_now timestamptz;
    v_count integer := cardinality(p_inputs);
    v_delay interval;
    v_workflow_id bigint;
    v_version_id bigint;
    v_task_count bigint;
    v_run_ids bigint[];
    v_created bigint[];
    v_clash record;
begin
    perform flowforge._check_name('workflow', p_workflow);
    v_delay := flowforge._seconds('delay', p_delay, 0, 315360000);
    if (p_priority between -1000000 and 1000000) is not true then
        raise exception using errcode = 'WF001',
            message = format('priority is %s; -1000000 to 1000000 are allowed', coalesce(p_priority::text, 'null'));
    end if;
    if jsonb_typeof(p_labels) is distinct from 'object' then
        raise exception using errcode = 'WF001', message = format('labels must be an object, not %s', coalesce(jsonb_typeof(p_labels), 'null'));
    end if;
    -- A client may add traceparent by itself, which must not push over the limit what its caller gave.
    perform flowforge._check_payload('labels', p_labels - 'traceparent', 'max_labels_bytes');
    -- It travels as a header of every message of the run.
    if p_labels ? 'traceparent' and (p_labels ->> 'traceparent' ~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$') is not true then
        raise exception using errcode = 'WF001',
            message = format('label traceparent is %s; it must have the form of W3C Trace Context', flowforge._quoted(p_labels ->> 'traceparent')),
            hint = 'Such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.';
    end if;
    for v_at in 1..v_count loop
        if p_inputs[v_at] is null then
            raise exception using errcode = 'WF001', message = 'input is null; pass any JSON value, such as {}';
        end if;
        perform flowforge._check_payload('input', p_inputs[v_at]);
        if p_keys[v_at] is not null then
            perform flowforge._check_name('idempotency_key', p_keys[v_at], 'max_key_bytes');
        end if;
    end loop;

    select w.workflow_id, wv.workflow_version_id, wv.task_count into v_workflow_id, v_version_id, v_task_count
    from flowforge.workflow w
    cross join lateral (select wv.workflow_version_id, wv.task_count from flowforge.workflow_version wv
        where wv.workflow_id = w.workflow_id and wv.version = coalesce(p_version, w.current_version) limit 1) wv
    where w.name = p_workflow;
    if not found then
        if exists (select from flowforge.workflow w where w.name = p_workflow) then
            raise exception using errcode = 'WF002', message = format('workflow %s has no version %s', flowforge._quoted(p_workflow), p_version);
        end if;
        raise exception using errcode = 'WF002', message = format('there is no workflow %s', flowforge._quoted(p_workflow)),
            hint = 'Register it with define_workflow first.';
    end if;
    if v_count * v_task_count > flowforge._limit('max_trigger_task_runs') then
        raise exception using errcode = 'WF005',
            message = format('%s runs of %s tasks are too many for one call; at most %s task runs are allowed',
                v_count, v_task_count, flowforge._limit('max_trigger_task_runs'));
    end if;

    v_run_ids := array(select nextval('flowforge.run_run_id_seq') from generate_series(1, v_count));
    v_created_at := flowforge._clock();
    with inserted as (
        insert into flowforge.run (run_id, workflow_id, workflow_version_id, priority, unsettled, created_at, idempotency_key, labels, input)
        overriding system value
        select v_run_ids[u.pos], v_workflow_id, v_version_id, p_priority, v_task_count, v_created_at, u.key, p_labels, u.input
        from unnest(p_inputs, p_keys) with ordinality u (input, key, pos)
        -- By key: two calls with the same keys in different order would wait for each other.
        order by u.key, u.pos
        on conflict (workflow_id, idempotency_key) where idempotency_key is not null do nothing
        returning run_id
    )
    select coalesce(array_agg(i.run_id order by i.run_id), '{}') into v_created from inserted i;

    -- Another call with one of the keys may have been waited for: what comes in line is no earlier than when it came.
    v_now := flowforge._clock();
    insert into flowforge.task_run (run_id, task_id, queue_id, priority, unmet, available_at, stage)
    select r.run_id, t.task_id, t.queue_id, t.priority + p_priority, t.upstream_count, v_now + v_delay,
        case when t.upstream_count > 0 then 'blocked' when v_delay > '0' then 'delayed' else 'eligible' end::flowforge.task_run_stage
    from unnest(v_created) r (run_id)
    cross join lateral (select t.task_id, t.queue_id, t.priority, t.upstream_count from flowforge.task t
        where t.workflow_version_id = v_version_id order by t.task_id) t;

    if cardinality(v_created) < v_count then
        -- Some keys were taken, by earlier calls or by an earlier position of this one.
        v_run_ids := array(
            select coalesce(e.run_id, case when v_run_ids[u.pos] = any (v_created) then v_run_ids[u.pos] end)
            from unnest(p_keys) with ordinality u (key, pos)
            left join lateral (select r.run_id from flowforge.run r
                -- Written so that only the index of keys serves, never that of all runs of the workflow.
                where r.workflow_id is not distinct from v_workflow_id and r.idempotency_key = u.key limit 1) e on true
            order by u.pos);
        if array_position(v_run_ids, null) is not null then
            raise exception using errcode = '40001', message = 'the run that held an idempotency key has just been pruned; repeat the call';
        end if;
        select u.key, r.run_id into v_clash
        from unnest(v_run_ids, p_keys, p_inputs) u (run_id, key, input)
        cross join lateral (select r.run_id, r.input from flowforge.run r where r.run_id = u.run_id limit 1) r
        where r.input is distinct from u.input limit 1;
        if found then
            raise exception using errcode = 'WF004',
                message = format('idempotency_key %s of workflow %s belongs to run %s, which has another input',
                    flowforge._quoted(v_clash.key), flowforge._quoted(p_workflow), v_clash.run_id),
                hint = 'Use a new key for new input.';
        end if;
    end if;
    if v_created <> '{}' then
        perform flowforge._wake_scheduler();
    end if;
    return v_run_ids;
end
$$;
comment on function flowforge._trigger(text, jsonb[], text[], bigint, bigint, interval, jsonb) is
    'Creates one run for each input; the work of trigger and trigger_many.';

create or replace function flowforge.trigger(
    workflow text, input jsonb default '{}', idempotency_key text default null, version bigint default null,
    priority bigint default 0, delay interval default '0', labels jsonb default '{}')
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return (flowforge._trigger(trigger.workflow, array[trigger.input], array[trigger.idempotency_key], trigger.version,
        trigger.priority, trigger.delay, trigger.labels))[1];
end
$$;
comment on function flowforge.trigger(text, jsonb, text, bigint, bigint, interval, jsonb) is
    'Creates a run of a workflow and answers its run_id. With an idempotency_key, the same key and input answer the same run for as long as that run is not pruned. priority is added to that of each task. delay: before anything of it is dispatched. labels: an object, kept with the run for people. Raises WF001, WF002 (no such workflow or version), WF004 (key reused with other input), WF005 (a limit), 40001 (the run that held the key has just been pruned: repeat the call).';

create or replace function flowforge.trigger_many(workflow text, inputs jsonb[], idempotency_keys text[] default null)
returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if trigger_many.inputs is null
        or format('[1:%s]', cardinality(trigger_many.inputs)) <> array_dims(trigger_many.inputs)
        or format('[1:%s]', cardinality(trigger_many.idempotency_keys)) <> array_dims(trigger_many.idempotency_keys)
    then
        raise exception using errcode = 'WF001',
            message = 'inputs must be an array of JSON values, idempotency_keys one of texts or null, each of one dimension, counted from 1';
    end if;
    if cardinality(trigger_many.inputs) <> cardinality(trigger_many.idempotency_keys) then
        raise exception using errcode = 'WF001', message = format('there are %s inputs but %s idempotency_keys',
            cardinality(trigger_many.inputs), cardinality(trigger_many.idempotency_keys));
    end if;
    if cardinality(trigger_many.inputs) > flowforge._limit('max_trigger_runs') then
        raise exception using errcode = 'WF005', message = format('%s inputs; at most %s are allowed',
            cardinality(trigger_many.inputs), flowforge._limit('max_trigger_runs'));
    end if;
    return flowforge._trigger(trigger_many.workflow, trigger_many.inputs,
        coalesce(trigger_many.idempotency_keys, array_fill(null::text, array[cardinality(trigger_many.inputs)])), null, 0, '0', '{}');
end
$$;
comment on function flowforge.trigger_many(text, jsonb[], text[]) is
    'Creates one run for each input and answers the run ids in the order of the inputs. Raises WF001, WF002, WF004, WF005, 40001, as trigger does; then none is created.';
