-- Queues, workers, limits, history: what operators and workers set. Each locks the one row that it changes; prune locks
-- ended runs, skipping locked ones. Safe to repeat. Raise WF001, WF002, WF005.

create or replace function flowforge._queue_id(p_queue text) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue_id bigint := (select q.queue_id from flowforge.queue q where q.name = p_queue);
begin
    if v_queue_id is null then
        raise exception using errcode = 'WF002', message = format('there is no queue %s', flowforge._quoted(p_queue)),
            hint = 'Queues are made by define_workflow; the view queue_status lists them.';
    end if;
    return v_queue_id;
end
$$;
comment on function flowforge._queue_id(text) is 'Identity of a queue. Raises WF002.';

create or replace function flowforge.pause_queue(queue text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue_id bigint := flowforge._queue_id(pause_queue.queue);
begin
    update flowforge.queue q set paused_at = flowforge._clock()
    where q.queue_id = v_queue_id and q.paused_at is null;
    return found;
end
$$;
comment on function flowforge.pause_queue(text) is
    'Stops dispatching from a queue; what is in its window already still runs. True if it was not paused before. Raises WF002.';

create or replace function flowforge.resume_queue(queue text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_queue_id bigint := flowforge._queue_id(resume_queue.queue);
begin
    update flowforge.queue q set paused_at = null
    where q.queue_id = v_queue_id and q.paused_at is not null;
    if not found then
        return false;
    end if;
    perform flowforge._wake_scheduler();
    return true;
end
$$;
comment on function flowforge.resume_queue(text) is 'Dispatches from a paused queue again. True if it was paused. Raises WF002.';

create or replace function flowforge.configure_queue(queue text, window_size bigint default null, redispatch_delay interval default null)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz;
    v_ids bigint[];
    v_queue_id bigint := flowforge._queue_id(configure_queue.queue);
    v_delay interval := case when configure_queue.redispatch_delay is not null
        then flowforge._seconds('redispatch_delay', configure_queue.redispatch_delay, 0.1, 86400) end;
begin
    if configure_queue.window_size < 0 or configure_queue.window_size > 1000000 then
        raise exception using errcode = 'WF001', message = format('window_size is %s; 0 to 1000000 or null are allowed', configure_queue.window_size);
    end if;
    update flowforge.queue q set (window_size, redispatch_delay) = (
        select case when configure_queue.window_size is null then q.window_size else nullif(configure_queue.window_size, 0) end,
            coalesce(v_delay, q.redispatch_delay))
    where q.queue_id = v_queue_id
        and (configure_queue.window_size is not null and q.window_size is distinct from nullif(configure_queue.window_size, 0)
            or v_delay is not null and q.redispatch_delay <> v_delay);
    if not found then
        return false;
    end if;
    v_now := flowforge._clock();
    -- What is dispatched already need not wait for longer either. What is locked is being claimed or moved.
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where case when tr.stage = 'dispatched' then tr.queue_id end = v_queue_id and tr.redispatch_at > v_now + v_delay
        order by tr.task_run_id for no key update skip locked);
    update flowforge.task_run tr set redispatch_at = v_now + v_delay
    where tr.task_run_id = any (v_ids) and tr.state = 'ready';
    return true;
end
$$;
comment on function flowforge.configure_queue(text, bigint, interval) is
    'Sets the window of a queue (0: the larger of 100 and 4 times the announced capacity) and how long a message may stay unclaimed before it is published again (30 s unless set). What is null stays as it is. True if that changed anything. Raises WF001, WF002.';

create or replace function flowforge.announce_worker(worker text, queues text[], capacity bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowforge._clock();
begin
    perform flowforge._check_name('worker', announce_worker.worker);
    perform flowforge._check_count('capacity', announce_worker.capacity, 0);
    perform flowforge._check_flat('announce_worker', array[array_dims(announce_worker.queues)]);
    if announce_worker.queues is null or array_position(announce_worker.queues, null) is not null or cardinality(announce_worker.queues) > 1000 then
        raise exception using errcode = 'WF001', message = 'announce_worker: queues must be an array of at most 1000 names';
    end if;
    perform flowforge._check_name('queue', q.name) from unnest(announce_worker.queues) q (name);
    if announce_worker.capacity = 0 then
        delete from flowforge.worker w where w.name = announce_worker.worker;
        return;
    end if;
    insert into flowforge.worker as w (name, queues, capacity, started_at, seen_at)
    values (announce_worker.worker, announce_worker.queues, announce_worker.capacity, v_now, v_now)
    on conflict (name) do update set queues = excluded.queues, capacity = excluded.capacity, seen_at = excluded.seen_at;
    delete from flowforge.worker w where w.name in (
        select old.name from flowforge.worker old where old.seen_at < v_now - interval '1 hour' for update skip locked);
end
$$;
comment on function flowforge.announce_worker(text, text[], bigint) is
    'Tells of a worker, the queues it serves and how many task runs it executes at once; repeated at least every 2 minutes; capacity 0 takes it away. Optional: it sizes windows and informs operators. Raises WF001, WF005.';

create or replace function flowforge.set_limit(name text, value bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_setting record;
begin
    select s.value, s.minimum, s.maximum into v_setting from flowforge.setting s where s.name = set_limit.name for no key update;
    if not found then
        raise exception using errcode = 'WF002', message = format('there is no limit %s', flowforge._quoted(set_limit.name)),
            hint = 'The view limits lists them.';
    end if;
    if (set_limit.value between v_setting.minimum and v_setting.maximum) is not true then
        raise exception using errcode = 'WF001', message = format('limit %s: %s is not allowed; %s to %s are',
            set_limit.name, coalesce(set_limit.value::text, 'null'), v_setting.minimum, v_setting.maximum);
    end if;
    update flowforge.setting s set value = set_limit.value where s.name = set_limit.name and s.value <> set_limit.value;
    return found;
end
$$;
comment on function flowforge.set_limit(text, bigint) is 'Sets a named limit of this database. True if that changed it. Raises WF001, WF002.';

create or replace function flowforge.prune(older_than interval, max_runs bigint default 1000) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_before timestamptz;
    v_run_ids bigint[];
    v_task_run_ids bigint[];
    v_left bigint := 50000;
begin
    perform flowforge._check_count('max_runs', prune.max_runs);
    v_before := flowforge._clock() - flowforge._seconds('older_than', prune.older_than, 0, 3153600000);
    v_run_ids := array(select r.run_id from flowforge.run r
        where r.finished_at is not null and r.finished_at < v_before
        order by r.finished_at limit prune.max_runs for update skip locked);
    -- At least one, and no more than make up so many task runs: what one transaction deletes stays bounded.
    for v_at in 1..cardinality(v_run_ids) loop
        v_left := v_left - (select count(*) from (select from flowforge.task_run tr where tr.run_id = v_run_ids[v_at] limit v_left + 1) n);
        if v_left <= 0 then
            v_run_ids := v_run_ids[1:greatest(1, v_at - (v_left < 0)::int)];
            exit;
        end if;
    end loop;
    if v_run_ids = '{}' then
        return 0;
    end if;
    v_task_run_ids := array(
        select l.task_run_id from unnest(v_run_ids) u (run_id)
        cross join lateral (select tr.task_run_id from flowforge.task_run tr where tr.run_id = u.run_id) l);
    delete from flowforge.progress p where p.task_run_id = any (v_task_run_ids);
    delete from flowforge.attempt a where a.task_run_id = any (v_task_run_ids);
    delete from flowforge.task_run tr where tr.task_run_id = any (v_task_run_ids);
    delete from flowforge.run_retry rr where rr.run_id = any (v_run_ids);
    delete from flowforge.run r where r.run_id = any (v_run_ids);
    return cardinality(v_run_ids);
end
$$;
comment on function flowforge.prune(interval, bigint) is
    'Deletes up to max_runs runs that ended longer ago than older_than, oldest first, with all that belongs to them, fewer when they have more than 50,000 task runs; repeat until it answers 0. Their idempotency keys become free. Raises WF001.';
