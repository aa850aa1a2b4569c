-- retry_run: an operator runs a part of a run again.
--
-- Lock order: run, then the task runs concerned in id order. Settles first. Repeatable through request_id. Raises
-- WF001, WF002, WF004, WF007, WF008.

create or replace function flowforge._below(p_task_ids bigint[]) returns bigint[]
language sql stable
set search_path = pg_catalog, pg_temp
begin atomic
    with recursive below (task_id) as (
        select unnest(p_task_ids)
        union
        -- The offset keeps this an index scan for each row: as a join it may be planned as a scan of the whole table,
        -- once for each level.
        select d.task_id from below b
        cross join lateral (select td.task_id from flowforge.task_dependency td where td.upstream_task_id = b.task_id offset 0) d
    )
    select coalesce(array_agg(b.task_id order by b.task_id), '{}') from below b;
end;
comment on function flowforge._below(bigint[]) is 'The given tasks and all that depend on them, directly or not.';

create or replace function flowforge._failed_part(p_run_id bigint, p_locked bigint[]) returns bigint[]
language sql stable
set search_path = pg_catalog, pg_temp
begin atomic
    with recursive part (task_id) as (
        select tr.task_id from flowforge.task_run tr
        where tr.run_id = p_run_id and tr.map_index is null and tr.state in ('failed', 'cancelled')
            -- Not what has failed since: that comes after this retry.
            and p_locked[flowforge._position(p_locked, tr.task_run_id)] = tr.task_run_id
        union
        select c.task_id from part p
        cross join lateral (select td.task_id from flowforge.task_dependency td where td.upstream_task_id = p.task_id offset 0) d
        cross join lateral (select tr.task_id from flowforge.task_run tr
            where tr.run_id = p_run_id and tr.task_id = d.task_id and tr.map_index is null and tr.state = 'skipped' limit 1) c
    )
    select coalesce(array_agg(p.task_id order by p.task_id), '{}') from part p;
end;
comment on function flowforge._failed_part(bigint, bigint[]) is
    'The failed and cancelled tasks of a run whose rows the caller has locked, and those skipped because of them.';

create or replace function flowforge._refuse_retry_under_way(p_run_id bigint, p_task_ids bigint[], p_locked bigint[]) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_busy record;
begin
    select (select t.name from flowforge.task t where t.task_id = tr.task_id) as task,
        case when tr.state = 'pending' and tr.map_count is not null then 'under way as a map' when tr.state = 'ready' then 'ready' else 'running' end as what into v_busy
    from unnest(p_task_ids) b (task_id)
    cross join lateral (
        select tr.task_id, tr.state, tr.map_count from flowforge.task_run tr
        where tr.run_id = p_run_id and tr.task_id = b.task_id and tr.map_index is null
            and (tr.state in ('ready', 'running') or tr.state = 'pending' and tr.map_count is not null
                -- Ready or running it was when the others were locked.
                or (p_locked[flowforge._position(p_locked, tr.task_run_id)] = tr.task_run_id) is not true)
        limit 1) tr
    limit 1;
    if found then
        raise exception using errcode = 'WF007',
            message = format('run %s cannot be retried now: task %s is %s', p_run_id, flowforge._quoted(v_busy.task), v_busy.what),
            hint = 'Wait until it has ended, or cancel the run first.';
    end if;
end
$$;
comment on function flowforge._refuse_retry_under_way(bigint, bigint[], bigint[]) is
    'Raises WF007 naming a task of the list that is ready, running, a map under way, or was not locked because it was so a moment ago.';

create or replace function flowforge._reset(p_run_id bigint, p_task_ids bigint[], p_below bigint[], p_expand_again bigint[], p_now timestamptz)
returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_reset bigint[];
    v_elements bigint[];
    v_affected bigint[];
    v_free bigint[];
    v_count bigint;
