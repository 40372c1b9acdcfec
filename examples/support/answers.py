"""Evaluate and print answers to the algorithmic tasks."""

import numpy as np


def judge(logits, targets, weights):
    """Loss per bit, and share of sequences without a wrong bit.

    `targets` and `weights` are those of `sequences`.
    """
    sign = np.where(targets > 0.5, 1, -1)
    losses = np.logaddexp(0, -sign * logits).mean(axis=-1) * weights
    wrong = ((logits > 0) != (targets > 0.5)) & (weights > 0)[..., None]
    return losses.mean(), 1 - wrong.any(axis=(1, 2)).mean()


def print_answer(logits, targets, weights, rows=None):
    """The first sequence's target and output side by side, as bits."""
    answer = weights[0] > 0
    targets, outputs = targets[0][answer] > 0.5, logits[0][answer] > 0
    print(f"\n{'target':{targets.shape[1]}}   output")
    for target, output in list(zip(targets, outputs))[:rows]:
        wrong = int((target != output).sum())
        print(
            "".join("01"[int(bit)] for bit in target),
            " ",
            "".join("01"[int(bit)] for bit in output),
            f"  {wrong} wrong" if wrong else "",
        )
