-- Views for operators and dashboards; plain columns, no payloads but errors. Written so that a condition and a limit
-- from outside reach the tables: no volatile function, and a state that is told without counting task runs.

create or replace function flowforge._reading() returns timestamptz
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return flowforge._clock();
end
$$;
comment on function flowforge._reading() is
    'The clock, for views: over a view with a volatile function no ORDER BY … LIMIT is answered by an index.';

create or replace view flowforge.limits as
select s.name, s.value, s.minimum, s.maximum, s.meaning from flowforge.setting s;
comment on view flowforge.limits is 'Named limits and switches; change them with set_limit.';
comment on column flowforge.limits.name is 'Name of the limit.';
comment on column flowforge.limits.value is 'Value in force.';
comment on column flowforge.limits.minimum is 'Smallest value allowed.';
comment on column flowforge.limits.maximum is 'Largest value allowed.';
comment on column flowforge.limits.meaning is 'What it limits, and its unit.';

create or replace view flowforge.workflow_status as
select w.workflow_id, w.name as workflow, w.current_version as version, wv.task_count as tasks, wv.created_at as registered_at,
    (select count(*) from flowforge.workflow_version v where v.workflow_id = w.workflow_id) as versions
from flowforge.workflow w
join flowforge.workflow_version wv on wv.workflow_id = w.workflow_id and wv.version = w.current_version;
comment on view flowforge.workflow_status is 'Workflows with their current version: the one that a trigger without a version runs.';
comment on column flowforge.workflow_status.workflow_id is 'Identity.';
comment on column flowforge.workflow_status.workflow is 'Name of the workflow.';
comment on column flowforge.workflow_status.version is 'Current version.';
comment on column flowforge.workflow_status.tasks is 'Number of its tasks.';
comment on column flowforge.workflow_status.registered_at is 'When it was registered.';
comment on column flowforge.workflow_status.versions is 'Number of all versions.';

create or replace view flowforge.workflow_version_status as
select w.name as workflow, wv.version, wv.version = w.current_version as is_current, wv.task_count as tasks,
    wv.created_at as registered_at, wv.spec as definition
from flowforge.workflow w
join flowforge.workflow_version wv on wv.workflow_id = w.workflow_id;
comment on view flowforge.workflow_version_status is 'Every version of every workflow, with its definition.';
comment on column flowforge.workflow_version_status.workflow is 'Name of the workflow.';
comment on column flowforge.workflow_version_status.version is 'Number of the version within the workflow, from 1.';
comment on column flowforge.workflow_version_status.is_current is 'Whether a trigger without a version runs it.';
comment on column flowforge.workflow_version_status.tasks is 'Number of its tasks.';
comment on column flowforge.workflow_version_status.registered_at is 'When it was registered.';
comment on column flowforge.workflow_version_status.definition is 'The normalised definition: every default filled in, tasks in the order of their names.';

create or replace view flowforge.run_status as
select r.run_id, w.name as workflow, wv.version,
    case when r.state <> 'running' then r.state::text
        -- Not exists (…): that may be hashed, which reads all there is.
        when (select true from flowforge.task_run tr
              where tr.run_id = r.run_id and (tr.state <> 'pending' or tr.fencing_token > 0) limit 1) is null then 'pending'
        when r.cancel_requested_at is not null then 'cancelling' else 'running' end as state,
    r.priority, r.labels, r.idempotency_key, r.created_at, r.finished_at, coalesce(r.finished_at, flowforge._reading()) - r.created_at as duration,
    r.cancel_requested_at, r.cancel_reason, r.unsettled,
    c.task_runs, c.pending, c.ready, c.running, c.succeeded, c.failed, c.cancelled, c.skipped,
    r.workflow_id, r.state in ('failed', 'cancelled') as unsuccessful
from flowforge.run r
join flowforge.workflow w on w.workflow_id = r.workflow_id
join flowforge.workflow_version wv on wv.workflow_version_id = r.workflow_version_id
cross join lateral (
    select count(*) as task_runs,
        count(*) filter (where tr.state = 'pending') as pending,
        count(*) filter (where tr.state = 'ready') as ready,
        count(*) filter (where tr.state = 'running') as running,
        count(*) filter (where tr.state = 'succeeded') as succeeded,
        count(*) filter (where tr.state = 'failed') as failed,
        count(*) filter (where tr.state = 'cancelled') as cancelled,
        count(*) filter (where tr.state = 'skipped') as skipped
    -- Without the elements of expansions that a retry has replaced. Own rows come in the order of the index: no sort.
    from (select e.state, e.map_index is not null and e.generation < max(e.generation) over (partition by e.task_id) as superseded
          from flowforge.task_run e where e.run_id = r.run_id offset 0) tr
    where not tr.superseded) c;
