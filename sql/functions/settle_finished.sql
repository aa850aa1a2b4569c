-- settle_finished, expand_map: the scheduler counts what has finished, judges what waited for it, and ends runs.
--
-- A finish only marks its own row unsettled. Settling works under the lock of the run's row, taken in an earlier
-- statement, so the task runs that wait in one run are counted by one transaction at a time; the counts come from
-- exactly the rows that the marking UPDATE returned; marking and decrementing are two statements. Lock order: run, then
-- task runs in id order. Rows that wait are changed only under the run's lock, but for dispatch, which touches only
-- rows with nothing unmet: so settling waits for a claim only that has passed such a row over and holds it still. Each level
-- is locked in id order; a cycle that such a claim and two levels could close is left to the server, which aborts one of
-- the two, and both are repeated. Safe to repeat. Raise WF001, WF008.

create or replace function flowforge._end_map(p_task_run_id bigint, p_now timestamptz) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_own record;
    v_sum record;
    v_error text;
begin
    select tr.run_id, tr.task_id, tr.generation, tr.map_count into v_own from flowforge.task_run tr where tr.task_run_id = p_task_run_id;
    select count(*) filter (where e.state = 'succeeded') as succeeded, count(*) filter (where e.state = 'failed') as failed,
        sum(e.output_bytes) as bytes into v_sum
    from flowforge.task_run e
    where e.run_id = v_own.run_id and e.task_id = v_own.task_id and e.map_index >= 0 and e.generation = v_own.generation;
    if v_sum.succeeded < v_own.map_count then
        -- With the error of one, by which most are told; the others are in dead_letters.
        v_error := format('%s of %s elements did not succeed (%s failed)', v_own.map_count - v_sum.succeeded, v_own.map_count, v_sum.failed)
            || coalesce((
                select format('; element %s: %s', e.map_index, left(split_part(e.error, E'\n', 1), 200))
                from flowforge.task_run e
                where e.run_id = v_own.run_id and e.task_id = v_own.task_id and e.map_index >= 0 and e.generation = v_own.generation
                    and e.state = 'failed' and e.error <> ''
                order by e.map_index limit 1), '');
    elsif v_sum.bytes > flowforge._limit('max_map_output_bytes') then
        v_error := format('the joined results are %s bytes; at most %s are allowed (limit max_map_output_bytes)',
            v_sum.bytes, flowforge._limit('max_map_output_bytes'));
    end if;
    update flowforge.task_run tr
    set state = case when v_error is null then 'succeeded' else 'failed' end::flowforge.task_run_state, stage = 'unsettled',
        finished_at = p_now, unmet = 0, error = v_error,
        output_bytes = case when v_error is null then v_sum.bytes end,
        output = case when v_error is null then (
            select jsonb_agg(e.output order by e.map_index) from flowforge.task_run e
            where e.run_id = v_own.run_id and e.task_id = v_own.task_id and e.map_index >= 0 and e.generation = v_own.generation) end
    where tr.task_run_id = p_task_run_id and tr.state = 'pending';
end
$$;
comment on function flowforge._end_map(bigint, timestamptz) is
    'Ends the own row of a map all of whose elements are settled: succeeded with their outputs in order, or failed.';

create or replace function flowforge._rule_met(p_rule flowforge.trigger_rule, p_upstreams bigint, p_succeeded bigint, p_failed bigint)
returns boolean
language sql immutable parallel safe
return case p_rule
    when 'all_succeeded' then p_succeeded = p_upstreams
    when 'all_done' then true
    when 'any_failed' then p_failed > 0
    when 'any_succeeded' then p_succeeded > 0
    when 'none_failed' then p_failed = 0
end;
comment on function flowforge._rule_met(flowforge.trigger_rule, bigint, bigint, bigint) is
    'Whether a task runs, given how many of its settled upstreams succeeded and how many failed or were cancelled.';

create or replace function flowforge._judge(p_task_run_ids bigint[], p_now timestamptz) returns bigint[]
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[];
    v_runs_on boolean[];
    v_bytes bigint[];
    v_map_ends bigint[];
    v_ended bigint[];
    v_task_run_id bigint;
    v_limit bigint := flowforge._limit('max_claim_bytes');
