"""Times that can be compared on a busy machine."""

import time

import keras


def best_times(calls, repeats, title, warm_up=2):
    """The shortest of `repeats` runs of each call, and its first, in seconds.

    The calls take turns, so that other load affects all of them, and the
    shortest run is the least disturbed one. The first run includes
    compilation.
    """
    print(title)
    bar = keras.utils.Progbar(len(calls) * (warm_up + repeats), unit_name="run")
    best, first = dict.fromkeys(calls, float("inf")), {}
    for turn in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            first.setdefault(name, seconds)
            if turn >= warm_up:
                best[name] = min(best[name], seconds)
            bar.add(1)
    return best, first