begin
    -- Own rows to reset, and the elements that failed of maps that keep their expansion. What the others expanded to has
    -- ended with them.
    select coalesce(array_agg(l.task_run_id order by l.task_run_id) filter (where l.map_index is null), '{}'),
        coalesce(array_agg(l.task_run_id order by l.task_run_id) filter (where l.map_index is not null), '{}')
    into v_reset, v_elements
    from unnest(p_task_ids) b (task_id)
    cross join lateral (
        select tr.task_run_id, tr.map_index
        from flowforge.task_run tr
        where tr.run_id = p_run_id and tr.task_id = b.task_id
            and case when tr.map_index is null then tr.state <> 'pending'
                else tr.state in ('failed', 'cancelled') and b.task_id <> all (p_expand_again) and tr.generation = (
                    select own.generation from flowforge.task_run own
                    where own.run_id = p_run_id and own.task_id = b.task_id and own.map_index is null) end
        offset 0) l;

    insert into flowforge.attempt (task_run_id, attempt, fencing_token, dispatch_id, outcome, answered, owner, started_at, ended_at, error)
    select tr.task_run_id, tr.attempt, tr.fencing_token, tr.dispatch_id, tr.state::text, tr.state = 'succeeded', tr.last_owner,
        tr.started_at, tr.finished_at, tr.error
    from flowforge.task_run tr where tr.task_run_id = any (v_reset || v_elements) and tr.dispatch_id is not null
    on conflict (task_run_id, attempt, fencing_token) do nothing;

    update flowforge.task_run tr
    set state = 'pending', stage = case when tr.map_index is null then 'blocked' else 'eligible' end::flowforge.task_run_stage,
        unmet = 0, attempt = tr.attempt + (tr.dispatch_id is not null)::int, dispatch_id = null, failures = 0, reaps = 0,
        redispatches = 0, output = null, output_bytes = null, error = null, available_at = p_now, ready_at = null, started_at = null, finished_at = null,
        unknown_handler_since = null,
        generation = tr.generation + (tr.map_index is null and tr.task_id = any (p_expand_again))::int,
        map_count = case when tr.map_index is null and tr.task_id = any (p_expand_again) then null else tr.map_count end
    where tr.task_run_id = any (v_reset || v_elements) and tr.state in ('succeeded', 'failed', 'cancelled', 'skipped');
    get diagnostics v_count = row_count;
    update flowforge.run r
    set state = 'running', finished_at = null, cancel_requested_at = null, cancel_sweep_at = null, cancel_reason = null,
        unsettled = r.unsettled + v_count
    where r.run_id = p_run_id;

    -- Counters of all that waits at or below what was reset, recounted from the edges by "not settled".
    v_affected := array(
        select tr.task_run_id from unnest(p_below) b (task_id)
        cross join lateral (select tr.task_run_id from flowforge.task_run tr
            where tr.run_id = p_run_id and tr.task_id = b.task_id and tr.map_index is null and tr.state = 'pending' limit 1) tr
        order by tr.task_run_id);
    with recounted as (
        update flowforge.task_run tr
        set (unmet, stage) = (
            select n.unmet, case when n.unmet > 0 then 'blocked' else tr.stage end
            from (select flowforge._count_unmet(tr.run_id, tr.task_id, tr.generation, tr.map_count) as unmet offset 0) n)
        where tr.task_run_id = any (v_affected) and tr.state = 'pending'
        returning tr.task_run_id, tr.unmet
    )
    select array_agg(r.task_run_id order by r.task_run_id) filter (where r.unmet = 0) into v_free from recounted r;
    if v_free is not null then
        perform flowforge._judge(v_free, p_now);
    end if;
    return v_count;
end
$$;
comment on function flowforge._reset(bigint, bigint[], bigint[], bigint[], timestamptz) is
    'Resets task runs of a locked run, recounts what waits below, and judges what waits for nothing. Answers how many were reset.';

create or replace function flowforge._count_unmet(p_run_id bigint, p_task_id bigint, p_generation bigint, p_map_count bigint) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_map_count is null then
        return (
            select count(*) from flowforge.task_dependency d
            cross join lateral (select u.stage from flowforge.task_run u
                where u.run_id = p_run_id and u.task_id = d.upstream_task_id and u.map_index is null limit 1) u
            where d.task_id = p_task_id and u.stage <> 'settled');
    end if;
    return (
        select count(*) from flowforge.task_run e
        where e.run_id = p_run_id and e.task_id = p_task_id and e.map_index >= 0 and e.generation = p_generation
            and e.stage <> 'settled');
end
$$;
comment on function flowforge._count_unmet(bigint, bigint, bigint, bigint) is
    'What an own row waits for, counted from the edges or, for an expanded map, from its elements.';

create or replace function flowforge._lock_for_retry(p_run_id bigint, p_from_task text) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_task_ids bigint[];
    v_unsettled bigint[];
begin
    -- What may be reset: with a name that task and everything below, else what has failed, been cancelled or is still to
    -- be settled, and everything below, since settling can fail or skip only that. Both lists are of one moment: what
    -- finishes after it comes after this retry.
    select coalesce(array_agg(distinct tr.task_id), '{}'), array_agg(tr.task_run_id) filter (where tr.stage = 'unsettled')
    into v_task_ids, v_unsettled
    from flowforge.task_run tr
    where tr.run_id = p_run_id and (tr.state in ('failed', 'cancelled') or tr.stage = 'unsettled');
    if p_from_task is not null then
        v_task_ids := array(select l.task_id from flowforge.run r
            cross join lateral (select t.task_id from flowforge.task t
                where t.workflow_version_id = r.workflow_version_id and t.name = p_from_task offset 0) l
            where r.run_id = p_run_id);
    end if;
    -- In one pass, as for a cancel, with what is to be settled. What is ready or running is refused, not waited for.
    -- Offset 0 keeps the step from a task to its rows a look-up by both columns, whatever the statistics.
    return array(
        select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = any (array(
                select l.task_run_id from unnest(flowforge._below(v_task_ids)) b (task_id)
                cross join lateral (select tr.task_run_id from flowforge.task_run tr
                    where tr.run_id = p_run_id and tr.task_id = b.task_id offset 0) l
                union
                select u.task_run_id from unnest(v_unsettled) u (task_run_id)))
            and tr.state not in ('ready', 'running')
        order by tr.task_run_id for no key update);
