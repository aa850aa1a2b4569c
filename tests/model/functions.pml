/* What functions of sql/functions/ do, each under its name, to the task run and its orders. They are called where their
 * condition holds, in a d_step. */

/* --- release_and_reap.sql --- */

/* The part of _arm, and of _fill_window, that inserts. A row that the sweep would delete may give its place;
 * what is parked is replaced. */
#define is_place(n) (order[n] == none || !locked(n) && order_dispatch[n] != dispatch)
inline insert_order() {
    i = 0;
    do
    :: i < ORDERS ->
        if
        :: is_parked(i) -> order[i] = replaced
        :: else
        fi;
        i++
    :: else -> break
    od;
    first_order(is_place);
    assert(within_the_bounds || i < ORDERS);
    order[i] = waiting;
    order_dispatch[i] = dispatch
}

/* An order that is still to be published serves, if it is due in time and can be locked; it is never changed. */
#ifdef MISTAKE_REARM_RELIES_ON_LOCKED
#define is_armed(n) (order[n] == waiting && order_dispatch[n] == dispatch)
#else
#define is_armed(n) (order[n] == waiting && order_dispatch[n] == dispatch && !locked(n))
#endif
inline _arm() {
#ifdef MISTAKE_REARM_IN_PLACE
    first_order(is_order);
    if
    :: i < ORDERS && !locked(i) -> order[i] = waiting
    :: i == ORDERS -> insert_order()
    :: else
    fi;
#else
    first_order(is_armed);
    if
    :: i == ORDERS -> insert_order()
    :: else
    fi;
#endif
    excused = 0
}

inline no_lease() { claim = 0; lease = 0; left = 0; spared = 0; stalled = 0 }

inline _give_back(counted) {
    sees = cancel && !late;
    late = 0;
    if
    :: sees -> becomes(cancelled)
#ifndef MISTAKE_NO_MAX_REAPS
    :: !sees && counted && reaps + 1 > MAX_REAPS -> becomes(failed)
#endif
    :: else ->
        becomes(ready);
        due = !(counted && reaps > 0);      /* at once the first time, then after a delay */
        in_line = due;
#ifdef MISTAKE_REAP_NEW_DISPATCH_ID
        new_dispatch_id();
#endif
        if
        :: counted && reaps <= MAX_REAPS -> reaps++
        :: else
        fi;
        _arm()
    fi;
    no_lease()
}

inline release_task_run(w, crashed) {
    if
    :: state == running && token == my_token[w] ->
#ifdef MISTAKE_CRASH_NOT_COUNTED
        _give_back(false);
#else
        _give_back(crashed);
#endif
        executions = executions - (1 - crashed)
    :: else
    fi
}

inline reap_expired_leases() {
    assert(no_takeover_after_an_outage || stalled || left == 0 || !any_worker(owns_and_works));
    if
    :: left == 0 -> _end_attempt()
    :: else -> _give_back(true)
    fi
}

/* --- finish.sql --- */

/* attempt + 1: nothing is known of it yet */
inline next_attempt() { accepted = 0; executions = 0; dispatch = 0 }

inline _end_attempt() {
    sees = cancel && !late;
    late = 0;
    failures++;
    reaps = 0;
    if
    :: sees -> becomes(cancelled)
    :: !sees && failures < MAX_ATTEMPTS -> becomes(pending); next_attempt(); due = 0; in_line = 0
    :: else -> becomes(failed)
    fi;
    no_lease()
}

/* with_effects: the handler's transaction is repeated whole, from assert_lease on. */
inline finish_task_runs(w, with_effects) {
    if
#ifdef MISTAKE_FINISH_WITHOUT_TOKEN
    :: state == running ->
#elif defined(MISTAKE_FINISH_WITHOUT_RUNNING)
    :: token == my_token[w] ->
#else
    :: state == running && token == my_token[w] ->
#endif
        assert(no_result_from_a_stale_token || token == my_token[w]);
        assert(one_result_for_each_attempt || !accepted);
        assert(success_with_its_effects || !in_transaction[w] || with_effects);
        accepted = 1;
        if
        :: success[w] -> becomes(succeeded); late = 0; reaps = 0; no_lease()
        :: else -> _end_attempt()
        fi
    :: else
    fi
}

/* --- dispatch_ready.sql --- */

inline new_dispatch_id() {
    minted++;
    assert(within_the_bounds || minted < DISPATCHES);
    dispatch = minted;
    unfit = 0
}

inline _promote_due() { in_line = 1 }

inline _fill_window() {
    becomes(ready);
    new_dispatch_id();
    identity = dispatch;
#ifndef MISTAKE_OUTBOX_ROW_APART
    insert_order();
#endif
    excused = 0
}

/* --- publish.sql --- */

#ifdef MISTAKE_FETCH_IGNORES_CANCEL
#define is_to_fetch(n) (order[n] == waiting && !locked(n) && state == ready && due && order_dispatch[n] == dispatch)
#else
#define is_to_fetch(n) (order[n] == waiting && !locked(n) && state == ready && due && order_dispatch[n] == dispatch && !cancel)
#endif
inline fetch_outbox(p) {
    first_order(is_to_fetch);
    assert(nothing_sent_when_cancelled || !cancel);
    held[p] = i;
#ifdef MISTAKE_MARK_BEFORE_CONFIRM
    order[i] = published
#endif
}

