-- _frontiers, advance_frontiers: where the looks for work begin, which the scheduler moves up.
--
-- Locks the one row of frontiers, skipping it when it is locked, and nothing else. Safe to repeat. A frontier that lags costs pages,
-- and one that is too far ahead hides what lies before it until the next call that looks at everything, which takes it back:
-- nothing is lost by either. See docs/adr/0013-looks-begin-where-work-begins.md. Raises WF008.

create or replace function flowforge._frontiers(
    p_all boolean default false,
    out v_eligible timestamptz, out v_delayed timestamptz, out v_dispatched timestamptz, out v_leased timestamptz,
    out v_unsettled timestamptz, out v_unpublished timestamptz, out v_outbox bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Not where nobody moves them, as with a scheduler of the release before alone, nor when the clock was put back.
    select f.eligible, f.delayed, f.dispatched, f.leased, f.unsettled, f.unpublished, f.outbox
    into v_eligible, v_delayed, v_dispatched, v_leased, v_unsettled, v_unpublished, v_outbox
    from flowforge.frontier f
    where f.one_row and not p_all and f.advanced_at between flowforge._clock() - interval '5 minutes' and flowforge._clock();
    if not found then
        v_eligible := '-infinity';
        v_delayed := '-infinity';
        v_dispatched := '-infinity';
        v_leased := '-infinity';
        v_unsettled := '-infinity';
        v_unpublished := '-infinity';
        v_outbox := 0;
    end if;
end
$$;
comment on function flowforge._frontiers(boolean) is
    'Before which keys no look for work has anything to find; from the start of each index with p_all, or when nobody has moved them for 5 minutes.';

create or replace function flowforge.advance_frontiers() returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    v_last record;
    v_from record;
    v_now timestamptz;
    v_snapshot pg_snapshot;
    v_all boolean;
    v_is_noted boolean;
    -- Both are read before this transaction has an id, if it is one of its own. Who has drawn such a number has a lesser one, which
    -- is told by it later; who draws a greater one reads the clock after this, however long what follows takes. (Unless a lock on
    -- a whole table held it up in between for a minute: what it writes then is left to the next look at everything.)
    v_began timestamptz := flowforge._clock();
    v_outbox bigint := coalesce(pg_sequence_last_value('flowforge.outbox_outbox_id_seq'), 0);
    v_oldest record;
begin
    perform flowforge._require_read_committed('advance_frontiers');
    select f.advanced_at, f.looked_at_all, f.took, f.is_late, f.noted_at into v_last
    from flowforge.frontier f where f.one_row for no key update skip locked;
    if not found then
        return;
    end if;
    v_now := flowforge._clock();
    if v_now >= v_last.advanced_at and v_now < v_last.advanced_at + interval '4 s' then
        return;
    end if;
    -- At everything, also at what no look finds any more, for a fiftieth of the time, and each minute, while that may have been
    -- committed late; for a five hundredth and each ten minutes else, in case that it came there in any other way; and at once
    -- when the clock was put back.
    v_all := v_now < v_last.advanced_at or v_now >= v_last.looked_at_all + case when v_last.is_late
        then least(50 * v_last.took, interval '1 minute') else least(500 * v_last.took, interval '10 minutes') end;
    v_from := flowforge._frontiers(v_all);
    v_is_noted := v_now between v_last.noted_at and v_last.noted_at + interval '30 s';
    -- Before it looks: who ends while it does has written what it does not see.
    v_snapshot := pg_current_snapshot();
    select (select min(tr.available_at) from flowforge.task_run tr
            where tr.stage = 'eligible' and tr.available_at >= v_from.v_eligible) as eligible,
        least((select tr.available_at from flowforge.task_run tr
                where tr.stage = 'delayed' and tr.available_at >= v_from.v_delayed order by tr.available_at limit 1),
            (select tr.available_at from flowforge.task_run tr
                where tr.stage = 'reoffered' and tr.available_at >= v_from.v_delayed order by tr.available_at limit 1)) as delayed,
        (select tr.redispatch_at from flowforge.task_run tr
            where tr.stage = 'dispatched' and tr.redispatch_at >= v_from.v_dispatched order by tr.redispatch_at limit 1) as dispatched,
        (select tr.lease_expires_at from flowforge.task_run tr
            where tr.lease_expires_at >= v_from.v_leased order by tr.lease_expires_at limit 1) as leased,
        (select min(tr.finished_at) from flowforge.task_run tr
            where tr.stage = 'unsettled' and tr.finished_at >= v_from.v_unsettled) as unsettled,
        (select o.next_attempt_at from flowforge.outbox o
            where o.published_at is null and o.parked_at is null and o.next_attempt_at >= v_from.v_unpublished
            order by o.next_attempt_at limit 1) as unpublished,
        (select o.outbox_id from flowforge.outbox o where o.outbox_id >= v_from.v_outbox order by o.outbox_id limit 1) as outbox
    into v_oldest;
    -- What enters a stage has a key that is no earlier than the time at which it entered. Open transactions may have written
    -- such as are not seen yet: for a minute they are waited for, and orders, which go by their number, until the next note. Where
    -- one has been writing since before the last note, which is the id of who made it, it may be too late by its end; and nobody
    -- knows where there was none for so long. (No snapshot tells which id comes next: those that run may be beyond its xmax.)
    update flowforge.frontier f
    set advanced_at = v_now,
        looked_at_all = case when v_all then v_now else f.looked_at_all end,
        took = case when v_all then greatest(flowforge._clock() - v_now, '0') else f.took end,
        is_late = not v_all and f.is_late or pg_snapshot_xmin(v_snapshot) < f.next_xid
            or v_now not between f.noted_at and f.noted_at + interval '1 minute',
        noted_at = case when v_is_noted then f.noted_at else v_began end,
        next_xid = case when v_is_noted then f.next_xid else pg_current_xact_id() end,
        last_outbox_id = case when v_is_noted then f.last_outbox_id else v_outbox end,
        eligible = least(v_oldest.eligible, v_now - interval '1 minute'), delayed = least(v_oldest.delayed, v_now - interval '1 minute'),
        dispatched = least(v_oldest.dispatched, v_now - interval '1 minute'), leased = least(v_oldest.leased, v_now - interval '1 minute'),
        unsettled = least(v_oldest.unsettled, v_now - interval '1 minute'), unpublished = least(v_oldest.unpublished, v_now - interval '1 minute'),
        outbox = least(v_oldest.outbox, f.last_outbox_id)
    where f.one_row;
end
$$;
comment on function flowforge.advance_frontiers() is
    'Moves each frontier to the oldest that its looks would find, or to a minute ago; back, too, to what was committed late. Does nothing within 4 s of the last time, nor while another session does it. To be called in a transaction of its own: what has written before it may hide orders from the looks for up to ten minutes. Raises WF008.';
