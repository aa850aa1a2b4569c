-- Private helpers that several functions share: the clock, the named limits, checks of arguments, wake-ups.

create or replace function flowforge._clock() returns timestamptz
language sql volatile parallel safe
return clock_timestamp();
comment on function flowforge._clock() is
    'The one clock of FlowForge. Callers read it into a variable, after their locks. Tests replace this function; no setting moves it.';

create or replace function flowforge.schema_version() returns bigint
language sql immutable parallel safe
return 2;
comment on function flowforge.schema_version() is
    'Version of the tables and functions. A daemon refuses to start against a version lower than its own.';

create or replace function flowforge._limit(p_name text) returns bigint
language plpgsql stable strict
set search_path = pg_catalog, pg_temp
as $$
begin
    return (select s.value from flowforge.setting s where s.name = p_name);
end
$$;
comment on function flowforge._limit(text) is 'Value of a named limit; see the view limits.';

create or replace function flowforge._position(p_sorted bigint[], p_id bigint) returns integer
language sql immutable strict parallel safe
return width_bucket(p_id, p_sorted);
comment on function flowforge._position(bigint[], bigint) is
    'Position of an id in an ascending array of distinct ids that holds it, by binary search. Lets an UPDATE be driven by "= any(ids)" alone, whose plan is the primary key on any statistics, and still reach values given per id.';

create or replace function flowforge._quoted(p_text text) returns text
language sql immutable parallel safe
set search_path = pg_catalog, pg_temp
begin atomic
    select coalesce(quote_literal(case when length(p_text) > 80 then left(p_text, 77) || '...' else p_text end), 'null');
end;
comment on function flowforge._quoted(text) is 'A value for an error message: quoted, and cut to 80 characters.';

create or replace function flowforge._check_name(p_what text, p_name text, p_limit text default 'max_name_bytes') returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_limit bigint;
begin
    if p_name is null or p_name = '' then
        raise exception using errcode = 'WF001', message = format('%s must be given and not be empty', p_what);
    end if;
    -- Escaped, so that it means the same whatever the caller has set standard_conforming_strings to.
    if p_name ~ E'[\\x01-\\x1f\\x7f-\\x9f]' or p_name ~ E'^\\s' or p_name ~ E'\\s$' then
        raise exception using errcode = 'WF001',
            message = format('%s %s has a control character, or a blank at an end', p_what, flowforge._quoted(p_name)),
            hint = 'A name is 1 to 200 bytes of UTF-8 without control characters and without blanks at its ends.';
    end if;
    v_limit := flowforge._limit(p_limit);
    if octet_length(p_name) > v_limit then
        raise exception using errcode = 'WF005',
            message = format('%s %s is %s bytes long; at most %s are allowed', p_what, flowforge._quoted(p_name), octet_length(p_name), v_limit),
            hint = format('See limit %s in view flowforge.limits.', p_limit);
    end if;
end
$$;
comment on function flowforge._check_name(text, text, text) is
    'The one rule for names: not empty, no control characters, no blank at either end, bounded bytes. Raises WF001 or WF005.';

