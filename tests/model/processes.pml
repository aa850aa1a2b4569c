/* Who calls the functions, when, and what can happen in between. */

/* --- the scheduler: it remembers nothing, so one stands for any number, killed between any two calls --- */

#define is_expired (state == running && lease == 0 && (!spared || left == 0))
#define is_eligible (state == pending && in_line && due && !cancel)
#define is_unpublished (any_order(is_to_publish) || any_order(is_parked) || any_order(is_replaced))

proctype Scheduler() {
#if defined(MISTAKE_REAP_BY_ID_ONLY) || defined(MISTAKE_DISPATCH_WITHOUT_RECHECK) || defined(MISTAKE_SETTLE_FROM_EARLIER_LIST)
    bit chosen;
#endif
    do
    /* dispatch_ready */
    :: d_step { (state == pending || state == ready) && due && !in_line -> _promote_due() }
#ifdef MISTAKE_DISPATCH_WITHOUT_RECHECK
    :: d_step { !chosen && is_eligible -> chosen = 1 }
    :: d_step { chosen -> chosen = 0; _fill_window(); check() }
#else
    :: d_step { is_eligible -> _fill_window(); check() }
#endif

#ifdef MISTAKE_REAP_BY_ID_ONLY
    :: d_step { !chosen && is_expired -> chosen = 1 }
    :: d_step { chosen -> chosen = 0; reap_expired_leases(); check() }
#elif defined(MISTAKE_REAP_AFTER_OUTAGE)
    :: d_step { state == running && lease == 0 -> reap_expired_leases(); check() }
#else
    :: d_step { is_expired -> reap_expired_leases(); check() }
#endif

    /* Its delay is longer than messages wait, but for a fault. */
#ifndef MISTAKE_NO_REDISPATCH
    :: d_step { state == ready && in_line && !is_unpublished && !is_carried -> redispatch_lost(); check() }
    :: d_step { state == ready && in_line && !is_unpublished && is_carried && faults > 0 -> faults--; redispatch_lost(); check() }
#endif

    :: d_step { any_order(is_to_sweep) -> sweep_outbox(); check() }
    :: d_step { state == ready && is_undeliverable -> fail_undeliverable(); check() }

#ifndef MISTAKE_NO_CANCEL_SWEEP
    :: d_step { cancel && !done && (state == pending || state == ready) -> cancel_leftovers(); check() }
#endif

    /* settle_finished */
#ifdef MISTAKE_SETTLE_FROM_EARLIER_LIST
    :: d_step { !chosen && ended && !settled -> chosen = 1 }
    :: d_step { chosen -> chosen = 0; _settle_locked() }
#else
    :: d_step { ended && !settled -> _settle_locked() }
#endif
    od
}

/* --- an operator, who at last does nothing more --- */

proctype Operator() {
    do
    :: d_step { cancels > 0 && !done -> cancels--; cancel_run(); check() }
    /* A transaction under way, which has read the run before, may still put the task run back in line. */
    :: d_step { cancels > 0 && !done && state == running -> cancels--; late = 1; cancel_run(); check() }
    :: d_step { retries > 0 && ended -> retries--; retry_run(); check() }
    :: d_step { cancels + retries > 0 -> cancels = 0; retries = 0 }
    od
}

/* --- publishers and the broker --- */

#ifndef CLAIM_NEXT

inline arrives(x) {
    if
    :: queued[x] < QUEUED -> queued[x]++
    :: else
    fi
}

inline ends_transaction(p) { publishing[p] = resting; held[p] = NOTHING }

#define of_now(n) (order_dispatch[n] == dispatch)

