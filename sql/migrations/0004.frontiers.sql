-- Where each look for work begins, so that it does not walk over what is done.
--
-- depends: 0003.released_attempts
--
-- Every statement tolerates being applied again, as by hand with psql.

create table if not exists flowforge.frontier (
    one_row boolean primary key default true check (one_row),
    advanced_at timestamptz not null default '-infinity',
    looked_at_all timestamptz not null default '-infinity',
    took interval not null default '0',
    is_late boolean not null default true,
    noted_at timestamptz not null default '-infinity',
    next_xid xid8 not null default '0',
    last_outbox_id bigint not null default 0,
    eligible timestamptz not null default '-infinity',
    delayed timestamptz not null default '-infinity',
    dispatched timestamptz not null default '-infinity',
    leased timestamptz not null default '-infinity',
    unsettled timestamptz not null default '-infinity',
    unpublished timestamptz not null default '-infinity',
    outbox bigint not null default 0
) with (fillfactor = 50);
insert into flowforge.frontier default values on conflict do nothing;
comment on table flowforge.frontier is 'One row: before which key nothing is that the looks for work would find. They begin there: what is done stays in their indexes until vacuum may remove it, which an old snapshot prevents. Moved by advance_frontiers.';
comment on column flowforge.frontier.one_row is 'Always true.';
comment on column flowforge.frontier.advanced_at is 'When they were last moved.';
comment on column flowforge.frontier.looked_at_all is 'When it was last looked at everything, not only from the frontiers on.';
comment on column flowforge.frontier.took is 'How long that took.';
comment on column flowforge.frontier.is_late is 'Whether a transaction was open since then that had been writing for so long that what it commits may lie before a frontier.';
comment on column flowforge.frontier.noted_at is 'When the next two were noted: every 30 s.';
comment on column flowforge.frontier.next_xid is 'Which transaction id came next then: what writes under a lesser one is older.';
comment on column flowforge.frontier.last_outbox_id is 'Which number the last order had then.';
comment on column flowforge.frontier.eligible is 'Of available_at, among what is eligible.';
comment on column flowforge.frontier.delayed is 'Of available_at, among what is delayed or offered again.';
comment on column flowforge.frontier.dispatched is 'Of redispatch_at, among what is dispatched.';
comment on column flowforge.frontier.leased is 'Of lease_expires_at.';
comment on column flowforge.frontier.unsettled is 'Of finished_at, among what is unsettled.';
comment on column flowforge.frontier.unpublished is 'Of next_attempt_at, among orders that are still to be published.';
comment on column flowforge.frontier.outbox is 'Of outbox_id, among all orders.';

-- Each ends with the time by which entries before the frontier are passed over in the index, without their rows. Those that they
-- stand for are dropped by the next migration: here, those who wait to write while these are built would not let it be done.
create index if not exists task_run_in_line on flowforge.task_run (queue_id, priority desc, task_run_id, available_at)
    where stage = 'eligible';
-- On an expression that only those write who go by it, so that statistics decide for nobody between this one and the next.
create index if not exists task_run_in_window on flowforge.task_run
    ((case when stage = 'dispatched' then queue_id end), priority desc, task_run_id, redispatch_at)
    where case when stage = 'dispatched' then queue_id end is not null;
create index if not exists task_run_unclaimed on flowforge.task_run (redispatch_at, queue_id) where stage = 'dispatched';
create index if not exists task_run_to_settle on flowforge.task_run (run_id, task_run_id, finished_at) where stage = 'unsettled';
comment on index flowforge.task_run_in_line is 'What is to be dispatched, by queue and priority.';
comment on index flowforge.task_run_in_window is 'What is dispatched and not claimed, by queue and priority.';
comment on index flowforge.task_run_unclaimed is 'What is dispatched and not claimed, by when it is to be looked at.';
comment on index flowforge.task_run_to_settle is 'What has finished and is not counted yet, by run.';
comment on column flowforge.task_run.available_at is 'Earliest time of dispatch or, for one offered again, of publishing; of what is in line, when it came there.';