begin
    select array_agg(tr.task_run_id order by tr.task_run_id) filter (where tr.map_count is null),
        array_agg(j.runs_on order by tr.task_run_id) filter (where tr.map_count is null),
        array_agg(j.bytes order by tr.task_run_id) filter (where tr.map_count is null),
        coalesce(array_agg(tr.task_run_id) filter (where tr.map_count is not null), '{}')
    into v_ids, v_runs_on, v_bytes, v_map_ends
    from flowforge.task_run tr
    cross join lateral (select t.rule, t.upstream_count, t.map_task_id from flowforge.task t where t.task_id = tr.task_id limit 1) t
    cross join lateral (
        select flowforge._rule_met(t.rule, t.upstream_count, count(*) filter (where u.state = 'succeeded'),
                count(*) filter (where u.state in ('failed', 'cancelled'))) as runs_on,
            -- The mapped array is not given to the elements.
            coalesce(sum(u.output_bytes) filter (where d.upstream_task_id is distinct from t.map_task_id), 0) as bytes
        from flowforge.task_dependency d
        cross join lateral (select uo.state, uo.output_bytes from flowforge.task_run uo
            where uo.run_id = tr.run_id and uo.task_id = d.upstream_task_id and uo.map_index is null limit 1) u
        where d.task_id = tr.task_id and tr.map_count is null) j
    where tr.task_run_id = any (p_task_run_ids) and tr.state = 'pending';

    with judged as (
        update flowforge.task_run tr
        set (state, stage, finished_at, error) = (
            select case when not n.runs_on then 'skipped' when n.bytes > v_limit then 'failed' else 'pending' end::flowforge.task_run_state,
                case when not n.runs_on or n.bytes > v_limit then 'unsettled'
                    when (select t.map_task_id from flowforge.task t where t.task_id = tr.task_id) is not null and tr.map_index is null then 'expand'
                    when tr.available_at > p_now then 'delayed' else 'eligible' end::flowforge.task_run_stage,
                case when not n.runs_on or n.bytes > v_limit then p_now end,
                -- Claimed it could never be: no answer can hold so much.
                case when n.runs_on and n.bytes > v_limit then
                    format('the outputs of its upstreams are %s bytes together; at most %s are allowed (limit max_claim_bytes)', n.bytes, v_limit) end
            from (select v_runs_on[flowforge._position(v_ids, tr.task_run_id)] as runs_on,
                         v_bytes[flowforge._position(v_ids, tr.task_run_id)] as bytes) n),
            unmet = 0, available_at = greatest(tr.available_at, p_now)
        where tr.task_run_id = any (v_ids) and tr.state = 'pending'
        returning tr.task_run_id, tr.state
    )
    select coalesce(array_agg(j.task_run_id) filter (where j.state <> 'pending'), '{}') into v_ended from judged j;
    foreach v_task_run_id in array v_map_ends loop
        perform flowforge._end_map(v_task_run_id, p_now);
    end loop;
    return v_ended || v_map_ends;
end
$$;
comment on function flowforge._judge(bigint[], timestamptz) is
    'Decides for task runs that have nothing left to wait for, in a run locked by the caller: in line, to be expanded, skipped by its trigger rule, failed because it would be given too much, or the end of a map. Answers those that ended by it, which are to be settled next.';

create or replace function flowforge._mark_settled(
    p_task_run_ids bigint[], p_now timestamptz, out v_run_ids bigint[], out v_ended bigint[])
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_task_ids bigint[];
    v_map_indexes bigint[];
    v_generations bigint[];
    v_waiting bigint[];
    v_counts bigint[];
    v_free bigint[];
