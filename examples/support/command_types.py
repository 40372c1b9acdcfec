"""Types of command line arguments, with errors that say what is taken."""

import argparse


def positive(text):
    return _checked(int(text), lambda number: number >= 1, "at least 1")


def at_least_zero(text):
    return _checked(int(text), lambda number: number >= 0, "at least 0")


def above_zero(text):
    return _checked(float(text), lambda number: number > 0, "above 0")


def zero_or_more(text):
    return _checked(
        float(text), lambda x: 0 <= x < float("inf"), "a number of at least 0"
    )


def rate(text):
    return _checked(
        float(text), lambda number: 0 <= number < 1, "at least 0 and below 1"
    )


def _checked(number, holds, takes):
    if not holds(number):
        raise argparse.ArgumentTypeError(f"must be {takes}, not {number}")
    return number
