"""Calculated cost of ARMIN on several devices.

    python examples/scaling.py                             all of it
    python examples/scaling.py --preset light --devices 1 4 16
    python examples/scaling.py --machine tpu --plot tpu.png

Nothing is measured here. The numbers of operations follow from the equations,
the devices are described by a few round figures (`MACHINES`), and
examples/SCALING.md lists what is left out. The tables are those printed there;
`--plot` draws the figure.
"""

import argparse
import io
import math
from typing import NamedTuple

FLOAT32, BFLOAT16 = 4, 2  # bytes
DEVICES = (1, 8, 16, 32, 64, 128, 256, 512, 1024)


class Network(NamedTuple):
    """A character model: embedding, `layers` times ARMIN, logits."""

    title: str
    units: int
    slots: int
    embedding: int
    symbols: int
    steps: int  # of time, in an update
    batch: int
    layers: int = 1


class Machine(NamedTuple):
    title: str
    peak: float  # FLOP/s of matrix products in bfloat16
    achieved: float  # the part of it that large products reach
    memory: float  # bytes/s between a device and its memory
    link: float  # bytes/s between two devices, each way
    hop: float  # s until a message arrives at the next device
    launch: float  # s that an operation takes, however small it is
    kernels: int  # operations per time step and layer, forward and backward


NETWORKS = {
    "ptb": Network("Penn Treebank, 800 units", 800, 20, 128, 50, 150, 128),
    "enwik8": Network(
        "enwik8, two layers of 800 units", 800, 20, 256, 205, 150, 128, 2
    ),
    "light": Network(
        "Penn Treebank, light: 500 units, 5 slots", 500, 5, 128, 50, 50, 384
    ),
}

# The operations of a time step were counted: on torch those that are no views,
# with XLA the instructions in the loops of what it compiled for a CPU.
MACHINES = {
    "gpu": Machine("GPU, XLA", 312e12, 0.4, 1.5e12, 50e9, 5e-6, 4e-6, 80),
    "gpu-torch": Machine(
        "GPU, torch", 312e12, 0.4, 1.5e12, 50e9, 5e-6, 10e-6, 198
    ),
    "tpu": Machine("TPU, XLA", 275e12, 0.4, 1.2e12, 50e9, 1e-6, 1e-6, 80),
}


def parameters(network):
    """Trainable parameters, layer norm included."""
    u, n, e = network.units, network.slots, network.embedding
    layer = (n + 7 * u) * (e + 1) + u * n + 14 * u * u + 16 * u
    between = (2 * u + 1) * e
    return (
        network.symbols * e
        + network.layers * layer
        + (network.layers - 1) * between
        + (2 * u + 1) * network.symbols
    )


def loop_products(network):
    """Multiplications of a character and layer that wait for the last step.

    The address, the two input gates, and three of the five gates.
    """
    u = network.units
    return u * network.slots + 4 * u * u + 6 * u * u


def other_products(network):
    """Those of a character, in all layers, that can be done for all steps."""
    u, e = network.units, network.embedding
    layer = e * (network.slots + 7 * u) + 4 * u * u
    between = 2 * u * e
    return (
        network.layers * layer
        + (network.layers - 1) * between
        + 2 * u * network.symbols
    )


def forward_flops(network):
    """Of a character, in matrix products: a multiplication and an addition."""
    loops = network.layers * loop_products(network)
    return 2 * (loops + other_products(network))


def update_flops(network, batch):
    """The backward pass has twice the multiplications of the forward pass."""
    return 3 * forward_flops(network) * network.steps * batch


def loop_pass(network, machine, batch, shards=1):
    """Seconds of one pass of a layer's loop, without its launches.

    A product of few rows waits for its kernel to be read from memory.
    """
    products = loop_products(network) / shards
    computing = 2 * products * batch / (machine.peak * machine.achieved)
    reading = BFLOAT16 * products / machine.memory
    return network.steps * max(computing, reading)


def waiting(network, machine):
    """Seconds of an update that no smaller batch and no chip makes shorter."""
    return network.layers * network.steps * machine.kernels * machine.launch