comment on view flowforge.run_status is
    'Runs with the numbers of their task runs by state. state adds two derived words: pending (nothing dispatched yet) and cancelling. Page by run_id, largest first. On a large history, name a workflow by its workflow_id (see workflow_status), and add "unsuccessful" or "finished_at is null" to a condition on state: each has its index.';
comment on column flowforge.run_status.run_id is 'Identity. Not an order: a smaller one can commit later.';
comment on column flowforge.run_status.workflow is 'Name of the workflow.';
comment on column flowforge.run_status.version is 'Version pinned at the trigger.';
comment on column flowforge.run_status.state is 'pending, running, cancelling, succeeded, failed or cancelled.';
comment on column flowforge.run_status.priority is 'Added to the priority of each task; larger goes first.';
comment on column flowforge.run_status.labels is 'Labels given at the trigger.';
comment on column flowforge.run_status.idempotency_key is 'Key given at the trigger.';
comment on column flowforge.run_status.created_at is 'When it was triggered.';
comment on column flowforge.run_status.finished_at is 'When it ended.';
comment on column flowforge.run_status.duration is 'From the trigger to the end, or to now.';
comment on column flowforge.run_status.cancel_requested_at is 'When a cancel was asked for.';
comment on column flowforge.run_status.cancel_reason is 'The reason given for it.';
comment on column flowforge.run_status.unsettled is 'Task runs whose end is not counted yet; the run ends at 0.';
comment on column flowforge.run_status.task_runs is 'Number of its task runs, elements of maps included, but not superseded ones.';
comment on column flowforge.run_status.pending is 'Of these, waiting for upstreams, time, a pause or the window.';
comment on column flowforge.run_status.ready is 'Of these, dispatched.';
comment on column flowforge.run_status.running is 'Of these, claimed by a worker.';
comment on column flowforge.run_status.succeeded is 'Of these, succeeded.';
comment on column flowforge.run_status.failed is 'Of these, failed for good.';
comment on column flowforge.run_status.cancelled is 'Of these, cancelled.';
comment on column flowforge.run_status.skipped is 'Of these, skipped by their trigger rule.';
comment on column flowforge.run_status.workflow_id is 'The workflow; see workflow_status.';
comment on column flowforge.run_status.unsuccessful is 'Whether it failed or was cancelled.';

create or replace view flowforge.run_input as
select r.run_id, r.input from flowforge.run r;
comment on view flowforge.run_input is 'What each run was triggered with. Apart from its status, which is listed: it may be large.';
comment on column flowforge.run_input.run_id is 'The run.';
comment on column flowforge.run_input.input is 'Its input.';

