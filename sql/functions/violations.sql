-- violations, ready_tasks: the invariants, stated declaratively and checked against what the functions maintain.
-- Lock nothing. Look at active runs and at what is active in ended ones; not at finished history.

create or replace function flowforge._rule_holds(p_run_id bigint, p_task_id bigint) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select flowforge._rule_met(t.rule, t.upstream_count, u.succeeded, u.failed)
        from flowforge.task t
        cross join lateral (
            select count(*) filter (where tr.state = 'succeeded') as succeeded,
                count(*) filter (where tr.state in ('failed', 'cancelled')) as failed
            from flowforge.task_dependency d
            cross join lateral (select tr.state from flowforge.task_run tr
                where tr.run_id = p_run_id and tr.task_id = d.upstream_task_id and tr.map_index is null limit 1) tr
            where d.task_id = t.task_id) u
        where t.task_id = p_task_id);
end
$$;
comment on function flowforge._rule_holds(bigint, bigint) is
    'Whether the trigger rule of a task is met by the present states of its upstreams.';

create or replace function flowforge.ready_tasks(run_id bigint)
returns table (task_run_id bigint, task text, map_index bigint)
language sql stable security definer
set search_path = pg_catalog, pg_temp
begin atomic
    select tr.task_run_id, t.name, tr.map_index
    from flowforge.run r
    join flowforge.task_run tr on tr.run_id = r.run_id
    join flowforge.task t on t.task_id = tr.task_id
    join flowforge.queue q on q.queue_id = tr.queue_id
    where r.run_id = ready_tasks.run_id and r.cancel_requested_at is null
        and tr.state = 'pending' and tr.available_at <= flowforge._clock() and q.paused_at is null
        and case
            when tr.map_index is not null then tr.generation = (
                select own.generation from flowforge.task_run own
                where own.run_id = tr.run_id and own.task_id = tr.task_id and own.map_index is null)
            when t.map_task_id is not null then false
            else flowforge._count_unmet(tr.run_id, tr.task_id, tr.generation, null) = 0
                and flowforge._rule_holds(tr.run_id, tr.task_id)
        end
    order by tr.task_run_id;
end;
comment on function flowforge.ready_tasks(bigint) is
    'Task runs of a run that may be dispatched now, answered straight from the edges: the oracle for the counters. The own row of a map is never dispatched, only its elements.';

create or replace function flowforge.violations()
returns table (rule text, run_id bigint, task_run_id bigint, detail text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowforge._clock();
begin
    -- G1: what waits agrees with its edges. Offset 0 makes this start from the active runs, never from all task runs.
    return query
        select v.rule, w.run_id, w.task_run_id, case v.rule
                when 'G1 counter' then format('unmet is %s, counted are %s', w.unmet, w.counted)
                else format('waits for nothing, and is %s%s', w.stage, case when w.rule_met then '' else ' against its rule' end)
            end
        from (
            select tr.run_id, tr.task_run_id, tr.unmet, tr.stage,
                case when tr.map_count is null then u.unsettled
                    else flowforge._count_unmet(tr.run_id, tr.task_id, tr.generation, tr.map_count) end as counted,
                flowforge._rule_met(t.rule, t.upstream_count, u.succeeded, u.failed) as rule_met
            from flowforge.run r
            cross join lateral (
                select tr.run_id, tr.task_run_id, tr.task_id, tr.generation, tr.map_count, tr.unmet, tr.stage
                from flowforge.task_run tr
                where tr.run_id = r.run_id and tr.map_index is null and tr.state = 'pending' offset 0) tr
            cross join lateral (select t.rule, t.upstream_count from flowforge.task t where t.task_id = tr.task_id limit 1) t
            cross join lateral (
                select count(*) filter (where u.stage <> 'settled') as unsettled,
                    count(*) filter (where u.state = 'succeeded') as succeeded,
                    count(*) filter (where u.state in ('failed', 'cancelled')) as failed
                from flowforge.task_dependency d
                cross join lateral (select u.state, u.stage from flowforge.task_run u
                    where u.run_id = tr.run_id and u.task_id = d.upstream_task_id and u.map_index is null limit 1) u
                where d.task_id = tr.task_id) u
            where r.finished_at is null) w
        cross join lateral (values
            ('G1 counter', w.unmet <> w.counted),
            ('G1 judgement', w.unmet = 0 and (w.stage = 'blocked' or not w.rule_met))) v (rule, broken)
        where v.broken;
    -- G2: runs and their task runs agree.
    return query
        select 'G2 unsettled', r.run_id, null::bigint, format('unsettled is %s, counted are %s', r.unsettled, c.unsettled)
        from flowforge.run r
        cross join lateral (select count(*) as unsettled from flowforge.task_run tr where tr.run_id = r.run_id and tr.stage <> 'settled') c
        where r.finished_at is null and (r.unsettled <> c.unsettled or c.unsettled = 0);
    return query
        select 'G2 ended run', tr.run_id, tr.task_run_id, format('the run has ended, but this is %s', tr.state)
        from (
            -- One by one, since each has its index of live rows.
            select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'eligible'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'delayed'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'expand'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'reoffered'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'dispatched'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.stage = 'unsettled'
            union all select e.run_id, e.task_run_id, e.state from flowforge.task_run e where e.lease_expires_at is not null
            -- Of what still waits for others there is no index: in the runs that ended last.
            union all select e.run_id, e.task_run_id, e.state
            from (select r.run_id from flowforge.run r where r.finished_at is not null order by r.finished_at desc limit 50) r
            cross join lateral (select e.run_id, e.task_run_id, e.state from flowforge.task_run e
                where e.run_id = r.run_id and e.stage = 'blocked' offset 0) e) tr
        cross join lateral (select r.finished_at from flowforge.run r where r.run_id = tr.run_id limit 1) r
        where r.finished_at is not null;
    -- G3: whoever runs holds a lease.
    return query
        select 'G3 lease', tr.run_id, tr.task_run_id, 'running without token, owner, claim or expiry'
        from flowforge.run r
        cross join lateral (select tr.run_id, tr.task_run_id from flowforge.task_run tr
            where tr.run_id = r.run_id and tr.stage = 'leased'
                and (tr.fencing_token < 1 or tr.lease_owner is null or tr.claim_id is null or tr.lease_expires_at is null) offset 0) tr
        where r.finished_at is null;
    -- G4: what is ready will be delivered. Ten seconds are left to a scheduler that is about to arm it again.
    return query
        select 'G4 delivery', tr.run_id, tr.task_run_id, 'ready, but with nothing to publish, and not armed again in time'
        from flowforge.task_run tr
        where tr.stage = 'dispatched' and (tr.redispatch_at > v_now - interval '10 s') is not true
            and (select true from flowforge.outbox o where o.task_run_id = tr.task_run_id
                     and o.dispatch_id = tr.dispatch_id and coalesce(o.published_at, o.parked_at) is null limit 1) is null;
end
$$;
comment on function flowforge.violations() is
    'Broken invariants: empty on a healthy system, backlog, pauses and back-offs included. rule: G1 counters and judgements, G2 runs, G3 leases, G4 delivery.';