def compute_time(network, machine, batch):
    """Seconds of an update on one device, with `batch` sequences."""
    loops = 2 * network.layers * loop_pass(network, machine, batch)
    # The gradient of a kernel is one product, after the loop.
    gradients = network.layers * loop_products(network)
    flops = 2 * (gradients + 3 * other_products(network))
    outside = flops * network.steps * batch / (machine.peak * machine.achieved)
    return loops + outside + waiting(network, machine)


def balanced_batch(network, machine):
    """Sequences with which a device works for as long as it waits."""
    flops = update_flops(network, 1)
    one = flops / (machine.peak * machine.achieved)
    return round(waiting(network, machine) / one)


def all_reduce_time(size, devices, machine):
    """Seconds to sum `size` bytes over a ring: each device sends it twice."""
    if devices == 1:
        return 0.0
    sent = 2 * (devices - 1) / devices * size
    return sent / machine.link + 2 * (devices - 1) * machine.hop


def all_gather_time(size, devices, machine):
    """Seconds until every device of a ring has all `size` bytes."""
    if devices == 1:
        return 0.0
    sent = (devices - 1) / devices * size
    return sent / machine.link + (devices - 1) * machine.hop


def update_time(network, machine, devices, batch):
    """Seconds of an update, each device with `batch` sequences of its own."""
    gradients = FLOAT32 * parameters(network)
    return compute_time(network, machine, batch) + all_reduce_time(
        gradients, devices, machine
    )


def strong(network, machine, devices):
    """Sequences on each device, seconds and speed-up: one batch, shared.

    None where there are more devices than sequences.
    """
    if devices > network.batch:
        return None
    batch = math.ceil(network.batch / devices)
    seconds = update_time(network, machine, devices, batch)
    alone = update_time(network, machine, 1, network.batch)
    return batch, seconds, alone / seconds


def weak(network, machine, devices):
    """Seconds and efficiency, where every device has a whole batch."""
    seconds = update_time(network, machine, devices, network.batch)
    return seconds, update_time(network, machine, 1, network.batch) / seconds


def shared_layer(network, machine, devices, batch=None):
    """Computing and communicating, in s, in the loops of an update.

    The columns of the recurrent kernels lie on several devices, the memory on
    each. Every step gathers what the input gates let through (h and r) and the
    new h, and sums two numbers per sequence for each of three layer norms; the
    backward pass does the same.
    """
    batch = network.batch if batch is None else batch
    computing = 2 * network.layers * loop_pass(network, machine, batch, devices)
    computing += waiting(network, machine)
    row = BFLOAT16 * batch * network.units
    step = (
        all_gather_time(2 * row, devices, machine)
        + all_gather_time(row, devices, machine)
        + 3 * all_reduce_time(2 * FLOAT32 * batch, devices, machine)
    )
    return computing, 2 * network.layers * network.steps * step


def break_even_units(network, machine, devices):
    """Hidden units, in hundreds, from which a shared layer is faster."""
    units = 100
    while True:
        wider = network._replace(units=units)
        alone = sum(shared_layer(wider, machine, 1))
        if sum(shared_layer(wider, machine, devices)) < alone:
            return units
        units += 100


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def ms(seconds):
    return f"{1e3 * seconds:.1f}"


def percent(part):
    return f"{100 * part:.0f} %"


def one_device_table(networks):
    heads = ["network", "parameters", "TFLOP", "on", "ms", "of it waiting"]
    heads += ["of the peak", "balanced batch"]
    rows = []
    for network in networks:
        flops = update_flops(network, network.batch)
        for machine in MACHINES.values():
            seconds = compute_time(network, machine, network.batch)
            rows.append(
                [
                    network.title,
                    f"{parameters(network):,}",
                    f"{flops / 1e12:.2f}",
                    machine.title,
                    ms(seconds),
                    percent(waiting(network, machine) / seconds),
                    percent(flops / seconds / machine.peak),
                    f"{balanced_batch(network, machine):,}",
                ]
            )
    return markdown(heads, rows)


