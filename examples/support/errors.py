"""Errors of the example scripts."""


class RunError(Exception):
    """Something the user can put right; the message says how."""