create or replace view flowforge.task_run_status as
select tr.task_run_id, tr.run_id, w.name as workflow, t.name as task, tr.map_index, tr.state::text as state,
    case
        when tr.stage = 'blocked' and tr.map_count is not null then format('%s of %s elements are not done', tr.unmet, tr.map_count)
        when tr.stage = 'blocked' then format('%s of %s upstreams are not done', tr.unmet, t.upstream_count)
        when tr.stage = 'expand' then 'to be expanded'
        when tr.stage = 'delayed' then format('until %s', tr.available_at)
        when tr.stage = 'eligible' and q.paused_at is not null then format('queue %s is paused', q.name)
        when tr.stage = 'eligible' and (s.reaper_ticked_at > flowforge._reading() - interval '1 minute') is not true then
            'for a scheduler: none is running'
        -- As of the last dispatch from it: to count what is in the window, for each row, would cost too much.
        when tr.stage = 'eligible' and q.sampled_window >= coalesce(q.window_size, 100)
            then format('for room in the window of queue %s', q.name)
        when tr.stage = 'eligible' then 'for the scheduler to dispatch it'
        when tr.stage = 'reoffered' and tr.unknown_handler_since is not null then
            format('for a worker that knows handler %s; to be offered again at %s', t.handler, tr.available_at)
        when tr.stage = 'reoffered' then format('to be offered again at %s', tr.available_at)
        when tr.stage = 'dispatched' then format('for a worker of queue %s', q.name)
        when tr.state = 'skipped' then format('rule %s was not met', t.rule)
        -- Workers renew every third of the lease. Near the time limit, past which no lease goes, renewals do not show.
        when tr.stage = 'leased' and tr.lease_expires_at - tr.lease_length / 2 < flowforge._reading()
            and (tr.lease_expires_at >= tr.deadline) is not true
            then format('its worker is silent: held by %s until %s', tr.lease_owner, tr.lease_expires_at)
    end as waits,
    q.name as queue, t.handler, tr.priority, tr.attempt, t.max_attempts, tr.reaps, t.max_reaps, tr.fencing_token, tr.dispatch_id,
    tr.available_at, tr.ready_at, tr.started_at, tr.finished_at,
    case when tr.started_at is not null then coalesce(tr.finished_at, case when tr.state = 'running' then flowforge._reading() end) - tr.started_at end as duration,
    tr.last_owner as worker, tr.lease_expires_at, p.fraction as progress, p.message as progress_message, tr.map_count, tr.unmet, tr.error,
    tr.map_index is not null and tr.generation < (
        select own.generation from flowforge.task_run own
        where own.run_id = tr.run_id and own.task_id = tr.task_id and own.map_index is null) as superseded
from flowforge.task_run tr
join flowforge.run r on r.run_id = tr.run_id
join flowforge.workflow w on w.workflow_id = r.workflow_id
join flowforge.task t on t.task_id = tr.task_id
join flowforge.queue q on q.queue_id = tr.queue_id
cross join flowforge.scheduler s
left join flowforge.progress p on p.task_run_id = tr.task_run_id and p.fencing_token = tr.fencing_token;
comment on view flowforge.task_run_status is
    'Task runs with what each waits for, who ran it, for how long, its progress and its error. Elements of a map have a map_index.';
comment on column flowforge.task_run_status.task_run_id is 'Identity.';
comment on column flowforge.task_run_status.run_id is 'The run.';
comment on column flowforge.task_run_status.workflow is 'Name of the workflow.';
comment on column flowforge.task_run_status.task is 'Name of the task.';
comment on column flowforge.task_run_status.map_index is 'Position of an element in the mapped array, from 0; null: the task''s own row.';
comment on column flowforge.task_run_status.state is 'State; see the type task_run_state.';
comment on column flowforge.task_run_status.waits is 'What it waits for, in words; null: nothing. Of a running one: that its worker has not renewed the lease for half of it.';
comment on column flowforge.task_run_status.queue is 'Queue it is dispatched to.';
comment on column flowforge.task_run_status.handler is 'What a worker looks up to run it.';
comment on column flowforge.task_run_status.priority is 'Priority of run and task together; larger goes first.';
comment on column flowforge.task_run_status.attempt is 'Number of the attempt, from 1.';
comment on column flowforge.task_run_status.max_attempts is 'Attempts in one budget.';
comment on column flowforge.task_run_status.reaps is 'Times it was taken back from a dead worker since a handler last answered.';
comment on column flowforge.task_run_status.max_reaps is 'How often that may happen before it fails for good.';
comment on column flowforge.task_run_status.fencing_token is 'Number of claims so far; the current one holds.';
comment on column flowforge.task_run_status.dispatch_id is 'Permission to execute this attempt; the AMQP message_id.';
comment on column flowforge.task_run_status.available_at is 'Earliest time of dispatch or, for one offered again, of publishing; of what is in line, when it came there.';
comment on column flowforge.task_run_status.ready_at is 'When the attempt was first dispatched.';
comment on column flowforge.task_run_status.started_at is 'When it was last claimed.';
comment on column flowforge.task_run_status.finished_at is 'When it became terminal.';
comment on column flowforge.task_run_status.duration is 'From the last claim to the end or, while it runs, to now.';
comment on column flowforge.task_run_status.worker is 'Worker that claimed it last.';
comment on column flowforge.task_run_status.lease_expires_at is 'When the lease runs out.';
comment on column flowforge.task_run_status.progress is 'Share done, from 0 to 1, as its handler last reported.';
comment on column flowforge.task_run_status.progress_message is 'Text of that report.';
comment on column flowforge.task_run_status.map_count is 'Elements of a map, once expanded.';
comment on column flowforge.task_run_status.unmet is 'Upstreams, or elements, that it still waits for.';
comment on column flowforge.task_run_status.error is 'Why the last attempt failed, or why it was cancelled.';
comment on column flowforge.task_run_status.superseded is 'Whether it is an element of an expansion that a retry has replaced.';

