-- The tables of FlowForge.
--
-- Partial indexes are the queues of this schema. Their predicates name only task_run.stage, or a column that is null
-- outside the index, and never task_run.state; keyed statements guard on state and never on those columns. So no
-- guard can tempt the planner into walking a partial index instead of the primary key.
--
-- Every statement tolerates being applied again, as by hand with psql.

do $$
begin
    create type flowforge.run_state as enum ('running', 'succeeded', 'failed', 'cancelled');
exception when duplicate_object then null;
end
$$;

do $$
begin
    create type flowforge.task_run_state as enum
        ('pending', 'ready', 'running', 'succeeded', 'failed', 'cancelled', 'skipped');
exception when duplicate_object then null;
end
$$;

do $$
begin
    create type flowforge.task_run_stage as enum
        ('blocked', 'expand', 'delayed', 'eligible', 'reoffered', 'dispatched', 'leased', 'unsettled', 'settled');
exception when duplicate_object then null;
end
$$;

do $$
begin
    create type flowforge.trigger_rule as enum
        ('all_succeeded', 'all_done', 'any_failed', 'any_succeeded', 'none_failed');
exception when duplicate_object then null;
end
$$;

do $$
begin
    create type flowforge.claim_row as (
        "position" bigint,
        outcome text,
        task_run_id bigint,
        dispatch_id uuid,
        fencing_token bigint,
        attempt bigint,
        run_id bigint,
        workflow text,
        task text,
        handler text,
        input jsonb,
        upstream_outputs jsonb,
        upstream_states jsonb,
        item jsonb,
        map_index bigint,
        lease interval,
        lease_expires_at timestamptz,
        time_limit interval
    );
exception when duplicate_object then null;
end
$$;

comment on type flowforge.claim_row is
    'Answer of a claim for one input position. outcome: claimed, running, finished, superseded, cancelled, unknown; the columns after dispatch_id are null unless claimed. upstream_outputs: outputs of the succeeded upstreams by task name; upstream_states: states of all of them; lease: the effective length, counted from the claim; time_limit: from the claim, null for none.';

comment on column flowforge.claim_row."position" is 'Position in the arrays of the call, from 1.';
comment on column flowforge.claim_row.outcome is 'claimed, running, finished, superseded, cancelled or unknown.';
comment on column flowforge.claim_row.task_run_id is 'The task run asked for.';
comment on column flowforge.claim_row.dispatch_id is 'The dispatch asked for.';
comment on column flowforge.claim_row.fencing_token is 'To be given with renew, progress, release and finish.';
comment on column flowforge.claim_row.attempt is 'Number of the attempt, from 1.';
comment on column flowforge.claim_row.run_id is 'The run.';
comment on column flowforge.claim_row.workflow is 'Name of the workflow.';
comment on column flowforge.claim_row.task is 'Name of the task.';
comment on column flowforge.claim_row.handler is 'What to run.';
comment on column flowforge.claim_row.input is 'Input of the run.';
comment on column flowforge.claim_row.upstream_outputs is 'Outputs of the succeeded upstreams by task name; without a mapped array.';
comment on column flowforge.claim_row.upstream_states is 'States of the upstreams by task name.';
comment on column flowforge.claim_row.item is 'Element of the mapped array.';
comment on column flowforge.claim_row.map_index is 'Its position, from 0; null: not an element.';
comment on column flowforge.claim_row.lease is 'Length of the lease, from the claim.';
comment on column flowforge.claim_row.lease_expires_at is 'When it runs out.';
comment on column flowforge.claim_row.time_limit is 'Longest time from the claim; null: none.';

comment on type flowforge.run_state is
    'State of a run. running: not every task run is terminal and settled yet (whether anything was dispatched is derived by the views).';
comment on type flowforge.task_run_state is
    'State of a task run. pending: waits for upstreams, time, a pause or the window; ready: dispatched, its message may be under way; running: claimed under a lease; the rest are terminal.';
