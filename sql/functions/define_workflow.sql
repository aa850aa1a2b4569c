-- define_workflow: registers a definition.
--
-- Called by clients. Locks: the workflow's row, then the rows of new queues. Safe to repeat: known content changes
-- nothing, not even which version is current. Raises WF001, WF003, WF005.

create or replace function flowforge._definition_error(p_message text, p_hint text default null) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_hint is null then
        raise exception using errcode = 'WF003', message = p_message;
    end if;
    raise exception using errcode = 'WF003', message = p_message, hint = p_hint;
end
$$;
comment on function flowforge._definition_error(text, text) is 'Raises WF003.';

create or replace function flowforge._check_keys(p_where text, p_object jsonb, p_allowed text[]) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_unknown text;
begin
    if jsonb_typeof(p_object) is distinct from 'object' then
        perform flowforge._definition_error(format('%s must be an object, not %s', p_where, coalesce(jsonb_typeof(p_object), 'null')));
    end if;
    select min(k) into v_unknown from jsonb_object_keys(p_object) k where k <> all (p_allowed);
    if v_unknown is not null then
        perform flowforge._definition_error(format('%s has the unknown key %s', p_where, flowforge._quoted(v_unknown)),
            'Allowed are: ' || array_to_string(p_allowed, ', ') || '.');
    end if;
end
$$;
comment on function flowforge._check_keys(text, jsonb, text[]) is 'Raises WF003 unless a value is an object with allowed keys only.';

create or replace function flowforge._definition_number(
    p_where text, p_object jsonb, p_key text, p_default numeric, p_minimum numeric, p_maximum numeric, p_whole boolean default false)
returns numeric
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_value jsonb := p_object -> p_key;
    v_number numeric;
