-- redispatch_lost, redispatch, fail_undeliverable, sweep_outbox: the scheduler keeps ready task runs and orders in step.
--
-- Each locks task runs, then outbox rows, skipping locked ones: what is locked is being claimed or moved.
-- redispatch_lost locks queues before these. Dispatch ids never change here. Safe to repeat. Raise WF001, WF002,
-- WF008.

create or replace function flowforge._unclaimed_delay(p_delay interval, p_redispatches bigint, p_served boolean) returns interval
language sql immutable
-- Twice as long each time: up to 32 times and an hour while somebody could claim, unless the pace says more; else up to a
-- day, since each message that nobody consumes stays at the broker.
return greatest(p_delay, case when p_served
    then least(p_delay * power(2, least(p_redispatches, 5)::double precision), interval '1 hour')
    else least(p_delay * power(2, least(p_redispatches, 12)::double precision), interval '1 day') end);
comment on function flowforge._unclaimed_delay(interval, bigint, boolean) is
    'How long a message may stay unclaimed that was published again so many times, in a queue with that delay.';

create or replace function flowforge.redispatch_lost(max_rows bigint default 500) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_since timestamptz := (flowforge._frontiers()).v_dispatched;
    v_ids bigint[];
    v_room jsonb;
    v_running bigint[];
    v_served bigint[];
    v_full bigint[];
    v_lost bigint[];
    v_queue_ids bigint[];
    v_queue_id bigint;
begin
    perform flowforge._check_count('max_rows', redispatch_lost.max_rows);
    -- The pace of queues from which nothing is dispatched at present, so that a slow one is not taken for a lost one; those
    -- looked at longest ago first.
    v_queue_ids := array(select distinct tr.queue_id from flowforge.task_run tr where tr.stage = 'dispatched' and tr.redispatch_at >= v_since);
    v_queue_ids := array(select q.queue_id from flowforge.queue q
        where ((q.sampled_at between v_now - interval '1 s' and v_now) is not true or q.stalled or q.drained_at <= v_now - q.redispatch_delay)
            and q.queue_id = any (v_queue_ids)
        order by q.sampled_at nulls first, q.queue_id limit 200
        for no key update of q skip locked);
    foreach v_queue_id in array v_queue_ids loop
        perform flowforge._sample_pace(v_queue_id, flowforge._in_window(v_queue_id), 0, v_now);
    end loop;
    -- Walks the windows, which are bounded. What has been due longest first: no queue's large window hides another's.
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where tr.stage = 'dispatched' and tr.redispatch_at <= v_now and tr.redispatch_at >= v_since
        order by tr.redispatch_at limit redispatch_lost.max_rows for no key update skip locked);
    if v_queue_ids <> '{}' or v_ids <> '{}' then
        select w.v_room, w.v_running into v_room, v_running from flowforge._known_workers(v_now) w;
    end if;
    -- Of workers that do not announce themselves nothing is known but what they run.
    update flowforge.queue q set stalled = not q.stalled
    where q.queue_id = any (v_queue_ids) and q.stalled <> (q.sampled_window > 0 and q.drained_at <= v_now - q.redispatch_delay
        and coalesce((v_room ->> q.name)::boolean, q.queue_id <> all (v_running)));
    if v_ids = '{}' then
        return 0;
    end if;
    select coalesce(array_agg(u.queue_id) filter (where v_room ? u.name or u.queue_id = any (v_running)), '{}'),
        coalesce(array_agg(u.queue_id) filter (where not (v_room ->> u.name)::boolean), '{}')
    into v_served, v_full
    from (select d.queue_id, (select q.name from flowforge.queue q where q.queue_id = d.queue_id) as name
          from (select distinct tr.queue_id from flowforge.task_run tr where tr.task_run_id = any (v_ids)) d) u;
    -- Not lost: an order that is still to be published, or one published only lately; an hour while no worker has room.
    v_lost := array(
        select tr.task_run_id from flowforge.task_run tr
        cross join lateral (select greatest(
            flowforge._unclaimed_delay(flowforge._redispatch_delay(tr.queue_id), tr.redispatches, tr.queue_id = any (v_served)),
            case when tr.queue_id = any (v_full) then interval '1 hour' end) as delay offset 0) n
        where tr.task_run_id = any (v_ids) and tr.state = 'ready'
            and not coalesce((select bool_or(coalesce(o.published_at + n.delay > v_now, true))
                              from flowforge.outbox o where o.task_run_id = tr.task_run_id and o.dispatch_id = tr.dispatch_id), false)
        order by tr.task_run_id);
    update flowforge.task_run tr
    set (redispatches, redispatch_at) = (
        select tr.redispatches + n.lost,
            -- At what is not lost is looked again after the setting's time, since the queue may stall, or be served again.
            v_now + flowforge._unclaimed_delay(case when n.lost = 0 then n.setting else n.delay end,
                case when n.lost = 1 then tr.redispatches + 1 when tr.queue_id = any (v_served) then 0 else tr.redispatches end, true)
        from (select coalesce((v_lost[flowforge._position(v_lost, tr.task_run_id)] = tr.task_run_id)::int, 0) as lost,
                  (select q.redispatch_delay from flowforge.queue q where q.queue_id = tr.queue_id) as setting,
                  flowforge._redispatch_delay(tr.queue_id) as delay offset 0) n)
    where tr.task_run_id = any (v_ids) and tr.state = 'ready';
    if v_lost <> '{}' then
        perform flowforge._arm(v_lost, v_now);
        perform flowforge._wake_delivery();
    end if;
    -- With as many as were asked for there may be more that are due.
    return case when cardinality(v_ids) = redispatch_lost.max_rows then redispatch_lost.max_rows else cardinality(v_lost) end;