create or replace view flowforge.attempt_status as
select a.task_run_id, tr.run_id, w.name as workflow, t.name as task, tr.map_index, a.attempt, a.fencing_token, a.dispatch_id, a.outcome,
    a.owner as worker, a.started_at, a.ended_at, a.ended_at - a.started_at as duration, a.error
from flowforge.attempt a
join flowforge.task_run tr on tr.task_run_id = a.task_run_id
join flowforge.run r on r.run_id = tr.run_id
join flowforge.workflow w on w.workflow_id = r.workflow_id
join flowforge.task t on t.task_id = tr.task_id;
comment on view flowforge.attempt_status is
    'Executions of task runs that did not simply succeed (failures, the last one included, time-outs, reaps, crashes, and what a stopping worker gave back), and those that a retry reset.';
comment on column flowforge.attempt_status.task_run_id is 'The task run.';
comment on column flowforge.attempt_status.run_id is 'The run.';
comment on column flowforge.attempt_status.workflow is 'Name of the workflow.';
comment on column flowforge.attempt_status.task is 'Name of the task.';
comment on column flowforge.attempt_status.map_index is 'Position of an element in the mapped array, from 0; null: the task''s own row.';
comment on column flowforge.attempt_status.attempt is 'Number of the attempt, from 1; executions that were reaped share it.';
comment on column flowforge.attempt_status.fencing_token is 'Token of the execution; grows with each.';
comment on column flowforge.attempt_status.dispatch_id is 'Dispatch id of the attempt; the AMQP message_id.';
comment on column flowforge.attempt_status.outcome is 'succeeded, failed, timed_out, cancelled, lease_expired, crashed, or released: broken off by a worker that was told to stop.';
comment on column flowforge.attempt_status.worker is 'Worker that held it.';
comment on column flowforge.attempt_status.started_at is 'When it was claimed.';
comment on column flowforge.attempt_status.ended_at is 'When it ended.';
comment on column flowforge.attempt_status.duration is 'From the claim to the end.';
comment on column flowforge.attempt_status.error is 'Why it ended so.';

create or replace view flowforge.unknown_handlers as
select t.handler, q.name as queue, count(*) as task_runs, flowforge._reading() - min(tr.unknown_handler_since) as age
from flowforge.task_run tr
join flowforge.task t on t.task_id = tr.task_id
join flowforge.queue q on q.queue_id = tr.queue_id
where tr.stage = 'reoffered' and tr.unknown_handler_since is not null
group by t.handler, q.name;
comment on view flowforge.unknown_handlers is
    'Handlers that no worker has known yet, of task runs that are offered again later; after 15 minutes they fail.';
comment on column flowforge.unknown_handlers.handler is 'Name of the handler.';
comment on column flowforge.unknown_handlers.queue is 'Queue whose workers were asked for it.';
comment on column flowforge.unknown_handlers.task_runs is 'Number of the task runs.';
comment on column flowforge.unknown_handlers.age is 'How long ago the first of them was first given back.';

create or replace view flowforge.dead_letters as
select tr.task_run_id, tr.run_id, w.name as workflow, t.name as task, tr.map_index, q.name as queue, t.handler, tr.attempt,
    tr.reaps, case when tr.state = 'failed' then tr.finished_at end as finished_at, tr.last_owner as worker, tr.error
from flowforge.task_run tr
-- Step by step from each: joined, all runs that there are may be read.
cross join lateral (select w.name from flowforge.run r join flowforge.workflow w on w.workflow_id = r.workflow_id
    where r.run_id = tr.run_id limit 1) w
