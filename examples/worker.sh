#!/bin/sh
# A worker in shell: psql and nothing else. It takes dispatches from PostgreSQL (claim_next), one at a time, renews its
# lease while a handler runs, and finishes under its token. A handler is a program in the directory HANDLERS, by its name:
# it reads {"input": …, "upstream": …, "item": …}, prints its output as JSON, and fails by its exit code, with what it
# prints as an error. With a login that is a member of flowforge_worker:
#
#     PGHOST=… PGUSER=… PGDATABASE=… FLOWFORGE_QUEUES=default ./worker.sh HANDLERS
#
# What any worker has to do is in docs/worker-protocol.md.
set -u
handlers=$1
worker="$(hostname):$$"
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
ended= # by SIGTERM: give back what runs, take nothing new
trap 'ended=yes' TERM INT

# One statement of standard input, repeated until it is answered: every call here is safe to repeat as it is. 1: refused
# for its values, or as no statement (22…, 42…, WF…), which is for good. 2: no answer, and the worker is to end. Never
# called in a subshell, such as that of a pipeline, which would not be told.
ask() {
    statement=$(cat) tries=5
    until printf '%s\n' "$statement" | psql -XqAt -F '	' -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate "$@" 2>"$scratch/refusal"; do
        cat "$scratch/refusal" >&2
        if grep -qE 'ERROR: +(22|42|WF)' "$scratch/refusal"; then return 1; fi
        if [ -n "$ended" ]; then
            tries=$((tries - 1))
            if [ $tries = 0 ]; then return 2; fi
        fi
        sleep 1
    done
}

# Optional: who has announced itself is listed by `flowforge workers`, and counts for the window of its queue.
announced=0
announce() {
    if [ $(($(date +%s) - announced)) -ge 30 ]; then
        announced=$(date +%s)
        ask -v queue="${FLOWFORGE_QUEUES:-default}" -v worker="$worker" <<'END' >/dev/null
select flowforge.announce_worker(:'worker', array[:'queue'], 1);
END
    fi
}

release() { # reason
    ask -v id="$id" -v token="$token" -v reason="$1" <<'END'
select flowforge.release_task_run(:id, :token, :'reason');
END
}

# Outcome, whether another attempt is of use. Output and error come by way of files: what stands in a program's arguments
# can be seen by others. Whatever the error is, it must be possible to report it.
finish() {
    if [ "$1" != succeeded ]; then : >"$scratch/output"; fi
    iconv -c -f UTF-8 -t UTF-8 <"$scratch/error" 2>/dev/null | tr -d '\000' >"$scratch/reported"
    ask -v id="$id" -v token="$token" -v outcome="$1" -v retryable="$2" <<END
\\set output \`cat $scratch/output\`
\\set error \`cat $scratch/reported\`
select flowforge.finish_task_run(:id, :token, :'outcome', (case :'outcome' when 'succeeded' then :'output' end)::jsonb,
    nullif(:'error', ''), :'retryable');
END
}

run() { # of the task run $id under $token: seconds of the lease, seconds of the time limit, handler, what it gets
    if [ -n "$ended" ]; then release unstarted; return; fi
    case $3 in */* | .*) false ;; *) [ -x "$handlers/$3" ] ;; esac || { release unknown_handler; return; }
    printf '%s\n' "$4" >"$scratch/task"
    setsid "$handlers/$3" <"$scratch/task" >"$scratch/output" 2>"$scratch/error" &
    handler=$! why= begun=$(date +%s) renewed=$(date +%s)
    while [ -z "$why" ] && kill -0 $handler 2>/dev/null; do
        sleep 0.1
        announce
        now=$(date +%s)
        if [ $((now - renewed)) -ge $(($1 / 3)) ]; then
            renewed=$now
            ask -v id="$id" -v token="$token" <<'END' >"$scratch/renewed"
select outcome from flowforge.renew_leases(array[:id], array[:token], '30 s');
END
            case $(cat "$scratch/renewed") in
                lost) why=lost ;;
                cancel) why=cancelled ;;
            esac
        fi
        if [ $((now - begun)) -gt "$2" ]; then why='time limit exceeded'; fi
        if [ -n "$ended" ]; then why=shutdown; fi
    done
    if [ -n "$why" ]; then kill -s KILL -- -$handler 2>/dev/null; fi # with all that it has started
    wait $handler
    code=$?
    case $why in
        lost) return ;; # it is somebody else's: report nothing
        shutdown) release shutdown; return ;;
        ?*) echo "$why" >"$scratch/error" ;;
    esac
    if [ "$why" = cancelled ]; then
        finish cancelled true
    elif [ -n "$why" ] || [ $code != 0 ]; then
        echo "exit code $code" >>"$scratch/error"
        finish failed true
    else
        : >"$scratch/error"
        finish succeeded true
        if [ $? = 1 ]; then echo 'the output cannot be stored' >"$scratch/error" && finish failed false; fi
    fi
}

while [ -z "$ended" ]; do
    announce
    echo 'select gen_random_uuid();' >"$scratch/question"
    ask <"$scratch/question" >"$scratch/claim_id"
    claim_id=$(cat "$scratch/claim_id")
    if [ -n "$ended" ]; then break; fi
    ask -v queue="${FLOWFORGE_QUEUES:-default}" -v worker="$worker" -v claim_id="$claim_id" <<'END' >"$scratch/claimed"
select task_run_id, fencing_token, floor(extract(epoch from lease)), coalesce(ceil(extract(epoch from time_limit)), 999999999),
    handler, jsonb_build_object('input', input, 'upstream', upstream_outputs, 'item', item)
from flowforge.claim_next(array[:'queue'], :'worker', :'claim_id', '30 s', 1);
END
    IFS='	' read -r id token lease limit name task <"$scratch/claimed"
    if [ -n "$id" ]; then run "$lease" "$limit" "$name" "$task" >"$scratch/answer"; else sleep 1; fi
done
