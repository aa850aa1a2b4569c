"""The exit codes of every command and daemon, and what each error ends with."""

from __future__ import annotations

from flowforge import errors

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 3
EXIT_DATABASE = 4
EXIT_SCHEMA = 5
EXIT_PRIVILEGE = 6
EXIT_BROKER = 7
EXIT_NO_SLOTS = 8
EXIT_TIMEOUT = 9
EXIT_REFUSED = 10
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

EXITS = {
    EXIT_OK: "done; of a run that was waited for: it succeeded",
    EXIT_FAILED: "the run failed or was cancelled, there is nothing to list or a problem, or the unforeseen",
    EXIT_USAGE: "wrong use: an unknown option, workflow, run or queue, a module or file that will not do, "
    "or a request not allowed as it is",
    EXIT_CONFIG: "a setting is missing or wrong, such as the connection string, also that of --database-url",
    EXIT_DATABASE: "the database cannot be reached, started, or refuses",
    EXIT_SCHEMA: "the schema is missing or too old: flowforge migrate",
    EXIT_PRIVILEGE: "the database login lacks a privilege",
    EXIT_BROKER: "the broker refuses",
    EXIT_NO_SLOTS: "a worker lost its last slot to a handler that cannot be stopped",
    EXIT_TIMEOUT: "a run that was waited for had not ended in time",
    EXIT_REFUSED: "refused in the present state: retry of a running task, a key used with other input",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C, or by SIGTERM or SIGHUP where a command waits; "
    "told to stop a second time",
    EXIT_PIPE: "whoever read the output, or the log of a daemon, has stopped reading, as head does",
}

# The first that fits counts, so subclasses stand before their bases.
_OF_ERRORS: tuple[tuple[type[errors.FlowForgeError], int], ...] = (
    (errors.NotFound, EXIT_USAGE),
    (errors.InvalidArgument, EXIT_USAGE),
    (errors.InvalidDefinition, EXIT_USAGE),
    (errors.LimitExceeded, EXIT_USAGE),
    (errors.NotStorable, EXIT_USAGE),
    (errors.IdempotencyConflict, EXIT_REFUSED),
    (errors.StateConflict, EXIT_REFUSED),
    (errors.WaitTimeout, EXIT_TIMEOUT),
    (errors.ConfigError, EXIT_CONFIG),
    (errors.SchemaError, EXIT_SCHEMA),
    (errors.MissingPrivilege, EXIT_PRIVILEGE),
    (errors.EmbeddedPostgresError, EXIT_DATABASE),
    (errors.DatabaseError, EXIT_DATABASE),
    (errors.BrokerError, EXIT_BROKER),
)


def exit_code(error: BaseException) -> int:
    """The exit code of what ends with `error`."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), EXIT_FAILED)