cross join lateral (select t.name, t.handler from flowforge.task t where t.task_id = tr.task_id limit 1) t
cross join lateral (select q.name from flowforge.queue q where q.queue_id = tr.queue_id limit 1) q
where case when tr.state = 'failed' then tr.finished_at end is not null and (
    select true from flowforge.task_run e
    where tr.map_index is null and e.run_id = tr.run_id and e.task_id = tr.task_id and e.map_index >= 0 and e.generation = tr.generation
        and e.state = 'failed' limit 1) is null
    -- Nor what a retry has replaced by another expansion.
    and (select true from flowforge.task_run own
         where tr.map_index is not null and own.run_id = tr.run_id and own.task_id = tr.task_id and own.map_index is null
             and own.generation > tr.generation) is null;
comment on view flowforge.dead_letters is
    'Task runs that failed for good; of a failed map, its failed elements. Retry their runs with retry_run.';
comment on column flowforge.dead_letters.task_run_id is 'Identity.';
comment on column flowforge.dead_letters.run_id is 'The run.';
comment on column flowforge.dead_letters.workflow is 'Name of the workflow.';
comment on column flowforge.dead_letters.task is 'Name of the task.';
comment on column flowforge.dead_letters.map_index is 'Position of an element in the mapped array; null: the task''s own row.';
comment on column flowforge.dead_letters.queue is 'Its queue.';
comment on column flowforge.dead_letters.handler is 'Its handler.';
comment on column flowforge.dead_letters.attempt is 'Number of the last attempt.';
comment on column flowforge.dead_letters.reaps is 'Times it was taken back from a dead worker since a handler last answered.';
comment on column flowforge.dead_letters.finished_at is 'When it failed.';
comment on column flowforge.dead_letters.worker is 'Worker that claimed it last.';
comment on column flowforge.dead_letters.error is 'Why it failed.';

create or replace view flowforge.queue_status as
select q.name as queue, q.paused_at, coalesce(q.window_size, greatest(100, 4 * c.capacity)) as window_size,
    coalesce(d.task_runs, 0) as dispatched, coalesce(e.task_runs, 0) as eligible, coalesce(o.task_runs, 0) as reoffered,
    flowforge._reading() - e.oldest as oldest_eligible_age, flowforge._reading() - d.oldest as oldest_dispatched_age,
    q.drain_rate, q.redispatch_delay, c.capacity, q.drained_at
from flowforge.queue q
-- All queues at once: counted for each, a large backlog would be read as often as there are queues.
left join (select tr.queue_id, count(*) as task_runs, min(tr.ready_at) as oldest from flowforge.task_run tr
           where tr.stage = 'dispatched' group by tr.queue_id) d on d.queue_id = q.queue_id
left join (select tr.queue_id, count(*) as task_runs, min(tr.available_at) as oldest from flowforge.task_run tr
           where tr.stage = 'eligible' group by tr.queue_id) e on e.queue_id = q.queue_id
left join (select tr.queue_id, count(*) as task_runs from flowforge.task_run tr
           where tr.stage = 'reoffered' group by tr.queue_id) o on o.queue_id = q.queue_id
cross join lateral (
    select coalesce(sum(w.capacity), 0)::bigint as capacity from flowforge.worker w
    where q.name = any (w.queues) and w.seen_at > flowforge._reading() - interval '2 minutes') c;
comment on view flowforge.queue_status is
    'Queues: pause, window, backlog and its age, recent pace of claims a second, announced capacity.';
comment on column flowforge.queue_status.queue is 'Name of the queue.';
comment on column flowforge.queue_status.paused_at is 'Since when nothing is dispatched from it; null: not paused.';
comment on column flowforge.queue_status.window_size is 'Most task runs dispatched and due at once.';
comment on column flowforge.queue_status.dispatched is 'Task runs waiting for a worker.';
comment on column flowforge.queue_status.eligible is 'Task runs in line for the window.';
comment on column flowforge.queue_status.reoffered is 'Task runs that were given back and are offered again after a delay: their worker was lost, or no worker knew their handler.';
comment on column flowforge.queue_status.oldest_eligible_age is 'How long the oldest eligible one could have been dispatched.';
comment on column flowforge.queue_status.oldest_dispatched_age is 'How long ago the oldest dispatched one was first dispatched.';
comment on column flowforge.queue_status.drain_rate is 'Recent pace of claims a second while the queue was busy.';
comment on column flowforge.queue_status.redispatch_delay is 'How long a published message may stay unclaimed.';
comment on column flowforge.queue_status.capacity is 'Task runs that its announced workers execute at once.';
comment on column flowforge.queue_status.drained_at is 'When fewer, or none, were last seen waiting for a worker than before: something was claimed, or nothing waited.';

