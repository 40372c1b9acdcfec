"""The comparison networks in NumPy: float64, one sample, one slot at a time.

Written from the publications, and slowly: sums are loops, sorting is sorting.
Each `step` takes the cell, its weights by name, an input and a dict of states,
which it returns updated, the output first.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def normalise(x, gain, bias):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-3) * gain + bias


def cosine(a, b):
    return (a @ b) / np.sqrt((a @ a + 1e-6) * (b @ b + 1e-6))


def lstm(weights, units, x, entering, c, switched=None):
    """The new h and c; `switched` is what the candidate sees instead."""
    gates = []
    for k in range(4):
        block = slice(k * units, (k + 1) * units)
        seen = switched if k == 3 and switched is not None else entering
        z = x @ weights["kernel"][:, block]
        z = z + seen @ weights["recurrent_kernel"][:, block]
        z = z + weights["bias"][block]
        if "norm_gain" in weights:
            gain, bias = weights["norm_gain"], weights["norm_bias"]
            z = normalise(z, gain[block], bias[block])
        gates.append(z)
    i, f, o, j = gates
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(j)
    shown = c
    if "norm_gain" in weights:
        gain, bias = weights["state_norm_gain"], weights["state_norm_bias"]
        shown = normalise(c, gain, bias)
    return sigmoid(o) * np.tanh(shown), c


def cut(vector, **sizes):
    """Pieces of a vector, by name; a pair of sizes gives a matrix."""
    pieces, start = {}, 0
    for name, size in sizes.items():
        count = int(np.prod(size))
        piece = vector[start : start + count]
        pieces[name] = piece.reshape(size) if isinstance(size, tuple) else piece
        start += count
    assert start == len(vector)
    return pieces


# --- NTM --------------------------------------------------------------------


def ntm(cell, weights, x, s):
    n, w = cell.memory_slots, cell.memory_dim
    reads, writes = cell.num_reads, cell.num_writes
    released, heads = cell.variant == "released", reads + writes
    h, c = lstm(weights, cell.units, x, s["output"], s["c"])
    shown = c / np.sqrt(c @ c + 1e-6) if released else h
    taps = 2 * cell.shift_range + 1
    sizes = {
        "key": (heads, w),
        "beta": heads,
        "gate": heads,
        "shift": (heads, taps),
        "gamma": heads,
        "add": (writes, w),
    }
    if not released:
        sizes["erase"] = (writes, w)
    p = cut(
        shown @ weights["interface_kernel"] + weights["interface_bias"], **sizes
    )
    memory = s["memory"].reshape(n, w)
    before = np.concatenate([s["read_weights"], s["write_weights"]])
    before = before.reshape(heads, n)
    new_weights = np.zeros((heads, n))
    for k in range(heads):
        key = p["key"][k] if released else np.tanh(p["key"][k])
        scores = np.array([cosine(key, row) for row in memory])
        by_content = softmax(softplus(p["beta"][k]) * scores)
        g = sigmoid(p["gate"][k])
        gated = g * by_content + (1 - g) * before[k]
        shift = softmax(p["shift"][k])
        moved = np.zeros(n)
        for i in range(n):
            for j in range(n):
                for tap in range(taps):
                    if (i - j - (tap - cell.shift_range)) % n == 0:
                        moved[i] += gated[j] * shift[tap]
        sharp = np.clip(moved, 1e-12, 1) ** (1 + softplus(p["gamma"][k]))
        new_weights[k] = sharp / sharp.sum()
    read = np.concatenate([new_weights[k] @ memory for k in range(reads)])
    new_memory = memory.copy()
    for k in range(writes):
        weight = new_weights[reads + k][:, None]
        erase = 1.0 if released else sigmoid(p["erase"][k])
        new_memory = new_memory * (1 - weight * erase)
    for k in range(writes):
        add = p["add"][k] if released else np.tanh(p["add"][k])
        new_memory = new_memory + np.outer(new_weights[reads + k], add)
    return {
        "output": np.concatenate([h, read]),
        "c": c,
        "memory": new_memory.ravel(),
        "read_weights": new_weights[:reads].ravel(),
        "write_weights": new_weights[reads:].ravel(),
    }


# --- DNC --------------------------------------------------------------------


def allocation(usage):
    """By sorting, as published; with the margin of the authors' code."""
    usage = 1e-6 + (1 - 1e-6) * usage
    result, product = np.zeros(len(usage)), 1.0
    for slot in np.argsort(usage, kind="stable"):
        result[slot] = (1 - usage[slot]) * product
        product *= usage[slot]
    return result


