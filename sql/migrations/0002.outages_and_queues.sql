-- What the reaper remembers of outages, and how many queues there may be.
--
-- depends: 0001.schema
--
-- Every statement tolerates being applied again, as by hand with psql.

alter table flowforge.scheduler add column if not exists gaps tstzmultirange not null default '{}';
comment on column flowforge.scheduler.gaps is 'The last times without a tick of the reaper, an outage each, without the first 3 s of each: they do not count as time that a worker had to renew its leases.';
-- What is being spared at this moment goes on being spared.
update flowforge.scheduler s set gaps = tstzmultirange(tstzrange(s.gap_ended_at - interval '10 s', s.gap_ended_at))
where s.gaps = '{}' and s.gap_ended_at is not null;
-- The functions of the release before still read them.
comment on column flowforge.scheduler.gap_ended_at is 'Of the release before, whose functions use it; to be dropped.';
comment on column flowforge.scheduler.previous_gap_ended_at is 'Of the release before, whose functions use it; to be dropped.';
comment on column flowforge.scheduler.reaper_period is 'Longest time between its recent ticks, gaps left out; a gap is longer than 10 s and than three of these.';

insert into flowforge.setting (name, value, minimum, maximum, meaning) values
    ('max_queues', 1000, 1, 100000, 'queues that the definitions of this database name')
on conflict (name) do nothing;
