-- fetch_outbox, mark_published, mark_refused, mark_unpublishable, queue_names: the publisher's functions.
--
-- fetch_outbox locks outbox rows, skipping locked ones, until the caller's transaction ends; the marks belong in that
-- same transaction, never in a new one: a lost connection means published again, and recognised at the claim.
-- Nothing here locks a task run. Raise WF001, WF005.

create or replace function flowforge.fetch_outbox(max_rows bigint)
returns table (outbox_id bigint, task_run_id bigint, dispatch_id uuid, queue text, handler text, attempt bigint, traceparent text, tries bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowforge._clock();
    v_since timestamptz := (flowforge._frontiers()).v_unpublished;
begin
    perform flowforge._check_count('max_rows', fetch_outbox.max_rows);
    return query
        select o.outbox_id, o.task_run_id, o.dispatch_id, o.queue, o.handler, o.attempt, o.traceparent, o.tries
        from flowforge.outbox o
        where o.published_at is null and o.parked_at is null and o.next_attempt_at <= v_now and o.next_attempt_at >= v_since
            and (select tr.state = 'ready' and tr.dispatch_id = o.dispatch_id and tr.available_at <= v_now
                     and (select r.cancel_requested_at from flowforge.run r where r.run_id = tr.run_id) is null
                 from flowforge.task_run tr where tr.task_run_id = o.task_run_id)
        order by o.next_attempt_at, o.outbox_id
        limit fetch_outbox.max_rows for update skip locked;
end
$$;
comment on function flowforge.fetch_outbox(bigint) is
    'Up to max_rows orders to publish now, the oldest first, locked until the transaction ends; never those of a cancelled run or of a dispatch that moved on. dispatch_id is the message_id; tries: how often the broker has refused it. Raises WF001.';

create or replace function flowforge.mark_published(outbox_ids bigint[]) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_marked bigint;
begin
    perform flowforge._check_batch('mark_published', array[cardinality(mark_published.outbox_ids)]);
    update flowforge.outbox o set published_at = v_now, last_error = null
    where o.outbox_id = any (mark_published.outbox_ids) and o.published_at is null;
    get diagnostics v_marked = row_count;
    return v_marked;
end
$$;
comment on function flowforge.mark_published(bigint[]) is
    'Marks orders that the broker has confirmed and not returned. Only in the transaction that fetched them. Answers how many were not marked before. Raises WF001, WF005.';

create or replace function flowforge.mark_refused(outbox_ids bigint[], errors text[]) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_ids bigint[];
    v_errors text[];
    v_marked bigint;
begin
    perform flowforge._check_batch('mark_refused', array[cardinality(mark_refused.outbox_ids), cardinality(mark_refused.errors)]);
    select array_agg(u.outbox_id order by u.outbox_id), array_agg(flowforge._cut_error(u.error) order by u.outbox_id) into v_ids, v_errors
    from (select distinct on (i.outbox_id) i.outbox_id, i.error from unnest(mark_refused.outbox_ids, mark_refused.errors) i (outbox_id, error)
          where i.outbox_id is not null order by i.outbox_id) u;
    -- Again after 1 s, 2 s, 4 s … at most a minute (and up to a quarter more, by chance), for as long as it takes.
    update flowforge.outbox o
    set tries = o.tries + 1, last_error = v_errors[flowforge._position(v_ids, o.outbox_id)],
        next_attempt_at = v_now + make_interval(secs => least(60, power(2, least(o.tries, 6)::double precision)) * (1 + random() / 4))
    where o.outbox_id = any (v_ids) and o.published_at is null;
    get diagnostics v_marked = row_count;
    return v_marked;
end
$$;
comment on function flowforge.mark_refused(bigint[], text[]) is
    'Keeps orders that the broker nacked or returned, or did not confirm in time, with the error, a count and a growing, capped delay. Answers how many. Raises WF001, WF005.';

create or replace function flowforge.mark_unpublishable(outbox_id bigint, error text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    if mark_unpublishable.outbox_id is null or mark_unpublishable.error is null then
        raise exception using errcode = 'WF001', message = 'mark_unpublishable: outbox_id and error must not be null';
    end if;
    update flowforge.outbox o
    set parked_at = flowforge._clock(), tries = o.tries + 1, last_error = flowforge._cut_error(mark_unpublishable.error)
    where o.outbox_id = mark_unpublishable.outbox_id and coalesce(o.published_at, o.parked_at) is null;
    if not found then
        return false;
    end if;
    perform flowforge._wake_scheduler();
    return true;
end
$$;
comment on function flowforge.mark_unpublishable(bigint, text) is
    'Parks an order whose error is permanent to itself; the scheduler then fails its task run, if nothing else is to be published for it. True if it was parked by this call. Raises WF001.';

create or replace function flowforge.queue_names() returns setof text
language sql stable security definer
set search_path = pg_catalog, pg_temp
begin atomic
    select q.name from flowforge.queue q order by q.name;
end;
comment on function flowforge.queue_names() is 'Names of all queues, for the publisher to declare.';
