"""ARMIN in NumPy, float64 and plain loops, written from the paper.

It shares no code with keras_armin. Weights come as a dict of arrays under the
names of the checkpoint contract, options as a dict of the cell's arguments.

    python -m tests.helpers.reference

writes tests/helpers/golden.npz, which the suite compares with on every backend.
"""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).with_name("golden.npz")
EPSILON = 1e-3

DEFAULTS = {
    "memory_slots": 20,
    "memory_dim": "half",
    "write_activation": "tanh",
    "addressing": "hard",
    "temperature": 1.0,
    "activation": "tanh",
    "recurrent_activation": "sigmoid",
    "state_activation": "tanh",
    "output_activation": None,
    "use_bias": True,
    "write_inputs": False,
    "learn_initial_state": False,
    "layer_norm": False,
    "zoneout": 0.0,
    "content_addressing": False,
    "output_read": True,
    "noise_scale": 0.0,
    "recency_addressing": True,
}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


ACTIVATIONS = {
    None: lambda x: x,
    "linear": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "softsign": lambda x: x / (1.0 + np.abs(x)),
    "hard_sigmoid": lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0),
}


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def normalise(x, gain, bias):
    """Layer norm of one block."""
    return (x - x.mean()) / np.sqrt(x.var() + EPSILON) * gain + bias


def normalise_blocks(x, sizes, gain, bias):
    out, start = np.empty_like(x), 0
    for size in sizes:
        block = slice(start, start + size)
        out[block] = normalise(x[block], gain[block], bias[block])
        start += size
    return out


class State:
    """One sample: hidden state, memory, number of writes, last output."""

    def __init__(self, units, slots, width, output_size):
        self.h = np.zeros(units)
        self.memory = np.zeros((slots, width))
        self.writes = 0
        # Oldest first: empty slots in the order in which they are filled.
        self.order = list(range(slots))
        self.output = np.zeros(output_size)


def slot_width(units, memory_dim):
    return (units + 1) // 2 if memory_dim == "half" else memory_dim or units


def initial_state(units, options, weights):
    o = {**DEFAULTS, **options}
    width = slot_width(units, o["memory_dim"])
    state = State(
        units,
        o["memory_slots"],
        width,
        units + (width if o["output_read"] else 0),
    )
    if o["learn_initial_state"]:
        state.h = np.tanh(weights["initial_state"])
        state.memory = weights["initial_memory"].copy()
    return state


