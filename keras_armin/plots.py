"""Plots. matplotlib is imported only when one is drawn."""

from typing import Any

import numpy as np

from keras_armin.inspection import MemoryTrace

_READ_COLOUR = "#1f5fa8"
_WRITE_COLOUR = "#d95f02"


def plot_memory(
    trace: MemoryTrace,
    sample: int = 0,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Plot the reads and writes of one sample over time.

    Args:
        trace: The `MemoryTrace` from `keras_armin.trace_memory`.
        sample: int. Index of the sample in the batch. Defaults to `0`.
        ax: Matplotlib axes to draw on. Defaults to `None`: a new figure.
        title: str. Defaults to `None`: none.

    Returns:
        The matplotlib axes. Reads are blue, darker for larger weights; writes
        are orange frames. Masked steps are empty.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    if not isinstance(trace, MemoryTrace):
        raise TypeError(
            "Argument `trace` must be a `MemoryTrace` from "
            f"`keras_armin.trace_memory`. Received: {type(trace).__name__}"
        )
    if sample not in range(len(trace.read_weights)):
        raise ValueError(
            "Argument `sample` must be an index in the batch, from 0 to "
            f"{len(trace.read_weights) - 1}. Received: {sample!r}"
        )
    reads = trace.read_weights[sample].T
    writes = trace.write_weights[sample].T
    slots, steps = reads.shape
    if ax is None:
        width = min(max(4.0, 0.14 * steps + 1.5), 16.0)
        height = min(max(2.5, 0.14 * slots + 1.2), 9.0)
        ax = plt.figure(figsize=(width, height), layout="constrained").gca()
    ax.imshow(
        reads,
        cmap=LinearSegmentedColormap.from_list("", ["white", _READ_COLOUR]),
        vmin=0.0,
        vmax=1.0,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )
    _frame_writes(ax, writes)
    ax.set_xlabel("time step")
    ax.set_ylabel("memory slot")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend(
        handles=[
            Patch(facecolor=_READ_COLOUR, label="read"),
            Patch(facecolor="none", edgecolor=_WRITE_COLOUR, label="written"),
        ],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2,
        frameon=False,
    )
    if title:
        ax.set_title(title, loc="right")
    return ax


def _frame_writes(ax: Any, writes: np.ndarray) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    # A distributed write frames the slots with at least an equal share.
    share = 1.0 / writes.shape[0]
    frames = [
        Rectangle((step - 0.5, slot - 0.5), 1.0, 1.0)
        for slot, step in zip(*(writes >= share).nonzero())
    ]
    ax.add_collection(
        PatchCollection(
            frames,
            facecolor="none",
            edgecolor=_WRITE_COLOUR,
            linewidth=1.2,
            clip_on=False,
        )
    )


def plot_boundaries(
    boundaries: np.ndarray,
    text: str | list[str],
    sample: int = 0,
    ax: Any = None,
) -> Any:
    """Plot where the segments of an `HMLSTM` end, over a text.

    Args:
        boundaries: Array from `keras_armin.trace_boundaries`.
        text: The characters, or words, that the steps read.
        sample: int. Index of the sample in the batch. Defaults to `0`.
        ax: Matplotlib axes to draw on. Defaults to `None`: a new figure.

    Returns:
        The matplotlib axes. Each level is a row, the first at the bottom; a
        step that ends a segment is filled.
    """
    import matplotlib.pyplot as plt

    shape = np.shape(boundaries)
    if len(shape) != 3 or len(text) != shape[1]:
        raise ValueError(
            "Argument `boundaries` must have the shape (batch, time, levels), "
            f"with as many steps as `text` is long. Received: shape {shape} "
            f"and a text of length {len(text)}"
        )
    if sample not in range(shape[0]):
        raise ValueError(
            "Argument `sample` must be an index in the batch, from 0 to "
            f"{shape[0] - 1}. Received: {sample!r}"
        )
    steps, levels = shape[1:]
    if ax is None:
        size = min(max(4.0, 0.14 * steps + 1.0), 20.0), 0.8 + 0.25 * levels
        ax = plt.figure(figsize=size, layout="constrained").gca()
    ax.imshow(
        np.asarray(boundaries)[sample].T,
        cmap="Blues",
        vmin=0.0,
        vmax=1.0,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )
    shown = [{"\n": "\\n", " ": "_"}.get(x, x) for x in text]
    ax.set_xticks(range(steps), shown, family="monospace", fontsize=7)
    ax.set_yticks(range(levels), [f"level {k + 1}" for k in range(levels)])
    return ax