create or replace function flowforge._bytes(p_json jsonb) returns bigint
language sql immutable strict parallel safe
-- The empty path answers the value as it is in memory: a stored one may be compressed.
return greatest(octet_length(p_json::text), pg_column_size(p_json #> '{}'));
comment on function flowforge._bytes(jsonb) is
    'Size of a JSON value: the larger of its text and its form in memory, either of which can be several times the other.';

create or replace function flowforge._check_payload(p_what text, p_payload jsonb, p_limit text default 'max_payload_bytes') returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_bytes bigint := flowforge._bytes(p_payload);
begin
    -- Most payloads are small: the limit is looked up only for those that could exceed its smallest value.
    if v_bytes > 1024 and v_bytes > flowforge._limit(p_limit) then
        raise exception using errcode = 'WF005',
            message = format('%s is %s bytes of JSON; at most %s are allowed', p_what, v_bytes, flowforge._limit(p_limit)),
            hint = format('Store large data elsewhere and pass a reference; see limit %s in view flowforge.limits.', p_limit);
    end if;
end
$$;
comment on function flowforge._check_payload(text, jsonb, text) is 'Raises WF005 when a payload exceeds a limit.';

create or replace function flowforge._check_flat(p_what text, p_dimensions text[]) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if array_to_string(p_dimensions, ' ') like '%][%' then
        raise exception using errcode = 'WF001', message = format('%s: an array must have one dimension', p_what);
    end if;
end
$$;
comment on function flowforge._check_flat(text, text[]) is
    'Raises WF001 when one of the arrays, told by their dimensions as array_dims does, has more than one.';

create or replace function flowforge._check_batch(p_what text, p_sizes integer[]) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if array_position(p_sizes, null) is not null then
        raise exception using errcode = 'WF001', message = format('%s: an array argument is null', p_what);
    end if;
    if p_sizes[1] <> any (p_sizes) then
        raise exception using errcode = 'WF001',
            message = format('%s: the arrays have different lengths: %s', p_what, array_to_string(p_sizes, ', '));
    end if;
    if p_sizes[1] > 1000 and p_sizes[1] > flowforge._limit('max_batch') then
        raise exception using errcode = 'WF005',
            message = format('%s: %s elements; at most %s are allowed', p_what, p_sizes[1], flowforge._limit('max_batch'));
    end if;
end
$$;
comment on function flowforge._check_batch(text, integer[]) is
    'Raises WF001 unless all arrays of a batch are given and equally long, WF005 above max_batch.';

create or replace function flowforge._check_count(p_what text, p_count bigint, p_minimum bigint default 1) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_count is null or p_count < p_minimum or p_count > 100000 then
        raise exception using errcode = 'WF001',
            message = format('%s is %s; %s to 100000 are allowed', p_what, coalesce(p_count::text, 'null'), p_minimum);
    end if;
end
$$;
comment on function flowforge._check_count(text, bigint, bigint) is 'Raises WF001 unless a count lies within its bounds.';

create or replace function flowforge._seconds(p_what text, p_interval interval, p_minimum double precision, p_maximum double precision)
returns interval
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_seconds double precision := extract(epoch from p_interval);
begin
    if v_seconds is null or v_seconds < p_minimum or v_seconds > p_maximum then
        raise exception using errcode = 'WF001',
            message = format('%s is %s; %s to %s seconds are allowed', p_what, coalesce(p_interval::text, 'null'), p_minimum, p_maximum);
    end if;
    return make_interval(secs => v_seconds);
end
$$;
comment on function flowforge._seconds(text, interval, double precision, double precision) is
    'An interval as exact seconds, so that no day or month of it depends on a time zone. Raises WF001 outside the bounds.';

create or replace function flowforge._check_lease(p_lease interval) returns interval
language sql immutable
set search_path = pg_catalog, pg_temp
begin atomic
    select flowforge._seconds('lease', p_lease, 0.1, 604800);
end;
comment on function flowforge._check_lease(interval) is 'A lease as exact seconds. Raises WF001 unless it is 0.1 s to 7 days.';

create or replace function flowforge._require_read_committed(p_function text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'WF008',
            message = format('%s needs READ COMMITTED, and this transaction is %s', p_function, upper(current_setting('transaction_isolation'))),
            hint = 'It locks in one statement and decides in a later one, which must see what was committed meanwhile.';
    end if;
end
$$;
comment on function flowforge._require_read_committed(text) is 'Raises WF008 at any isolation level other than READ COMMITTED.';

create or replace function flowforge._notify(p_channel text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Where a session that listens keeps a transaction open, the server's queue fills up, and once it is full every commit
    -- that notifies fails. Nothing here is worth that: everyone polls too. Asking also moves the queue's end on.
    if flowforge._limit('notify') = 1 and pg_notification_queue_usage() < 0.5 then
        perform pg_notify(p_channel, '');
    end if;
end
$$;
comment on function flowforge._notify(text) is
    'Notifies a channel, unless that is turned off or the server''s notification queue is half full.';

create or replace function flowforge._wake_scheduler() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- A NOTIFY takes a database-wide lock at commit, so it is sent only to a scheduler that has declared itself asleep.
    if (select s.asleep from flowforge.scheduler s) then
        perform flowforge._notify('flowforge_scheduler');
    end if;
end
$$;
comment on function flowforge._wake_scheduler() is 'Wakes the schedulers, if one is asleep. A hint: they poll too.';

create or replace function flowforge._wake_delivery() returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    perform flowforge._notify('flowforge_outbox');
end
$$;
comment on function flowforge._wake_delivery() is 'Wakes publishers, and workers without a broker. A hint: they poll too.';