def dnc(cell, weights, x, s):
    n, w, reads = cell.memory_slots, cell.memory_dim, cell.num_reads
    released = cell.variant == "released"
    h, c = lstm(weights, cell.units, x, s["output"], s["c"])
    p = cut(
        h @ weights["interface_kernel"] + weights["interface_bias"],
        read_key=(reads, w),
        read_beta=reads,
        write_key=w,
        write_beta=1,
        erase=w,
        write=w,
        free=reads,
        allocation=1,
        write_gate=1,
        modes=(reads, 3),
    )
    memory = s["memory"].reshape(n, w)

    def content(memory, key, beta):
        key = np.tanh(key) if released else key
        scores = np.array([cosine(key, row) for row in memory])
        strength = softplus(beta) if released else 1 + softplus(beta)
        return softmax(strength * scores / (w if released else 1))

    old_reads = s["read_weights"].reshape(reads, n)
    psi = np.ones(n)
    for k in range(reads):
        psi *= 1 - sigmoid(p["free"][k]) * old_reads[k]
    old_write = s["write_weights"]
    usage = (s["usage"] + old_write - s["usage"] * old_write) * psi
    gate = sigmoid(p["allocation"])
    by_content = content(memory, p["write_key"], p["write_beta"])
    write = sigmoid(p["write_gate"]) * (
        gate * allocation(usage) + (1 - gate) * by_content
    )
    value = np.tanh(p["write"]) if released else p["write"]
    memory = memory * (1 - np.outer(write, sigmoid(p["erase"])))
    memory = memory + np.outer(write, value)
    link, precedence = s["link"].reshape(n, n), s["precedence"]
    new_link = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                kept = (1 - write[i] - write[j]) * link[i, j]
                new_link[i, j] = kept + write[i] * precedence[j]
    modes = p["modes"]
    over_heads = np.exp(modes) / np.exp(modes).sum(axis=0)
    read_weights = []
    for k in range(reads):
        b, f, m = over_heads[k] if released else softmax(modes[k])
        weight = b * new_link.T @ old_reads[k] + f * new_link @ old_reads[k]
        by_content = content(memory, p["read_key"][k], p["read_beta"][k])
        read_weights.append(weight + m * by_content)
    read = np.concatenate([weight @ memory for weight in read_weights])
    return {
        "output": np.concatenate([h, read]),
        "c": c,
        "memory": memory.ravel(),
        "usage": usage,
        "precedence": (1 - write.sum()) * precedence + write,
        "link": new_link.ravel(),
        "read_weights": np.concatenate(read_weights),
        "write_weights": write,
    }


# --- SAM --------------------------------------------------------------------


