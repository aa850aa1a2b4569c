-- claim_task_run, claim_task_runs, claim_next: a worker becomes the owner of task runs.
--
-- A claim by message locks, in id order and waiting, only rows that match its guard (ready under the dispatch id, or
-- running under this very claim_id); it never skips a locked row, since who skips a row whose other claimer then rolls
-- back has lost a message. claim_next chooses its candidates itself and skips locked ones. Then the clock is read, and
-- one UPDATE that repeats the guard takes lease and token. Lock order: task runs in id order, then outbox rows (skipped
-- when locked: a claim waits for nothing that a publisher holds). Safe to repeat with the same claim_id and arguments.
-- Raises WF001, WF005.

create or replace function flowforge._take(p_task_run_ids bigint[], p_worker text, p_claim_id uuid, p_lease interval) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_taken bigint[];
begin
    with taken as (
        update flowforge.task_run tr
        set state = 'running', stage = 'leased', fencing_token = tr.fencing_token + 1, claim_id = p_claim_id,
            lease_owner = p_worker, last_owner = p_worker, started_at = v_now, redispatch_at = null,
            (lease_length, lease_expires_at, deadline) = (
                select coalesce(t.lease, p_lease), v_now + least(coalesce(t.lease, p_lease), t.time_limit), v_now + t.time_limit
                from flowforge.task t where t.task_id = tr.task_id)
        where tr.task_run_id = any (p_task_run_ids) and tr.state = 'ready'
            and (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is null
        returning tr.task_run_id
    )
    select coalesce(array_agg(t.task_run_id order by t.task_run_id), '{}') into v_taken from taken t;
    return v_taken;
end
$$;
comment on function flowforge._take(bigint[], text, uuid, interval) is
    'Makes locked ready task runs running under a lease and a new fencing token, unless their run is being cancelled. Answers those taken, ascending.';

create or replace function flowforge._give_again(p_task_run_ids bigint[], p_claim_id uuid) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := flowforge._clock();
begin
    update flowforge.task_run tr
    set lease_expires_at = greatest(tr.lease_expires_at, least(v_now + tr.lease_length, tr.deadline))
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running' and tr.claim_id is not distinct from p_claim_id;
end
$$;
comment on function flowforge._give_again(bigint[], uuid) is
    'A call was made before and its answer was lost: its claims, locked by the caller, are given back with a fresh lease.';

create or replace function flowforge._claim_pairs(
    p_task_run_ids bigint[], p_dispatch_ids uuid[], p_worker text, p_claim_id uuid, p_lease interval)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ready bigint[];
    v_held bigint[];
begin
    select coalesce(array_agg(l.task_run_id order by l.task_run_id) filter (where l.state = 'ready'), '{}'),
        array_agg(l.task_run_id order by l.task_run_id) filter (where l.state = 'running')
    into v_ready, v_held
    from (select distinct u.task_run_id, u.dispatch_id from unnest(p_task_run_ids, p_dispatch_ids) u (task_run_id, dispatch_id)
          order by u.task_run_id) u
    cross join lateral (
        select tr.task_run_id, tr.state from flowforge.task_run tr
        where tr.task_run_id = u.task_run_id and tr.dispatch_id = u.dispatch_id
            and (tr.state = 'ready' or tr.state = 'running' and tr.claim_id = p_claim_id)
        for no key update) l;
    if v_held is not null then
        perform flowforge._give_again(v_held, p_claim_id);
    end if;
    return flowforge._take(v_ready, p_worker, p_claim_id, p_lease) || v_held;
end
$$;
comment on function flowforge._claim_pairs(bigint[], uuid[], text, uuid, interval) is
    'Locks what matches the given pairs, waiting, and takes it; what this claim_id holds already is given back.';

create or replace function flowforge._claim_pairs_unlocked(
    p_task_run_ids bigint[], p_dispatch_ids uuid[], p_worker text, p_claim_id uuid, p_lease interval)
returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ready bigint[];
begin
    select coalesce(array_agg(l.task_run_id order by l.task_run_id), '{}') into v_ready
    from (select distinct u.task_run_id, u.dispatch_id from unnest(p_task_run_ids, p_dispatch_ids) u (task_run_id, dispatch_id)
          order by u.task_run_id) u
    cross join lateral (
        select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = u.task_run_id and tr.dispatch_id = u.dispatch_id and tr.state = 'ready'
        for no key update skip locked) l;
    return flowforge._take(v_ready, p_worker, p_claim_id, p_lease);
end
$$;
comment on function flowforge._claim_pairs_unlocked(bigint[], uuid[], text, uuid, interval) is
    'The second round of a claim: what has become ready since the first and is not locked. A second waiting lock could close a cycle.';

create or replace function flowforge._claim_reason(p_task_run_id bigint, p_dispatch_id uuid) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return coalesce((
        select case
            when tr.dispatch_id is distinct from p_dispatch_id then
                case when (select true from flowforge.attempt a
                           where a.task_run_id = tr.task_run_id and a.dispatch_id = p_dispatch_id limit 1)
                    then 'superseded' else 'unknown' end
            when tr.state = 'cancelled' then 'cancelled'
            when tr.state = 'running' then 'running'
            when tr.state = 'ready' then
                case when (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is not null
                    then 'cancelled' else 'ready' end
            else 'finished'
        end
        from flowforge.task_run tr
        where tr.task_run_id = p_task_run_id), 'unknown');
end
$$;
comment on function flowforge._claim_reason(bigint, uuid) is
    'Why a claim was not won: running, finished, superseded, cancelled, unknown, or ready, when it could be won after all.';

create or replace function flowforge._claim_answer(p_task_run_ids bigint[], p_dispatch_ids uuid[], p_won bigint[])
returns setof flowforge.claim_row
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return query
    select u.pos,
        case when c.task_run_id is not null then 'claimed'
            -- Still ready: another claimer has it locked at this moment.
            else coalesce(nullif(flowforge._claim_reason(u.task_run_id, u.dispatch_id), 'ready'), 'running')
        end,
        u.task_run_id, u.dispatch_id, c.fencing_token, c.attempt, c.run_id, c.workflow, c.task, c.handler, c.input,
        c.upstream_outputs, c.upstream_states, c.item, c.map_index, c.lease_length, c.lease_expires_at, c.time_limit
    from (select i.task_run_id, i.dispatch_id, i.pos,
              i.task_run_id = any (p_won)
              and row_number() over (partition by i.task_run_id, i.dispatch_id order by i.pos) = 1 as is_first
          from unnest(p_task_run_ids, p_dispatch_ids) with ordinality i (task_run_id, dispatch_id, pos)) u
    left join lateral (
        select tr.task_run_id, tr.fencing_token, tr.attempt, tr.run_id, r.workflow, d.task, d.handler, r.input, up.upstream_outputs,
            up.upstream_states, tr.item, tr.map_index, tr.lease_length, tr.lease_expires_at, d.time_limit
        from flowforge.task_run tr
        cross join lateral (
            select (select w.name from flowforge.workflow w where w.workflow_id = r.workflow_id) as workflow, r.input
            from flowforge.run r where r.run_id = tr.run_id limit 1) r
        cross join lateral (
            select t.name as task, t.handler, t.time_limit, t.map_task_id, t.upstream_count
            from flowforge.task t where t.task_id = tr.task_id limit 1) d
        cross join lateral (
            select coalesce(jsonb_object_agg(e.name, e.output) filter (where e.state = 'succeeded'), '{}') as upstream_outputs,
                coalesce(jsonb_object_agg(e.name, e.state) filter (where e.name is not null), '{}') as upstream_states
            from (
                select n.name, o.state, o.output
                from flowforge.task_dependency td
                cross join lateral (select t.name from flowforge.task t where t.task_id = td.upstream_task_id limit 1) n
                cross join lateral (
                    select uo.state, uo.output from flowforge.task_run uo
                    where uo.run_id = tr.run_id and uo.task_id = td.upstream_task_id and uo.map_index is null
                    limit 1) o
                -- An element has its own item; the whole mapped array is not copied into every claim.
                where td.task_id = tr.task_id and td.upstream_task_id is distinct from d.map_task_id and d.upstream_count > 0
            ) e) up
        where u.is_first and tr.task_run_id = u.task_run_id and tr.dispatch_id = u.dispatch_id
        limit 1
    ) c on true
    order by u.pos;
end
$$;
comment on function flowforge._claim_answer(bigint[], uuid[], bigint[]) is
    'One row for each input position: the winner''s row with all that a handler needs, or why it was not won.';

create or replace function flowforge.claim_task_runs(
    task_run_ids bigint[], dispatch_ids uuid[], worker text, claim_id uuid, lease interval)
returns setof flowforge.claim_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_lease interval := flowforge._check_lease(claim_task_runs.lease);
    v_won bigint[];
    v_again boolean;
begin
    perform flowforge._check_batch('claim_task_runs', array[cardinality(claim_task_runs.task_run_ids), cardinality(claim_task_runs.dispatch_ids)]);
    perform flowforge._check_flat('claim', array[array_dims(claim_task_runs.task_run_ids), array_dims(claim_task_runs.dispatch_ids)]);
    perform flowforge._check_name('worker', claim_task_runs.worker);
    if claim_task_runs.claim_id is null
        or array_position(claim_task_runs.task_run_ids, null) is not null
        or array_position(claim_task_runs.dispatch_ids, null) is not null
    then
        raise exception using errcode = 'WF001', message = 'claim: claim_id, task_run_id and dispatch_id must not be null';
    end if;

    v_won := flowforge._claim_pairs(claim_task_runs.task_run_ids, claim_task_runs.dispatch_ids,
        claim_task_runs.worker, claim_task_runs.claim_id, v_lease);
    if cardinality(v_won) < cardinality(claim_task_runs.task_run_ids) then
        -- The reaper may have given a task run back between the snapshot of the guard and now.
        select bool_or(flowforge._claim_reason(u.task_run_id, u.dispatch_id) = 'ready') into v_again
        from unnest(claim_task_runs.task_run_ids, claim_task_runs.dispatch_ids) u (task_run_id, dispatch_id)
        where u.task_run_id <> all (v_won);
        if v_again then
            v_won := v_won || flowforge._claim_pairs_unlocked(claim_task_runs.task_run_ids, claim_task_runs.dispatch_ids,
                claim_task_runs.worker, claim_task_runs.claim_id, v_lease);
        end if;
    end if;
    return query select a.* from flowforge._claim_answer(claim_task_runs.task_run_ids, claim_task_runs.dispatch_ids, v_won) a;
end
$$;
comment on function flowforge.claim_task_runs(bigint[], uuid[], text, uuid, interval) is
    'Claims task runs by their messages; one row for each input position. outcome: claimed, running (another delivery has it), finished, superseded (a newer attempt), cancelled, unknown. Only the same claim_id with the same arguments gets its claims back. lease: 0.1 s to 7 days; one in the definition wins. Raises WF001, WF005.';

create or replace function flowforge.claim_task_run(
    task_run_id bigint, dispatch_id uuid, worker text, claim_id uuid, lease interval)
returns setof flowforge.claim_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    return query
        select c.* from flowforge.claim_task_runs(array[claim_task_run.task_run_id], array[claim_task_run.dispatch_id],
            claim_task_run.worker, claim_task_run.claim_id, claim_task_run.lease) c;
end
$$;
comment on function flowforge.claim_task_run(bigint, uuid, text, uuid, interval) is
    'Claims one task run by its message: one row, as claim_task_runs answers it. Raises WF001, WF005.';

create or replace function flowforge.claim_next(
    queues text[], worker text, claim_id uuid, lease interval, max_rows bigint default 1)
returns setof flowforge.claim_row
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_lease interval := flowforge._check_lease(claim_next.lease);
    v_since timestamptz := (flowforge._frontiers()).v_dispatched;
    v_queue_id bigint;
    v_chosen bigint[];
    v_dispatch_ids uuid[];
    v_won bigint[];
begin
    perform flowforge._check_name('worker', claim_next.worker);
    perform flowforge._check_flat('claim_next', array[array_dims(claim_next.queues)]);
    perform flowforge._check_count('max_rows', claim_next.max_rows);
    if claim_next.queues is null or array_position(claim_next.queues, null) is not null or claim_next.claim_id is null then
        raise exception using errcode = 'WF001', message = 'claim_next: queues and claim_id must not be null';
    end if;
    -- A repeat of this call may overtake the call itself, whose answer was lost: one waits for the other here.
    perform pg_advisory_xact_lock(hashtextextended('flowforge.claim ' || claim_next.claim_id, 0));
    -- What it holds is locked: the answer must not tell the token of somebody who takes it over at this moment.
    v_won := array(select tr.task_run_id from flowforge.task_run tr where tr.claim_id = claim_next.claim_id
        order by tr.task_run_id for no key update);

    if v_won <> '{}' then
        perform flowforge._give_again(v_won, claim_next.claim_id);
    else
        -- Priority orders within a queue; the queues come in random order, so that none starves another.
        for v_queue_id in
            select q.queue_id
            from (select q.queue_id from flowforge.queue q where q.name = any (claim_next.queues) order by q.queue_id) q
            order by random()
        loop
            exit when cardinality(v_won) >= claim_next.max_rows;
            select coalesce(array_agg(c.task_run_id order by c.task_run_id), '{}') into v_chosen
            from (select tr.task_run_id from flowforge.task_run tr
                  where case when tr.stage = 'dispatched' then tr.queue_id end = v_queue_id and tr.redispatch_at >= v_since
                      -- One without a further token would fail every batch; fail_undeliverable takes it.
                      and tr.fencing_token < 9223372036854775807
                      and (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is null
                  order by tr.priority desc, tr.task_run_id
                  limit claim_next.max_rows - cardinality(v_won)
                  for no key update skip locked) c;
            continue when v_chosen = '{}';
            v_won := v_won || flowforge._take(v_chosen, claim_next.worker, claim_next.claim_id, v_lease);
        end loop;
        -- The orders to publish are consumed with the claim; one that a publisher holds is left to the sweep. "+ 0": in the
        -- order of the primary key, all that is in the outbox would be read for each, dead rows and all.
        delete from flowforge.outbox o
        where o.outbox_id = any (array(
            select l.outbox_id from unnest(v_won) u (task_run_id)
            cross join lateral (select o.outbox_id from flowforge.outbox o where o.task_run_id = u.task_run_id
                                order by o.outbox_id + 0 for update skip locked) l));
    end if;

    v_dispatch_ids := array(
        select l.dispatch_id from unnest(v_won) with ordinality u (task_run_id, pos)
        cross join lateral (select tr.dispatch_id from flowforge.task_run tr where tr.task_run_id = u.task_run_id limit 1) l
        order by u.pos);
    return query select a.* from flowforge._claim_answer(v_won, v_dispatch_ids, v_won) a;
end
$$;
comment on function flowforge.claim_next(text[], text, uuid, interval, bigint) is
    'Claims up to max_rows dispatched task runs of the given queues by priority: delivery without a broker. One row for each, outcome claimed. A repeat with the same claim_id answers what that claim holds, with a fresh lease, and chooses nothing new. Raises WF001, WF005.';