end
$$;
comment on function flowforge.redispatch_lost(bigint) is
    'Arms ready task runs again, under the same dispatch id, that were published but not claimed within the delay of their queue (doubling up to 32 times; in a queue that no live worker has announced, and of which nothing runs, up to a day; an hour at least while all announced workers are full), or have no order at all. Answers how many; max_rows when there may be more to look at. Raises WF001.';

create or replace function flowforge.redispatch(queue text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_queue_id bigint := flowforge._queue_id(redispatch.queue);
    v_ids bigint[];
    v_now timestamptz;
begin
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where case when tr.stage = 'dispatched' then tr.queue_id end = v_queue_id order by tr.task_run_id for no key update skip locked);
    v_now := flowforge._clock();
    update flowforge.task_run tr
    set redispatch_at = v_now + (select q.redispatch_delay from flowforge.queue q where q.queue_id = v_queue_id)
    where tr.task_run_id = any (v_ids) and tr.state = 'ready';
    perform flowforge._arm(v_ids, v_now);
    perform flowforge._wake_delivery();
    return cardinality(v_ids);
end
$$;
comment on function flowforge.redispatch(text) is
    'Arms every ready task run of a queue again at once, as after the broker lost its messages. Harmless when it did not: doubled messages are recognised. Answers how many are armed. Raises WF002.';

create or replace function flowforge.fail_undeliverable(max_rows bigint default 500) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_since timestamptz := (flowforge._frontiers()).v_dispatched;
    v_ids bigint[];
    v_parked bigint[];
    v_failed bigint;
