#!/bin/bash
# A worker in shell, for Linux: it takes messages where FLOWFORGE_AMQP_URL (amqp://…) names a RabbitMQ, by amqp-tools, and
# else dispatches from PostgreSQL, by psql alone; one at a time. A handler is a program in the directory HANDLERS, by its
# name: it reads {"input": …, "upstream": …, "item": …}, prints its output as JSON, and fails by its exit code, with what
# it prints as an error. With a login that is a member of flowforge_worker:
#
#     PGHOST=… PGUSER=… PGDATABASE=… FLOWFORGE_QUEUES=shell ./worker.sh HANDLERS
#
# A queue that no other kind of worker serves: the tasks' "queue". What is given back for want of its handler may take minutes.
# For the database of `flowforge up`, which prints that: PGHOST=…/run PGPASSFILE=…/pgpass PGUSER=flowforge PGDATABASE=flowforge
#
# What any worker has to do is in docs/worker-protocol.md. No password and no output stands in a program's arguments.
set -u
if [ ! -d "${1:-}" ]; then echo "usage: $0 HANDLERS, a directory of programs" >&2; exit 2; fi
for tool in psql ${FLOWFORGE_AMQP_URL:+amqp-consume amqp-publish}; do
    command -v $tool >/dev/null || { echo "there is no $tool" >&2; exit 2; }
done
handlers=$1 queue=${FLOWFORGE_QUEUES:-default} exchange=${FLOWFORGE_NAMESPACE:+$FLOWFORGE_NAMESPACE.}flowforge
worker="$(hostname):$$" claim_id='' announced=-30
export PGCONNECT_TIMEOUT="${PGCONNECT_TIMEOUT:-5}"
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
ended= # by a signal: give back what runs, take nothing new; the seconds that each call still has
trap 'ended=5' TERM INT HUP
trap : PIPE # when nobody reads what this tells; what is only ignored, handlers would ignore, too

# A statement, repeated until it is answered, as is safe with each; its rows are in $scratch/answer. $text in it is the text
# of the file $2: refused when it is none; cut off, and so no JSON, beyond the largest payload that there can be. 1: refused
# for its values, which is for good. 2: no answer, and the worker is to end, or there is only $once, in seconds. Never in a
# subshell, which would not know of either.
text="convert_from(decode(:'base64', 'base64'), 'UTF8')"
ask() {
    tries=2
    until answered "$@"; do
        cat "$scratch/refusal" >&2
        if grep -qE ': +(22|23|54|WF)[0-9A-Z]{3}$' "$scratch/refusal"; then return 1; fi
        if [ -n "${once-}" ] || { [ -n "$ended" ] && [ $((tries -= 1)) = 0 ]; }; then return 2; fi
        sleep 1
    done
}

# In the background: else bash would look at a signal only when it is done. From SIGTERM on it has five seconds.
answered() {
    printf '\\set base64 `head -c 67108865 "%s" | base64 -w 0`\n%s\n' "${2:-/dev/null}" "$1" |
        timeout "${ended:-${once:-60}}" psql -XqAt -F $'\t' -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate -v queue="$queue" \
            -v worker="$worker" -v claim_id="$claim_id" >"$scratch/answer" 2>"$scratch/refusal" &
    asked=$! waited=0 status=''
    if [ -z "$ended" ]; then
        wait $asked
        status=$?
    fi
    if [ -n "$ended" ] && [ "${status:-129}" -gt 128 ]; then # not waited for, or not to its end
        while [ $((waited += 1)) -le 50 ] && kill -0 $asked 2>/dev/null; do sleep 0.1; done
        kill $asked 2>/dev/null
        # Not once more when a signal broke that off: bash may have lost its end, and would wait for the consumer's.
        if [ -z "$status" ]; then
            wait $asked
            status=$?
        fi
    fi
    return $status
}

# Optional: who has announced itself is listed by `flowforge workers`, and counts for the window of its queue.
announce() {
    if [ $((SECONDS - announced)) -lt 30 ]; then return; fi
    announced=$SECONDS
    once=5 ask "select flowforge.announce_worker(:'worker', array[:'queue'], 1)"
}

claim() { # by the call, under $claim_id, which has $text in it of the file $2
    ask "select task_run_id, fencing_token, floor(extract(epoch from lease)), coalesce(ceil(extract(epoch from time_limit)),
            999999999), handler, jsonb_build_object('input', input, 'upstream', upstream_outputs, 'item', item)
        from $1 where outcome = 'claimed'" "${2:-}"
}

take_dispatch() {
    claim "flowforge.claim_next(array[:'queue'], :'worker', :'claim_id', '30 s', 1)"
    if [ ! -s "$scratch/answer" ]; then sleep 1; fi
}

consumer='' # forgotten soon after its end, before another process may have its number
consuming() { kill -0 ${consumer:-none} 2>/dev/null || { consumer='' && false; }; }

