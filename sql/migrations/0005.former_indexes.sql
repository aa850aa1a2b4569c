-- depends: 0004.frontiers
-- The indexes for which others stand now.

drop index if exists flowforge.task_run_eligible, flowforge.task_run_dispatched, flowforge.task_run_unsettled;