/* Published orders of one dispatch are alike: one of them stands for all. */
#define is_another(n) (n != held[p] && order[n] == published && order_dispatch[n] == order_dispatch[held[p]])
inline mark_published(p) {
    order[held[p]] = published;
    first_order(is_another);
    if
    :: i < ORDERS -> order[i] = none; order_dispatch[i] = 0
    :: else
    fi
}

inline mark_refused(p) { order[held[p]] = later }

inline mark_unpublishable(p) { order[held[p]] = parked }

/* --- claim.sql --- */

inline _take(w) {
    becomes(running);
#ifndef MISTAKE_CLAIM_WITHOUT_NEW_TOKEN
    token++;
    begun = 0;
#endif
    executions++;
    assert(executions_bounded || executions <= MAX_REAPS + 1);
    claim = my_claim[w];
    my_token[w] = token;
    lease = 2; spared = 0; stalled = 0;
    left = TIME_LIMIT
}

inline _give_again(w) {
    my_token[w] = token;
    if
    :: left > 0 -> lease = 2; spared = 0; stalled = 0
    :: else
    fi
}

inline claim_task_runs(w) {
    found = 1;
    if
#ifdef MISTAKE_CLAIM_WITHOUT_DISPATCH_ID
    :: state == ready && !cancel ->
#else
    :: state == ready && dispatch == message[w] && !cancel ->
#endif
        assert(no_claim_by_an_older_message || message[w] == identity);
        _take(w)
#ifdef MISTAKE_CLAIM_WITHOUT_STATE_GUARD
    :: saw[w] && !(state == ready && dispatch == message[w]) -> _take(w)
#endif
#ifdef MISTAKE_CLAIM_PAST_REAPER
    :: state == running && dispatch == message[w] && lease == 0 && claim != my_claim[w] -> state = ready; _take(w)
#endif
#ifdef MISTAKE_CLAIM_GIVEN_TO_ANY
    :: state == running && dispatch == message[w] -> _give_again(w)
#else
    :: state == running && dispatch == message[w] && claim == my_claim[w] -> _give_again(w)
#endif
    :: else -> found = 0
    fi
}

inline claim_next(w) {
    found = 1;
    if
    :: state == running && claim == my_claim[w] -> _give_again(w)
    :: state == ready && in_line && !cancel ->
        _take(w);
        i = 0;
        do
        :: i < ORDERS -> order[i] = none; order_dispatch[i] = 0; i++
        :: else -> break
        od
    :: else -> found = 0
    fi
}

/* --- renew_leases.sql --- */

inline renew_leases() { lease = 2; spared = 0; stalled = 0 }

/* --- redispatch.sql --- */

inline redispatch_lost() { _arm() }

inline redispatch() {
    if
    :: state == ready && in_line -> _arm()
    :: else
    fi
}

/* What is still to be published is waited for, but sweeps nothing away: its message may be gone before it is marked. */
#ifdef MISTAKE_PUBLISHED_STANDS_FOR_PARKED
#define is_undeliverable (any_order(is_parked) && !any_order(is_to_publish) && !any_order(is_published))
#define is_parked_in_vain(n) (order[n] == replaced || order[n] == parked && (any_other(is_to_publish) || any_other(is_published)))
#else
#define is_undeliverable (any_order(is_parked) && !any_order(is_to_publish))
#define is_parked_in_vain(n) (order[n] == replaced)
#endif
inline fail_undeliverable() { becomes(failed) }

#ifdef MISTAKE_SWEEP_OF_LIVE
#define is_to_sweep(n) (order[n] != none && !locked(n))
#else
#define is_to_sweep(n) (order[n] != none && !locked(n) && (state != ready || order_dispatch[n] != dispatch || is_parked_in_vain(n)))
#endif
inline sweep_outbox() {
    first_order(is_to_sweep);
    order[i] = none;
    order_dispatch[i] = 0
}

/* --- settle_finished.sql: the run has this one task --- */

inline _settle_locked() {
    if
#ifdef MISTAKE_SETTLE_FROM_EARLIER_LIST
    :: true ->
#else
    :: ended && !settled ->
#endif
        settled = 1;
        assert(run_ends_once || ended && run_state == running);
        run_state = (state == succeeded || state == failed -> state : cancelled)
    :: else
    fi
}

/* --- cancel_run.sql --- */

inline cancel_run() {
    if
    :: ended && !settled -> _settle_locked()
    :: else ->
        cancel = 1;
        if
        :: state == pending || state == ready -> becomes(cancelled); _settle_locked()
        :: else
        fi
    fi
}

inline cancel_leftovers() { becomes(cancelled); _settle_locked() }

/* --- retry_run.sql --- */

inline retry_run() {
    if
    :: !settled -> _settle_locked()
    :: else
    fi;
    becomes(pending);
#ifdef MISTAKE_RETRY_KEEPS_ATTEMPT
    executions = 0; dispatch = 0;
#else
    next_attempt();
#endif
    failures = 0; reaps = 0;
    due = 1; in_line = 1;
    settled = 0; run_state = running; cancel = 0
}