def step(units, options, weights, x, state, training=False, noise=None):
    """One step of one sample; returns (read weights, write weights)."""
    o = {**DEFAULTS, **options}
    noise = noise or {}
    n, width = o["memory_slots"], slot_width(units, o["memory_dim"])
    act = {k: ACTIVATIONS[o[k]] for k in o if k.endswith("activation")}
    sigma = act["recurrent_activation"]
    h, memory = state.h, state.memory
    inputs = x * noise.get("dropout", 1.0)
    drop = noise.get("recurrent_dropout", np.ones(units + width))

    z = inputs @ weights["kernel"]
    if o["use_bias"]:
        z = z + weights["bias"]
    z_address, z_gates, z_five = np.split(z, [n, n + units + width])

    # Where to read (Eq. 9), and what is read (Eq. 10).
    logits = (
        z_address + (h * drop[:units]) @ weights["address_recurrent_kernel"]
    )
    if o["content_addressing"]:
        query = np.concatenate([inputs, h * drop[:units]])
        query = query @ weights["query_kernel"]
        scale = np.exp(weights["content_scale"]) / np.sqrt(width)
        logits = logits + scale * (memory @ query)
    if o["recency_addressing"]:
        for age, slot in enumerate(reversed(state.order)):
            logits[slot] += weights["recency_scale"] * np.log(1 + age)
    read, write_if_full = address(o, logits, training, noise.get("gumbel"))
    r = np.zeros(width)
    for slot in range(n):
        r = r + read[slot] * memory[slot]

    # The two input gates (Eq. 3 to 5).
    gates = (
        z_gates
        + (np.concatenate([h, r]) * drop) @ (weights["gate_recurrent_kernel"])
    )
    if o["layer_norm"]:
        gates = normalise_blocks(
            gates,
            [units, width],
            weights["gate_norm_gain"],
            weights["gate_norm_bias"],
        )
    gated = np.concatenate([sigma(gates[:units]) * h, sigma(gates[units:]) * r])

    # The five gates (Eq. 6).
    five = z_five + (gated * drop) @ weights["recurrent_kernel"]
    sizes = [units] * 4 + ([width] if o["output_read"] else [])
    if o["layer_norm"]:
        five = normalise_blocks(
            five, sizes, weights["norm_gain"], weights["norm_bias"]
        )
    i, f, g, o_h = (five[k * units : (k + 1) * units] for k in range(4))
    o_r = five[4 * units :]

    # New hidden state (Eq. 7) and output (Eq. 8).
    c = sigma(f) * h + sigma(i) * act["activation"](g)
    if o["layer_norm"]:
        c = normalise(c, weights["state_norm_gain"], weights["state_norm_bias"])
    c = act["state_activation"](c)
    output = sigma(o_h) * act["output_activation"](c)
    if o["output_read"]:
        tail = sigma(o_r) * act["output_activation"](r)
        output = np.concatenate([output, tail])

    # Zoneout, then the write: empty slots first.
    if o["zoneout"] and training:
        c = np.where(noise["zoneout"], h, c)
    elif o["zoneout"]:
        c = o["zoneout"] * h + (1 - o["zoneout"]) * c
    value = c
    if o["write_inputs"]:
        value = np.concatenate([inputs, c])
    if o["write_inputs"] or width != units:
        value = value @ weights["write_kernel"]
        if o["use_bias"]:
            value = value + weights["write_bias"]
        value = act["write_activation"](value)
    write = np.eye(n)[state.writes] if state.writes < n else write_if_full
    state.memory = np.stack(
        [w * value + (1 - w) * row for w, row in zip(write, memory)]
    )
    state.order.remove(np.argmax(write))
    state.order.append(np.argmax(write))
    state.h, state.output, state.writes = c, output, state.writes + 1
    return read, write


def address(o, logits, training, gumbel):
    """Read weights, and write weights for a full memory."""
    n = len(logits)
    if o["addressing"] == "soft":
        weights = softmax(logits / o["temperature"])
        return weights, weights
    if not training:
        best = np.eye(n)[np.argmax(logits)]
        return best, best
    noise = 0.0
    if o["noise_scale"]:
        noise = o["noise_scale"] * np.asarray(gumbel, "float64")
    noisy = (logits + noise) / o["temperature"]
    best = np.eye(n)[np.argmax(noisy)]
    return (best if o["addressing"] == "hard" else softmax(noisy)), best


def run(
    units,
    options,
    weights,
    x,
    training=False,
    noise=None,
    mask=None,
    reset=None,
    states=None,
):
    """All samples and steps of `x` `(batch, time, features)`.

    Returns outputs `(batch, time, ...)`, the list of final `State`s, read
    weights and write weights. Noise arrays are `(batch, time, ...)`, dropout
    masks `(batch, ...)`.
    """
    noise = noise or {}
    weights = {k: np.asarray(v, "float64") for k, v in weights.items()}
    outputs, reads, writes, finals = [], [], [], []
    for b, sequence in enumerate(np.asarray(x, "float64")):
        start = states[b] if states else initial_state(units, options, weights)
        state = start
        rows = [[], [], []]
        for t, x_t in enumerate(sequence):
            if reset is not None and reset[b, t]:
                state = initial_state(units, options, weights)
            if mask is not None and not mask[b, t]:
                blank = np.zeros(len(state.memory))
                read = write = blank
            else:
                step_noise = {
                    k: v[b] if "dropout" in k else v[b, t]
                    for k, v in noise.items()
                }
                read, write = step(
                    units, options, weights, x_t, state, training, step_noise
                )
            for row, value in zip(rows, (state.output, read, write)):
                row.append(value)
        outputs.append(rows[0])
        reads.append(rows[1])
        writes.append(rows[2])
        finals.append(state)
    return np.array(outputs), finals, np.array(reads), np.array(writes)


