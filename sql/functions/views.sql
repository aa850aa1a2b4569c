-- Views for operators and dashboards; plain columns, no payloads but errors.

create or replace view flowforge.limits as
select s.name, s.value, s.minimum, s.maximum, s.meaning from flowforge.setting s;
comment on view flowforge.limits is 'Named limits and switches; change them with set_limit.';

create or replace view flowforge.run_status as
select r.run_id, w.name as workflow, wv.version,
    case when r.state = 'running' and c.started = 0 then 'pending' when r.state = 'running' and r.cancel_requested_at is not null then 'cancelling'
        else r.state::text end as state,
    r.priority, r.labels, r.idempotency_key, r.created_at, r.finished_at, coalesce(r.finished_at, flowforge._clock()) - r.created_at as duration,
    r.cancel_requested_at, r.cancel_reason, r.unsettled,
    c.task_runs, c.pending, c.ready, c.running, c.succeeded, c.failed, c.cancelled, c.skipped
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
        count(*) filter (where tr.state = 'skipped') as skipped,
        count(*) filter (where tr.state <> 'pending' or tr.fencing_token > 0) as started
    from flowforge.task_run tr where tr.run_id = r.run_id) c;
comment on view flowforge.run_status is
    'Runs with the numbers of their task runs by state. state adds two derived words: pending (nothing dispatched yet) and cancelling. Page by run_id, largest first.';

create or replace view flowforge.task_run_status as
select tr.task_run_id, tr.run_id, w.name as workflow, t.name as task, tr.map_index, tr.state::text as state,
    case
        when tr.stage = 'blocked' and tr.map_count is not null then format('%s of %s elements are not done', tr.unmet, tr.map_count)
        when tr.stage = 'blocked' then format('%s of %s upstreams are not done', tr.unmet, t.upstream_count)
        when tr.stage = 'expand' then 'to be expanded'
        when tr.stage = 'delayed' then format('until %s', tr.available_at)
        when tr.stage = 'eligible' and q.paused_at is not null then format('queue %s is paused', q.name)
        when tr.stage = 'eligible' then format('for room in the window of queue %s', q.name)
        when tr.stage = 'dispatched' and tr.available_at > flowforge._clock() then format('to be offered again at %s', tr.available_at)
        when tr.stage = 'dispatched' then format('for a worker of queue %s', q.name)
        when tr.state = 'skipped' then format('rule %s was not met', t.rule)
    end as waits,
    q.name as queue, t.handler, tr.priority, tr.attempt, t.max_attempts, tr.reaps, t.max_reaps, tr.fencing_token, tr.dispatch_id,
    tr.available_at, tr.ready_at, tr.started_at, tr.finished_at,
    case when tr.started_at is not null then coalesce(tr.finished_at, case when tr.state = 'running' then flowforge._clock() end) - tr.started_at end as duration,
    tr.last_owner as worker, tr.lease_expires_at, p.fraction as progress, p.message as progress_message, tr.map_count, tr.unmet, tr.error
from flowforge.task_run tr
join flowforge.run r on r.run_id = tr.run_id
join flowforge.workflow w on w.workflow_id = r.workflow_id
join flowforge.task t on t.task_id = tr.task_id
join flowforge.queue q on q.queue_id = tr.queue_id
left join flowforge.progress p on p.task_run_id = tr.task_run_id and p.fencing_token = tr.fencing_token;
comment on view flowforge.task_run_status is
    'Task runs with what each waits for, who ran it, for how long, its progress and its error. Elements of a map have a map_index.';

create or replace view flowforge.dead_letters as
select tr.task_run_id, tr.run_id, w.name as workflow, t.name as task, tr.map_index, q.name as queue, t.handler, tr.attempt,
    tr.reaps, tr.finished_at, tr.last_owner as worker, tr.error
from flowforge.task_run tr
join flowforge.run r on r.run_id = tr.run_id
join flowforge.workflow w on w.workflow_id = r.workflow_id
join flowforge.task t on t.task_id = tr.task_id
join flowforge.queue q on q.queue_id = tr.queue_id
where tr.state = 'failed' and not exists (
    select from flowforge.task_run e
    where tr.map_index is null and e.run_id = tr.run_id and e.task_id = tr.task_id and e.map_index >= 0 and e.generation = tr.generation and e.state = 'failed');