proctype Publisher(byte p) {
    do
    /* queue_names, and their declaration at the broker; then redispatch, if the queue was gone */
    :: d_step { publishing[p] == resting && gone[p] == 2 -> gone[p] = 1 - queue; queue = 1 }
    :: d_step { publishing[p] == resting && gone[p] == 1 -> gone[p] = 0; redispatch(); check() }

    /* The transaction stays open until the order is marked. */
    :: d_step { publishing[p] == resting && gone[p] == 0 && any_order(is_to_fetch) ->
        fetch_outbox(p); publishing[p] = fetched; check() }

    /* sent, and what the broker says: confirmed, returned for want of a queue, nacked */
    :: d_step { publishing[p] == fetched && of_now(held[p]) && !unfit && queue ->
        arrives(dispatch); publishing[p] = confirmed }
    :: d_step { publishing[p] == fetched && !of_now(held[p]) && queue ->
        arrives(order_dispatch[held[p]]); publishing[p] = confirmed }
#ifdef MISTAKE_NO_MANDATORY
    :: d_step { publishing[p] == fetched && !queue -> publishing[p] = confirmed }
#else
    :: d_step { publishing[p] == fetched && !queue -> publishing[p] = refused; gone[p] = 2 }
#endif
    :: d_step { publishing[p] == fetched && faults > 0 -> faults--; publishing[p] = refused }
    /* an error permanent to the message, and so to all orders of the dispatch from then on */
    :: d_step { publishing[p] == fetched && of_now(held[p]) && unfit -> publishing[p] = permanent }
    :: d_step { publishing[p] == fetched && of_now(held[p]) && !unfit && faults > 0 ->
        faults--; unfit = 1; publishing[p] = permanent }

#ifdef MISTAKE_REFUSED_TAKEN_AS_SENT
    :: d_step { publishing[p] == confirmed || publishing[p] == refused -> mark_published(p); ends_transaction(p); check() }
#else
    :: d_step { publishing[p] == confirmed -> mark_published(p); ends_transaction(p); check() }
    :: d_step { publishing[p] == refused -> mark_refused(p); ends_transaction(p); check() }
#endif
    :: d_step { publishing[p] == permanent -> mark_unpublishable(p); ends_transaction(p); check() }

    /* killed, or a connection lost: rolled back, whether the message has arrived or not */
    :: d_step { publishing[p] != resting && faults > 0 -> faults--; ends_transaction(p); gone[p] = 2; check() }
    od
}

#define is_lost(n) d_step { faults > 0 && queued[n] > 0 -> \
    faults--; queued[n]--; excused = excused || n == dispatch; check() }
#define is_doubled(n) d_step { faults > 0 && queued[n] > 0 && queued[n] < QUEUED -> faults--; queued[n]++ }

proctype Broker() {
    do
    :: is_lost(1) :: is_lost(2) :: is_lost(3) :: is_lost(4) :: is_lost(5)
    :: is_doubled(1) :: is_doubled(2) :: is_doubled(3) :: is_doubled(4) :: is_doubled(5)
    /* the queue is deleted */
    :: d_step { faults > 0 && queue ->
        faults--;
        queue = 0;
        excused = excused || queued[dispatch] > 0;
        i = 0;
        do
        :: i < DISPATCHES -> queued[i] = 0; i++
        :: else -> break
        od;
        check() }
    od
}
#endif

/* --- workers --- */

inline rests(w) {
    does[w] = idle; message[w] = 0; copies[w] = 0; my_claim[w] = 0; my_token[w] = 0; success[w] = 0; in_transaction[w] = 0
}

/* uuid4(): another than the row's; no other call of this worker is under way. */
inline new_claim_id(w) { my_claim[w] = (claim == 2 * w + 1 -> 2 * w + 2 : 2 * w + 1) }

inline begins(w) {
    assert(one_execution_for_each_token || !begun);
    begun = 1;
    does[w] = executing
}

#ifdef CLAIM_NEXT
#define claims(w) claim_next(w)
#else
#define claims(w) claim_task_runs(w)
#endif

/* What was not acknowledged is delivered again. */
inline redeliver(w) {
    i = copies[w];
#ifndef MISTAKE_ACK_BEFORE_CLAIM
    do
    :: i > 0 && queue -> i--;
        if
        :: queued[message[w]] < QUEUED -> queued[message[w]]++
        :: else
        fi
    :: else -> break
    od;
    excused = excused || i > 0 && message[w] == dispatch
#endif
}

/* Idle workers are alike: the first of them takes. */
#define takes(n) d_step { does[w] == idle && (w == 0 || does[0] != idle) && queued[n] > 0 -> \
    queued[n]--; message[w] = n; copies[w] = 1; does[w] = holding; new_claim_id(w) }

