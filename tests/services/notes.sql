-- What happens to task runs and orders, noted where it happens, since the sweep deletes orders and a retry resets task runs:
-- every dispatch, every token handed out, every finish that was accepted, every mark of an order.

create table public.dispatched (at timestamptz default clock_timestamp());
create table public.marked (
    outbox_id bigint, dispatch_id uuid, fetched_at timestamptz default transaction_timestamp(),
    at timestamptz default clock_timestamp());
create table public.handed_out (
    id bigint generated always as identity, task_run_id bigint, attempt bigint, token bigint,
    at timestamptz default clock_timestamp());
create table public.accepted (
    task_run_id bigint, attempt bigint, answer text, outcome text, token bigint, at timestamptz default clock_timestamp());

create function public.note_mark() returns trigger language plpgsql security definer as
    'begin insert into public.marked values (new.outbox_id, new.dispatch_id); return new; end';
create trigger note_mark after update of published_at on flowforge.outbox
    for each row when (new.published_at is not null) execute function public.note_mark();

create function public.note_task_run() returns trigger language plpgsql security definer as $$
begin
    if new.state = 'ready' and old.state = 'pending' then
        insert into public.dispatched default values;
    end if;
    if new.fencing_token <> old.fencing_token or new.state = 'running' and old.state <> 'running' then
        insert into public.handed_out (task_run_id, attempt, token) values (new.task_run_id, new.attempt, new.fencing_token);
    end if;
    if new.state = 'succeeded' and new.fencing_token > 0
        and (old.state <> 'succeeded' or new.output is distinct from old.output)
    then
        insert into public.accepted values
            (new.task_run_id, new.attempt, new.output::text, 'succeeded', new.fencing_token);
    end if;
    return new;
end $$;
create trigger note_task_run after update on flowforge.task_run
    for each row execute function public.note_task_run();

create function public.note_attempt() returns trigger language plpgsql security definer as $$
begin
    insert into public.accepted values (new.task_run_id, new.attempt, new.error, new.outcome, new.fencing_token);
    return new;
end $$;
create trigger note_attempt after insert on flowforge.attempt
    for each row when (new.answered and new.outcome <> 'succeeded') execute function public.note_attempt();