def digits(counts):
    """Whole numbers as four digits to the base 128, lowest first."""
    counts = np.asarray(counts)
    return np.stack([counts // 128**k % 128 for k in range(4)], -1)


def number(digits):
    return (digits.reshape(-1, 4) @ 128 ** np.arange(4)).astype(int)


def sam(cell, weights, x, s):
    n, w, reads = cell.memory_slots, cell.memory_dim, cell.num_reads
    released, k = cell.variant == "released", min(cell.top_k, cell.memory_slots)
    h, c = lstm(weights, cell.units, x, s["output"], s["c"])
    sizes = {"query": (reads, w)}
    if not released:
        sizes["beta"] = reads
    seen = min(cell.top_k + 1, n)
    sizes |= {"write": w, "gamma": seen if released else 1, "alpha": 1}
    p = cut(
        h @ weights["interface_kernel"] + weights["interface_bias"], **sizes
    )
    memory = s["memory"].reshape(n, w).copy()
    old = s["read_weights"].reshape(reads, n).mean(axis=0)
    last = number(s["accessed"])
    oldest = int(np.argmin(last))
    gamma = np.full(n, sigmoid(p["gamma"][0]))
    if released:
        gamma = np.zeros(n)
        order = np.argsort(-old, kind="stable")[:seen]
        for place, row in enumerate(order):
            gamma[row] = sigmoid(p["gamma"][place])
    indicator = np.eye(n)[oldest]
    write = sigmoid(p["alpha"]) * (gamma * old + (1 - gamma) * indicator)
    memory[oldest] = 0
    memory += np.outer(write, p["write"])
    all_weights = np.zeros((reads, n))
    for head in range(reads):
        scores = np.array([cosine(p["query"][head], row) for row in memory])
        order = np.argsort(-scores, kind="stable")
        if released:
            order = [row for row in order if row != oldest][:k] + [oldest]
            chosen = softmax(scores[order] / w)
        else:
            order = order[:k]
            beta = 1 + softplus(p["beta"][head])
            chosen = softmax(beta * scores[order])
        all_weights[head, order] = chosen
    touched = all_weights.sum(axis=0) + write > 0.005
    touched &= (last > 0) | (write > 0.005)
    last = np.where(touched, s["step"] + 1, last)
    return {
        "output": np.concatenate(
            [h, *(weight @ memory for weight in all_weights)]
        ),
        "c": c,
        "memory": memory.ravel(),
        "read_weights": all_weights.ravel(),
        "accessed": digits(last).ravel().astype(float),
    }


# --- TARDIS and AwTA --------------------------------------------------------


def tardis_logits(cell, weights, from_inputs, from_state, memory, s):
    released = cell.variant == "released"
    usage = number(s["usage"]).astype(float)
    if released:
        usage = usage / np.sqrt(usage @ usage + 1e-6)
    else:
        usage = (usage - usage.mean()) / np.sqrt(usage.var() + 1e-6)
    logits = np.zeros(cell.memory_slots)
    for i in range(cell.memory_slots):
        hidden = np.tanh(
            from_inputs
            + from_state
            + weights["address_keys"][i] @ weights["address_key_kernel"]
            + memory[i] @ weights["address_memory_kernel"]
            + usage @ weights["address_usage_kernel"]
        )
        logits[i] = hidden @ weights["address_vector"][:, 0]
    if "address_norm_gain" in weights:
        logits = normalise(
            logits, weights["address_norm_gain"], weights["address_norm_bias"]
        )
    (last,) = number(s["last_read"])
    if last:
        logits[last - 1] -= 100
    if released:
        logits = logits / np.sqrt(logits @ logits + 1e-6)
    return logits


def note_read(s, slot):
    counts = number(s["usage"])
    counts[slot] += 1
    return {
        "usage": digits(counts).ravel().astype(float),
        "last_read": digits(slot + 1).astype(float),
    }


def tardis(cell, weights, x, s, gumbel=0.0, switches=0.0):
    u, n, w = cell.units, cell.memory_slots, cell.memory_dim
    released = cell.variant == "released"
    h, c, memory = s["output"][:u], s["c"], s["memory"].reshape(n, w).copy()
    logits = tardis_logits(
        cell,
        weights,
        x @ weights["address_kernel"] + weights["address_bias"],
        (c if released else h) @ weights["address_recurrent_kernel"],
        memory,
        s,
    )
    slot = int(np.argmax(logits + gumbel))
    r = memory[slot].copy()
    if not released:
        r = np.concatenate([weights["address_keys"][slot], r])
    entering = np.concatenate([h, r])
    z = x @ weights["switch_kernel"] + weights["switch_bias"]
    z = z + entering @ weights["switch_recurrent_kernel"]
    of_h, of_r = sigmoid((z + switches) / 0.3)
    switched = np.concatenate([of_h * h, of_r * r])
    h, c = lstm(weights, u, x, entering, c, switched)
    value = np.concatenate([x, h]) if released else h
    value = value @ weights["write_kernel"] + weights["write_bias"]
    memory[s["step"] if s["step"] < n else slot] = value
    return {
        "output": np.concatenate([h, r]),
        "c": c,
        "memory": memory.ravel(),
        **note_read(s, slot),
    }


def awta(cell, weights, x, s, gumbel=0.0):
    """The cell of the paper on ARMIN; memory as wide as the state."""
    u, n = cell.units, cell.memory_slots
    h, memory = s["h"], s["memory"].reshape(n, u).copy()
    a = cell.address_units
    columns = x @ weights["kernel"] + weights["bias"]
    logits = tardis_logits(
        cell,
        weights,
        columns[:a],
        h @ weights["address_recurrent_kernel"],
        memory,
        s,
    )
    slot = int(np.argmax(logits + gumbel))
    r = memory[slot].copy()
    both = np.concatenate([h, r])
    gates = sigmoid(
        columns[a : a + 2 * u] + both @ weights["gate_recurrent_kernel"]
    )
    z = columns[a + 2 * u :] + (gates * both) @ weights["recurrent_kernel"]
    i, f, g, o_h, o_r = np.split(z, 5)
    h = sigmoid(f) * h + sigmoid(i) * np.tanh(g)
    memory[s["step"] if s["step"] < n else slot] = h
    return {
        "output": np.concatenate(
            [sigmoid(o_h) * np.tanh(h), sigmoid(o_r) * np.tanh(r)]
        ),
        "h": h,
        "memory": memory.ravel(),
        **note_read(s, slot),
    }


# --- SAB --------------------------------------------------------------------


def sab(cell, weights, x, s):
    u, n = cell.units, cell.memory_slots
    h, c = lstm(weights, u, x, s["output"][:u], s["c"])
    stored = s.get("stored", [])
    candidates = [np.zeros(u), *stored]
    query = h @ weights["query_kernel"] + weights["query_bias"]
    scores = np.array(
        [
            np.tanh(query + m @ weights["key_kernel"])
            @ weights["address_vector"][:, 0]
            for m in candidates
        ]
    )
    ranked = np.sort(scores)[::-1]
    floor = ranked[min(cell.top_k, len(ranked) - 1)]
    above = np.maximum(scores - floor, 0)
    recall = above / (above.sum() + 1e-8)
    recalled = sum(weight * m for weight, m in zip(recall, candidates))
    h = h + recalled
    if s["step"] % cell.store_every == 0:
        stored = [*stored, h][-n:]
    return {"output": np.concatenate([h, recalled]), "c": c, "stored": stored}


# --- IndRNN, RHN and NAS ----------------------------------------------------


def indrnn(cell, weights, x, s):
    z = x @ weights["kernel"] + weights["bias"]
    if "norm_gain" in weights:
        z = normalise(z, weights["norm_gain"], weights["norm_bias"])
    z = z + weights["recurrent_weights"] * s["output"]
    return {"output": np.where(z > 0, z, 0)}


def highway(cell, weights, prefix, x, s, scales):
    """s_1 to s_depth; `scales` are of the sums of each layer."""
    found = []
    for layer in range(1, cell.depth + 1):
        blocks = []
        for block in range(2 if cell.coupled else 3):
            columns = slice(block * len(s), (block + 1) * len(s))
            z = s @ weights[f"{prefix}recurrent_kernel_{layer}"][:, columns]
            if layer == 1:
                z = z + x @ weights[f"{prefix}kernel"][:, columns]
            z = z * scales[layer - 1]
            z = z + weights[f"{prefix}bias_{layer}"][columns]
            norm = f"{prefix}layer_{layer}_norm_"
            if f"{norm}gain" in weights:
                gain, bias = weights[f"{norm}gain"], weights[f"{norm}bias"]
                z = normalise(z, gain[columns], bias[columns])
            blocks.append(z)
        h, t = np.tanh(blocks[0]), sigmoid(blocks[1])
        carry = 1 - t if cell.coupled else sigmoid(blocks[2])
        s = h * t + s * carry
        found.append(s)
    return found


def rhn(cell, weights, x, s):
    ones = np.ones(cell.depth)
    return {"output": highway(cell, weights, "", x, s["output"], ones)[-1]}


def hyper_rhn(cell, weights, x, s):
    ones = np.ones(cell.depth)
    small = highway(cell, weights, "hyper_", x, s["hyper"], ones)
    scales = [
        state @ weights[f"scale_kernel_{layer}"]
        + weights[f"scale_bias_{layer}"]
        for layer, state in enumerate(small, 1)
    ]
    large = highway(cell, weights, "", x, s["output"], scales)
    return {"output": large[-1], "hyper": small[-1]}


def nas(cell, weights, x, s):
    a, m = [], []
    for leaf in range(8):
        columns = slice(leaf * cell.units, (leaf + 1) * cell.units)
        of_x = x @ weights["kernel"][:, columns]
        of_h = s["output"] @ weights["recurrent_kernel"][:, columns]
        of_h = of_h + weights["bias"][columns]
        if "input_norm_gain" in weights:
            of_x, of_h = (
                normalise(
                    z,
                    weights[f"{name}_norm_gain"][columns],
                    weights[f"{name}_norm_bias"][columns],
                )
                for z, name in ((of_x, "input"), (of_h, "recurrent"))
            )
        a.append(of_x)
        m.append(of_h)
    left = np.tanh(sigmoid(a[0] + m[0]) * np.maximum(a[1] + m[1], 0))
    right = np.tanh(sigmoid(a[2] + m[2]) + np.maximum(a[3] * m[3], 0))
    c = np.tanh(left + s["c"]) * right
    inner = np.tanh(np.tanh(a[4] + m[4]) * sigmoid(a[5] + m[5]))
    inner = inner + sigmoid(np.tanh(a[6] + m[6]) + sigmoid(a[7] + m[7]))
    h = np.tanh(c * np.tanh(inner))
    if "projection_kernel" in weights:
        h = h @ weights["projection_kernel"]
    return {"output": h, "c": c}


# --- FS-LSTM, HyperLSTM and HM-LSTM -----------------------------------------


def of_prefix(weights, prefix):
    """Weights whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def zoned(keep, new, old):
    """h and c after zoneout, each of a pair."""
    return [k * o + (1 - k) * n for k, n, o in zip(keep, new, old)]


def fs_lstm(cell, weights, x, s, zoneout=0.0, zoneout_cell=0.0):
    u, k = cell.units, cell.fast_cells
    width, ends = k * u + cell.slow_units, [u * (i + 1) for i in range(k)]
    masks = (np.broadcast_to(m, width) for m in (zoneout, zoneout_cell))
    *of_fast, of_slow = zip(*(np.split(m, ends) for m in masks))
    fast, slow = (s["output"], s["fast_c"]), (s["slow"], s["slow_c"])
    own = of_prefix(weights, "fast_1_")
    fast = zoned(of_fast[0], lstm(own, u, x, *fast), fast)
    own = of_prefix(weights, "slow_")
    new = lstm(own, cell.slow_units, fast[0], *slow)
    slow = zoned(of_slow, new, slow)
    own = of_prefix(weights, "fast_2_")
    fast = zoned(of_fast[1], lstm(own, u, slow[0], *fast), fast)
    for i in range(2, k):
        own = of_prefix(weights, f"fast_{i + 1}_")
        own["kernel"] = np.zeros((1, 4 * u))
        fast = zoned(of_fast[i], lstm(own, u, np.zeros(1), *fast), fast)
    return {
        "output": fast[0],
        "slow": slow[0],
        "fast_c": fast[1],
        "slow_c": slow[1],
    }


def hyper_lstm(cell, weights, x, s, zoneout=0.0, zoneout_cell=0.0):
    u, n = cell.units, cell.embedding_units
    own = of_prefix(weights, "hyper_")
    entering = np.concatenate([s["hyper"], s["output"]])
    hyper, hyper_c = lstm(own, cell.hyper_units, x, entering, s["hyper_c"])
    # An LSTM with the kernels and the bias of this very step.
    now = dict(weights)
    kernels = {"recurrent": "recurrent_kernel", "input": "kernel"}
    for part in ("recurrent", "input", "bias"):
        scales = []
        for gate in range(4):
            columns = slice(gate * n, (gate + 1) * n)
            z = hyper @ weights[f"{part}_embedding_kernel"][:, columns]
            if part != "bias":
                z = z + weights[f"{part}_embedding_bias"][columns]
            columns = slice(gate * u, (gate + 1) * u)
            scales.append(z @ weights[f"{part}_scale_kernel"][:, columns])
        scales = np.concatenate(scales)
        if part == "bias":
            now["bias"] = weights["bias"] + scales
        else:
            now[kernels[part]] = weights[kernels[part]] * scales
    old = s["output"], s["c"]
    h, c = zoned((zoneout, zoneout_cell), lstm(now, u, x, *old), old)
    return {"output": h, "c": c, "hyper": hyper, "hyper_c": hyper_c}


def hm_lstm(cell, weights, x, s):
    u, levels = cell.units, cell.levels
    h, c = np.split(s["output"], levels), np.split(s["c"], levels)
    old_h, ended = list(h), [*s["boundaries"], 0.0]
    below, entering, found = 1.0, x, []
    for k in range(levels):
        z = old_h[k] @ weights[f"recurrent_kernel_{k + 1}"]
        if k < levels - 1 and ended[k] == 1:
            z = z + old_h[k + 1] @ weights[f"top_down_kernel_{k + 1}"]
        if below == 1:
            z = z + entering @ weights[f"kernel_{k + 1}"]
        z = z + weights[f"bias_{k + 1}"]
        i, f, o, j = np.split(z[: 4 * u], 4)
        if f"level_{k + 1}_norm_gain" in weights:
            gains = np.split(weights[f"level_{k + 1}_norm_gain"], 4)
            biases = np.split(weights[f"level_{k + 1}_norm_bias"], 4)
            i, f, o, j = map(normalise, (i, f, o, j), gains, biases)
        if ended[k] == 1:
            c[k] = sigmoid(i) * np.tanh(j)
        elif below == 1:
            c[k] = sigmoid(f) * c[k] + sigmoid(i) * np.tanh(j)
        if ended[k] == 1 or below == 1:
            shown = c[k]
            if f"state_{k + 1}_norm_gain" in weights:
                gain = weights[f"state_{k + 1}_norm_gain"]
                bias = weights[f"state_{k + 1}_norm_bias"]
                shown = normalise(shown, gain, bias)
            h[k] = sigmoid(o) * np.tanh(shown)
        entering = h[k]
        if k < levels - 1:
            soft = min(1, max(0, (weights["slope"] * z[-1] + 1) / 2))
            below = 1.0 if soft > 0.5 else 0.0
            found.append(below)
    return {
        "output": np.concatenate(h),
        "c": np.concatenate(c),
        "boundaries": np.array(found),
    }


STEPS = {
    "IndRNN": indrnn,
    "RHN": rhn,
    "HyperRHN": hyper_rhn,
    "NAS": nas,
    "FSLSTM": fs_lstm,
    "HyperLSTM": hyper_lstm,
    "HMLSTM": hm_lstm,
    "NTM": ntm,
    "DNC": dnc,
    "SAM": sam,
    "TARDIS": tardis,
    "AwTA": awta,
    "SAB": sab,
}


def run(name, cell, weights, x, start, noise=None):
    """Outputs `(batch, time, output)` and the last states by name.

    `start` and `noise` hold arrays by name, `(batch, size)` and
    `(batch, time, size)`.
    """
    outputs, finals = [], []
    for b, sequence in enumerate(x):
        states, row = {k: v[b] for k, v in start.items()}, []
        for t, x_t in enumerate(sequence):
            drawn = {k: v[b, t] for k, v in (noise or {}).items()}
            states = STEPS[name](
                cell, weights, x_t, {**states, "step": t}, **drawn
            )
            row.append(states["output"])
        outputs.append(row)
        finals.append(states)
    return np.array(outputs), finals