begin
    with marked as (
        update flowforge.task_run tr set stage = 'settled'
        where tr.task_run_id = any (p_task_run_ids) and tr.state in ('succeeded', 'failed', 'cancelled', 'skipped') and tr.stage <> 'settled'
        returning tr.run_id, tr.task_id, tr.map_index, tr.generation
    )
    select coalesce(array_agg(m.run_id), '{}'), array_agg(m.task_id), array_agg(m.map_index), array_agg(m.generation)
    into v_run_ids, v_task_ids, v_map_indexes, v_generations from marked m;

    -- Who waited for what was marked: downstream own rows for an own row, the own row of the map for an element of its
    -- current generation.
    select array_agg(w.task_run_id order by w.task_run_id) filter (where w.unmet <> w.times),
        array_agg(w.times order by w.task_run_id) filter (where w.unmet <> w.times),
        array_agg(w.task_run_id order by w.task_run_id) filter (where w.unmet = w.times)
    into v_waiting, v_counts, v_free
    from (
        select c.task_run_id, c.unmet, count(*) as times
        from unnest(v_run_ids, v_task_ids, v_map_indexes, v_generations) m (run_id, task_id, map_index, generation)
        cross join lateral (
            select d.task_id from flowforge.task_dependency d where d.upstream_task_id = m.task_id and m.map_index is null
            union all select m.task_id where m.map_index is not null) d
        cross join lateral (
            select tr.task_run_id, tr.unmet from flowforge.task_run tr
            where tr.run_id = m.run_id and tr.task_id = d.task_id and tr.map_index is null and tr.state = 'pending'
                and (m.map_index is null or tr.map_count is not null and tr.generation = m.generation)
            limit 1) c
        group by c.task_run_id, c.unmet) w;
    perform from flowforge.task_run tr where tr.task_run_id = any (v_waiting || v_free) order by tr.task_run_id for no key update;
    -- What still waits is decremented; what waits for nothing more is judged, and its count ended by that same UPDATE.
    update flowforge.task_run tr set unmet = tr.unmet - v_counts[flowforge._position(v_waiting, tr.task_run_id)]
    where tr.task_run_id = any (v_waiting) and tr.state = 'pending';
    if v_free is not null then
        v_ended := flowforge._judge(v_free, p_now);
    end if;
end
$$;
comment on function flowforge._mark_settled(bigint[], timestamptz) is
    'One level of settling: marks, decrements what waited, judges what waits for nothing more. Answers the run of each row marked, and what ended by the judgement: the next level.';

