-- depends: 0002.outages_and_queues
-- An execution that its worker broke off to stop is recorded, so that a second one does not come unexplained.
--
-- Every row there is fits the wider rule: to look at them all would hold up the workers for nothing.

alter table flowforge.attempt drop constraint if exists attempt_outcome_check;
alter table flowforge.attempt add constraint attempt_outcome_check
    check (outcome in ('succeeded', 'failed', 'timed_out', 'cancelled', 'lease_expired', 'crashed', 'released')) not valid;
