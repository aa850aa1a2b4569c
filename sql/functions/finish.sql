-- finish_task_run, finish_task_runs: a worker reports how an execution ended.
--
-- Locks, in id order, only task runs that are running under the given token; a stale call locks nothing. Never touches
-- the run or a child: the task run becomes finished and unsettled, and the scheduler's settle does the rest. Safe to
-- repeat: answers repeated. Raises WF001, WF005, WF007.

create or replace function flowforge._backoff(p_task_id bigint, p_failures bigint) returns interval
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- The exponent is bounded, since the power of a large attempt number overflows; jitter only ever adds.
    return (
        select make_interval(secs =>
            least(t.retry_max_delay, t.retry_delay * power(t.retry_backoff, least(p_failures - 1, 60)::double precision))
            * (1 + t.retry_jitter * random()))
        from flowforge.task t where t.task_id = p_task_id);
end
$$;
comment on function flowforge._backoff(bigint, bigint) is
    'Delay before the next attempt after so many failures: exponential, capped, with additive jitter.';

create or replace function flowforge._end_attempt(
    p_task_run_ids bigint[], p_outcomes text[], p_errors text[], p_retryables boolean[], p_answered boolean, p_now timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_states text[];
    v_delays interval[];
begin
    -- Decided in one statement, written by a later one; the rows are locked.
    select array_agg(
            case
                when (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is not null then 'cancelled'
                when p_outcomes[flowforge._position(p_task_run_ids, tr.task_run_id)] = 'cancelled' then 'refused'
                when p_retryables[flowforge._position(p_task_run_ids, tr.task_run_id)]
                    and tr.failures + 1 < (select t.max_attempts from flowforge.task t where t.task_id = tr.task_id) then 'pending'
                else 'failed'
            end order by tr.task_run_id),
        array_agg(flowforge._backoff(tr.task_id, tr.failures + 1) order by tr.task_run_id)
    into v_states, v_delays
    from flowforge.task_run tr where tr.task_run_id = any (p_task_run_ids);
    if 'refused' = any (v_states) then
        raise exception using errcode = 'WF007',
            message = format('task run %s cannot finish as cancelled: its run is not being cancelled',
                p_task_run_ids[array_position(v_states, 'refused')]),
            hint = 'Allowed are succeeded and failed.';
    end if;

    insert into flowforge.attempt (task_run_id, attempt, fencing_token, dispatch_id, outcome, answered, owner, started_at, ended_at, error)
    select tr.task_run_id, tr.attempt, tr.fencing_token, tr.dispatch_id,
        p_outcomes[flowforge._position(p_task_run_ids, tr.task_run_id)], p_answered, tr.lease_owner, tr.started_at, p_now,
        p_errors[flowforge._position(p_task_run_ids, tr.task_run_id)]
    from flowforge.task_run tr where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running';

    update flowforge.task_run tr
    set (state, stage, attempt, dispatch_id, available_at, finished_at) = (
            select n.state::flowforge.task_run_state,
                case when n.state <> 'pending' then 'unsettled' when n.delay > '0' then 'delayed' else 'eligible' end::flowforge.task_run_stage,
                tr.attempt + (n.state = 'pending')::int,
                case when n.state <> 'pending' then tr.dispatch_id end,
                case when n.state = 'pending' then p_now + n.delay else tr.available_at end,
                case when n.state <> 'pending' then p_now end
            from (select v_states[flowforge._position(p_task_run_ids, tr.task_run_id)] as state,
                         v_delays[flowforge._position(p_task_run_ids, tr.task_run_id)] as delay) n),
        failures = tr.failures + 1, reaps = 0, redispatches = 0, error = p_errors[flowforge._position(p_task_run_ids, tr.task_run_id)],
        claim_id = null, lease_owner = null, lease_expires_at = null, lease_length = null, deadline = null, start_deadline = null,
        unknown_handler_since = null
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running';
end
$$;
comment on function flowforge._end_attempt(bigint[], text[], text[], boolean[], boolean, timestamptz) is
    'Ends the executions of locked running task runs (ids ascending) that did not succeed: cancelled in a cancelled run, else the next attempt while the budget lasts, else failed. Records each. Raises WF007 for cancelled in a run that is not being cancelled.';

create or replace function flowforge._cut_error(p_error text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
begin atomic
    select case when length(p_error) > flowforge._limit('max_error_chars')
        then left(p_error, flowforge._limit('max_error_chars')::int) || ' [cut off]' else p_error end;
end;
comment on function flowforge._cut_error(text) is 'An error text, cut to max_error_chars.';

create or replace function flowforge.finish_task_runs(
    task_run_ids bigint[], fencing_tokens bigint[], outcomes text[], outputs jsonb[], errors text[], retryables boolean[])
returns table ("position" bigint, task_run_id bigint, answer text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ids bigint[];
    v_positions bigint[];
    v_succeeded bigint[];
    v_outputs jsonb[];
    v_other bigint[];
    v_outcomes text[];
    v_errors text[];
    v_retryables boolean[];
    v_accepted bigint[] := array[]::bigint[];
begin
    perform flowforge._check_batch('finish_task_runs', array[
        cardinality(finish_task_runs.task_run_ids), cardinality(finish_task_runs.fencing_tokens), cardinality(finish_task_runs.outcomes),
        cardinality(finish_task_runs.outputs), cardinality(finish_task_runs.errors), cardinality(finish_task_runs.retryables)]);
    -- They are read by position, so each must count from 1, in one dimension.
    if format('[1:%s]', cardinality(finish_task_runs.task_run_ids)) <> any (array[
        array_dims(finish_task_runs.task_run_ids), array_dims(finish_task_runs.fencing_tokens), array_dims(finish_task_runs.outcomes),
        array_dims(finish_task_runs.outputs), array_dims(finish_task_runs.errors), array_dims(finish_task_runs.retryables)])
    then
        raise exception using errcode = 'WF001', message = 'finish: the arrays must have one dimension, counted from 1';
    end if;
    if array_position(finish_task_runs.task_run_ids, null) is not null or array_position(finish_task_runs.fencing_tokens, null) is not null
        or array_position(finish_task_runs.retryables, null) is not null
    then
        raise exception using errcode = 'WF001', message = 'finish: task_run_id, fencing_token and retryable must not be null';
    end if;
    for v_at in 1..cardinality(finish_task_runs.outcomes) loop
        if (finish_task_runs.outcomes[v_at] in ('succeeded', 'failed', 'cancelled')) is not true then
            raise exception using errcode = 'WF001', message = format('finish: outcome %s of task run %s is not allowed',
                flowforge._quoted(finish_task_runs.outcomes[v_at]), finish_task_runs.task_run_ids[v_at]),
                hint = 'Allowed are succeeded, failed and cancelled.';
        end if;
        perform flowforge._check_payload('output', finish_task_runs.outputs[v_at]);
    end loop;

    select array_agg(l.task_run_id order by l.task_run_id), array_agg(u.pos order by l.task_run_id) into v_ids, v_positions
    from (select distinct on (i.task_run_id, i.fencing_token) i.task_run_id, i.fencing_token, i.pos
          from unnest(finish_task_runs.task_run_ids, finish_task_runs.fencing_tokens) with ordinality i (task_run_id, fencing_token, pos)
          order by i.task_run_id, i.fencing_token, i.pos) u
    cross join lateral (
        select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = u.task_run_id and tr.state = 'running' and tr.fencing_token = u.fencing_token
        for no key update) l;
    v_now := flowforge._clock();

    if v_ids is not null then
        select array_agg(u.task_run_id order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] = 'succeeded'),
            array_agg(finish_task_runs.outputs[u.pos] order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] = 'succeeded'),
            array_agg(u.task_run_id order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] <> 'succeeded'),
            array_agg(finish_task_runs.outcomes[u.pos] order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] <> 'succeeded'),
            array_agg(flowforge._cut_error(finish_task_runs.errors[u.pos]) order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] <> 'succeeded'),
            array_agg(finish_task_runs.retryables[u.pos] order by u.task_run_id) filter (where finish_task_runs.outcomes[u.pos] <> 'succeeded')
        into v_succeeded, v_outputs, v_other, v_outcomes, v_errors, v_retryables
        from unnest(v_ids, v_positions) u (task_run_id, pos);

        if v_succeeded is not null then
            with finished as (
                update flowforge.task_run tr
                set state = 'succeeded', stage = 'unsettled', finished_at = v_now, error = null, reaps = 0,
                    (output, output_bytes) = (
                        select o.output, flowforge._bytes(o.output)
                        from (select coalesce(v_outputs[flowforge._position(v_succeeded, tr.task_run_id)], 'null') as output offset 0) o),
                    claim_id = null, lease_owner = null, lease_expires_at = null, lease_length = null, deadline = null,
                    start_deadline = null, unknown_handler_since = null
                where tr.task_run_id = any (v_succeeded) and tr.state = 'running'
                    and tr.fencing_token = finish_task_runs.fencing_tokens[v_positions[flowforge._position(v_ids, tr.task_run_id)]]
                returning tr.task_run_id
            )
            select coalesce(array_agg(f.task_run_id), '{}') into v_accepted from finished f;
        end if;
        if v_other is not null then
            perform flowforge._end_attempt(v_other, v_outcomes, v_errors, v_retryables, true, v_now);
            v_accepted := v_accepted || v_other;
        end if;
        perform flowforge._wake_scheduler();
    end if;

    return query
        select u.pos, u.task_run_id,
            case
                when u.task_run_id = any (v_accepted) and u.pos = v_positions[flowforge._position(v_ids, u.task_run_id)] then 'accepted'
                -- Not exists (…): that may be hashed, from a scan of the whole table.
                when (select true from flowforge.task_run tr where tr.task_run_id = u.task_run_id and tr.state = 'succeeded'
                          and tr.fencing_token = u.fencing_token limit 1)
                    or (select true from flowforge.attempt a where a.task_run_id = u.task_run_id
                            and a.fencing_token = u.fencing_token and a.answered limit 1) then 'repeated'
                else 'fenced'
            end
        from unnest(finish_task_runs.task_run_ids, finish_task_runs.fencing_tokens) with ordinality u (task_run_id, fencing_token, pos)
        order by u.pos;
end
$$;
comment on function flowforge.finish_task_runs(bigint[], bigint[], text[], jsonb[], text[], boolean[]) is
    'Finishes executions under their tokens; one answer for each position: accepted, repeated (this token was answered before; that answer stands) or fenced (the token holds nothing: nothing was changed). outcome succeeded stores output (null: JSON null); failed stores error and, while attempts are left and retryable, makes the next attempt pending; cancelled only in a run being cancelled. Raises WF001, WF005, WF007; then nothing of the batch is done.';

create or replace function flowforge.finish_task_run(
    task_run_id bigint, fencing_token bigint, outcome text, output jsonb default null, error text default null, retryable boolean default true)
returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    return (
        select f.answer from flowforge.finish_task_runs(array[finish_task_run.task_run_id], array[finish_task_run.fencing_token],
            array[finish_task_run.outcome], array[finish_task_run.output], array[finish_task_run.error], array[finish_task_run.retryable]) f);
end
$$;
comment on function flowforge.finish_task_run(bigint, bigint, text, jsonb, text, boolean) is
    'Finishes one execution under its token: accepted, repeated or fenced, as finish_task_runs answers it. Raises WF001, WF005, WF007.';