comment on view flowforge.dead_letters is
    'Task runs that failed for good; of a failed map, its failed elements. Retry their runs with retry_run.';

create or replace view flowforge.queue_status as
select q.name as queue, q.paused_at, coalesce(q.window_size, greatest(100, 4 * c.capacity)) as window_size,
    (select count(*) from flowforge.task_run tr where tr.queue_id = q.queue_id and tr.stage = 'dispatched') as dispatched,
    (select count(*) from flowforge.task_run tr where tr.queue_id = q.queue_id and tr.stage = 'eligible') as eligible,
    flowforge._clock() - (select min(tr.available_at) from flowforge.task_run tr where tr.queue_id = q.queue_id and tr.stage = 'eligible') as oldest_eligible_age,
    flowforge._clock() - (select min(tr.ready_at) from flowforge.task_run tr where tr.queue_id = q.queue_id and tr.stage = 'dispatched') as oldest_dispatched_age,
    q.drain_rate, q.redispatch_delay, c.capacity
from flowforge.queue q
cross join lateral (
    select coalesce(sum(w.capacity), 0)::bigint as capacity from flowforge.worker w
    where q.name = any (w.queues) and w.seen_at > flowforge._clock() - interval '2 minutes') c;
comment on view flowforge.queue_status is
    'Queues: pause, window, backlog and its age, recent pace of claims a second, announced capacity.';

create or replace view flowforge.worker_status as
select w.name as worker, w.queues, w.capacity, w.started_at, w.seen_at, w.seen_at > flowforge._clock() - interval '2 minutes' as alive,
    (select count(*) from flowforge.task_run tr where tr.stage = 'leased' and tr.lease_owner = w.name) as running
from flowforge.worker w;
comment on view flowforge.worker_status is 'Workers that announced themselves, and how much each is running.';

create or replace view flowforge.health as
select h.name, h.value, h.meaning
from (
    select 'active_runs' as name, (select count(*) from flowforge.run r where r.finished_at is null)::double precision as value,
        'runs that have not ended' as meaning
    union all select 'cancelling_runs', (select count(*) from flowforge.run r where r.cancel_requested_at is not null and r.finished_at is null),
        'runs being cancelled'
    union all select 'eligible', (select count(*) from flowforge.task_run tr where tr.stage = 'eligible'), 'task runs in line for dispatch'
    union all select 'oldest_eligible_seconds', (select extract(epoch from max(q.oldest_eligible_age)) from flowforge.queue_status q),
        'age of the oldest of them; priority is strict, so a low one can wait'
    union all select 'dispatched', (select count(*) from flowforge.task_run tr where tr.stage = 'dispatched'), 'task runs waiting for a worker'
    union all select 'running', (select count(*) from flowforge.task_run tr where tr.lease_expires_at is not null), 'task runs under a lease'
    union all select 'expired_leases', (select count(*) from flowforge.task_run tr where tr.lease_expires_at < flowforge._clock()),
        'leases that have run out and are not reaped yet'
    union all select 'unsettled', (select count(*) from flowforge.task_run tr where tr.stage = 'unsettled'), 'finished task runs not counted yet'
    union all select 'unpublished', (select count(*) from flowforge.outbox o where o.published_at is null and o.parked_at is null), 'orders to publish'
    union all select 'refused', (select count(*) from flowforge.outbox o where o.published_at is null and o.parked_at is null and o.tries > 0),
        'of these, refused by the broker at least once'
    union all select 'parked', (select count(*) from flowforge.outbox o where o.parked_at is not null), 'orders that can never be published'
    union all select 'reaper_seconds', (select extract(epoch from flowforge._clock() - s.reaper_ticked_at) from flowforge.scheduler s),
        'seconds since a scheduler last reaped; null: never'
    union all select 'workers', (select count(*) from flowforge.worker_status w where w.alive), 'workers announced and alive'
    union all select 'notification_queue', pg_notification_queue_usage(), 'share of the server''s notification queue in use, 0 to 1'
) h;
comment on view flowforge.health is 'Figures to watch, one a row.';