begin
    if v_value is null or v_value = 'null' and p_default is null then
        return p_default;
    end if;
    if jsonb_typeof(v_value) = 'number' then
        v_number := (v_value #>> '{}')::numeric;
    end if;
    if v_number is null or v_number < p_minimum or v_number > p_maximum or p_whole and v_number <> trunc(v_number) then
        perform flowforge._definition_error(format('%s: %s is %s; %s from %s to %s is allowed', p_where, p_key,
            left(v_value::text, 80), case when p_whole then 'a whole number' else 'a number' end, p_minimum, p_maximum));
    end if;
    -- 5 and 5.0 are one number, and only one of the two is written like an integer.
    return trim_scale(v_number);
end
$$;
comment on function flowforge._definition_number(text, jsonb, text, numeric, numeric, numeric, boolean) is
    'A number of a definition, or its default. Raises WF003 when it is no number or out of bounds.';

create or replace function flowforge._definition_text(p_where text, p_object jsonb, p_key text, p_default text) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_value jsonb := p_object -> p_key;
begin
    if v_value is null then
        return p_default;
    end if;
    if jsonb_typeof(v_value) <> 'string' then
        perform flowforge._definition_error(format('%s: %s must be a string, not %s', p_where, p_key, left(v_value::text, 80)));
    end if;
    return v_value #>> '{}';
end
$$;
comment on function flowforge._definition_text(text, jsonb, text, text) is 'A text of a definition, or its default. Raises WF003.';

create or replace function flowforge._normalised_task(p_workflow text, p_task jsonb, p_ordinal bigint) returns jsonb
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_where text := format('task %s of workflow %s',
        case when jsonb_typeof(p_task -> 'name') = 'string' then flowforge._quoted(p_task ->> 'name') else p_ordinal::text end,
        flowforge._quoted(p_workflow));
    v_name text;
    v_handler text;
    v_queue text;
    v_map text;
    v_when text;
    v_retry jsonb;
    v_after text[];
begin
    perform flowforge._check_keys(v_where, p_task, array['name', 'after', 'handler', 'queue', 'map', 'when', 'priority',
        'retry', 'lease', 'time_limit', 'start_within', 'max_reaps']);
    v_name := flowforge._definition_text(v_where, p_task, 'name', null);
    perform flowforge._check_name(v_where || ': its name', v_name);
    v_where := format('task %s of workflow %s', flowforge._quoted(v_name), flowforge._quoted(p_workflow));

    v_handler := flowforge._definition_text(v_where, p_task, 'handler', p_workflow || '.' || v_name);
    perform flowforge._check_name(v_where || ': its handler', v_handler, 'max_handler_bytes');
    v_queue := flowforge._definition_text(v_where, p_task, 'queue', 'default');
    perform flowforge._check_name(v_where || ': its queue', v_queue);
    if v_queue = 'dead' then
        perform flowforge._definition_error(format('%s: its queue is ''dead''', v_where),
            'The dead-letter queue has that name; choose another.');
    end if;
    v_map := case when p_task -> 'map' <> 'null' then flowforge._definition_text(v_where, p_task, 'map', null) end;
    v_when := flowforge._definition_text(v_where, p_task, 'when', 'all_succeeded');
    if v_when <> all (enum_range(null::flowforge.trigger_rule)::text[]) then
        perform flowforge._definition_error(format('%s: when is %s', v_where, flowforge._quoted(v_when)),
            'Allowed are: ' || array_to_string(enum_range(null::flowforge.trigger_rule)::text[], ', ') || '.');
    end if;

    if jsonb_typeof(coalesce(p_task -> 'after', '[]')) <> 'array'
        or exists (select from jsonb_array_elements(p_task -> 'after') e where jsonb_typeof(e) <> 'string')
    then
        perform flowforge._definition_error(format('%s: after must be an array of task names', v_where));
    end if;
    -- A dependency named twice is one dependency; a map's upstream is a dependency too.
    v_after := array(
        select a.name from (
            select e.name from jsonb_array_elements_text(coalesce(p_task -> 'after', '[]')) e (name)
            union select v_map where v_map is not null) a
        order by a.name collate "C");
    if v_name = any (v_after) then
        perform flowforge._definition_error(format('%s depends on itself', v_where));
    end if;
    if v_after = '{}' and p_task ? 'when' then
        perform flowforge._definition_error(format('%s has a trigger rule (when) but no upstream', v_where),
            'Remove when, or name upstreams in after.');
    end if;

    v_retry := coalesce(p_task -> 'retry', '{}');
    perform flowforge._check_keys(v_where || ': retry', v_retry, array['max_attempts', 'delay', 'backoff', 'max_delay', 'jitter']);
    return jsonb_build_object(
        'name', v_name, 'after', to_jsonb(v_after), 'handler', v_handler, 'queue', v_queue, 'map', v_map, 'when', v_when,
        'priority', flowforge._definition_number(v_where, p_task, 'priority', 0, -1000000, 1000000, true),
        'retry', jsonb_build_object(
            'max_attempts', flowforge._definition_number(v_where || ': retry', v_retry, 'max_attempts', 1, 1, 1000000, true),
            'delay', flowforge._definition_number(v_where || ': retry', v_retry, 'delay', 1, 0, 31536000),
            'backoff', flowforge._definition_number(v_where || ': retry', v_retry, 'backoff', 2, 1, 100),
            'max_delay', flowforge._definition_number(v_where || ': retry', v_retry, 'max_delay', 3600, 0, 31536000),
            'jitter', flowforge._definition_number(v_where || ': retry', v_retry, 'jitter', 0.25, 0, 10)),
        'lease', flowforge._definition_number(v_where, p_task, 'lease', null, 0.1, 604800),
        'time_limit', flowforge._definition_number(v_where, p_task, 'time_limit', null, 0.1, 31536000),
        'start_within', flowforge._definition_number(v_where, p_task, 'start_within', null, 0.1, 31536000),
        'max_reaps', flowforge._definition_number(v_where, p_task, 'max_reaps', 2, 0, 1000000, true));
end
$$;
comment on function flowforge._normalised_task(text, jsonb, bigint) is
    'One task of a definition, checked, with every default filled in. Raises WF001, WF003, WF005.';

create or replace function flowforge._topological_order(p_names text[], p_from bigint[], p_to bigint[]) returns bigint[]
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
-- Kahn (1962), "Topological sorting of large networks". Edges run from an upstream (p_from) to what waits (p_to), as
-- positions in p_names. Both adjacency and queue are arrays, so the work is linear in tasks and edges.
declare
    v_tasks integer := cardinality(p_names);
    v_unmet integer[] := array_fill(0, array[v_tasks]);
    v_first integer[] := array_fill(0, array[v_tasks]);
    v_next integer[] := array_fill(0, array[cardinality(p_from)]);
    v_order bigint[] := array[]::bigint[];
    v_head integer := 1;
    v_edge integer;
    v_at integer;
    v_upstream integer[];
    v_path integer[];
begin
    for v_edge in reverse cardinality(p_from)..1 loop
        v_at := p_from[v_edge];
        v_next[v_edge] := v_first[v_at];
        v_first[v_at] := v_edge;
        v_at := p_to[v_edge];
        v_unmet[v_at] := v_unmet[v_at] + 1;
    end loop;
    for v_task in 1..v_tasks loop
        if v_unmet[v_task] = 0 then
            v_order[v_head] := v_task;
            v_head := v_head + 1;
        end if;
    end loop;
    v_head := 1;
    while v_head <= cardinality(v_order) loop
        v_edge := v_first[v_order[v_head]];
        while v_edge > 0 loop
            v_at := p_to[v_edge];
            v_unmet[v_at] := v_unmet[v_at] - 1;
            if v_unmet[v_at] = 0 then
                v_order[cardinality(v_order) + 1] := v_at;
            end if;
            v_edge := v_next[v_edge];
        end loop;
        v_head := v_head + 1;
    end loop;

    if cardinality(v_order) < v_tasks then
        -- Every task left has an upstream that is left, so walking upstream comes round; after as many steps as there
        -- are tasks it is on a cycle for certain.
        for v_edge in 1..cardinality(p_from) loop
            if v_unmet[p_from[v_edge]] > 0 then
                v_at := p_to[v_edge];
                v_upstream[v_at] := p_from[v_edge];
            end if;
        end loop;
        for v_step in 1..v_tasks loop
            v_at := v_upstream[v_at];
        end loop;
        v_path := array[v_at];
        loop
            v_path := v_upstream[v_path[1]] || v_path;
            exit when v_path[1] = v_at;
        end loop;
        perform flowforge._definition_error('the dependencies form a cycle: '
            || (select string_agg(flowforge._quoted(p_names[u.task]), ' -> ' order by u.pos)
                from unnest(v_path) with ordinality u (task, pos) where u.pos <= 20)
            || case when cardinality(v_path) > 20 then format(' -> ... (%s tasks)', cardinality(v_path) - 1) else '' end,
            'An arrow runs from a task to one that waits for it.');
    end if;
    return v_order;
end
$$;
comment on function flowforge._topological_order(text[], bigint[], bigint[]) is
    'Positions in topological order (Kahn 1962). Raises WF003 naming the path of a cycle.';

create or replace function flowforge.define_workflow(spec jsonb)
returns table (workflow text, version bigint, created boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowforge._clock();
    v_name text;
    v_tasks jsonb[];
    v_names text[];
    v_clash text;
    v_upstreams text[];
    v_unknown integer;
    v_from bigint[];
    v_to bigint[];
    v_order bigint[];
    v_task_ids bigint[];
    v_map_at bigint[];
    v_spec jsonb;
    v_hash bytea;
    v_workflow_id bigint;
    v_version_id bigint;
    v_version bigint;
begin
    perform flowforge._check_keys('the definition', define_workflow.spec, array['name', 'tasks', 'description']);
    v_name := flowforge._definition_text('the definition', define_workflow.spec, 'name', null);
    perform flowforge._check_name('the name of the workflow', v_name);
    perform flowforge._definition_text('the definition', define_workflow.spec, 'description', null);
    perform flowforge._check_payload('the definition', define_workflow.spec);
    if jsonb_typeof(define_workflow.spec -> 'tasks') is distinct from 'array' or define_workflow.spec -> 'tasks' = '[]' then
        perform flowforge._definition_error(format('workflow %s has no tasks', flowforge._quoted(v_name)),
            'tasks must be an array of at least one task.');
    end if;
    if jsonb_array_length(define_workflow.spec -> 'tasks') > flowforge._limit('max_tasks') then
        raise exception using errcode = 'WF005', message = format('workflow %s has %s tasks; at most %s are allowed',
            flowforge._quoted(v_name), jsonb_array_length(define_workflow.spec -> 'tasks'), flowforge._limit('max_tasks'));
    end if;
    -- Counted before anything is built from them.
    if (select sum(jsonb_array_length(t -> 'after')) from jsonb_array_elements(define_workflow.spec -> 'tasks') t
        where jsonb_typeof(t) = 'object' and jsonb_typeof(t -> 'after') = 'array') > flowforge._limit('max_dependencies')
    then
        raise exception using errcode = 'WF005', message = format('workflow %s has more than %s dependencies',
            flowforge._quoted(v_name), flowforge._limit('max_dependencies'));
    end if;

    v_tasks := array(select flowforge._normalised_task(v_name, t.task, t.pos)
        from jsonb_array_elements(define_workflow.spec -> 'tasks') with ordinality t (task, pos) order by t.pos);
    v_names := array(select t.task ->> 'name' from unnest(v_tasks) with ordinality t (task, pos) order by t.pos);

    -- Names that differ only in case or Unicode form are one name to a reader.
    select string_agg(flowforge._quoted(n), ' and ') into v_clash
    from unnest(v_names) n group by lower(normalize(n, nfkc)) having count(*) > 1 limit 1;
    if v_clash is not null then
        perform flowforge._definition_error(format('workflow %s: duplicate task %s', flowforge._quoted(v_name), v_clash),
            'Names that differ only in case or Unicode form count as the same.');
    end if;

    -- The edges: first by name, flat, so that looking up the positions of all names is one hash join.
    select coalesce(array_agg(t.pos order by t.pos, a.upstream collate "C"), '{}'), array_agg(a.upstream order by t.pos, a.upstream collate "C")
    into v_to, v_upstreams
    from unnest(v_tasks) with ordinality t (task, pos) cross join jsonb_array_elements_text(t.task -> 'after') a (upstream);
    v_from := array(select u.pos from unnest(v_upstreams) with ordinality e (upstream, pos)
        left join unnest(v_names) with ordinality u (name, pos) on u.name = e.upstream order by e.pos);
    v_unknown := array_position(v_from, null);
    if v_unknown is not null then
        perform flowforge._definition_error(format('task %s of workflow %s depends on the unknown task %s',
            flowforge._quoted(v_names[v_to[v_unknown]]), flowforge._quoted(v_name), flowforge._quoted(v_upstreams[v_unknown])));
    end if;
    v_order := flowforge._topological_order(v_names, v_from, v_to);

    -- In an order that no locale changes: the hash must stay the same.
    v_spec := jsonb_build_object('name', v_name, 'tasks', (select jsonb_agg(t order by t ->> 'name' collate "C") from unnest(v_tasks) t))
        || case when define_workflow.spec ? 'description' then jsonb_build_object('description', define_workflow.spec -> 'description') else '{}' end;
    v_hash := sha256(convert_to(v_spec::text, 'UTF8'));

    insert into flowforge.workflow (name, current_version, created_at) values (v_name, 1, v_now) on conflict (name) do nothing;
    select w.workflow_id into v_workflow_id from flowforge.workflow w where w.name = v_name for no key update;
    select wv.version into v_version from flowforge.workflow_version wv
    where wv.workflow_id = v_workflow_id and wv.content_hash = v_hash;
    if found then
        return query values (v_name, v_version, false);
        return;
    end if;

    insert into flowforge.queue (name)
    select distinct t ->> 'queue' from unnest(v_tasks) t order by 1 on conflict (name) do nothing;
    if found and (select count(*) from flowforge.queue) > flowforge._limit('max_queues') then
        raise exception using errcode = 'WF005',
            message = format('workflow %s makes more than %s queues; at most that many are allowed', flowforge._quoted(v_name), flowforge._limit('max_queues')),
            hint = 'See limit max_queues in view flowforge.limits.';
    end if;
    v_version := 1 + coalesce((select max(wv.version) from flowforge.workflow_version wv where wv.workflow_id = v_workflow_id), 0);
    insert into flowforge.workflow_version (workflow_id, version, task_count, content_hash, spec, created_at)
    values (v_workflow_id, v_version, cardinality(v_names), v_hash, v_spec, v_now)
    returning workflow_version_id into v_version_id;

    -- Without a table: beside one, a bad estimate of it would compare all tasks with all.
    v_map_at := array(select u.pos from unnest(v_tasks) with ordinality t (task, pos)
        left join unnest(v_names) with ordinality u (name, pos) on u.name = t.task ->> 'map' order by t.pos);
    -- Identities ascend in topological order; v_task_ids is by position in the definition.
    select array_agg(i.task_id order by i.pos) into v_task_ids
    from (select o.pos, nextval('flowforge.task_task_id_seq') as task_id from unnest(v_order) o (pos)) i;
    insert into flowforge.task (task_id, workflow_version_id, name, handler, queue_id, map_task_id, upstream_count, rule,
        priority, max_attempts, retry_delay, retry_backoff, retry_max_delay, retry_jitter, lease, time_limit, start_within, max_reaps)
    overriding system value
    select v_task_ids[t.pos], v_version_id, t.task ->> 'name', t.task ->> 'handler', q.queue_id, v_task_ids[v_map_at[t.pos]],
        jsonb_array_length(t.task -> 'after'), (t.task ->> 'when')::flowforge.trigger_rule, (t.task ->> 'priority')::bigint,
        (r.retry ->> 'max_attempts')::bigint, (r.retry ->> 'delay')::double precision, (r.retry ->> 'backoff')::double precision,
        (r.retry ->> 'max_delay')::double precision, (r.retry ->> 'jitter')::double precision,
        make_interval(secs => (t.task ->> 'lease')::double precision), make_interval(secs => (t.task ->> 'time_limit')::double precision),
        make_interval(secs => (t.task ->> 'start_within')::double precision), (t.task ->> 'max_reaps')::bigint
    from unnest(v_tasks) with ordinality t (task, pos)
    cross join lateral (select t.task -> 'retry' as retry) r
    join flowforge.queue q on q.name = t.task ->> 'queue'
    order by v_task_ids[t.pos];
    insert into flowforge.task_dependency (workflow_version_id, task_id, upstream_task_id)
    select v_version_id, v_task_ids[e.edge_to], v_task_ids[e.edge_from] from unnest(v_from, v_to) e (edge_from, edge_to);

    update flowforge.workflow w set current_version = v_version where w.workflow_id = v_workflow_id;
    return query values (v_name, v_version, true);
end
$$;
comment on function flowforge.define_workflow(jsonb) is
    'Registers a definition and makes new content the current version. Known content changes nothing (created is false). Raises WF001 (bad name), WF003 (unknown key or dependency, duplicate, cycle with its path, bad value), WF005 (a limit).';

create or replace function flowforge.activate_version(workflow text, version bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_workflow_id bigint;
    v_current bigint;
begin
    select w.workflow_id, w.current_version into v_workflow_id, v_current
    from flowforge.workflow w where w.name = activate_version.workflow for no key update;
    if not found then
        raise exception using errcode = 'WF002', message = format('there is no workflow %s', flowforge._quoted(activate_version.workflow));
    end if;
    if not exists (select from flowforge.workflow_version wv
                   where wv.workflow_id = v_workflow_id and wv.version = activate_version.version) then
        raise exception using errcode = 'WF002', message = format('workflow %s has no version %s',
            flowforge._quoted(activate_version.workflow), coalesce(activate_version.version::text, 'null'));
    end if;
    update flowforge.workflow w set current_version = activate_version.version
    where w.workflow_id = v_workflow_id and w.current_version <> activate_version.version;
    return v_current <> activate_version.version;
end
$$;
comment on function flowforge.activate_version(text, bigint) is
    'Makes a registered version the one that a trigger without a version runs. Runs under way keep theirs. True if that changed anything. Raises WF002.';