def many_devices_table(network, machine, devices):
    heads = ["devices", "all-reduce, ms"]
    heads += ["sequences each", "ms", "speed-up"]
    heads += [f"{network.batch} each: ms", "efficiency"]
    heads += ["shared layer: ms", "of it sending"]
    rows = []
    for count in devices:
        gradients = FLOAT32 * parameters(network)
        row = [f"{count:,}", ms(all_reduce_time(gradients, count, machine))]
        shared = strong(network, machine, count)
        if shared is None:
            row += ["-", "-", "-"]
        else:
            batch, seconds, speed_up = shared
            row += [batch, ms(seconds), f"{speed_up:.1f}"]
        seconds, efficiency = weak(network, machine, count)
        row += [ms(seconds), percent(efficiency)]
        if count > network.units:
            row += ["-", "-"]
        else:
            computing, sending = shared_layer(network, machine, count)
            row += [ms(computing + sending), ms(sending)]
        rows.append(row)
    return markdown(heads, rows)


def report(networks, machine, devices):
    """All tables, as text."""
    parts = ["One device, a whole batch:", one_device_table(networks)]
    for network in networks:
        parts += [
            f"{network.title}, batch {network.batch}, {network.steps} steps, "
            f"{machine.title}:",
            many_devices_table(network, machine, devices),
            "A layer shared by 8 devices is faster than on one from "
            f"{break_even_units(network, machine, 8):,} units.",
        ]
    return "\n\n".join(parts)


COLOURS = ("tab:blue", "tab:orange", "tab:green")


def draw(path):
    """Speed-up, efficiency and a shared layer over the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.6), layout="constrained")
    _draw_strong(axes[0])
    _draw_weak(axes[1])
    _draw_shared(axes[2])
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("devices")
        axis.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    # A third of the size without a visible difference.
    Image.open(drawn).convert("RGB").quantize(48).save(path, optimize=True)


def _curves():
    """Colour, line, label, network and machine of each curve."""
    for colour, (name, network) in zip(COLOURS, NETWORKS.items()):
        for line, key in (("-", "gpu"), ("--", "tpu")):
            yield colour, line, f"{name}, {key}", network, MACHINES[key]


def _draw_strong(axis):
    for colour, line, label, network, machine in _curves():
        counts = [n for n in DEVICES if n <= network.batch]
        speed = [strong(network, machine, n)[2] for n in counts]
        axis.plot(counts, speed, line, color=colour, marker=".", label=label)
    axis.plot([1, 3], [1, 3], ":", color="grey", label="ideal")
    axis.set_ylim(0, 3)
    axis.set_title("one batch, shared by all")
    axis.set_ylabel("speed-up")
    axis.legend(fontsize=7, ncols=2, loc="upper right")


def _draw_weak(axis):
    for colour, line, label, network, machine in _curves():
        parts = [100 * weak(network, machine, n)[1] for n in DEVICES]
        axis.plot(DEVICES, parts, line, color=colour, marker=".", label=label)
    axis.set_ylim(0, 105)
    axis.set_title("a batch for each")
    axis.set_ylabel("efficiency, %")


def _draw_shared(axis):
    """The time of the loops; the dotted line is what computing would take."""
    counts = [n for n in DEVICES if n <= 128]
    for colour, line, label, network, machine in _curves():
        pairs = [shared_layer(network, machine, n) for n in counts]
        total = [1e3 * sum(pair) for pair in pairs]
        axis.plot(counts, total, line, color=colour, marker=".", label=label)
        if line == "-":
            alone = [1e3 * computing for computing, _ in pairs]
            axis.plot(counts, alone, ":", color=colour)
    axis.set_yscale("log")
    axis.set_title("one layer, shared by all")
    axis.set_ylabel("ms in the loops of an update")
    axis.plot([], [], ":", color="grey", label="computing alone (gpu)")
    axis.legend(handles=axis.lines[-1:], fontsize=7, loc="upper left")


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--preset", choices=[*NETWORKS, "all"], default="all", help="network"
    )
    parser.add_argument("--machine", choices=MACHINES, default="gpu")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--plot", help="file to draw the picture to")
    options = parser.parse_args(arguments)
    if min(options.devices) < 1:
        parser.error("--devices must be at least 1")
    return options


def main(arguments=None):
    options = parse(arguments)
    names = NETWORKS if options.preset == "all" else [options.preset]
    networks = [NETWORKS[name] for name in names]
    print(report(networks, MACHINES[options.machine], options.devices))
    if options.plot:
        draw(options.plot)


if __name__ == "__main__":
    main()