def weight_shapes(features, units, options):
    """The checkpoint contract: names and shapes of the trainable weights."""
    o = {**DEFAULTS, **options}
    n, h = o["memory_slots"], units
    r = slot_width(units, o["memory_dim"])
    five = 4 * h + (r if o["output_read"] else 0)
    shapes = {
        "kernel": (features, n + h + r + five),
        "address_recurrent_kernel": (h, n),
        "gate_recurrent_kernel": (h + r, h + r),
        "recurrent_kernel": (h + r, five),
    }
    if o["use_bias"]:
        shapes["bias"] = (n + h + r + five,)
    if o["write_inputs"] or r != h:
        rows = h + (features if o["write_inputs"] else 0)
        shapes["write_kernel"] = (rows, r)
        if o["use_bias"]:
            shapes["write_bias"] = (r,)
    if o["layer_norm"]:
        for name, size in (("gate", h + r), ("", five), ("state", h)):
            stem = f"{name}_norm" if name else "norm"
            shapes[f"{stem}_gain"] = shapes[f"{stem}_bias"] = (size,)
    if o["content_addressing"]:
        shapes["query_kernel"] = (features + h, r)
        shapes["content_scale"] = ()
    if o["recency_addressing"]:
        shapes["recency_scale"] = ()
    if o["learn_initial_state"]:
        shapes["initial_state"] = (h,)
        shapes["initial_memory"] = (n, r)
    return shapes


def random_weights(rng, features, units, options):
    """Weights all different, so that no two gates or axes can be swapped."""
    return {
        name: rng.normal(0.0, 0.6, shape)
        for name, shape in weight_shapes(features, units, options).items()
    }


PAPER = {
    "memory_dim": None,
    "write_activation": None,
    "state_activation": None,
    "output_activation": "tanh",
    "recency_addressing": False,
}
GOLDEN_CASES = {
    "paper": {"memory_slots": 3, **PAPER},
    "language_model": {
        **PAPER,
        "memory_slots": 4,
        "layer_norm": True,
        "zoneout": 0.3,
    },
    "algorithmic": {
        "memory_slots": 3,
        "memory_dim": 5,
        "write_activation": None,
        "addressing": "soft",
        "temperature": 0.7,
        "state_activation": "tanh",
        "output_activation": None,
        "write_inputs": True,
        "learn_initial_state": True,
        "recency_addressing": False,
    },
    "content": {
        **PAPER,
        "memory_slots": 5,
        "memory_dim": 2,
        "content_addressing": True,
        "output_read": False,
    },
}
GOLDEN_SIZES = {"batch": 3, "time": 8, "features": 4, "units": 6}


def make_golden():
    s = GOLDEN_SIZES
    arrays = {}
    for seed, (case, options) in enumerate(GOLDEN_CASES.items()):
        rng = np.random.default_rng(seed)
        weights = random_weights(rng, s["features"], s["units"], options)
        x = rng.normal(size=(s["batch"], s["time"], s["features"]))
        outputs, finals, _, _ = run(s["units"], options, weights, x)
        arrays[f"{case}/x"] = x
        arrays[f"{case}/outputs"] = outputs
        arrays[f"{case}/memory"] = np.array([f.memory for f in finals])
        for name, value in weights.items():
            arrays[f"{case}/weights/{name}"] = value
    return arrays


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **make_golden())
    print(f"wrote {GOLDEN}")