comment on type flowforge.task_run_stage is
    'Where a task run stands in line; refines its state, and every partial index is on it. pending is blocked (waits for others), expand (a map to be expanded), delayed (waits for its time) or eligible; ready is dispatched, or reoffered until its delay after a reap or release is over; running is leased; a terminal state is unsettled until its effects on the run are counted, then settled.';
comment on type flowforge.trigger_rule is
    'When a task runs, judged once when all its upstreams are settled. cancelled counts as failed; skipped is neither succeeded nor failed.';

create table if not exists flowforge.setting (
    name text primary key,
    value bigint not null,
    minimum bigint not null,
    maximum bigint not null,
    meaning text not null,
    constraint setting_in_bounds check (value between minimum and maximum)
);
comment on table flowforge.setting is 'Named limits and switches of this database; see the view limits and the function set_limit.';
comment on column flowforge.setting.name is 'Name of the limit; its unit is part of the meaning.';
comment on column flowforge.setting.value is 'Value in force.';
comment on column flowforge.setting.minimum is 'Smallest value that set_limit accepts.';
comment on column flowforge.setting.maximum is 'Largest value that set_limit accepts.';
comment on column flowforge.setting.meaning is 'What the limit limits, and its unit.';

insert into flowforge.setting (name, value, minimum, maximum, meaning) values
    ('max_tasks', 20000, 1, 100000, 'tasks in one workflow'),
    ('max_dependencies', 200000, 1, 2000000, 'dependencies in one workflow'),
    ('max_name_bytes', 200, 1, 200, 'bytes of a workflow, task, queue or worker name'),
    ('max_handler_bytes', 255, 1, 255, 'bytes of a handler name (it travels as an AMQP short string)'),
    ('max_key_bytes', 255, 1, 1000, 'bytes of an idempotency key or a request id'),
    ('max_payload_bytes', 16777216, 1024, 67108864, 'bytes of one input, output or definition, as JSON text or in memory'),
    ('max_labels_bytes', 65536, 1024, 1048576, 'bytes of the labels of a run'),
    ('max_claim_bytes', 67108864, 1048576, 134217728, 'bytes of the upstream outputs that one task is given'),
    ('max_map_width', 10000, 1, 100000, 'elements of one map'),
    ('max_map_output_bytes', 67108864, 1024, 134217728, 'bytes of the joined results of one map'),
    ('max_error_chars', 10000, 100, 1000000, 'characters kept of an error text; the rest is cut off'),
    ('max_trigger_runs', 10000, 1, 100000, 'runs triggered by one call of trigger_many'),
    ('max_trigger_task_runs', 200000, 1, 10000000, 'task runs created by one call of trigger_many'),
    ('max_batch', 10000, 1000, 100000, 'elements of one call to claim, renew, finish, fetch or mark'),
    ('notify', 1, 0, 1, '1: NOTIFY wakes the daemons; 0: they only poll')
on conflict (name) do nothing;

create table if not exists flowforge.workflow (
    workflow_id bigint generated always as identity primary key,
    name text not null unique,
    current_version bigint not null,
    created_at timestamptz not null
);
comment on table flowforge.workflow is 'A workflow: a name under which versions of a definition are registered.';
comment on column flowforge.workflow.workflow_id is 'Identity.';
comment on column flowforge.workflow.name is 'Name, unique in the database.';
comment on column flowforge.workflow.current_version is 'Version that a trigger without a version runs.';
comment on column flowforge.workflow.created_at is 'When the first version was registered.';

create table if not exists flowforge.workflow_version (
    workflow_version_id bigint generated always as identity primary key,
    workflow_id bigint not null references flowforge.workflow,
    version bigint not null check (version > 0),
    task_count bigint not null check (task_count > 0),
    content_hash bytea not null,
    spec jsonb not null,
    created_at timestamptz not null,
    unique (workflow_id, version),
    unique (workflow_id, content_hash)
);
comment on table flowforge.workflow_version is 'An immutable version of a workflow; a run pins the version it was triggered with.';
comment on column flowforge.workflow_version.workflow_version_id is 'Identity.';
comment on column flowforge.workflow_version.workflow_id is 'The workflow.';
comment on column flowforge.workflow_version.version is 'Number of the version within the workflow, from 1.';
comment on column flowforge.workflow_version.task_count is 'Number of its tasks.';
comment on column flowforge.workflow_version.content_hash is 'SHA-256 of the normalised definition, tasks and dependencies in name order.';
comment on column flowforge.workflow_version.spec is 'The normalised definition: every default filled in.';
comment on column flowforge.workflow_version.created_at is 'When it was registered.';

