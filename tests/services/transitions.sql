-- Rejects, in every test's database, each change of state that the state machine does not have. What tells two causes
-- of one transition apart (attempt, dispatch id, fencing token) is checked too, and that tokens and attempts never
-- decrease. The fixture `db` also fails a test in whose database something was rejected, whoever swallowed the error.

create schema if not exists flowforge_test;

create or replace function flowforge_test.check_task_run() returns trigger
-- Reads the task and the run whatever the rights of who changes the row.
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_old text;
    v_new text := new.state;
    v_allowed boolean;
begin
    if tg_op = 'INSERT' then
        v_allowed := v_new = 'pending' and new.fencing_token = 0;
    else
        v_old := old.state;
        v_allowed := case v_old || ' → ' || v_new
            when 'pending → ready' then new.attempt = old.attempt and new.dispatch_id is not null
            when 'pending → skipped' then true
            when 'pending → cancelled' then true
            -- The end of a map's own row.
            when 'pending → succeeded' then flowforge_test.is_own_row_of_map(new)
            when 'pending → failed' then flowforge_test.is_own_row_of_map(new) or new.error like '%max_claim_bytes%'
            when 'ready → running' then new.attempt = old.attempt and new.dispatch_id = old.dispatch_id
            when 'ready → failed' then true
            when 'ready → cancelled' then true
            when 'running → succeeded' then true
            when 'running → failed' then true
            when 'running → cancelled' then
                exists (select from flowforge.run as r where r.run_id = new.run_id and r.cancel_requested_at is not null)
            -- The next attempt, which gets a dispatch id of its own when it is dispatched.
            when 'running → pending' then new.attempt = old.attempt + 1
            -- The same attempt, offered again under the same dispatch id.
            when 'running → ready' then new.attempt = old.attempt and new.dispatch_id = old.dispatch_id
            when 'succeeded → pending' then true
            when 'failed → pending' then true
            when 'cancelled → pending' then true
            when 'skipped → pending' then true
            else v_old = v_new
        end
        -- A claim, and nothing else, hands out the next token.
        and new.fencing_token = old.fencing_token + (v_old <> 'running' and v_new = 'running')::int
        and new.attempt >= old.attempt;
    end if;
    if v_allowed is distinct from true then
        raise exception 'forbidden transition of task run %: % → %', new.task_run_id, coalesce(v_old, '–'), v_new
            using errcode = 'assert_failure',
                detail = format(
                    'attempt %s → %s, fencing token %s → %s, dispatch id %s → %s',
                    old.attempt, new.attempt, old.fencing_token, new.fencing_token, old.dispatch_id, new.dispatch_id
                );
    end if;
    return null;
end
$$;

create or replace function flowforge_test.is_own_row_of_map(p_task_run flowforge.task_run) returns boolean
language sql stable
as $$
    select p_task_run.map_index is null and t.map_task_id is not null
    from flowforge.task as t
    where t.task_id = p_task_run.task_id
$$;

create or replace function flowforge_test.check_run() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_old text;
    v_new text := new.state;
begin
    if tg_op = 'UPDATE' then
        v_old := old.state;
    end if;
    if (coalesce(v_old, '–') || ' → ' || v_new) not in (
        '– → running', 'running → succeeded', 'running → failed', 'running → cancelled',
        'succeeded → running', 'failed → running', 'cancelled → running'
    ) then
        raise exception 'forbidden transition of run %: % → %', new.run_id, coalesce(v_old, '–'), v_new
            using errcode = 'assert_failure';
    end if;
    return null;
end
$$;

create or replace trigger check_inserted after insert on flowforge.task_run
for each row execute function flowforge_test.check_task_run();

create or replace trigger check_updated after update on flowforge.task_run
for each row
when (
    old.state is distinct from new.state
    or old.attempt is distinct from new.attempt
    or old.fencing_token is distinct from new.fencing_token
)
execute function flowforge_test.check_task_run();

create or replace trigger check_inserted after insert on flowforge.run
for each row execute function flowforge_test.check_run();

create or replace trigger check_updated after update on flowforge.run
for each row when (old.state is distinct from new.state) execute function flowforge_test.check_run();