# By a consumer that brings one message and ends. It acknowledges that when the command that it runs for it exits 0, here
# once the claim is answered; else the message is in its queue again. "$@": the options that lead to the broker.
take_message() {
    while [ -z "$ended" ] && consuming; do announce; sleep 0.1; done # until the last one is acknowledged
    : >"$scratch/answer"
    if [ -n "$ended" ]; then return; fi
    rm -f "$scratch/message."*
    message=$scratch/message.$claim_id
    amqp-consume "$@" -q "$exchange.$queue" -c 1 -- sh -c 'cat >"$0.new" && mv "$0.new" "$0"
        until [ -e "$0.answered" ]; do [ -e "$0" ] && kill -0 "$1" && sleep 0.1 || exit 1; done' "$message" $$ &
    consumer=$!
    since=$SECONDS # ten seconds at most: it is not told when its queue is deleted, and declared anew
    until [ -e "$message" ]; do
        if [ -n "$ended" ] || [ $((SECONDS - since)) -ge 10 ]; then kill $consumer 2>/dev/null; fi
        if ! consuming; then sleep 1; return; fi
        announce
        sleep 0.1
    done
    claim "(select $text::jsonb as body) as message, flowforge.claim_task_run((body->>'task_run_id')::bigint,
        (body->>'dispatch_id')::uuid, :'worker', :'claim_id', '30 s')" "$message"
    case $? in
        0) true ;;
        # With a consumer that has died it is only what has come of a message, which is in its queue again.
        1) consuming && timeout 20 amqp-publish "$@" -p -e "$exchange.dead" <"$message" ;;
        *) false ;;
    esac && touch "$message.answered" || { kill ${consumer:-none} 2>/dev/null; sleep 1; }
}

release() { ask "select flowforge.release_task_run($id, $token, '$1')"; }

finish() { # outcome, output, error, which of them is in which file
    ask "select flowforge.finish_task_run($id, $token, '$1', $2, $3, true)" "$4"
    if [ $? = 1 ] && [ "$1" = succeeded ]; then
        ask "select flowforge.finish_task_run($id, $token, 'failed', null, 'the output cannot be stored', false)"
    fi
}

run() { # the task run $id under $token
    if [ -n "$ended" ]; then release unstarted; return; fi
    case $handler in */* | .*) false ;; *) [ -x "$handlers/$handler" ] ;; esac || {
        echo "there is no handler $handler, for task run $id" >&2
        release unknown_handler
        return
    }
    printf '%s\n' "$task" >"$scratch/task"
    setsid "$handlers/$handler" <"$scratch/task" >"$scratch/output" 2>"$scratch/error" &
    pid=$! why='' begun=$SECONDS renewed=$SECONDS
    while [ -z "$why$ended" ] && kill -0 $pid 2>/dev/null; do
        sleep 0.1
        consuming
        announce
        if [ $((SECONDS - renewed)) -ge $((lease / 3)) ]; then
            renewed=$SECONDS
            once=5 ask "select outcome from flowforge.renew_leases(array[$id], array[$token], '30 s')" ||
                renewed=$((SECONDS - lease / 3 + 1))
            why=$(grep -E 'lost|cancel' "$scratch/answer")
        fi
        if [ $((SECONDS - begun)) -gt "$limit" ] && kill -0 $pid 2>/dev/null; then why='time limit exceeded'; fi
    done
    {
        if [ -n "$why$ended" ]; then kill -s KILL -- -$pid $pid; fi # with all that it has started
        wait $pid
        code=$?
    } 2>/dev/null # where bash tells of who was killed
    # Ended here, or by the same signal, which systemd sends to all; but what has succeeded by now is not thrown away.
    if [ -n "$ended" ] && { [ $code != 0 ] || [ ! -s "$scratch/output" ]; }; then why=${why:-shutdown}; fi
    why=${why:-exit code $code}
    case $why in
        lost) ;; # it is somebody else's: report nothing
        shutdown) release shutdown ;;
        cancel) finish cancelled null null "" ;;
        'exit code 0') finish succeeded "$text::jsonb" null "$scratch/output" ;;
        *)
            error=$(tail -c 100000 "$scratch/error" | tr -d '\000' | iconv -c -f UTF-8 -t UTF-8 2>/dev/null)
            last=$(printf %s "$error" | grep -a '[^[:space:]]' | tail -n 1)
            printf %s "$why${last:+: $last}" >"$scratch/told" # by the first line it is known in lists
            if [ "$error" != "$last" ]; then printf '\n%s' "$error" >>"$scratch/told"; fi
            finish failed null "$text" "$scratch/told"
            ;;
    esac
}

decode() { printf '%b' "${1//%/\\x}"; } # the percent-encoding of a URL

shift $#
if [ -n "${FLOWFORGE_AMQP_URL:-}" ]; then
    url='^amqp://(([^:@/]*):([^@/]*)@)?([^]:@/[]+)(:([0-9]+))?(/([^?/]*))?$'
    [[ $FLOWFORGE_AMQP_URL =~ $url ]] || { echo 'FLOWFORGE_AMQP_URL is not amqp://user:password@host:port/vhost' >&2; exit 1; }
    set -- "${BASH_REMATCH[@]}" # 3: user, 4: password, 5: host, 7: port, 9: virtual host
    (umask 077 && printf 'username:%s\npassword:%s\n' "$(decode "${3:-guest}")" "$(decode "${4:-guest}")" >"$scratch/login")
    set -- --authfile="$scratch/login" --server="$5" --port="${7:-5672}" --vhost="$(decode "${9:-/}")" --heartbeat=30
fi
while [ -z "$ended" ]; do
    announce
    if [ -n "$ended" ]; then break; fi
    claim_id=$(cat /proc/sys/kernel/random/uuid)
    if [ $# = 0 ]; then take_dispatch; else take_message "$@"; fi
    IFS=$'\t' read -r id token lease limit handler task <"$scratch/answer"
    if [ -n "$id" ]; then run; fi
done
waited=0 # a consumer whose broker answers nothing is not waited for: its message is claimed
while consuming && [ $((waited += 1)) -le 20 ]; do sleep 0.1; done
if consuming; then kill $consumer 2>/dev/null; fi
wait || true # bash may tell here of the signal again