end
$$;
comment on function flowforge._lock_for_retry(bigint, text) is
    'Locks, in id order, what a retry settles, looks at and resets in a run locked by the caller. Answers their ids.';

create or replace function flowforge.retry_run(run_id bigint, from_task text default null, request_id text default null)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_run record;
    v_earlier record;
    v_ids bigint[];
    v_task_ids bigint[];
    v_below bigint[];
    v_expand_again bigint[];
    v_count bigint;
begin
    perform flowforge._require_read_committed('retry_run');
    if retry_run.request_id is not null then
        perform flowforge._check_name('request_id', retry_run.request_id, 'max_key_bytes');
    end if;
    perform from flowforge.run r where r.run_id = retry_run.run_id for no key update;
    if not found then
        raise exception using errcode = 'WF002', message = format('there is no run %s', coalesce(retry_run.run_id::text, 'null'));
    end if;
    select rr.task_runs, rr.from_task into v_earlier from flowforge.run_retry rr
    where rr.run_id = retry_run.run_id and rr.request_id = retry_run.request_id;
    if found then
        if v_earlier.from_task is distinct from retry_run.from_task then
            raise exception using errcode = 'WF004', message = format('request_id %s was used before for a retry of run %s from %s',
                flowforge._quoted(retry_run.request_id), retry_run.run_id,
                coalesce('task ' || flowforge._quoted(v_earlier.from_task), 'what had failed'));
        end if;
        return v_earlier.task_runs;
    end if;
    v_ids := flowforge._lock_for_retry(retry_run.run_id, retry_run.from_task);
    perform flowforge._settle_locked(v_ids, null);
    select r.state, r.cancel_requested_at, r.workflow_version_id into v_run from flowforge.run r where r.run_id = retry_run.run_id;
    if v_run.state = 'running' and v_run.cancel_requested_at is not null then
        raise exception using errcode = 'WF007', message = format('run %s cannot be retried now: it is being cancelled', retry_run.run_id),
            hint = 'Wait until it has ended.';
    end if;

    if retry_run.from_task is null then
        v_task_ids := flowforge._failed_part(retry_run.run_id, v_ids);
        v_below := flowforge._below(v_task_ids);
    else
        v_below := flowforge._below(array(
            select t.task_id from flowforge.task t
            where t.workflow_version_id = v_run.workflow_version_id and t.name = retry_run.from_task));
        v_task_ids := v_below;
        if v_below = '{}' then
            raise exception using errcode = 'WF002',
                message = format('run %s has no task %s', retry_run.run_id, flowforge._quoted(retry_run.from_task));
        end if;
    end if;

    perform flowforge._refuse_retry_under_way(retry_run.run_id, v_below, v_ids);
    v_now := flowforge._clock();

    -- A map expands again when anything that it waits for is reset, or when the retry starts at or above it by name.
    v_expand_again := array(
        select t.task_id from unnest(v_task_ids) b (task_id)
        cross join lateral (select t.task_id, t.map_task_id from flowforge.task t where t.task_id = b.task_id limit 1) t
        where t.map_task_id is not null
            and (retry_run.from_task is not null
                or exists (select from flowforge.task_dependency d where d.task_id = t.task_id and d.upstream_task_id = any (v_task_ids))));
    v_count := 0;
    if v_task_ids <> '{}' then
        v_count := flowforge._reset(retry_run.run_id, v_task_ids, v_below, v_expand_again, v_now);
        perform flowforge._settle_locked(v_ids, null);
        perform flowforge._wake_scheduler();
    end if;
    if v_count > 0 or retry_run.request_id is not null then
        insert into flowforge.run_retry (run_id, request_id, from_task, task_runs, requested_at)
        values (retry_run.run_id, coalesce(retry_run.request_id, gen_random_uuid()::text), retry_run.from_task, v_count, v_now);
    end if;
    return v_count;
end
$$;
comment on function flowforge.retry_run(bigint, text, text) is
    'Runs a part of a run again: without from_task what failed or was cancelled and what was skipped because of it, else that task and everything below it. Attempt numbers go on; budgets of attempts and reaps start anew. Answers how many task runs were reset (0: nothing to retry); the same request_id answers the same. Raises WF001 or WF005 (request_id is no name, or too long), WF002 (run or task), WF004 (the request_id was used with another from_task), WF007 (something concerned is ready or running, a map under way, the run being cancelled), WF008.';
