-- cancel_run, cancel_leftovers: a run is given up.
--
-- Lock order: run, then its task runs in id order. cancel_run settles first, so that nothing finished is overlooked,
-- and marks the run before it changes what waits. Safe to repeat. Raise WF001, WF002, WF008.

-- Of the release before, with one parameter.
drop function if exists flowforge._lock_for_cancel(bigint[]);

create or replace function flowforge._lock_for_cancel(p_run_ids bigint[], p_wait boolean) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[];
begin
    -- In one pass, and nothing is locked after it: locked apart, what has finished and what waits close a cycle with a
    -- batch that holds the one, as a row that it has waited for and then passed over, and waits for the other. What
    -- finishes from now on is settled by settle_finished; what comes back in line is cancelled by cancel_leftovers.
    -- Found run by run first: of rows in the order of their ids the planner would walk the primary key.
    v_ids := array(
        select l.task_run_id from unnest(p_run_ids) u (run_id)
        cross join lateral (select tr.task_run_id from flowforge.task_run tr
            where tr.run_id = u.run_id and (tr.state in ('pending', 'ready') or tr.stage = 'unsettled') offset 0) l);
    if p_wait then
        return array(select tr.task_run_id from flowforge.task_run tr
            where tr.task_run_id = any (v_ids) and (tr.state in ('pending', 'ready') or tr.stage = 'unsettled')
            order by tr.task_run_id for no key update);
    end if;
    return array(select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = any (v_ids) and (tr.state in ('pending', 'ready') or tr.stage = 'unsettled')
        order by tr.task_run_id for no key update skip locked);
end
$$;
comment on function flowforge._lock_for_cancel(bigint[], boolean) is
    'Locks, in id order, what a cancel settles and what it cancels in runs locked by the caller, waiting for what others hold or passing it over. Answers their ids.';

create or replace function flowforge._cancel_waiting(p_task_run_ids bigint[]) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_cancelled bigint;
begin
    update flowforge.task_run tr
    set state = 'cancelled', stage = 'unsettled', finished_at = v_now, redispatch_at = null, start_deadline = null,
        error = 'the run was cancelled'
    where tr.task_run_id = any (p_task_run_ids) and tr.state in ('pending', 'ready');
    get diagnostics v_cancelled = row_count;
    perform flowforge._settle_locked(p_task_run_ids, null);
    return v_cancelled;
end
$$;
comment on function flowforge._cancel_waiting(bigint[]) is
    'Cancels what is pending or ready among task runs locked by _lock_for_cancel, in runs marked as being cancelled, and settles it. Answers how many.';

create or replace function flowforge.cancel_run(run_id bigint, reason text default null) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_ids bigint[];
begin
    perform flowforge._require_read_committed('cancel_run');
    if length(cancel_run.reason) > 1000 then
        raise exception using errcode = 'WF005',
            message = format('cancel_run: reason is %s characters long; at most 1000 are allowed', length(cancel_run.reason));
    end if;
    perform from flowforge.run r where r.run_id = cancel_run.run_id for no key update;
    if not found then
        raise exception using errcode = 'WF002', message = format('there is no run %s', coalesce(cancel_run.run_id::text, 'null'));
    end if;
    v_ids := flowforge._lock_for_cancel(array[cancel_run.run_id], true);
    perform flowforge._settle_locked(v_ids, null);
    update flowforge.run r
    set cancel_requested_at = flowforge._clock(), cancel_sweep_at = flowforge._clock(), cancel_reason = cancel_run.reason
    where r.run_id = cancel_run.run_id and r.state = 'running' and r.cancel_requested_at is null;
    if not found then
        return false;
    end if;
    perform flowforge._cancel_waiting(v_ids);
    return true;
end
$$;
comment on function flowforge.cancel_run(bigint, text) is
    'Cancels what is pending or ready in a run; running task runs learn of it at their next renewal, and a success that still comes is accepted. True if this call began it; false if it had been asked for before or the run had ended. reason: at most 1000 characters. Raises WF002, WF005, WF008.';

create or replace function flowforge.cancel_leftovers(max_runs bigint default 100, one_by_one boolean default false) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_run_ids bigint[];
    v_run_id bigint;
    v_cancelled bigint := 0;
begin
    perform flowforge._require_read_committed('cancel_leftovers');
    perform flowforge._check_count('max_runs', cancel_leftovers.max_runs);
    v_run_ids := array(select r.run_id from flowforge.run r
        where r.cancel_requested_at is not null and r.finished_at is null
            -- Further away than a minute it was put by a clock that was ahead.
            and (r.cancel_sweep_at > v_now and r.cancel_sweep_at <= v_now + interval '1 minute') is not true
        order by r.run_id limit cancel_leftovers.max_runs for no key update skip locked);
    if v_run_ids = '{}' then
        return 0;
    end if;
    -- Only what finished or was given back while the cancel was under way can come back in line: the longer ago that is,
    -- the more seldom is looked, since it takes a walk through the run.
    update flowforge.run r set cancel_sweep_at = v_now + least(interval '1 minute', greatest(interval '1 s', v_now - r.cancel_requested_at))
    where r.run_id = any (v_run_ids);
    v_run_ids := array(select u.run_id from unnest(v_run_ids) u (run_id)
        where (select true from flowforge.task_run tr where tr.run_id = u.run_id and tr.state in ('pending', 'ready') limit 1));
    if not cancel_leftovers.one_by_one then
        v_cancelled := flowforge._cancel_waiting(flowforge._lock_for_cancel(v_run_ids, false));
    else
        foreach v_run_id in array v_run_ids loop
            begin
                v_cancelled := v_cancelled + flowforge._cancel_waiting(flowforge._lock_for_cancel(array[v_run_id], false));
            exception when others then
                raise warning 'run % cannot be cancelled: %', v_run_id, sqlerrm;
            end;
        end loop;
    end if;
    -- What was locked has been passed over, so that one session holds up no other run, and is looked at soon.
    update flowforge.run r set cancel_sweep_at = v_now + interval '1 s'
    where r.run_id = any (v_run_ids)
        and (select true from flowforge.task_run tr where tr.run_id = r.run_id and tr.state in ('pending', 'ready') limit 1);
    return v_cancelled;
end
$$;
comment on function flowforge.cancel_leftovers(bigint, boolean) is
    'Cancels what a failed finish or a release has put back in line in runs being cancelled; looks at each after 1 s, 2 s, 4 s … at most a minute. one_by_one: run by run, after an error, so that what raises is warned of and holds up nothing else. Answers how many task runs. Raises WF001, WF008.';
