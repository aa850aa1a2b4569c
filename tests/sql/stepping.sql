-- What the harness of stepping.py puts into its database: the pause, a witness of claims and finishes, the checks that
-- hold after every schedule, and a driver that brings every run to its end.

-- A vacuum in between would have every session plan anew.
alter table flowforge.run set (autovacuum_enabled = off);
alter table flowforge.task_run set (autovacuum_enabled = off);
alter table flowforge.outbox set (autovacuum_enabled = off);
alter table flowforge.attempt set (autovacuum_enabled = off);
alter table flowforge.queue set (autovacuum_enabled = off);
alter table flowforge.scheduler set (autovacuum_enabled = off);

create sequence flowforge_test.pauses_1;
create sequence flowforge_test.pauses_2;
create sequence flowforge_test.pauses_3;

-- Announces where the session is, then waits for the lock that the controller holds: the one of this pause, by turns.
-- A session without the setting passes. The count lives in a sequence, which a rollback does not take back.
create function flowforge_test.pause(p_place text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
    v_session integer := nullif(current_setting('flowforge_test.session', true), '');
    v_turn integer;
begin
    if v_session is not null then
        v_turn := nextval(('flowforge_test.pauses_' || v_session)::regclass) % 2;
        raise notice using message = format('%s %s', v_turn, p_place);
        perform pg_advisory_lock(v_session, v_turn);
        perform pg_advisory_unlock(v_session, v_turn);
    end if;
end
$$;

create table flowforge_test.claimed (task_run_id bigint not null, attempt bigint not null, fencing_token bigint not null);
create table flowforge_test.accepted (task_run_id bigint not null, fencing_token bigint not null);
-- What handlers write in the transaction of their finish.
create table flowforge_test.effect (task_run_id bigint not null);
create index on flowforge_test.claimed (task_run_id);
create index on flowforge_test.accepted (task_run_id);
create index on flowforge_test.effect (task_run_id);

create function flowforge_test.note_claim() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
begin
    insert into flowforge_test.claimed (task_run_id, attempt, fencing_token) values (new.task_run_id, new.attempt, new.fencing_token);
    return null;
end
$$;
create trigger note_claim after update on flowforge.task_run
for each row when (new.state = 'running' and old.state <> 'running') execute function flowforge_test.note_claim();

-- Everything that is wrong. The arguments are the finishes that were accepted since the last call, outside the driver,
-- and whether everything should have ended.
create function flowforge_test.broken(p_task_run_ids bigint[], p_tokens bigint[], p_ended boolean) returns setof text
language plpgsql volatile
as $$
begin
    insert into flowforge_test.accepted select * from unnest(p_task_run_ids, p_tokens);
    return query select format('%s: run %s, task run %s: %s', v.rule, v.run_id, v.task_run_id, v.detail) from flowforge.violations() v;
    -- What is in line is what the edges say may run.
    return query
        select format('task run %s is %s', coalesce(e.task_run_id, o.task_run_id),
            case when o.task_run_id is null then 'in line, and the edges say no' else 'not in line, and the edges say yes' end)
        from (select tr.task_run_id from flowforge.task_run tr join flowforge.run r on r.run_id = tr.run_id
              join flowforge.queue q on q.queue_id = tr.queue_id
              where tr.stage in ('eligible', 'delayed') and tr.available_at <= flowforge._clock()
                  and r.finished_at is null and r.cancel_requested_at is null and q.paused_at is null) e
        full join (select o.task_run_id from flowforge.run r cross join lateral flowforge.ready_tasks(r.run_id) o
                   where r.finished_at is null) o on o.task_run_id = e.task_run_id
        where e.task_run_id is null or o.task_run_id is null;
    -- At most one finish of an attempt is accepted, under its last token.
    return query
        select format('G5: task run %s, attempt %s: %s finishes accepted, under tokens to %s; handed out to %s',
            c.task_run_id, c.attempt, count(a.fencing_token), max(a.fencing_token), max(c.fencing_token))
        from flowforge_test.claimed c
        left join flowforge_test.accepted a on a.task_run_id = c.task_run_id and a.fencing_token = c.fencing_token
        group by c.task_run_id, c.attempt
        having count(a.fencing_token) > 1 or max(a.fencing_token) < max(c.fencing_token);
    return query
        select format('G5: a finish of task run %s was accepted under token %s, which nobody had', a.task_run_id, a.fencing_token)
        from flowforge_test.accepted a
        where not exists (select from flowforge_test.claimed c
                          where c.task_run_id = a.task_run_id and c.fencing_token = a.fencing_token);
    return query
        select format('order %s of task run %s is left in the outbox', o.outbox_id, o.task_run_id)
        from flowforge.outbox o where p_ended;
end
$$;

-- Forgets the runs after this one. By key, since truncating would have every session plan anew.
create function flowforge_test.forget(p_after_run_id bigint) returns void
language plpgsql volatile
as $$
declare
    v_ids bigint[] := array(select tr.task_run_id from flowforge.task_run tr where tr.run_id > p_after_run_id);
begin
    -- Also what pruned task runs left behind.
    delete from flowforge.outbox;
    delete from flowforge.attempt a where a.task_run_id = any (v_ids);
    delete from flowforge.task_run tr where tr.task_run_id = any (v_ids);
    delete from flowforge.run_retry rr where rr.run_id > p_after_run_id;
    delete from flowforge.run r where r.run_id > p_after_run_id;
    delete from flowforge_test.claimed c where c.task_run_id = any (v_ids);
    delete from flowforge_test.accepted a where a.task_run_id = any (v_ids);
    delete from flowforge_test.effect e where e.task_run_id = any (v_ids);
    delete from flowforge.worker;
    update flowforge.queue set paused_at = null, window_size = null, redispatch_delay = '30 s', drain_rate = 0, sampled_window = 0, sampled_at = null;
    update flowforge.scheduler set asleep = false, reaper_ticked_at = null, reaper_period = '0', gaps = '{}';
end
$$;

-- Everything there is, but for what differs from one repetition to the next: identities, and the time of day.
create function flowforge_test.fingerprint() returns text
language sql stable
as $$
    with now as (select flowforge._clock() as now),
    state as (
        select 1 as kind, dense_rank() over (order by r.run_id) as number,
            (r.workflow_version_id, r.state, r.unsettled, now - r.finished_at, now - r.cancel_requested_at)::text as content
        from flowforge.run r, now
        union all
        select 2, dense_rank() over (order by tr.task_run_id),
            (tr.task_id, tr.map_index, tr.generation, tr.map_count, tr.unmet, tr.attempt, tr.failures, tr.reaps, tr.fencing_token,
             tr.redispatches, tr.state, tr.stage, tr.output, now - tr.available_at, now - tr.lease_expires_at, now - tr.deadline,
             now - tr.redispatch_at, now - tr.start_deadline, now - tr.unknown_handler_since, tr.dispatch_id is null,
             (select array_agg((a.attempt, a.fencing_token, a.outcome, a.answered) order by a.fencing_token, a.attempt)
              from flowforge.attempt a where a.task_run_id = tr.task_run_id))::text
        from flowforge.task_run tr, now
        union all
        select 3, dense_rank() over (order by o.outbox_id),
            (tr.task_id, tr.map_index, o.dispatch_id = tr.dispatch_id, now - o.next_attempt_at, now - o.published_at,
             now - o.parked_at)::text
        from flowforge.outbox o left join flowforge.task_run tr on tr.task_run_id = o.task_run_id, now
    )
    select md5(string_agg(s.kind || s.content, '' order by s.kind, s.number)) from state s;
$$;

-- Brings every run to its end, as daemons would: executions under way succeed, messages are published and claimed.
-- Answers how often nothing but the clock could go on, so that it was moved; null when that did not help.
-- The arguments are the messages in the broker.
create function flowforge_test.drive(p_task_run_ids bigint[], p_dispatch_ids uuid[]) returns bigint
language plpgsql volatile
as $$
declare
    v_moved bigint;
    v_waits bigint := 0;
    v_orders record;
begin
    perform from flowforge.claim_task_runs(p_task_run_ids, p_dispatch_ids, 'driver', gen_random_uuid(), '30 s');
    loop
        insert into flowforge_test.accepted
        select tr.task_run_id, tr.fencing_token from flowforge.task_run tr
        where tr.stage = 'leased' and flowforge.finish_task_run(tr.task_run_id, tr.fencing_token, 'succeeded', '[1, 2]') = 'accepted';
        v_moved := flowforge.settle_finished() + flowforge.expand_map() + flowforge.dispatch_ready();
        select array_agg(f.outbox_id) as outbox_ids, array_agg(f.task_run_id) as task_run_ids, array_agg(f.dispatch_id) as dispatch_ids
        into v_orders from flowforge.fetch_outbox(1000) f;
        if v_orders.outbox_ids is not null then
            v_moved := v_moved + flowforge.mark_published(v_orders.outbox_ids);
            perform from flowforge.claim_task_runs(v_orders.task_run_ids, v_orders.dispatch_ids, 'driver', gen_random_uuid(), '30 s');
        end if;
        continue when v_moved > 0;

        update flowforge.scheduler s set reaper_ticked_at = flowforge._clock() where s.one_row;
        continue when flowforge.cancel_leftovers() + flowforge.reap_expired_leases() + flowforge.fail_undeliverable()
            + flowforge.redispatch_lost() + flowforge.sweep_outbox() > 0;
        if not exists (select from flowforge.run r where r.finished_at is null) then
            return v_waits;
        end if;
        if v_waits = 10 then
            return null;
        end if;
        v_waits := v_waits + 1;
        update flowforge_test.clock set reading = reading + interval '10 min';
    end loop;
end
$$;
