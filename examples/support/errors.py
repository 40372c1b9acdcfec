"""Errors of the example scripts and their messages."""

STOPPED = (
    "stopped; the same command with --resume continues from the last complete "
    "epoch"
)
LOST = (
    "another process of this run has ended. The same command with --resume, "
    "in all processes, continues from the last complete epoch."
)


class RunError(Exception):
    """An error that the user can fix; the message says how."""
