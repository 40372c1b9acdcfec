"""Errors of the example scripts, and what is said about them."""

STOPPED = (
    "stopped; the same command with --resume goes on from the last complete "
    "epoch"
)
LOST = (
    "another process of this run has ended. The same command with --resume, "
    "in all processes, goes on from the last complete epoch."
)


class RunError(Exception):
    """Something the user can put right; the message says how."""