begin
    perform flowforge._require_read_committed('fail_undeliverable');
    perform flowforge._check_count('max_rows', fail_undeliverable.max_rows);
    -- Not started in time, without a further token, or not to be published any more. The windows and the parked rows are few.
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where tr.stage = 'dispatched' and tr.redispatch_at >= v_since
            and (tr.start_deadline <= v_now or tr.fencing_token = 9223372036854775807)
        limit fail_undeliverable.max_rows for no key update skip locked);
    v_parked := array(
        select l.task_run_id
        from (select distinct f.task_run_id
              from (select o.task_run_id from flowforge.outbox o where o.parked_at is not null
                    order by o.parked_at limit fail_undeliverable.max_rows) f
              order by f.task_run_id) p
        cross join lateral (select tr.task_run_id from flowforge.task_run tr
            where tr.task_run_id = p.task_run_id and tr.state = 'ready' for no key update skip locked) l);
    -- What is still to be published is waited for. An order that was written after one was parked replaces that; no earlier one
    -- does, though it was published, even later or under a greater id: its message may have been given back or lost before.
    v_parked := array(select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = any (v_parked) and tr.state = 'ready'
            and (select o.parked_at is not null from flowforge.outbox o
                 where o.task_run_id = tr.task_run_id and o.dispatch_id = tr.dispatch_id
                 order by coalesce(o.published_at, o.parked_at) is null desc, coalesce(o.parked_at, o.created_at) desc, o.outbox_id desc
                 limit 1));
    update flowforge.task_run tr
    set state = 'failed', stage = 'unsettled', finished_at = v_now, redispatch_at = null, start_deadline = null,
        error = case when tr.task_run_id = any (v_parked)
            then 'the message cannot be published: ' || (select o.last_error from flowforge.outbox o
                where o.task_run_id = tr.task_run_id and o.dispatch_id = tr.dispatch_id and o.parked_at is not null
                order by o.parked_at desc, o.outbox_id desc limit 1)
            when tr.fencing_token = 9223372036854775807 then 'cannot be claimed: its fencing token has reached its last value'
            else format('not started within %s s', (
                select extract(epoch from t.start_within)::double precision from flowforge.task t where t.task_id = tr.task_id)) end
    where tr.task_run_id = any (v_ids || v_parked) and tr.state = 'ready';
    get diagnostics v_failed = row_count;
    if v_failed > 0 then
        perform flowforge._wake_scheduler();
    end if;
    return v_failed;
end
$$;
comment on function flowforge.fail_undeliverable(bigint) is
    'Fails ready task runs whose message can never be published (an order was parked, none was written since, and none is still to be published), that were not started within start_within, or whose fencing token has reached its last value. Answers how many. Raises WF001, WF008.';

create or replace function flowforge.sweep_outbox(max_rows bigint default 2000) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_since bigint := (flowforge._frontiers()).v_outbox;
    v_ids bigint[];
    v_swept bigint;
begin
    perform flowforge._require_read_committed('sweep_outbox');
    perform flowforge._check_count('max_rows', sweep_outbox.max_rows);
    v_ids := array(
        select o.outbox_id from flowforge.outbox o
        where o.outbox_id >= v_since
            and ((select tr.state = 'ready' and tr.dispatch_id = o.dispatch_id
                  from flowforge.task_run tr where tr.task_run_id = o.task_run_id) is not true
                or o.parked_at is not null)
        order by o.outbox_id limit sweep_outbox.max_rows for update skip locked);
    -- Judged again now that the rows are locked: a task run given back meanwhile may have come to rely on its row. A parked
    -- one is replaced as fail_undeliverable judges: by an order that was written since.
    delete from flowforge.outbox o
    where o.outbox_id = any (v_ids)
        and ((select tr.state = 'ready' and tr.dispatch_id = o.dispatch_id
              from flowforge.task_run tr where tr.task_run_id = o.task_run_id) is not true
            or o.parked_at is not null and (
                select true from flowforge.outbox other
                where other.task_run_id = o.task_run_id and other.dispatch_id = o.dispatch_id and other.parked_at is null
                    and (other.created_at, other.outbox_id) > (o.parked_at, o.outbox_id) limit 1));
    get diagnostics v_swept = row_count;
    return v_swept;
end
$$;
comment on function flowforge.sweep_outbox(bigint) is
    'Deletes orders whose task run is no longer ready under their dispatch id, and parked ones that another order replaces, written since. Answers how many. Raises WF001, WF008.';
