-- renew_leases, assert_lease, report_progress, traceparents: what a worker calls for what it has claimed.
--
-- renew_leases locks only task runs that are running under the given tokens, in id order, and skips locked ones: a
-- handler inside its own long transaction is not lost, nor can the reaper touch it. Safe to repeat. Raises WF001, WF005.
-- assert_lease locks the task run inside the caller's transaction, waiting, and bounds that transaction. Raises WF001,
-- WF006.
-- traceparents reads, and locks nothing. Raises WF001, WF005.

create or replace function flowforge.renew_leases(task_run_ids bigint[], fencing_tokens bigint[], lease interval)
returns table ("position" bigint, task_run_id bigint, outcome text, lease_expires_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_lease interval := flowforge._check_lease(renew_leases.lease);
    v_now timestamptz;
    v_ids bigint[];
begin
    perform flowforge._check_batch('renew_leases', array[cardinality(renew_leases.task_run_ids), cardinality(renew_leases.fencing_tokens)]);
    select array_agg(l.task_run_id order by l.task_run_id) into v_ids
    from (select distinct i.task_run_id, i.fencing_token
          from unnest(renew_leases.task_run_ids, renew_leases.fencing_tokens) i (task_run_id, fencing_token) order by i.task_run_id) u
    cross join lateral (
        select tr.task_run_id from flowforge.task_run tr
        where tr.task_run_id = u.task_run_id and tr.state = 'running' and tr.fencing_token = u.fencing_token
        for no key update skip locked) l;
    v_now := flowforge._clock();

    if v_ids is not null then
        update flowforge.task_run tr
        set (lease_length, lease_expires_at) = (
            select coalesce(t.lease, v_lease), least(v_now + coalesce(t.lease, v_lease), tr.deadline)
            from flowforge.task t where t.task_id = tr.task_id)
        where tr.task_run_id = any (v_ids) and tr.state = 'running';
    end if;

    return query
        select u.pos, u.task_run_id,
            case
                when l.lease_expires_at is null then 'lost'
                when l.cancel_requested_at is not null then 'cancel'
                when u.task_run_id = any (v_ids) then 'held'
                else 'busy'
            end,
            l.lease_expires_at
        from unnest(renew_leases.task_run_ids, renew_leases.fencing_tokens) with ordinality u (task_run_id, fencing_token, pos)
        left join lateral (
            select tr.lease_expires_at,
                (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) as cancel_requested_at
            from flowforge.task_run tr
            where tr.task_run_id = u.task_run_id and tr.state = 'running' and tr.fencing_token = u.fencing_token
            limit 1) l on true
        order by u.pos;
end
$$;
comment on function flowforge.renew_leases(bigint[], bigint[], interval) is
    'Extends leases, never past the time limit, and tells of each: held, cancel (held, but its run is being cancelled: stop), busy (locked, by the handler''s own transaction perhaps: not lost) or lost (another owner, or ended: stop). lease: 0.1 s to 7 days; one in the definition wins. Raises WF001, WF005.';

create or replace function flowforge.assert_lease(task_run_id bigint, fencing_token bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_left bigint;
begin
    if assert_lease.task_run_id is null or assert_lease.fencing_token is null then
        raise exception using errcode = 'WF001', message = 'assert_lease: task_run_id and fencing_token must not be null';
    end if;
    perform from flowforge.task_run tr
    where tr.task_run_id = assert_lease.task_run_id and tr.state = 'running' and tr.fencing_token = assert_lease.fencing_token
    for no key update;
    v_now := flowforge._clock();
    update flowforge.task_run tr
    set lease_expires_at = greatest(tr.lease_expires_at, least(v_now + tr.lease_length, tr.deadline))
    where tr.task_run_id = assert_lease.task_run_id and tr.state = 'running' and tr.fencing_token = assert_lease.fencing_token
        and (tr.deadline > v_now) is not false
    returning case when tr.deadline is not null then least(ceil(1000 * extract(epoch from tr.deadline - v_now)), 2147483647) end into v_left;
    if not found then
        raise exception using errcode = 'WF006',
            message = format('task run %s is not held under token %s', assert_lease.task_run_id, assert_lease.fencing_token),
            hint = 'It was taken over, has ended, or is past its time limit: stop, and roll back.';
    end if;
    -- The row is locked until the caller's transaction ends. A host that vanishes must not hold it for ever: for the rest
    -- of the transaction the server looks after it, unless the caller has settings of its own.
    perform set_config(s.name, s.value, true)
    from (values ('idle_in_transaction_session_timeout', '5min'), ('tcp_user_timeout', '20s'), ('client_connection_check_interval', '1s')) s (name, value)
    where current_setting(s.name) in ('0', '0ms');
    -- Of these the system's own values are answered, of hours.
    perform set_config(s.name, s.value::text, true)
    from (values ('tcp_keepalives_idle', 10), ('tcp_keepalives_interval', 5), ('tcp_keepalives_count', 3)) s (name, value)
    where current_setting(s.name)::bigint not between 1 and s.value;
    -- Nor longer than its time limit allows, whatever the settings (from version 17 on in all, before each statement and
    -- each pause between two): the reaper cannot take a row that is locked.
    if v_left is not null then
        perform set_config(s.name, v_left || 'ms', true)
        from unnest(array['idle_in_transaction_session_timeout', 'statement_timeout', 'transaction_timeout']) s (name)
        cross join lateral (select current_setting(s.name, true) as value) c
        where c.value is not null and (c.value in ('0', '0ms') or 1000 * extract(epoch from c.value::interval) > v_left);
    end if;
end
$$;
comment on function flowforge.assert_lease(bigint, bigint) is
    'Locks the task run in the caller''s transaction and extends its lease, or raises WF006 when the token no longer holds it. As the first statement of a transaction: what follows commits only under a live lease, and not long past the time limit: the session''s time-outs are set for the rest of the transaction. Raises WF001, WF006.';

create or replace function flowforge.report_progress(
    task_run_id bigint, fencing_token bigint, fraction double precision, message text default null)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    if report_progress.task_run_id is null or report_progress.fencing_token is null
        or not (coalesce(report_progress.fraction, 0) between 0 and 1)
    then
        raise exception using errcode = 'WF001',
            message = format('report_progress: fraction is %s; 0 to 1 is allowed, and task_run_id and fencing_token must be given',
                coalesce(report_progress.fraction::text, 'null'));
    end if;
    if length(report_progress.message) > 1000 then
        raise exception using errcode = 'WF005',
            message = format('report_progress: message is %s characters long; at most 1000 are allowed', length(report_progress.message));
    end if;
    -- With a lock that stops nobody but who deletes the row: it may end, and be pruned, before the insert refers to it.
    perform from flowforge.task_run tr where tr.task_run_id = report_progress.task_run_id
        and tr.state = 'running' and tr.fencing_token = report_progress.fencing_token
    for key share;
    if not found then
        return false;
    end if;
    insert into flowforge.progress as p (task_run_id, fencing_token, fraction, message, reported_at)
    values (report_progress.task_run_id, report_progress.fencing_token, report_progress.fraction, report_progress.message, flowforge._clock())
    on conflict (task_run_id) do update
    set fencing_token = excluded.fencing_token, fraction = excluded.fraction, message = excluded.message, reported_at = excluded.reported_at
    where p.fencing_token <= excluded.fencing_token;
    return found;
end
$$;
comment on function flowforge.report_progress(bigint, bigint, double precision, text) is
    'Records progress of a running execution under its token, for views only; false when the token no longer holds. fraction: 0 to 1 or null; message: at most 1000 characters. Raises WF001, WF005.';

create or replace function flowforge.traceparents(task_run_ids bigint[], fencing_tokens bigint[])
returns table ("position" bigint, traceparent text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    perform flowforge._check_batch('traceparents', array[cardinality(traceparents.task_run_ids), cardinality(traceparents.fencing_tokens)]);
    return query
        select u.pos, l.traceparent
        from unnest(traceparents.task_run_ids, traceparents.fencing_tokens) with ordinality u (task_run_id, fencing_token, pos)
        left join lateral (
            select (select r.labels ->> 'traceparent' from flowforge.run r where r.run_id = tr.run_id) as traceparent
            from flowforge.task_run tr
            where tr.task_run_id = u.task_run_id and tr.state = 'running' and tr.fencing_token = u.fencing_token
            limit 1) l on true
        order by u.pos;
end
$$;
comment on function flowforge.traceparents(bigint[], bigint[]) is
    'The W3C trace context of whoever triggered the run of each, from its label traceparent: what a message carries in its header. Null without that label, and for what is not held under the token. Raises WF001, WF005.';
