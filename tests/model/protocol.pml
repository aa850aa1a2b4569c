/* The life of one task run: dispatch, outbox, broker, claim, lease, fence, reap, re-dispatch, cancel and retry.
 *
 * A d_step is one transaction, or one event outside the database. functions.pml holds what a function of sql/functions/
 * does to the row, under that function's name; processes.pml who calls it when. What is left out, and why, stands in
 * docs/model.md. -DMISTAKE_… puts a mistake in; the macros below set the bounds.
 */

#ifndef WORKERS         /* 1 or 2 */
#define WORKERS 2
#endif
#ifndef PUBLISHERS      /* 1 or 2 */
#define PUBLISHERS 1
#endif
#ifndef FAULTS          /* how many faults, of any kinds */
#define FAULTS 2
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef RETRIES
#define RETRIES 0
#endif
#ifndef MAX_ATTEMPTS
#define MAX_ATTEMPTS 2
#endif
#ifndef MAX_REAPS
#define MAX_REAPS 1
#endif
#ifndef TIME_LIMIT      /* 2: of so many steps of the clock; 3: none */
#define TIME_LIMIT 3
#endif
#ifndef ORDERS          /* rows of the outbox at once, 4 or 6 */
#define ORDERS 4
#endif
#define DISPATCHES 6    /* one more than there can be dispatch ids: they count from 1 */
#define QUEUED 3        /* copies of one message at the broker */
#define NOTHING 255

/* The properties. What is asserted names one of these, which is never true, so that the checker's message tells it. */
hidden byte one_execution_for_each_token, no_result_from_a_stale_token, one_result_for_each_attempt,
    only_transitions_of_the_table, dispatch_id_stays, no_claim_by_an_older_message, executions_bounded, never_lost,
    nothing_sent_when_cancelled, run_ends_once, success_with_its_effects, no_takeover_after_an_outage,
    every_task_run_ends;
/* Not of the protocol: the bounds above suffice. */
hidden byte within_the_bounds;

mtype = { pending, ready, running, succeeded, failed, cancelled };  /* a task run */
/* an order; later: refused, and waits out its delay; replaced: parked, before another was written */
mtype = { none, waiting, later, published, parked, replaced };
mtype = { idle, holding, asked, executing, hung, told };            /* a worker; asked, told: the answer was lost */
mtype = { resting, fetched, confirmed, refused, permanent };        /* a publisher */

/* --- the database: the row, its run, its orders --- */

mtype state = pending;
bit settled;
bit due = 1;                    /* available_at has come */
bit in_line = 1;                /* stage: neither delayed nor reoffered */
byte failures, reaps, dispatch, token, claim;
byte lease;                     /* 2: fresh, 1: to be renewed, 0: run out */
byte left;                      /* steps of the clock until the time limit; 3: none */
bit spared;                     /* the lease ran out while the database was away */
mtype run_state = running;
bit cancel;                     /* cancel_requested_at is set */
bit late;                       /* a transaction that ends or gives back the execution has read `cancel` before it was set */
byte minted;                    /* dispatch ids made so far */
mtype order[ORDERS] = none;
byte order_dispatch[ORDERS];

/* --- outside of it --- */

bit queue = 1;                  /* there is a queue at the broker */
byte queued[DISPATCHES];        /* messages in it, by dispatch id: copies count, their order does not */
bit unfit;                      /* the message of the present dispatch can't be published any more */
mtype publishing[PUBLISHERS] = resting;
byte held[PUBLISHERS] = NOTHING;    /* the order that the open transaction has locked */
byte gone[PUBLISHERS] = 2;      /* 2: the queue is to be declared; 1: it was found gone, which is to be told */
mtype does[WORKERS] = idle;
byte message[WORKERS], copies[WORKERS], my_claim[WORKERS], my_token[WORKERS];
bit success[WORKERS];
bit in_transaction[WORKERS];    /* the finish is part of the handler's transaction */
byte faults = FAULTS, cancels = CANCELS, retries = RETRIES;
#ifdef MISTAKE_CLAIM_WITHOUT_STATE_GUARD
bit saw[WORKERS];
#endif

/* --- what only properties look at --- */

bit begun;                      /* an execution has begun under the row's token */
bit accepted;                   /* the attempt has an accepted result */
byte executions;                /* of the attempt, but those that their worker gave back */
byte identity;                  /* the dispatch id that the attempt was given */
bit excused;                    /* the broker has lost the message of the dispatch */
bit stalled;                    /* the owner has not renewed in time */

hidden byte i, found, sees;     /* within one step */

#define ended (state == succeeded || state == failed || state == cancelled)
#define done (run_state != running)

#if WORKERS == 2
#define any_worker(p) (p(0) || p(1))
#else
#define any_worker(p) (p(0))
#endif
#define owns(w) ((does[w] == executing || does[w] == hung || does[w] == told) && my_token[w] == token)
#define owns_and_works(w) (owns(w) && does[w] != hung)
#define undecided(w) ((does[w] == holding || does[w] == asked) && message[w] == dispatch)
#define is_carried (queued[dispatch] > 0 || any_worker(undecided))

/* Two names, since no macro expands within itself. */
#if ORDERS == 4
#define any_order(p) (p(0) || p(1) || p(2) || p(3))
#define any_other(p) (p(0) || p(1) || p(2) || p(3))
#else
#define any_order(p) (p(0) || p(1) || p(2) || p(3) || p(4) || p(5))
#define any_other(p) (p(0) || p(1) || p(2) || p(3) || p(4) || p(5))
#endif
#if PUBLISHERS == 2
#define locked(n) (held[0] == n || held[1] == n)
#else
#define locked(n) (held[0] == n)
#endif
#define is_order(n) (order[n] != none && order_dispatch[n] == dispatch)
#define is_to_publish(n) ((order[n] == waiting || order[n] == later) && order_dispatch[n] == dispatch)
#define is_published(n) (order[n] == published && order_dispatch[n] == dispatch)
#define is_parked(n) (order[n] == parked && order_dispatch[n] == dispatch)
#define is_replaced(n) (order[n] == replaced && order_dispatch[n] == dispatch)

/* The first order for which p holds, or ORDERS. */
#define first_order(p) i = 0; do :: i < ORDERS && !(p(i)) -> i++ :: else -> break od

/* The table of states in ARCHITECTURE.md. */
inline becomes(to) {
    assert(only_transitions_of_the_table ||
        state == pending && (to == ready || to == cancelled) ||
        state == ready && (to == running || to == failed || to == cancelled) ||
        state == running && to != running ||
        ended && to == pending && retries < RETRIES);
    state = to
}

/* After every transaction, and every loss outside. */
inline check() {
    assert(dispatch_id_stays || dispatch == 0 || dispatch == identity);
#ifndef CLAIM_NEXT
    assert(never_lost || state != ready || cancel || excused || is_carried || any_order(is_to_publish) || any_order(is_parked))
#endif
}

#include "functions.pml"
#include "processes.pml"

init {
    atomic {
        run Scheduler();
        run Operator();
        i = 0;
        do
        :: i < WORKERS -> run Worker(i); run LeaseKeeper(i); i++
        :: else -> break
        od;
#ifndef CLAIM_NEXT
        i = 0;
        do
        :: i < PUBLISHERS -> run Publisher(i); i++
        :: else -> break
        od;
        run Broker();
#endif
        run Clock();
        run Ends()
    }
}

#ifdef LIVENESS
ltl every_task_run_ends_for_good { <> [] done }
#endif
