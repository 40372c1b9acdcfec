"""Pictures of a character language model."""

from matplotlib import pyplot as plt

from keras_armin import MemoryTrace
from keras_armin import plot_memory

CHARACTERS_A_ROW = 60


def draw_curve(history, epoch_updates, path):
    """Bits per character over updates, in training and in validation."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    updates = [(i + 1) * epoch_updates for i in range(len(history))]
    for name, label in (("bpc", "training"), ("val_bpc", "validation")):
        values = [logs[name] for logs in history]
        axis.plot(updates, values, marker=".", label=label)
    axis.set_xlabel("updates")
    axis.set_ylabel("bits per character")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_reads(traces, characters, path):
    """Which slots were read at which character: a band for each layer.

    Args:
        traces: A `MemoryTrace` for each layer.
        characters: What was fed in, a string for each time step.
    """
    starts = range(0, len(characters), CHARACTERS_A_ROW)
    slots = traces[0].read_weights.shape[-1]
    figure, axes = plt.subplots(
        len(traces) * len(starts),
        1,
        figsize=(12, len(traces) * len(starts) * (1.1 + 0.13 * slots)),
        squeeze=False,
        layout="constrained",
    )
    axes = iter(axes[:, 0])
    for number, trace in enumerate(traces, start=1):
        for start in starts:
            some = slice(start, start + CHARACTERS_A_ROW)
            axis = next(axes)
            plot_memory(MemoryTrace(*(w[:, some] for w in trace)), ax=axis)
            _label(axis, characters[some])
            if len(traces) > 1:
                axis.set_ylabel(f"layer {number}, slot")
            if start:
                axis.get_legend().remove()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(axis, characters):
    axis.set_xticks(
        range(len(characters)),
        [visible(character) for character in characters],
        family="monospace",
    )
    axis.tick_params("x", length=0)
    axis.set_xlim(-0.5, CHARACTERS_A_ROW - 0.5)
    axis.set_xlabel("")


def visible(character):
    """A visible mark for whitespace characters."""
    return {" ": "␣", "\n": "↵", "\t": "→"}.get(character, character)