create or replace function flowforge._settle_locked(p_task_run_ids bigint[], p_max_rows bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz := flowforge._clock();
    v_ids bigint[] := p_task_run_ids;
    v_level record;
    v_marked bigint[] := array[]::bigint[];
    v_runs bigint[];
    v_counts bigint[];
begin
    while v_ids <> '{}' loop
        v_level := flowforge._mark_settled(v_ids, v_now);
        v_marked := v_marked || v_level.v_run_ids;
        -- Skips and ends of maps are settled level by level, each from what the last one ended: finding them through the
        -- index would walk all the levels before. What does not fit is unsettled still and comes next time.
        v_ids := v_level.v_ended[1:coalesce(p_max_rows - cardinality(v_marked), cardinality(v_level.v_ended))];
    end loop;
    if v_marked = '{}' then
        return 0;
    end if;

    select array_agg(m.run_id order by m.run_id), array_agg(m.times order by m.run_id) into v_runs, v_counts
    from (select u.run_id, count(*) as times from unnest(v_marked) u (run_id) group by u.run_id) m;
    -- Counted and ended by one UPDATE: a row updated twice in a transaction has its foreign keys checked again.
    update flowforge.run r
    set (unsettled, state, finished_at) = (
        select n.unsettled,
            case
                when n.unsettled > 0 then r.state
                when (
                    select true from flowforge.task_run tr
                    where tr.run_id = r.run_id and tr.map_index is null and tr.state = 'cancelled' limit 1) then 'cancelled'
                when (
                    select true from flowforge.task_run tr
                    where tr.run_id = r.run_id and tr.map_index is null and tr.state = 'failed' limit 1) then 'failed'
                else 'succeeded'
            end,
            case when n.unsettled = 0 then v_now end
        from (select r.unsettled - v_counts[flowforge._position(v_runs, r.run_id)] as unsettled) n)
    where r.run_id = any (v_runs) and r.state = 'running';
    return cardinality(v_marked);
end
$$;
comment on function flowforge._settle_locked(bigint[], bigint) is
    'Settles those of the given task runs that have ended, and what ends by it, up to so many rows (null: all); ends the runs that have nothing unsettled left. The caller has locked the runs in an earlier statement, then the task runs. Answers how many were settled.';

create or replace function flowforge.settle_finished(max_rows bigint default 1000, one_by_one boolean default false) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_since timestamptz := (flowforge._frontiers()).v_unsettled;
    v_run_ids bigint[];
    v_run_id bigint;
    v_share bigint;
    v_left bigint;
    v_ids bigint[];
    v_settled bigint := 0;
begin
    perform flowforge._require_read_committed('settle_finished');
    perform flowforge._check_count('max_rows', settle_finished.max_rows);
    -- A loose scan of the unsettled index, run by run; a run that another session has locked is passed over before it
    -- counts against the limit.
    with recursive candidate as (
        (select tr.run_id from flowforge.task_run tr
            where tr.stage = 'unsettled' and tr.finished_at >= v_since order by tr.run_id limit 1)
        union all
        select (select tr.run_id from flowforge.task_run tr
                where tr.stage = 'unsettled' and tr.finished_at >= v_since and tr.run_id > c.run_id order by tr.run_id limit 1)
        from candidate c where c.run_id is not null
    )
    select array_agg(l.run_id order by l.run_id) into v_run_ids
    from (
        select l.run_id from candidate c
        cross join lateral (select r.run_id from flowforge.run r where r.run_id = c.run_id for no key update skip locked) l
        limit least(settle_finished.max_rows, 500)) l;
    -- Run by run, each in the order of its index: over all of them at once, order and limit would tempt the planner into
    -- walking the primary key, and a sort would read the whole backlog. What is locked is passed over, so that nothing is
    -- waited for; it comes next time. No run has more than its share, so that a wide one does not hold up the hops of others.
    v_share := greatest(1, settle_finished.max_rows / greatest(1, cardinality(v_run_ids)));
    if not settle_finished.one_by_one then
        v_ids := array(
            select l.task_run_id from unnest(v_run_ids) u (run_id)
            cross join lateral (select tr.task_run_id from flowforge.task_run tr
                where tr.run_id = u.run_id and tr.stage = 'unsettled'
                order by tr.task_run_id limit v_share for no key update skip locked) l
            limit settle_finished.max_rows);
        -- What others leave of their shares goes to those that have more.
        v_left := settle_finished.max_rows - cardinality(v_ids);
        if v_left > 0 and cardinality(v_run_ids) > 1 then
            v_ids := v_ids || array(
                select l.task_run_id from (
                    select tr.run_id, max(tr.task_run_id) as last from flowforge.task_run tr
                    where tr.task_run_id = any (v_ids) group by tr.run_id having count(*) = v_share order by tr.run_id) u
                cross join lateral (select tr.task_run_id from flowforge.task_run tr
                    where tr.run_id = u.run_id and tr.stage = 'unsettled' and tr.task_run_id > u.last
                    order by tr.task_run_id limit v_left for no key update skip locked) l
                limit v_left);
        end if;
        return flowforge._settle_locked(v_ids, settle_finished.max_rows);
    end if;
    foreach v_run_id in array coalesce(v_run_ids, '{}') loop
        begin
            v_settled := v_settled + flowforge._settle_locked(array(
                select tr.task_run_id from flowforge.task_run tr
                where tr.run_id = v_run_id and tr.stage = 'unsettled'
                order by tr.task_run_id limit v_share for no key update skip locked), v_share);
        exception when others then
            raise warning 'run % cannot be settled: %', v_run_id, sqlerrm;
        end;
    end loop;
    return v_settled;
end
$$;
comment on function flowforge.settle_finished(bigint, boolean) is
    'Counts finished task runs, makes what waited for them eligible or skips it, and ends runs. one_by_one: run by run, after an error, so that what raises is warned of and holds up nothing else. Answers how many task runs were settled. Raises WF001, WF008.';

create or replace function flowforge.expand_map(one_by_one boolean default false) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_ids bigint[];
    v_task_run_id bigint;
begin
    perform flowforge._require_read_committed('expand_map');
    if not expand_map.one_by_one then
        return flowforge._expand((
            select c.task_run_id
            from (select tr.task_run_id, tr.run_id from flowforge.task_run tr where tr.stage = 'expand' order by tr.task_run_id) c
            cross join lateral (select r.run_id from flowforge.run r where r.run_id = c.run_id for no key update skip locked) l
            limit 1));
    end if;
    -- In no order, lest those that raise are always the first.
    v_ids := array(
        select c.task_run_id
        from (select tr.task_run_id, tr.run_id from flowforge.task_run tr where tr.stage = 'expand' order by random()) c
        cross join lateral (select r.run_id from flowforge.run r where r.run_id = c.run_id for no key update skip locked) l
        limit 100);
    foreach v_task_run_id in array v_ids loop
        begin
            return flowforge._expand(v_task_run_id);
        exception when others then
            raise warning 'map % cannot be expanded: %', v_task_run_id, sqlerrm;
        end;
    end loop;
    return 0;
end
$$;
comment on function flowforge.expand_map(boolean) is
    'Expands at most one map whose trigger rule is met into its elements, whole; an empty one succeeds with []; one that cannot be expanded fails, saying why. one_by_one: the first that can be, of 100, after an error, so that what raises is warned of and holds up nothing else. Answers 1 or 0. Raises WF008.';

create or replace function flowforge._expand(p_task_run_id bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_now timestamptz;
    v_own record;
    v_upstream record;
    v_width bigint;
    v_error text;
begin
    select tr.run_id, tr.task_id, tr.queue_id, tr.priority, tr.generation, tr.stage, tr.map_count, t.map_task_id, t.name, t.map_name into v_own
    from flowforge.task_run tr
    cross join lateral (select t.map_task_id, t.name, (select m.name from flowforge.task m where m.task_id = t.map_task_id) as map_name
        from flowforge.task t where t.task_id = tr.task_id limit 1) t
    where tr.task_run_id = p_task_run_id;
    v_now := flowforge._clock();
    -- Looked at again, now that its run is locked.
    if (v_own.stage = 'expand') is not true then
        return 0;
    end if;
    select tr.state, tr.output, jsonb_typeof(tr.output) as type into v_upstream
    from flowforge.task_run tr where tr.run_id = v_own.run_id and tr.task_id = v_own.map_task_id and tr.map_index is null;
    if v_upstream.state <> 'succeeded' then
        v_error := format('cannot map over task %s: it is %s and has no output', flowforge._quoted(v_own.map_name), v_upstream.state);
    elsif v_upstream.type <> 'array' then
        v_error := format('cannot map over task %s: its output is %s, not an array', flowforge._quoted(v_own.map_name), v_upstream.type);
    else
        v_width := jsonb_array_length(v_upstream.output);
        if v_width > flowforge._limit('max_map_width') then
            v_error := format('cannot map over task %s: its output has %s elements; at most %s are allowed (limit max_map_width)',
                flowforge._quoted(v_own.map_name), v_width, flowforge._limit('max_map_width'));
        end if;
    end if;
    if v_error is not null or v_width = 0 then
        update flowforge.task_run tr
        set state = case when v_error is null then 'succeeded' else 'failed' end::flowforge.task_run_state, stage = 'unsettled',
            finished_at = v_now, error = v_error, map_count = case when v_error is null then 0 end,
            output = case when v_error is null then '[]'::jsonb end
        where tr.task_run_id = p_task_run_id and tr.state = 'pending' and tr.map_count is null;
        return 1;
    end if;

    -- The count first, then the elements: no half-expanded map is ever seen.
    update flowforge.task_run tr set stage = 'blocked', unmet = v_width, map_count = v_width
    where tr.task_run_id = p_task_run_id and tr.state = 'pending' and tr.map_count is null;
    update flowforge.run r set unsettled = r.unsettled + v_width where r.run_id = v_own.run_id and r.state = 'running';
    insert into flowforge.task_run (run_id, task_id, queue_id, map_index, generation, priority, unmet, available_at, stage, item)
    select v_own.run_id, v_own.task_id, v_own.queue_id, e.pos - 1, v_own.generation, v_own.priority, 0, v_now, 'eligible', e.item
    from jsonb_array_elements(v_upstream.output) with ordinality e (item, pos)
    order by e.pos;
    return 1;
end
$$;
comment on function flowforge._expand(bigint) is
    'Expands a map whose run the caller has locked, if it is still to be expanded. Answers 1 or 0.';