proctype Worker(byte w) {
    do
#ifdef CLAIM_NEXT
    :: d_step { does[w] == idle && (w == 0 || does[0] != idle) && state == ready && in_line && !cancel ->
        does[w] = holding; new_claim_id(w) }
#else
    :: takes(1) :: takes(2) :: takes(3) :: takes(4) :: takes(5)
    /* a second copy for the same call */
    :: d_step { does[w] == holding && copies[w] == 1 && queued[message[w]] > 0 -> queued[message[w]]--; copies[w] = 2 }
#endif
#ifdef MISTAKE_CLAIM_WITHOUT_STATE_GUARD
    :: d_step { does[w] == holding && !saw[w] && state == ready && dispatch == message[w] -> saw[w] = 1 }
#endif

    /* The claim; only its first position can win. Then it acknowledges. */
    :: d_step { does[w] == holding || does[w] == asked ->
        claims(w);
        if
#ifdef MISTAKE_CLAIM_SPLIT
        :: found && does[w] == asked && copies[w] == 2 -> begins(w); begins(w)
#endif
        :: found -> begins(w)
        :: else -> rests(w)
        fi;
        check() }
    /* The answer is lost: the same call is made again until it is answered. */
    :: d_step { does[w] == holding && faults > 0 -> faults--; claims(w); does[w] = asked; my_token[w] = 0; check() }

    /* The finish, and again when the answer is lost. */
    :: d_step { does[w] == executing -> success[w] = 1; finish_task_runs(w, true); rests(w); check() }
    :: d_step { does[w] == executing -> finish_task_runs(w, true); rests(w); check() }
    :: d_step { does[w] == executing && faults > 0 ->
        faults--; success[w] = 1; finish_task_runs(w, true); does[w] = told; check() }
    :: d_step { does[w] == executing && faults > 0 -> faults--; finish_task_runs(w, true); does[w] = told; check() }
    /* It was part of the handler's transaction, which was rolled back when the connection was lost. */
    :: d_step { does[w] == executing && faults > 0 -> faults--; success[w] = 1; in_transaction[w] = 1; does[w] = told }
#ifdef MISTAKE_FINISH_REPEATED_ALONE
    :: d_step { does[w] == told -> finish_task_runs(w, false); rests(w); check() }
#else
    :: d_step { does[w] == told -> finish_task_runs(w, true); rests(w); check() }
#endif

    /* Its child process has died; it is told to stop. */
    :: d_step { does[w] == executing && faults > 0 -> faults--; release_task_run(w, true); rests(w); check() }
    :: d_step { does[w] == executing && faults > 0 -> faults--; release_task_run(w, false); rests(w); check() }

    /* killed, and started again under its name; before it has acknowledged, or after */
    :: d_step { does[w] != idle && faults > 0 -> faults--; redeliver(w); rests(w); check() }
    :: d_step { does[w] == executing && faults > 0 -> faults--; rests(w); check() }

    /* The handler hangs, and cannot be stopped before the lease is lost. */
    :: d_step { does[w] == executing && faults > 0 && TIME_LIMIT < 3 -> faults--; does[w] = hung }
    od
}

/* The worker's thread that renews, and stops what it is told to be lost. */
proctype LeaseKeeper(byte w) {
    do
#ifdef MISTAKE_RENEWAL_BY_WORKER
    :: d_step { state == running && (claim + 1) / 2 == w + 1 && lease < 2 && left > 0 -> renew_leases() }
#elif defined(MISTAKE_RENEWAL_PAST_LIMIT)
    :: d_step { state == running && owns(w) && lease < 2 -> renew_leases() }
#else
    :: d_step { state == running && owns(w) && lease < 2 && left > 0 -> renew_leases() }
#endif
    :: d_step { (does[w] == executing || does[w] == hung) && !(state == running && owns(w)) -> rests(w); check() }
    od
}

/* --- time --- */

#define is_due_again(n) d_step { order[n] == later -> order[n] = waiting }

proctype Clock() {
    do
    :: d_step { state == running && lease == 2 ->
        lease = 1;
        if
        :: left == 1 || left == 2 -> left--
        :: else
        fi;
#ifndef MISTAKE_RENEWAL_PAST_LIMIT
        if
        :: left == 0 -> lease = 0
        :: else
        fi
#endif
        }
    /* Who owns it and lives renews in time, but for a fault. */
    :: d_step { state == running && lease == 1 && !any_worker(owns) -> lease = 0 }
    :: d_step { state == running && lease == 1 && any_worker(owns) && faults > 0 -> faults--; lease = 0; stalled = 1 }
    /* The database is away until the lease has run out: it is spared until its own length has passed again. */
    :: d_step { state == running && lease > 0 && faults > 0 -> faults--; lease = 0; spared = 1 }
    :: d_step { spared && !any_worker(owns) -> spared = 0 }
    :: d_step { spared && any_worker(owns) && faults > 0 -> faults--; spared = 0; stalled = 1 }

    :: d_step { (state == pending || state == ready) && !due -> due = 1 }
    :: is_due_again(0) :: is_due_again(1) :: is_due_again(2) :: is_due_again(3)
#if ORDERS == 6
    :: is_due_again(4) :: is_due_again(5)
#endif
    od
}

/* Faults end. Whatever is then stuck is told by an assertion or, where liveness is checked, goes on for ever. */
proctype Ends() {
    do
    :: d_step { faults > 0 -> faults = 0 }
#ifdef LIVENESS
    :: faults == 0 && !done
#else
    :: timeout -> assert(every_task_run_ends || done)
#endif
    od
}
