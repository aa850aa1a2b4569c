-- release_task_run, reap_expired_leases: a running task run is given back, by its worker or by the scheduler.
--
-- Both lock only running task runs (release: under the token; the reaper, after the scheduler's row: expired ones, skipping
-- locked), then outbox rows (skipping locked). The dispatch id stays: the same attempt is offered again. Release is safe to
-- repeat (answers fenced), reaping too. Raise WF001.

create or replace function flowforge._arm(p_task_run_ids bigint[], p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_armed bigint[];
begin
    -- An earlier order that is still unpublished serves, if it is due in time (it may wait out a back-off) and can be
    -- locked: a publisher or the sweep may otherwise be about to mark or delete it. It is never changed. "+ 0" keeps the plan
    -- from reading the outbox in the order of its primary key.
    v_armed := array(
        select l.task_run_id from unnest(p_task_run_ids) u (task_run_id)
        cross join lateral (
            select o.task_run_id from flowforge.outbox o
            where o.task_run_id = u.task_run_id and coalesce(o.published_at, o.parked_at) is null
                and (o.dispatch_id, true) = (
                    select tr.dispatch_id, o.next_attempt_at <= greatest(tr.available_at, p_now)
                    from flowforge.task_run tr where tr.task_run_id = u.task_run_id)
            order by o.outbox_id + 0 limit 1 for update skip locked) l
        order by l.task_run_id);
    insert into flowforge.outbox (task_run_id, dispatch_id, attempt, queue, handler, traceparent, next_attempt_at, created_at)
    select tr.task_run_id, tr.dispatch_id, tr.attempt,
        (select q.name from flowforge.queue q where q.queue_id = tr.queue_id),
        (select t.handler from flowforge.task t where t.task_id = tr.task_id),
        (select r.labels ->> 'traceparent' from flowforge.run r where r.run_id = tr.run_id),
        greatest(tr.available_at, p_now), p_now
    from flowforge.task_run tr
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'ready'
        and (v_armed[flowforge._position(v_armed, tr.task_run_id)] = tr.task_run_id) is not true
    order by tr.task_run_id;
end
$$;
comment on function flowforge._arm(bigint[], timestamptz) is
    'Makes sure that ready task runs locked by the caller have an order to publish in the outbox.';

create or replace function flowforge._redispatch_delay(p_queue_id bigint) returns interval
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Twice what the window takes to drain at the recent pace, a day at most; in a stalled queue nothing is waited for.
    return (
        select case when q.stalled or (q.drain_rate > 0) is not true then q.redispatch_delay
            else greatest(q.redispatch_delay, make_interval(secs => least(86400, 2 * q.sampled_window / q.drain_rate)))
        end
        from flowforge.queue q where q.queue_id = p_queue_id);
end
$$;
comment on function flowforge._redispatch_delay(bigint) is
    'How long a dispatch of a queue may stay unclaimed: its setting, or longer while a full window drains slowly.';

create or replace function flowforge._give_back(
    p_task_run_ids bigint[], p_outcome text, p_reason text, p_counted boolean, p_delays interval[], p_now timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_states text[];
    v_delays interval[] := p_delays;
begin
    select array_agg(
            case
                when (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is not null then 'cancelled'
                when p_counted and tr.reaps + 1 > (select t.max_reaps from flowforge.task t where t.task_id = tr.task_id) then 'failed'
                else 'ready'
            end order by tr.task_run_id),
        -- Offered again at once the first time, then after 5 s, 10 s, 20 s … at most 5 minutes. Which of those that a worker
        -- held together has killed it, nobody knows: then they come back apart, or they would all die of it again.
        coalesce(p_delays, array_agg(case when tr.reaps = 0 then interval '0'
            else make_interval(secs => least(300, 5 * power(2, least(tr.reaps - 1, 10)::double precision))
                + random() * least(300, extract(epoch from tr.lease_length)::double precision * (tr.held - 1)))
            end order by tr.task_run_id))
    into v_states, v_delays
    from (
        select tr.task_run_id, tr.run_id, tr.task_id, tr.reaps, tr.lease_length, count(*) over (partition by tr.lease_owner) as held
        from flowforge.task_run tr where tr.task_run_id = any (p_task_run_ids)) tr;

    if p_outcome is not null then
        insert into flowforge.attempt (task_run_id, attempt, fencing_token, dispatch_id, outcome, answered, owner, started_at, ended_at, error)
        select tr.task_run_id, tr.attempt, tr.fencing_token, tr.dispatch_id, p_outcome, false, tr.lease_owner, tr.started_at, p_now, p_reason
        from flowforge.task_run tr where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running';
    end if;

    update flowforge.task_run tr
    set (state, stage, available_at, redispatch_at, start_deadline, finished_at, error) = (
            select n.state::flowforge.task_run_state,
                case when n.state <> 'ready' then 'unsettled' when n.delay > '0' then 'reoffered' else 'dispatched' end::flowforge.task_run_stage,
                case when n.state = 'ready' then p_now + n.delay else tr.available_at end,
                case when n.state = 'ready' then p_now + n.delay + (
                    select q.redispatch_delay from flowforge.queue q where q.queue_id = tr.queue_id) end,
                case when n.state = 'ready' then p_now + n.delay + (select t.start_within from flowforge.task t where t.task_id = tr.task_id) end,
                case when n.state <> 'ready' then p_now end,
                case n.state
                    when 'failed' then format('%s; given up after %s executions without an answer', p_reason, tr.reaps + 1)
                    when 'cancelled' then 'the run was cancelled'
                    else tr.error
                end
            from (select v_states[flowforge._position(p_task_run_ids, tr.task_run_id)] as state,
                         v_delays[flowforge._position(p_task_run_ids, tr.task_run_id)] as delay) n),
        reaps = tr.reaps + p_counted::int, redispatches = 0, unknown_handler_since = null,
        claim_id = null, lease_owner = null, lease_expires_at = null, lease_length = null, deadline = null
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running';
    perform flowforge._arm(p_task_run_ids, p_now);
    if 'ready' = any (v_states) then
        perform flowforge._wake_delivery();
    end if;
end
$$;
comment on function flowforge._give_back(bigint[], text, text, boolean, interval[], timestamptz) is
    'Locked running task runs (ids ascending) become ready again under the same dispatch id, or cancelled in a cancelled run, or failed beyond max_reaps when this counts as a reap. p_outcome: how to record the execution; null: not at all.';

create or replace function flowforge.release_task_run(task_run_id bigint, fencing_token bigint, reason text) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_unknown_since timestamptz;
    v_start_deadline timestamptz;
    v_state flowforge.task_run_state;
    v_reason text := release_task_run.reason;
    v_broke_off text := 'the execution broke off without an answer';
begin
    -- In one argument, since another would take the function from those who call it while it is replaced.
    if starts_with(v_reason, 'crashed: ') then
        v_broke_off := format('%s: %s', v_broke_off, flowforge._cut_error(substr(v_reason, length('crashed: ') + 1)));
        v_reason := 'crashed';
    end if;
    if (v_reason in ('unstarted', 'shutdown', 'crashed', 'unknown_handler')) is not true then
        raise exception using errcode = 'WF001', message = format('release: reason %s is not allowed', flowforge._quoted(release_task_run.reason)),
            hint = 'Allowed are unstarted, shutdown, crashed (or crashed: and how) and unknown_handler.';
    end if;
    if release_task_run.task_run_id is null or release_task_run.fencing_token is null then
        raise exception using errcode = 'WF001', message = 'release: task_run_id and fencing_token must not be null';
    end if;
    select tr.unknown_handler_since, tr.start_deadline into v_unknown_since, v_start_deadline from flowforge.task_run tr
    where tr.task_run_id = release_task_run.task_run_id and tr.state = 'running' and tr.fencing_token = release_task_run.fencing_token
    for no key update;
    if not found then
        return 'fenced';
    end if;
    v_now := flowforge._clock();

    if v_reason = 'crashed' then
        perform flowforge._give_back(array[release_task_run.task_run_id], 'crashed', v_broke_off, true, null, v_now);
    elsif v_reason = 'unknown_handler' then
        -- A rolling deploy may bring the handler soon: ask again with a growing delay, for 15 minutes from the first
        -- time. Any other way of giving back comes from a worker that knew it, and ends that time.
        v_unknown_since := coalesce(v_unknown_since, v_now);
        if v_now - v_unknown_since >= interval '15 minutes' then
            perform flowforge._end_attempt(array[release_task_run.task_run_id], array['failed'],
                array(select format('no worker knew the handler %s for 15 minutes', flowforge._quoted(t.handler))
                      from flowforge.task_run tr join flowforge.task t on t.task_id = tr.task_id
                      where tr.task_run_id = release_task_run.task_run_id),
                array[false], false, v_now);
        else
            perform flowforge._give_back(array[release_task_run.task_run_id], null, null, false,
                array[least(interval '60 s', greatest(interval '1 s', (v_now - v_unknown_since) / 2 * (1 + random() / 4)))], v_now);
            update flowforge.task_run tr set unknown_handler_since = v_unknown_since
            where tr.task_run_id = release_task_run.task_run_id and tr.state = 'ready';
        end if;
    else
        -- What had begun leaves a trace, or a second execution would come unexplained.
        perform flowforge._give_back(array[release_task_run.task_run_id],
            case when v_reason = 'shutdown' then 'released' end, 'given back by a worker that was told to stop',
            false, array[interval '0'], v_now);
    end if;
    if v_reason in ('unstarted', 'unknown_handler') then
        -- Nobody has begun it: the time that it may wait for its start goes on.
        update flowforge.task_run tr set start_deadline = v_start_deadline
        where tr.task_run_id = release_task_run.task_run_id and tr.state = 'ready';
    end if;
    select tr.state into v_state from flowforge.task_run tr where tr.task_run_id = release_task_run.task_run_id;
    if v_state in ('cancelled', 'failed') then
        perform flowforge._wake_scheduler();
        return v_state;
    end if;
    return 'released';
end
$$;
comment on function flowforge.release_task_run(bigint, bigint, text) is
    'Gives a claimed task run back for the same attempt under the same dispatch id. reason: unstarted, shutdown (it had begun, and is recorded; neither is counted), crashed, or crashed: and how, which the error then tells (counts like a reap; beyond max_reaps it fails) or unknown_handler (again after 1 to 60 s; fails after 15 minutes). Answers released, failed, cancelled (in a cancelled run) or fenced. Raises WF001.';

-- Of the release before, with other columns.
drop function if exists flowforge._tick_reaper();

create or replace function flowforge._store_tick(out v_ends timestamptz[], out v_needs interval[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz;
    v_last record;
    v_since interval;
    v_is_gap boolean;
    v_gaps tstzmultirange;
begin
    select s.reaper_ticked_at as at, s.reaper_period as period, s.gaps into v_last from flowforge.scheduler s for no key update;
    v_now := flowforge._clock();
    v_since := greatest(v_now - v_last.at, '0');
    v_is_gap := coalesce(v_since > greatest(interval '10 s', 3 * v_last.period), false);
    -- The first 3 s of a gap count as time like any other, which keeps one gap apart from the next. What a clock wrote that
    -- was ahead is forgotten, and all but the last twenty.
    v_gaps := v_last.gaps * tstzmultirange(tstzrange(null, v_now));
    if v_is_gap then
        v_gaps := v_gaps + tstzmultirange(tstzrange(v_last.at + interval '3 s', v_now));
    end if;
    v_gaps := coalesce((select range_agg(g.gap) from (select u.gap from unnest(v_gaps) u (gap) order by u.gap desc limit 20) g), '{}');
    -- Schedulers that tick slowly need a longer pause to make a gap: what they are used to is forgotten slowly.
    update flowforge.scheduler s
    set reaper_ticked_at = v_now, gaps = v_gaps,
        reaper_period = greatest(case when v_is_gap then '0' else v_since end, v_last.period * 0.9, '0')
    where s.one_row;

    -- A lease has its own length anew from the end of the gap in which it ran out, in which later gaps do not count; where
    -- there are ever more of them, three lengths of any time will do. So those are spared that are longer than this.
    select array_agg(g.ended order by g.ended), array_agg(greatest(v_now - g.ended - g.later, (v_now - g.ended) / 3) order by g.ended)
    into v_ends, v_needs
    from (
        select upper(u.gap) as ended, coalesce(sum(upper(u.gap) - lower(u.gap)) over (
            order by u.gap desc rows between unbounded preceding and 1 preceding), '0') as later
        from unnest(v_gaps) u (gap)) g;
    if cardinality(v_ends) = 20 then
        -- What ran out before all of them has been spared for one that is forgotten.
        v_ends := lower(v_gaps) - interval '3 s' || v_ends;
        v_needs := interval '1000 years' || v_needs;
    end if;
end
$$;
comment on function flowforge._store_tick() is
    'Stores a tick of the reaper, and answers which leases its last twenty gaps of more than 10 s spare: what ran out by v_ends[i], and by none before it, if its length is more than v_needs[i]; what ran out later, as by the last. Holds the scheduler''s row: reapers come one at a time.';

create or replace function flowforge.reap_expired_leases(max_rows bigint default 500, one_by_one boolean default false) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_leased;
    v_spared record;
    v_now timestamptz;
    v_ids bigint[];
    v_reaped bigint := 0;
    v_task_run_id bigint;
begin
    perform flowforge._check_count('max_rows', reap_expired_leases.max_rows);
    v_spared := flowforge._store_tick();
    v_now := flowforge._clock();
    -- While nobody reaped, the database or the network may have been away, and workers could not renew: whoever held a
    -- lease has its own length anew, once, but not past its time limit.
    v_ids := array(select tr.task_run_id from flowforge.task_run tr
        where tr.lease_expires_at <= v_now and tr.lease_expires_at >= v_since
            and ((tr.lease_length > v_spared.v_needs[least(cardinality(v_spared.v_ends),
                    width_bucket(tr.lease_expires_at - interval '1 microsecond', v_spared.v_ends) + 1)]) is not true
                or tr.deadline <= v_now)
        order by tr.lease_expires_at
        limit case when not reap_expired_leases.one_by_one then reap_expired_leases.max_rows end for no key update skip locked);
    if v_ids = '{}' then
        return 0;
    end if;
    if not reap_expired_leases.one_by_one then
        v_reaped := flowforge._reap(v_ids, v_now);
    else
        -- In no order, lest those that raise are always the first.
        for v_task_run_id in select u.task_run_id from unnest(v_ids) u (task_run_id) order by random() limit reap_expired_leases.max_rows loop
            begin
                v_reaped := v_reaped + flowforge._reap(array[v_task_run_id], v_now);
            exception when others then
                raise warning 'task run % cannot be taken back: %', v_task_run_id, sqlerrm;
            end;
        end loop;
    end if;
    -- The scheduler is who calls this, and looks on at once: nothing is to wake it for.
    return v_reaped;
end
$$;
comment on function flowforge.reap_expired_leases(bigint, boolean) is
    'Takes task runs back whose lease has run out: cancelled in a cancelled run; a timed-out attempt past the time limit; else ready again under the same dispatch id, or failed beyond max_reaps. After a gap in its own ticks (more than 10 s, and than three of its recent ones) every lease has its own length anew, once, from the first tick after the gap; later gaps are no part of that, up to three times its length. one_by_one: after an error, so that what raises is warned of and holds up nothing else. Answers how many it took. Raises WF001.';

create or replace function flowforge._reap(p_task_run_ids bigint[], p_now timestamptz) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_timed_out bigint[];
    v_expired bigint[];
begin
    -- Judged again now that the rows are locked: a worker may have finished or renewed in between. Without "is true" the
    -- condition on the lease would invite its partial index, dead entries and all.
    select coalesce(array_agg(tr.task_run_id order by tr.task_run_id) filter (where tr.deadline <= p_now), '{}'),
        coalesce(array_agg(tr.task_run_id order by tr.task_run_id) filter (where (tr.deadline <= p_now) is not true), '{}')
    into v_timed_out, v_expired
    from flowforge.task_run tr
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'running' and (tr.lease_expires_at <= p_now) is true;

    if v_timed_out <> '{}' then
        perform flowforge._end_attempt(v_timed_out, array_fill('timed_out'::text, array[cardinality(v_timed_out)]),
            (select array_agg(format('time limit of %s s exceeded, and no end was reported by then: the handler does not stop, or its worker is lost',
                                     extract(epoch from tr.deadline - tr.started_at)::double precision)
                              order by tr.task_run_id)
             from flowforge.task_run tr where tr.task_run_id = any (v_timed_out)),
            array_fill(true, array[cardinality(v_timed_out)]), false, p_now);
    end if;
    if v_expired <> '{}' then
        perform flowforge._give_back(v_expired, 'lease_expired', 'lease expired, worker lost', true, null, p_now);
    end if;
    return cardinality(v_timed_out) + cardinality(v_expired);
end
$$;
comment on function flowforge._reap(bigint[], timestamptz) is
    'Takes back those of the locked task runs that are still running and whose lease has run out. Answers how many.';
