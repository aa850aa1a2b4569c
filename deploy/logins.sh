#!/bin/sh
# Run once by the image of PostgreSQL, on its new and empty database: makes FlowForge's group roles, a login for each
# program that is a member of its group, and the schema. The scheduler reads besides: its metrics tell of the database.
#
# So the owner, as whom `flowforge migrate` runs, needs neither CREATEROLE nor any right on the database.
set -eu

for login in owner scheduler publisher worker client operator; do
    if ! grep -q '^password=.' "/run/secrets/ff_$login"; then
        echo "error: /run/secrets/ff_$login holds no line password=…" >&2
        exit 1
    fi
done

# psql reads the passwords itself: they show neither among arguments nor in the environment.
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\set owner `sed -n 's/^password=//p' /run/secrets/ff_owner`
\set scheduler `sed -n 's/^password=//p' /run/secrets/ff_scheduler`
\set publisher `sed -n 's/^password=//p' /run/secrets/ff_publisher`
\set worker `sed -n 's/^password=//p' /run/secrets/ff_worker`
\set client `sed -n 's/^password=//p' /run/secrets/ff_client`
\set operator `sed -n 's/^password=//p' /run/secrets/ff_operator`

begin;
create role flowforge_owner;
create role flowforge_client;
create role flowforge_worker;
create role flowforge_scheduler;
create role flowforge_publisher;
create role flowforge_operator;
create role flowforge_reader;

create role ff_owner     login password :'owner'     in role flowforge_owner;
create role ff_scheduler login password :'scheduler' in role flowforge_scheduler, flowforge_reader;
create role ff_publisher login password :'publisher' in role flowforge_publisher;
create role ff_worker    login password :'worker'    in role flowforge_worker;
create role ff_client    login password :'client'    in role flowforge_client;
create role ff_operator  login password :'operator'  in role flowforge_operator, flowforge_reader;

create schema flowforge authorization flowforge_owner;
commit;
SQL
