-- dispatch_ready, next_due: the scheduler decides what is dispatched.
--
-- Lock order: queue, then task runs, all skipping locked (what becomes due is moved in before, without a queue). State and
-- order to publish change in one transaction. Two schedulers cannot overfill a window, since each holds the row of the
-- queue that it fills. Safe to repeat. Raises WF001.

create or replace function flowforge._window(p_queue_id bigint) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select coalesce(q.window_size, greatest(100, 4 * (
            select sum(w.capacity) from flowforge.worker w
            where q.name = any (w.queues) and w.seen_at > flowforge._clock() - interval '2 minutes')))::bigint
        from flowforge.queue q where q.queue_id = p_queue_id);
end
$$;
comment on function flowforge._window(bigint) is
    'Most task runs of a queue dispatched and due at once: its setting, or the larger of 100 and 4 times the announced capacity.';

create or replace function flowforge._promote_due(p_now timestamptz, p_max_rows bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_delayed;
    v_delayed bigint[];
    v_reoffered bigint[];
begin
    v_delayed := array(select tr.task_run_id from flowforge.task_run tr
        where tr.stage = 'delayed' and tr.available_at <= p_now and tr.available_at >= v_since
        order by tr.available_at, tr.task_run_id limit p_max_rows for no key update skip locked);
    update flowforge.task_run tr set stage = 'eligible', available_at = p_now
    where tr.task_run_id = any (v_delayed) and tr.state = 'pending' and tr.unmet = 0 and tr.available_at <= p_now;
    v_reoffered := array(select tr.task_run_id from flowforge.task_run tr
        where tr.stage = 'reoffered' and tr.available_at <= p_now and tr.available_at >= v_since
        order by tr.available_at, tr.task_run_id limit p_max_rows for no key update skip locked);
    -- Only now may claim_next take it: what was reckoned from its due time, a time without a scheduler does not shorten.
    update flowforge.task_run tr
    set stage = 'dispatched', redispatch_at = tr.redispatch_at + (p_now - tr.available_at),
        start_deadline = tr.start_deadline + (p_now - tr.available_at)
    where tr.task_run_id = any (v_reoffered) and tr.state = 'ready' and tr.available_at <= p_now;
    if v_reoffered <> '{}' then
        perform flowforge._wake_delivery();
    end if;
    return cardinality(v_delayed) + cardinality(v_reoffered);
end
$$;
comment on function flowforge._promote_due(timestamptz, bigint) is
    'Moves what has become due into line, and what is offered again into its window; what waits for its time never sits in the indexes of either.';

create or replace function flowforge._in_window(p_queue_id bigint) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_dispatched;
begin
    return (select count(*) from flowforge.task_run tr
        where case when tr.stage = 'dispatched' then tr.queue_id end = p_queue_id and tr.redispatch_at >= v_since);
end
$$;
comment on function flowforge._in_window(bigint) is
    'How many task runs of a queue are dispatched and due; more than its window after that has shrunk.';

-- Of the release before.
drop function if exists flowforge._has_room(bigint, timestamptz);
drop function if exists flowforge._is_served(bigint, timestamptz);

create or replace function flowforge._known_workers(p_now timestamptz, out v_room jsonb, out v_running bigint[])
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_leased;
    -- All leases are counted at once, for all queues: there may be hundreds of workers, and of queues.
    v_held jsonb := (select jsonb_object_agg(l.lease_owner, l.held) from (
        select tr.lease_owner, count(*) as held from flowforge.task_run tr where tr.lease_expires_at >= v_since group by tr.lease_owner) l);
begin
    v_room := coalesce((
        select jsonb_object_agg(n.queue, n.has_room)
        from (
            select u.queue, bool_or(w.capacity > coalesce((v_held ->> w.name)::bigint, 0)) as has_room
            from flowforge.worker w
            cross join lateral unnest(w.queues) u (queue)
            where w.seen_at > p_now - interval '2 minutes'
            group by u.queue) n), '{}');
    v_running := array(select distinct tr.queue_id from flowforge.task_run tr where tr.lease_expires_at >= v_since);
end
$$;
comment on function flowforge._known_workers(timestamptz) is
    'v_room: by the name of each queue that a live worker has announced, whether one of them could claim at this moment. v_running: the queues of which something runs, whoever runs it.';

create or replace function flowforge._sample_pace(p_queue_id bigint, p_left bigint, p_added bigint, p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- What has left the window since the last sample, as long as it never ran empty (an empty window tells of little
    -- work, not of slow workers). An exponential average whose memory is the time that a window takes at the pace
    -- estimated so far: however slow the claims become, the estimate falls no faster than one window in the time since,
    -- so that what waits behind them is never taken for lost. Where nothing was added, once a second.
    update flowforge.queue q
    set sampled_window = p_left + p_added, sampled_at = p_now,
        drained_at = case when q.sampled_at is null or p_left = 0 or p_left < q.sampled_window then p_now else q.drained_at end,
        -- Whether it begins is for redispatch_lost to say, which knows the workers.
        stalled = q.stalled and p_left > 0 and p_left >= q.sampled_window,
        drain_rate = case
            when p_left = 0 or q.sampled_at is null or p_now <= q.sampled_at then q.drain_rate
            else (
                select coalesce(q.drain_rate + (1 - exp(-least(100, n.seconds / greatest(1, q.sampled_window / nullif(q.drain_rate, 0)))))
                        * (n.claims / n.seconds - q.drain_rate),
                    nullif(n.claims / n.seconds, 0))
                from (select extract(epoch from p_now - q.sampled_at)::double precision as seconds,
                          greatest(q.sampled_window - p_left, 0) as claims) n)
        end
    where q.queue_id = p_queue_id and (p_added > 0 or (q.sampled_at between p_now - interval '1 s' and p_now) is not true);
end
$$;
comment on function flowforge._sample_pace(bigint, bigint, bigint, timestamptz) is
    'Keeps the estimate of a queue''s pace of claims, given how many are left in its window and how many were just added; a claim ends a stall. The caller holds the queue''s row.';

create or replace function flowforge._fill_window(p_queue_id bigint, p_max_rows bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz;
    v_since timestamptz := (flowforge._frontiers()).v_eligible;
    v_queue text;
    v_window bigint;
    v_in_window bigint;
    v_unknown bigint;
    v_ids bigint[];
    v_delay interval;
    v_dispatched bigint;
begin
    select q.name, q.redispatch_delay into v_queue, v_delay from flowforge.queue q
    where q.queue_id = p_queue_id and q.paused_at is null
    for no key update skip locked;
    if not found then
        return 0;
    end if;
    v_now := flowforge._clock();
    v_window := flowforge._window(p_queue_id);
    v_in_window := flowforge._in_window(p_queue_id);
    -- What is to be offered again later does not fill the window. But what no worker knows how to run comes back at once, as
    -- after a mistaken or an early deploy: a window of that in 5 s is enough, or the whole backlog would be claimed in turn.
    select count(*) filter (where w.unknown_handler_since >= v_now - interval '5 s') into v_unknown
    from (select tr.unknown_handler_since from flowforge.task_run tr
          where case when tr.stage = 'reoffered' then tr.queue_id end = p_queue_id limit 4 * v_window) w;
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where tr.queue_id = p_queue_id and tr.stage = 'eligible' and tr.available_at >= v_since
            -- What a cancelled run has left takes nobody's place until it is cancelled.
            and (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is null
        order by tr.priority desc, tr.task_run_id
        limit greatest(0, least(p_max_rows, v_window - v_in_window - greatest(0, v_unknown - v_window)))
        for no key update skip locked);
    if v_ids = '{}' then
        perform flowforge._sample_pace(p_queue_id, v_in_window, 0, v_now);
        return 0;
    end if;

    update flowforge.task_run tr
    set state = 'ready', stage = 'dispatched', dispatch_id = gen_random_uuid(), ready_at = v_now, redispatches = 0,
        redispatch_at = v_now + v_delay,
        -- Later than now it was put in line by a clock that was ahead.
        available_at = least(tr.available_at, v_now),
        start_deadline = v_now + (select t.start_within from flowforge.task t where t.task_id = tr.task_id)
    where tr.task_run_id = any (v_ids) and tr.state = 'pending' and tr.unmet = 0
        and (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is null;
    insert into flowforge.outbox (task_run_id, dispatch_id, attempt, queue, handler, traceparent, next_attempt_at, created_at)
    select tr.task_run_id, tr.dispatch_id, tr.attempt, v_queue,
        (select t.handler from flowforge.task t where t.task_id = tr.task_id),
        (select r.labels ->> 'traceparent' from flowforge.run r where r.run_id = tr.run_id), v_now, v_now
    from flowforge.task_run tr where tr.task_run_id = any (v_ids) and tr.state = 'ready'
    order by tr.priority desc, tr.task_run_id;
    get diagnostics v_dispatched = row_count;
    perform flowforge._sample_pace(p_queue_id, v_in_window, v_dispatched, v_now);
    return v_dispatched;
end
$$;
comment on function flowforge._fill_window(bigint, bigint) is
    'Dispatches task runs of one queue, up to its window: ready, a new dispatch id, an order to publish.';

create or replace function flowforge.dispatch_ready(max_rows bigint default 500) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_eligible;
    v_queue_id bigint;
    v_promoted bigint;
    v_dispatched bigint := 0;
begin
    perform flowforge._check_count('max_rows', dispatch_ready.max_rows);
    v_promoted := flowforge._promote_due(flowforge._clock(), dispatch_ready.max_rows);
    for v_queue_id in
        select q.queue_id from flowforge.queue q
        where q.paused_at is null
            and (select true from flowforge.task_run tr where tr.queue_id = q.queue_id and tr.stage = 'eligible' and tr.available_at >= v_since limit 1)
        -- The one served longest ago first: no queue with a large backlog takes every turn.
        order by q.sampled_at nulls first, q.queue_id
    loop
        exit when v_dispatched >= dispatch_ready.max_rows;
        v_dispatched := v_dispatched + flowforge._fill_window(v_queue_id, dispatch_ready.max_rows - v_dispatched);
    end loop;
    if v_dispatched > 0 then
        perform flowforge._wake_delivery();
    end if;
    return v_promoted + v_dispatched;
end
$$;
comment on function flowforge.dispatch_ready(bigint) is
    'Moves due task runs into line, then dispatches eligible ones queue by queue into their windows, by priority. Answers how many it moved; 0 when there is nothing to do now. Raises WF001.';

create or replace function flowforge.next_due() returns interval
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_delayed;
begin
    return least(
        (select tr.available_at from flowforge.task_run tr
            where tr.stage = 'delayed' and tr.available_at >= v_since order by tr.available_at limit 1),
        (select tr.available_at from flowforge.task_run tr
            where tr.stage = 'reoffered' and tr.available_at >= v_since order by tr.available_at limit 1))
        - flowforge._clock();
end
$$;
comment on function flowforge.next_due() is
    'Time until the next task run that is delayed, or offered again later, becomes due; null when none waits, 0 or less when one is due.';

create or replace function flowforge.declare_scheduler(asleep boolean) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if declare_scheduler.asleep is null then
        raise exception using errcode = 'WF001', message = 'declare_scheduler: asleep must not be null';
    end if;
    update flowforge.scheduler s set asleep = declare_scheduler.asleep
    where s.one_row and s.asleep <> declare_scheduler.asleep;
end
$$;
comment on function flowforge.declare_scheduler(boolean) is
    'A scheduler tells the writers whether to wake it. Before a long sleep: declare true, wait a moment, scan again, sleep; with work again: false. Raises WF001.';
