-- run_result, task_output: what a client asks of its run. Lock nothing. Raise WF002.

create or replace function flowforge.run_result(run_id bigint)
returns table (workflow text, version bigint, state text, created_at timestamptz, finished_at timestamptz, outputs jsonb, errors jsonb)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
        select w.name, wv.version, r.state::text, r.created_at, r.finished_at,
            -- A jsonb holds 256 MB at most, and no client wants so much at once.
            case when x.bytes <= flowforge._limit('max_claim_bytes') then (
                select coalesce(jsonb_object_agg(t.name, tr.output), '{}')
                from flowforge.task_run tr
                cross join lateral (select t.name from flowforge.task t where t.task_id = tr.task_id limit 1) t
                where tr.task_run_id = any (x.last)) end,
            case when r.finished_at is not null then (
                select coalesce(jsonb_object_agg(t.name,
                    case when x.error_bytes <= flowforge._limit('max_claim_bytes') then coalesce(tr.error, '') else coalesce(left(tr.error, 200), '') end), '{}')
                from flowforge.task_run tr
                cross join lateral (select t.name from flowforge.task t where t.task_id = tr.task_id limit 1) t
                where tr.task_run_id = any (x.failed)) end
        from flowforge.run r
        join flowforge.workflow w on w.workflow_id = r.workflow_id
        join flowforge.workflow_version wv on wv.workflow_version_id = r.workflow_version_id
        left join lateral (
            select coalesce(array_agg(tr.task_run_id) filter (where l.is_last), '{}') as last,
                coalesce(sum(tr.output_bytes) filter (where l.is_last), 0) as bytes,
                coalesce(array_agg(tr.task_run_id) filter (where tr.state = 'failed'), '{}') as failed,
                coalesce(sum(octet_length(tr.error)) filter (where tr.state = 'failed'), 0) as error_bytes
            from flowforge.task_run tr join flowforge.task t on t.task_id = tr.task_id
            cross join lateral (select tr.state = 'succeeded' and not exists (
                select from flowforge.task_dependency d where d.upstream_task_id = t.task_id) as is_last) l
            where tr.run_id = r.run_id and tr.map_index is null) x on r.finished_at is not null
        where r.run_id = run_result.run_id;
    if not found then
        raise exception using errcode = 'WF002', message = format('there is no run %s', coalesce(run_result.run_id::text, 'null'));
    end if;
end
$$;
comment on function flowforge.run_result(bigint) is
    'State of a run (running, succeeded, failed or cancelled) and, once it has ended, outputs of its succeeded last tasks (those nothing depends on) and errors of its failed ones, by task name; outputs is null when they are more than max_claim_bytes together: then ask task_output for each. Errors that are more together are cut to 200 characters each. Raises WF002.';

create or replace function flowforge.task_output(run_id bigint, task text) returns jsonb
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    v_output jsonb;
begin
    select tr.output into v_output
    from flowforge.run r
    cross join lateral (select t.task_id from flowforge.task t
        where t.workflow_version_id = r.workflow_version_id and t.name = task_output.task limit 1) t
    cross join lateral (select tr.output from flowforge.task_run tr
        where tr.run_id = r.run_id and tr.task_id = t.task_id and tr.map_index is null limit 1) tr
    where r.run_id = task_output.run_id;
    if not found then
        if (select true from flowforge.run r where r.run_id = task_output.run_id) is null then
            raise exception using errcode = 'WF002', message = format('there is no run %s', coalesce(task_output.run_id::text, 'null'));
        end if;
        raise exception using errcode = 'WF002',
            message = format('there is no task %s in run %s', flowforge._quoted(task_output.task), coalesce(task_output.run_id::text, 'null'));
    end if;
    return v_output;
end
$$;
comment on function flowforge.task_output(bigint, text) is
    'Output of a task of a run, of a map those of its elements in order; null while it has not succeeded. Raises WF002.';