create table if not exists flowforge.queue (
    queue_id bigint generated always as identity primary key,
    name text not null unique,
    paused_at timestamptz,
    window_size bigint check (window_size > 0),
    redispatch_delay interval not null default '30 s' check (redispatch_delay > '0'),
    drain_rate double precision,
    sampled_window bigint not null default 0,
    sampled_at timestamptz,
    drained_at timestamptz,
    stalled boolean not null default false
) with (fillfactor = 50);
comment on table flowforge.queue is 'A queue: what workers subscribe to; dispatch holds its row.';
comment on column flowforge.queue.queue_id is 'Identity.';
comment on column flowforge.queue.name is 'Name; also the AMQP routing key.';
comment on column flowforge.queue.paused_at is 'Since when nothing is dispatched from it; null: not paused.';
comment on column flowforge.queue.window_size is 'Most task runs dispatched and due at once; null: the larger of 100 and 4 times the announced capacity.';
comment on column flowforge.queue.redispatch_delay is 'How long a published message may stay unclaimed before it is published again; doubles at each repeat.';
comment on column flowforge.queue.drain_rate is 'Recent pace of claims a second while the queue was busy; null: none was seen.';
comment on column flowforge.queue.sampled_window is 'Window when the pace was last estimated.';
comment on column flowforge.queue.sampled_at is 'When the pace was last estimated.';
comment on column flowforge.queue.drained_at is 'When the window was last seen to have shrunk or to be empty.';
comment on column flowforge.queue.stalled is 'Whether nothing was claimed for the redispatch delay although a worker has room: the broker may have lost the messages.';

create table if not exists flowforge.task (
    task_id bigint generated always as identity primary key,
    workflow_version_id bigint not null references flowforge.workflow_version,
    name text not null,
    handler text not null,
    queue_id bigint not null references flowforge.queue,
    map_task_id bigint,
    upstream_count bigint not null check (upstream_count >= 0),
    rule flowforge.trigger_rule not null,
    priority bigint not null,
    max_attempts bigint not null check (max_attempts > 0),
    retry_delay double precision not null check (retry_delay >= 0),
    retry_backoff double precision not null check (retry_backoff >= 1),
    retry_max_delay double precision not null check (retry_max_delay >= 0),
    retry_jitter double precision not null check (retry_jitter >= 0),
    lease interval check (lease > '0'),
    time_limit interval check (time_limit > '0'),
    start_within interval check (start_within > '0'),
    max_reaps bigint not null check (max_reaps >= 0),
    unique (workflow_version_id, name),
    unique (workflow_version_id, task_id),
    foreign key (workflow_version_id, map_task_id) references flowforge.task (workflow_version_id, task_id),
    constraint map_of_an_earlier_task check (map_task_id < task_id)
);
comment on table flowforge.task is 'A task of a workflow version. Identities ascend in topological order.';
comment on column flowforge.task.task_id is 'Identity; larger than that of every upstream.';
comment on column flowforge.task.workflow_version_id is 'The version it belongs to.';
comment on column flowforge.task.name is 'Name, unique within the version.';
comment on column flowforge.task.handler is 'What a worker looks up to run it.';
comment on column flowforge.task.queue_id is 'Queue it is dispatched to.';
comment on column flowforge.task.map_task_id is 'Upstream whose array output it is mapped over; null: not a map.';
comment on column flowforge.task.upstream_count is 'Number of its upstreams.';
comment on column flowforge.task.rule is 'Trigger rule.';
comment on column flowforge.task.priority is 'Added to the priority of the run; larger goes first within a queue.';
comment on column flowforge.task.max_attempts is 'Attempts in all, the first included.';
comment on column flowforge.task.retry_delay is 'Seconds before the second attempt.';
comment on column flowforge.task.retry_backoff is 'Factor by which the delay grows with each further attempt; 1: fixed.';
comment on column flowforge.task.retry_max_delay is 'Largest delay in seconds, before jitter.';
comment on column flowforge.task.retry_jitter is 'Largest share of the delay that is added to it at random.';
comment on column flowforge.task.lease is 'Lease length; null: the worker''s.';
comment on column flowforge.task.time_limit is 'Longest time from the claim; null: none.';
comment on column flowforge.task.start_within is 'Longest time from dispatch to claim, else the task run fails; null: none.';
comment on column flowforge.task.max_reaps is 'How often a task run may be taken back from dead workers before it fails for good.';

