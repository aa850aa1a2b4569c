#!/bin/sh
# A worker in shell: psql and nothing else. It takes dispatches from PostgreSQL (claim_next), renews its lease while a
# handler runs, and finishes under its token. Usage, with a login that is a member of flowforge_worker:
#
#     PGHOST=… PGUSER=… PGDATABASE=… ./worker.sh [QUEUE]
#
# What any worker has to do is in docs/worker-protocol.md.
set -u
queue=${1:-default}
worker="$(hostname):$$"
lease=${LEASE:-30} # seconds
ended=           # by SIGTERM: finish what runs, take nothing new
trap 'ended=yes' TERM INT

# A handler: the name in $1, the run's input on standard input; the output, as JSON, on standard output.
handle() {
    case $1 in
        shell.words) wc -w | tr -d ' ' ;;
        shell.sleep) sleep 3600 ;;
        shell.fail) echo 'nothing to be done' >&2 && return 1 ;;
        *) return 127 ;;
    esac
}

# One statement of standard input, repeated until it is answered: every call here is safe to repeat as it is.
ask() {
    statement=$(cat)
    until printf '%s\n' "$statement" | psql -XqAt -F '	' -v ON_ERROR_STOP=1 -v queue="$queue" -v worker="$worker" "$@"; do
        sleep 1
    done
}

run() { # task run, token, handler, input
    output=$(mktemp) && errors=$(mktemp)
    printf '%s' "$4" | handle "$3" >"$output" 2>"$errors" &
    handler=$! renewed=$(date +%s)
    while kill -0 $handler 2>/dev/null; do
        sleep 0.1
        if [ $(($(date +%s) - renewed)) -ge $((lease / 3)) ]; then
            renewed=$(date +%s)
            case $(echo "select outcome from flowforge.renew_leases(array[:id], array[:token], :'lease');" |
                ask -v id="$1" -v token="$2" -v lease="$lease s") in
                lost | cancel) kill $handler 2>/dev/null ;;
            esac
        fi
    done
    wait $handler
    code=$?
    if [ $code = 127 ]; then
        echo "select flowforge.release_task_run(:id, :token, 'unknown_handler');"
    elif [ $code = 0 ]; then
        # By way of a file: what stands in a program's arguments can be seen by others.
        echo "\\set output \`cat $output\`
            select flowforge.finish_task_run(:id, :token, 'succeeded', :'output'::jsonb);"
    else
        echo "\\set error \`cat $errors\`
            select flowforge.finish_task_run(:id, :token, 'failed', error => :'error' || ', exit code $code');"
    fi | ask -v id="$1" -v token="$2"
    rm -f "$output" "$errors"
}

while [ -z "$ended" ]; do
    claim_id=$(echo 'select gen_random_uuid();' | ask)
    claimed=$(echo "select task_run_id, fencing_token, handler, input
        from flowforge.claim_next(array[:'queue'], :'worker', :'claim_id', :'lease', 1);" |
        ask -v claim_id="$claim_id" -v lease="$lease s")
    if [ -z "$claimed" ]; then
        sleep 1
        continue
    fi
    printf '%s\n' "$claimed" | {
        IFS='	' read -r id token handler input
        run "$id" "$token" "$handler" "$input"
    }
done
