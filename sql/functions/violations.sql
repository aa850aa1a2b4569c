-- violations, ready_tasks: the invariants, stated declaratively and checked against what the functions maintain.
-- Lock nothing. Look at active runs and at what is active in ended ones; not at finished history.

create or replace function flowforge._rule_holds(p_run_id bigint, p_task_id bigint) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
begin atomic
    select flowforge._rule_met(t.rule, t.upstream_count, count(u.state) filter (where u.state = 'succeeded'),
        count(u.state) filter (where u.state in ('failed', 'cancelled')))
    from flowforge.task t
    left join flowforge.task_dependency d on d.task_id = t.task_id
    left join flowforge.task_run u on u.run_id = p_run_id and u.task_id = d.upstream_task_id and u.map_index is null
    where t.task_id = p_task_id
    group by t.rule, t.upstream_count;
end;
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
as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowforge._clock();
begin
    -- G1: what waits agrees with its edges.
    return query
        select 'G1 counter', tr.run_id, tr.task_run_id, format('unmet is %s, counted are %s', tr.unmet, c.unmet)
        from flowforge.run r
        join flowforge.task_run tr on tr.run_id = r.run_id and tr.map_index is null and tr.state = 'pending'
        cross join lateral (select flowforge._count_unmet(tr.run_id, tr.task_id, tr.generation, tr.map_count) as unmet) c
        where r.finished_at is null and tr.unmet <> c.unmet;
    return query
        select 'G1 judgement', tr.run_id, tr.task_run_id,
            format('waits for nothing, and is %s%s', tr.stage, case when flowforge._rule_holds(tr.run_id, tr.task_id) then '' else ' against its rule' end)
        from flowforge.run r
        join flowforge.task_run tr on tr.run_id = r.run_id and tr.map_index is null and tr.state = 'pending'
        where r.finished_at is null and tr.unmet = 0
            and (tr.stage = 'blocked' or not flowforge._rule_holds(tr.run_id, tr.task_id));
    -- G2: runs and their task runs agree.
    return query
        select 'G2 unsettled', r.run_id, null::bigint, format('unsettled is %s, counted are %s', r.unsettled, c.unsettled)
        from flowforge.run r
        cross join lateral (select count(*) as unsettled from flowforge.task_run tr where tr.run_id = r.run_id and tr.stage <> 'settled') c
        where r.finished_at is null and (r.unsettled <> c.unsettled or c.unsettled = 0);
    return query
        select 'G2 ended run', tr.run_id, tr.task_run_id, format('the run has ended, but this is %s', tr.state)
        from flowforge.task_run tr
        join flowforge.run r on r.run_id = tr.run_id
        where tr.stage in ('eligible', 'delayed', 'expand', 'dispatched', 'leased', 'unsettled') and r.finished_at is not null;
    -- G3: whoever runs holds a lease.
    return query
        select 'G3 lease', tr.run_id, tr.task_run_id, 'running without token, owner, claim or expiry'
        from flowforge.task_run tr
        where tr.stage = 'leased'
            and (tr.fencing_token < 1 or tr.lease_owner is null or tr.claim_id is null or tr.lease_expires_at is null);
    -- G4: what is ready will be delivered. Ten seconds are left to a scheduler that is about to arm it again.
    return query
        select 'G4 delivery', tr.run_id, tr.task_run_id, 'ready, but with nothing to publish, and not armed again in time'
        from flowforge.task_run tr
        where tr.stage = 'dispatched' and (tr.redispatch_at > v_now - interval '10 s') is not true
            and not exists (select from flowforge.outbox o where o.task_run_id = tr.task_run_id
                            and o.dispatch_id = tr.dispatch_id and o.published_at is null);
end
$$;
comment on function flowforge.violations() is
    'Broken invariants: empty on a healthy system, backlog, pauses and back-offs included. rule: G1 counters and judgements, G2 runs, G3 leases, G4 delivery.';
