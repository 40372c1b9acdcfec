"""Pictures of what examples/benchmark.py measures."""

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

COLOURS = {
    "ARMIN": "tab:blue",
    "RNN(ARMINCell)": "tab:orange",
    "keras.layers.LSTM": "tab:green",
    "torch.nn.LSTM": "tab:red",
}
AXES = {
    "units": "hidden units",
    "slots": "memory slots",
    "time": "time steps",
    "batch": "batch size",
}


def draw(results, path):
    """A column of panels for each backend, a panel for each varied size."""
    panels = _panels(results[0])
    if any(_panels(result) != panels for result in results):
        raise SystemExit("These files do not vary the same sizes.")
    figure, axes = plt.subplots(
        len(panels),
        len(results),
        figsize=(4.6 * len(results), 3.4 * len(panels)),
        squeeze=False,
        layout="constrained",
    )
    for column, result in enumerate(results):
        for row, (name, part) in enumerate(panels):
            points = [p for p in result["points"] if p["varied"] == name]
            _draw_panel(axes[row][column], result, name, part, points)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _panels(result):
    """Pairs of a varied size and, where a panel shows a part, its suffix."""
    names = list(dict.fromkeys(p["varied"] for p in result["points"]))
    if result["question"] == "scaling":
        return [
            (names[0], "us a time step"),
            (names[0], "s longer the first time"),
        ]
    return [(name, None) for name in names]


def _draw_panel(axis, result, name, part, points):
    axis.set_title(result["backend"])
    axis.set_xlabel(AXES[name])
    axis.set_ylabel(part or result["unit"])
    labels = list(dict.fromkeys(k for p in points for k in p["found"]))
    labels = [k for k in labels if part is None or k.endswith(part)]
    if result["question"] in ("memory", "networks"):
        _bars(axis, name, points, labels)
    else:
        _curves(axis, name, points, labels)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=7)


def _bars(axis, name, points, labels):
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        places = [
            x + (i - (len(labels) - 1) / 2) * width for x in _range(points)
        ]
        heights = [p["found"][label] for p in points]
        axis.bar(places, heights, width, label=label, color=_colour(label))
    axis.set_xticks(_range(points), [p[name] for p in points])


def _curves(axis, name, points, labels):
    for label in labels:
        style = "--" if "XLA" in label or "generating" in label else "-"
        axis.plot(
            [p[name] for p in points],
            [p["found"][label] for p in points],
            style,
            marker="o",
            markersize=3,
            label=label,
            color=_colour(label),
        )
    if name == "time":
        axis.set_xscale("log")


def _range(points):
    return list(range(len(points)))


def _colour(label):
    # Others get the next colour of the picture.
    return COLOURS.get(label.split(",")[0].removesuffix(" with XLA"))