create or replace view flowforge.worker_status as
select w.name as worker, w.queues, w.capacity, w.started_at, w.seen_at, w.seen_at > flowforge._reading() - interval '2 minutes' as alive,
    coalesce(l.running, 0) as running
from flowforge.worker w
left join (
    select tr.lease_owner, count(*) as running from flowforge.task_run tr
    where tr.lease_expires_at is not null group by tr.lease_owner) l on l.lease_owner = w.name;
comment on view flowforge.worker_status is 'Workers that announced themselves, and how much each is running.';
comment on column flowforge.worker_status.worker is 'Name of the worker.';
comment on column flowforge.worker_status.queues is 'Queues it serves.';
comment on column flowforge.worker_status.capacity is 'Task runs it executes at once.';
comment on column flowforge.worker_status.started_at is 'When it was first seen.';
comment on column flowforge.worker_status.seen_at is 'When it was last seen.';
comment on column flowforge.worker_status.alive is 'Whether that was within 2 minutes.';
comment on column flowforge.worker_status.running is 'Task runs under its lease.';

create or replace view flowforge.health as
select h.name, h.value, h.meaning
from (
    select 'active_runs' as name, (select count(*) from flowforge.run r where r.finished_at is null)::double precision as value,
        'runs that have not ended' as meaning
    union all select 'cancelling_runs', (select count(*) from flowforge.run r where r.cancel_requested_at is not null and r.finished_at is null),
        'runs being cancelled'
    union all select 'eligible', (select count(*) from flowforge.task_run tr where tr.stage = 'eligible'), 'task runs in line for dispatch'
    union all select 'oldest_eligible_seconds', (select extract(epoch from flowforge._reading() - min(tr.available_at)) from flowforge.task_run tr where tr.stage = 'eligible'),
        'age of the oldest of them; priority is strict, so a low one can wait'
    union all select 'reoffered', (select count(*) from flowforge.task_run tr where tr.stage = 'reoffered'),
        'task runs that were given back and are offered again after a delay'
    union all select 'unknown_handler',
        (select count(*) from flowforge.task_run tr where tr.stage = 'reoffered' and tr.unknown_handler_since is not null),
        'those of them whose handler no worker knew'
    union all select 'dispatched', (select count(*) from flowforge.task_run tr where tr.stage = 'dispatched'), 'task runs waiting for a worker'
    union all select 'running', (select count(*) from flowforge.task_run tr where tr.lease_expires_at is not null), 'task runs under a lease'
    union all select 'expired_leases', (select count(*) from flowforge.task_run tr where tr.lease_expires_at < flowforge._reading()),
        'leases that have run out and are not reaped yet'
    union all select 'unsettled', (select count(*) from flowforge.task_run tr where tr.stage = 'unsettled'), 'finished task runs not counted yet'
    union all select 'unpublished', (select count(*) from flowforge.outbox o where o.published_at is null and o.parked_at is null), 'orders to publish'
    union all select 'oldest_unpublished_seconds',
        (select extract(epoch from flowforge._reading() - min(o.next_attempt_at)) from flowforge.outbox o
         where o.published_at is null and o.parked_at is null and o.next_attempt_at <= flowforge._reading()),
        'how long the oldest of them could have been published; null: none can be now'
    union all select 'refused', (select count(*) from flowforge.outbox o where o.published_at is null and o.parked_at is null and o.tries > 0),
        'of these, refused by the broker at least once'
    union all select 'parked', (select count(*) from flowforge.outbox o where o.parked_at is not null), 'orders that can never be published'
    union all select 'reaper_seconds', (select extract(epoch from flowforge._reading() - s.reaper_ticked_at) from flowforge.scheduler s),
        'seconds since a scheduler last reaped; null: never'
    union all select 'workers', (select count(*) from flowforge.worker_status w where w.alive), 'workers announced and alive'
    union all select 'notification_queue', pg_notification_queue_usage(), 'share of the server''s notification queue in use, 0 to 1'
) h;
comment on view flowforge.health is 'Figures to watch, one a row.';
comment on column flowforge.health.name is 'Name of the figure.';
comment on column flowforge.health.value is 'The figure; null: unknown.';
comment on column flowforge.health.meaning is 'What it counts or measures.';