create table if not exists flowforge.task_dependency (
    workflow_version_id bigint not null,
    task_id bigint not null,
    upstream_task_id bigint not null,
    primary key (task_id, upstream_task_id),
    foreign key (workflow_version_id, task_id) references flowforge.task (workflow_version_id, task_id),
    foreign key (workflow_version_id, upstream_task_id) references flowforge.task (workflow_version_id, task_id),
    constraint upstream_comes_first check (upstream_task_id < task_id)
);
create index if not exists task_dependency_downstream on flowforge.task_dependency (upstream_task_id, task_id);
comment on table flowforge.task_dependency is 'Edges of the graph. Both ends are of one version and identities ascend along every edge, so neither a cycle nor a foreign edge can be stored.';
comment on column flowforge.task_dependency.workflow_version_id is 'The version of both ends.';
comment on column flowforge.task_dependency.task_id is 'The task that waits.';
comment on column flowforge.task_dependency.upstream_task_id is 'The task that it waits for.';
comment on index flowforge.task_dependency_downstream is 'From a settled task to those that wait for it.';

create table if not exists flowforge.run (
    run_id bigint generated always as identity primary key,
    workflow_id bigint not null references flowforge.workflow,
    workflow_version_id bigint not null references flowforge.workflow_version,
    state flowforge.run_state not null default 'running',
    priority bigint not null,
    unsettled bigint not null check (unsettled >= 0),
    created_at timestamptz not null,
    finished_at timestamptz,
    cancel_requested_at timestamptz,
    cancel_sweep_at timestamptz,
    cancel_reason text,
    idempotency_key text,
    labels jsonb not null,
    input jsonb not null,
    constraint finished_iff_not_running check ((state = 'running') = (finished_at is null)),
    constraint running_iff_unsettled check ((state = 'running') = (unsettled > 0))
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
create unique index if not exists run_idempotency_key on flowforge.run (idempotency_key, workflow_id)
    where idempotency_key is not null;
create index if not exists run_of_workflow on flowforge.run (workflow_id, run_id);
create index if not exists run_active on flowforge.run (run_id) where finished_at is null;
create index if not exists run_cancelling on flowforge.run (run_id)
    where cancel_requested_at is not null and finished_at is null;
create index if not exists run_finished on flowforge.run (finished_at) where finished_at is not null;
create index if not exists run_unsuccessful on flowforge.run (run_id) where state in ('failed', 'cancelled');
comment on table flowforge.run is 'One execution of a workflow version.';
comment on column flowforge.run.run_id is 'Identity. Not an order: a smaller one can commit later.';
comment on column flowforge.run.workflow_id is 'The workflow.';
comment on column flowforge.run.workflow_version_id is 'The version pinned at the trigger.';
comment on column flowforge.run.state is 'State, decided once by settle; back to running only by retry_run.';
comment on column flowforge.run.priority is 'Added to the priority of each task.';
comment on column flowforge.run.unsettled is 'Number of its task runs that are not settled; the run ends when it reaches 0.';
comment on column flowforge.run.created_at is 'When it was triggered.';
comment on column flowforge.run.finished_at is 'When it ended; null while running.';
comment on column flowforge.run.cancel_sweep_at is 'When the standing sweep of a run being cancelled looks at it next; the longer it takes, the more seldom.';
comment on column flowforge.run.cancel_requested_at is 'When a cancel was asked for; cleared by retry_run.';
comment on column flowforge.run.cancel_reason is 'The reason given for the cancel.';
comment on column flowforge.run.idempotency_key is 'Key under which the trigger is repeatable, within its workflow, until the run is pruned.';
comment on column flowforge.run.labels is 'Free labels, an object; a label traceparent travels with each message.';
comment on column flowforge.run.input is 'Input of the run.';
comment on index flowforge.run_idempotency_key is 'One run for a key.';
comment on index flowforge.run_of_workflow is 'Runs of one workflow, for listings.';
comment on index flowforge.run_active is 'Runs that have not ended.';
comment on index flowforge.run_cancelling is 'Runs being cancelled, for the standing sweep.';
comment on index flowforge.run_finished is 'Ended runs by time, for prune.';
comment on index flowforge.run_unsuccessful is 'Failed and cancelled runs, for listings.';

create table if not exists flowforge.task_run (
    task_run_id bigint generated always as identity primary key,
    run_id bigint not null references flowforge.run,
    task_id bigint not null references flowforge.task,
    queue_id bigint not null,
    map_index bigint,
    generation bigint not null default 0,
    map_count bigint,
    priority bigint not null,
    unmet bigint not null check (unmet >= 0),
    attempt bigint not null default 1,
    failures bigint not null default 0,
    reaps bigint not null default 0,
    fencing_token bigint not null default 0,
    redispatches bigint not null default 0,
    dispatch_id uuid,
    claim_id uuid,
    available_at timestamptz not null,
    ready_at timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    lease_expires_at timestamptz,
    lease_length interval,
    deadline timestamptz,
    redispatch_at timestamptz,
    start_deadline timestamptz,
    unknown_handler_since timestamptz,
    state flowforge.task_run_state not null default 'pending',
    stage flowforge.task_run_stage not null,
    lease_owner text,
    last_owner text,
    error text,
    output_bytes bigint,
    item jsonb,
    output jsonb,
    constraint lease_iff_running check (
        case when state = 'running'
            then claim_id is not null and lease_owner is not null and lease_expires_at is not null and lease_length is not null
            else claim_id is null and lease_owner is null and lease_expires_at is null and lease_length is null and deadline is null
        end),
    constraint stage_refines_state check (
        case stage
            when 'reoffered' then state = 'ready'
            when 'dispatched' then state = 'ready'
            when 'leased' then state = 'running'
            when 'unsettled' then state in ('succeeded', 'failed', 'cancelled', 'skipped')
            when 'settled' then state in ('succeeded', 'failed', 'cancelled', 'skipped')
            else state = 'pending'
        end),
    constraint dispatched_under_an_id check (state not in ('ready', 'running') or dispatch_id is not null),
    constraint no_dispatch_id_while_pending check (state <> 'pending' or dispatch_id is null),
    constraint finished_iff_terminal check ((finished_at is not null) = (state in ('succeeded', 'failed', 'cancelled', 'skipped'))),
    constraint waits_only_when_blocked check (unmet = 0 or state <> 'pending' or stage = 'blocked'),
    constraint only_an_own_row_expands check (map_index is null or map_count is null and stage <> 'expand')
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
create unique index if not exists task_run_of_run on flowforge.task_run (run_id, task_id, map_index, generation)
    nulls not distinct;
create index if not exists task_run_eligible on flowforge.task_run (queue_id, priority desc, task_run_id)
    where stage = 'eligible';
create index if not exists task_run_delayed on flowforge.task_run (available_at, task_run_id) where stage = 'delayed';
create index if not exists task_run_reoffered on flowforge.task_run (available_at, task_run_id) where stage = 'reoffered';
create index if not exists task_run_expand on flowforge.task_run (task_run_id) where stage = 'expand';
create index if not exists task_run_dispatched on flowforge.task_run (queue_id, priority desc, task_run_id)
    where stage = 'dispatched';
create index if not exists task_run_lease on flowforge.task_run (lease_expires_at) where lease_expires_at is not null;
create index if not exists task_run_claim on flowforge.task_run (claim_id) where claim_id is not null;
create index if not exists task_run_unsettled on flowforge.task_run (run_id, task_run_id) where stage = 'unsettled';
-- These two on expressions that one statement each writes, so that no other one can match them.
create index if not exists task_run_reoffered_of_queue on flowforge.task_run ((case when stage = 'reoffered' then queue_id end))
    where case when stage = 'reoffered' then queue_id end is not null;
create index if not exists task_run_failed on flowforge.task_run ((case when state = 'failed' then finished_at end))
    where case when state = 'failed' then finished_at end is not null;
comment on table flowforge.task_run is 'One task of one run; a map also has one row for each element.';
comment on column flowforge.task_run.task_run_id is 'Identity; within a run ascending in topological order. Locks are taken in this order.';
comment on column flowforge.task_run.run_id is 'The run.';
comment on column flowforge.task_run.task_id is 'The task.';
comment on column flowforge.task_run.queue_id is 'Queue of the task, copied so that the eligible index leads with it.';
comment on column flowforge.task_run.map_index is 'Position in the mapped array, from 0; null: the task''s own row.';
comment on column flowforge.task_run.generation is 'Own row of a map: which expansion is current. Element: which expansion made it; elements of earlier ones no longer count.';
comment on column flowforge.task_run.map_count is 'Own row of a map: number of elements of the current generation; null: not expanded.';
comment on column flowforge.task_run.priority is 'Priority of run and task together; larger goes first within a queue.';
comment on column flowforge.task_run.unmet is 'How many task runs it waits for: upstreams not settled or, once a map is expanded, elements not settled. Meaningful while pending.';
comment on column flowforge.task_run.attempt is 'Number of the attempt, from 1; never decreases.';
comment on column flowforge.task_run.failures is 'Attempts of the present budget that failed; a retry by an operator starts it anew.';
comment on column flowforge.task_run.reaps is 'Times it was taken back from a dead worker since a handler last answered.';
comment on column flowforge.task_run.fencing_token is 'Incremented by every claim; renew, progress, release and finish require the current one.';
comment on column flowforge.task_run.redispatches is 'Times the present dispatch was armed again for want of a claim.';
comment on column flowforge.task_run.dispatch_id is 'Permission to execute this attempt; the AMQP message_id.';
comment on column flowforge.task_run.claim_id is 'The claiming call; set exactly while running.';
comment on column flowforge.task_run.available_at is 'Earliest time of dispatch or, for one offered again, of publishing.';
comment on column flowforge.task_run.ready_at is 'When the attempt was first dispatched.';
comment on column flowforge.task_run.started_at is 'When the attempt was last claimed.';
comment on column flowforge.task_run.finished_at is 'When it became terminal.';
comment on column flowforge.task_run.lease_expires_at is 'When the lease runs out; set exactly while running.';
comment on column flowforge.task_run.lease_length is 'Length of the lease at the last claim or renewal; set exactly while running.';
comment on column flowforge.task_run.deadline is 'Claim plus time limit; no renewal extends past it.';
comment on column flowforge.task_run.redispatch_at is 'When a ready task run is looked at again for a lost message.';
comment on column flowforge.task_run.start_deadline is 'When a ready task run fails if it has not been claimed.';
comment on column flowforge.task_run.unknown_handler_since is 'Since when workers have given it back for want of its handler.';
comment on column flowforge.task_run.state is 'State; see the type.';
comment on column flowforge.task_run.stage is 'Place in line; see the type.';
comment on column flowforge.task_run.lease_owner is 'Worker that holds the lease; set exactly while running.';
comment on column flowforge.task_run.last_owner is 'Worker that claimed it last.';
comment on column flowforge.task_run.error is 'Why the last attempt failed, or why it was cancelled.';
comment on column flowforge.task_run.item is 'Element of the mapped array.';
comment on column flowforge.task_run.output_bytes is 'Size of the output, for the limit of what a task is given.';
comment on column flowforge.task_run.output is 'Output of the handler; for a map the outputs of its elements in order.';
comment on index flowforge.task_run_of_run is 'From a run and task to its rows.';
comment on index flowforge.task_run_eligible is 'What can be dispatched now, by queue.';
comment on index flowforge.task_run_delayed is 'What waits only for its time.';
comment on index flowforge.task_run_reoffered_of_queue is 'The same by queue: counted against its window.';
comment on index flowforge.task_run_reoffered is 'What is offered again later; moved into the window when due.';
comment on index flowforge.task_run_expand is 'Maps to be expanded.';
comment on index flowforge.task_run_dispatched is 'The window of each queue.';
comment on index flowforge.task_run_lease is 'Leases by expiry, for the reaper.';
comment on index flowforge.task_run_claim is 'From a repeated claim to what it holds.';
comment on index flowforge.task_run_unsettled is 'What finished and is not counted yet, by run.';
comment on index flowforge.task_run_failed is 'What failed, by time, for the view dead_letters.';

create table if not exists flowforge.attempt (
    task_run_id bigint not null references flowforge.task_run on delete cascade,
    attempt bigint not null,
    fencing_token bigint not null,
    dispatch_id uuid,
    outcome text not null check (outcome in ('succeeded', 'failed', 'timed_out', 'cancelled', 'lease_expired', 'crashed')),
    answered boolean not null,
    owner text,
    started_at timestamptz,
    ended_at timestamptz not null,
    error text,
    primary key (task_run_id, attempt, fencing_token)
);
comment on table flowforge.attempt is 'Executions that did not simply succeed, and those that an operator''s retry reset.';
comment on column flowforge.attempt.task_run_id is 'The task run.';
comment on column flowforge.attempt.attempt is 'Number of the attempt.';
comment on column flowforge.attempt.fencing_token is 'Token of the execution.';
comment on column flowforge.attempt.dispatch_id is 'Dispatch id of the attempt: a late message of it is recognised by this.';
comment on column flowforge.attempt.outcome is 'How the execution ended.';
comment on column flowforge.attempt.answered is 'Whether a finish under this token was accepted, so that its repeat is recognised.';
comment on column flowforge.attempt.owner is 'Worker that held it.';
comment on column flowforge.attempt.started_at is 'When it was claimed.';
comment on column flowforge.attempt.ended_at is 'When it ended.';
comment on column flowforge.attempt.error is 'Error text.';

create table if not exists flowforge.progress (
    task_run_id bigint primary key references flowforge.task_run on delete cascade,
    fencing_token bigint not null,
    fraction double precision,
    message text,
    reported_at timestamptz not null
) with (fillfactor = 50);
comment on table flowforge.progress is 'Last progress that a handler reported; apart from task_run so that a report rewrites little.';
comment on column flowforge.progress.task_run_id is 'The task run.';
comment on column flowforge.progress.fencing_token is 'Token of the execution that reported.';
comment on column flowforge.progress.fraction is 'Share done, from 0 to 1.';
comment on column flowforge.progress.message is 'Free text.';
comment on column flowforge.progress.reported_at is 'When it was reported.';

create table if not exists flowforge.outbox (
    outbox_id bigint generated always as identity primary key,
    task_run_id bigint not null,
    dispatch_id uuid not null,
    attempt bigint not null,
    queue text not null,
    handler text not null,
    traceparent text,
    next_attempt_at timestamptz not null,
    created_at timestamptz not null,
    published_at timestamptz,
    parked_at timestamptz,
    tries bigint not null default 0,
    last_error text,
    constraint published_or_parked check (published_at is null or parked_at is null)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
create index if not exists outbox_unpublished on flowforge.outbox (next_attempt_at, outbox_id)
    where published_at is null and parked_at is null;
create index if not exists outbox_parked on flowforge.outbox (parked_at) where parked_at is not null;
create index if not exists outbox_of_task_run on flowforge.outbox (task_run_id);
comment on table flowforge.outbox is 'Orders to publish. One row is one order; arming a dispatch again adds a row and never changes an earlier one.';
comment on column flowforge.outbox.outbox_id is 'Identity. Not an order of commits.';
comment on column flowforge.outbox.task_run_id is 'The task run. No foreign key: the sweep removes rows whose task run moved on or is gone.';
comment on column flowforge.outbox.dispatch_id is 'Travels as the AMQP message_id.';
comment on column flowforge.outbox.attempt is 'Number of the attempt.';
comment on column flowforge.outbox.queue is 'Name of the queue; the routing key.';
comment on column flowforge.outbox.handler is 'Handler; the AMQP type.';
comment on column flowforge.outbox.traceparent is 'W3C trace context from the labels of the run.';
comment on column flowforge.outbox.next_attempt_at is 'Not to be published before.';
comment on column flowforge.outbox.created_at is 'When it was written.';
comment on column flowforge.outbox.published_at is 'When the broker had confirmed it.';
comment on column flowforge.outbox.parked_at is 'When it was found impossible to publish.';
comment on column flowforge.outbox.tries is 'Times the broker refused it.';
comment on column flowforge.outbox.last_error is 'Why the broker refused it last.';
comment on index flowforge.outbox_unpublished is 'What the publisher fetches.';
comment on index flowforge.outbox_parked is 'What can never be published, for the scheduler to fail.';
comment on index flowforge.outbox_of_task_run is 'From a task run to its orders.';

create table if not exists flowforge.worker (
    name text primary key,
    queues text[] not null,
    capacity bigint not null check (capacity > 0),
    started_at timestamptz not null,
    seen_at timestamptz not null
) with (fillfactor = 50);
comment on table flowforge.worker is 'Presence of workers: sizes the windows and informs operators. Nothing depends on it for correctness.';
comment on column flowforge.worker.name is 'Name, with a random part for each process.';
comment on column flowforge.worker.queues is 'Queues it serves.';
comment on column flowforge.worker.capacity is 'Task runs it executes at once.';
comment on column flowforge.worker.started_at is 'When it was first seen.';
comment on column flowforge.worker.seen_at is 'When it was last seen; after 2 minutes it no longer counts.';

create table if not exists flowforge.scheduler (
    one_row boolean primary key default true check (one_row),
    asleep boolean not null default false,
    reaper_ticked_at timestamptz,
    reaper_period interval not null default '0',
    gap_ended_at timestamptz,
    previous_gap_ended_at timestamptz
) with (fillfactor = 10);
insert into flowforge.scheduler default values on conflict (one_row) do nothing;
comment on table flowforge.scheduler is 'One row: what the schedulers tell each other and the writers.';
comment on column flowforge.scheduler.one_row is 'Always true.';
comment on column flowforge.scheduler.asleep is 'Whether a scheduler has declared itself asleep: only then is it notified.';
comment on column flowforge.scheduler.reaper_ticked_at is 'Last tick of the reaper.';
comment on column flowforge.scheduler.reaper_period is 'Longest time between its recent ticks, gaps left out; a gap is longer than 10 s and than three of these.';
comment on column flowforge.scheduler.previous_gap_ended_at is 'First tick after the gap before: a lease that had run out by then has had its time.';
comment on column flowforge.scheduler.gap_ended_at is 'First tick after the last gap: from here on every lease has its own length anew, unless the gap before had given it that.';

create table if not exists flowforge.run_retry (
    run_id bigint not null references flowforge.run on delete cascade,
    request_id text not null,
    from_task text,
    task_runs bigint not null,
    requested_at timestamptz not null,
    primary key (run_id, request_id)
);
comment on table flowforge.run_retry is 'Retries by operators, so that a repeated request answers the same.';
comment on column flowforge.run_retry.run_id is 'The run.';
comment on column flowforge.run_retry.request_id is 'Key of the request.';
comment on column flowforge.run_retry.from_task is 'Task it started from; null: the failed part.';
comment on column flowforge.run_retry.task_runs is 'Number of task runs reset.';
comment on column flowforge.run_retry.requested_at is 'When it was asked for.';
