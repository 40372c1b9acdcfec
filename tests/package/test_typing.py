"""`Typing :: Typed`: the signatures that users see are complete.

`mypy`, which runs with the lint checks, compares them with the code.
"""

import inspect

import keras_armin
from keras_armin import baselines
from keras_armin import callbacks


def public_objects():
    for module in (keras_armin, baselines, callbacks):
        yield from (getattr(module, name) for name in module.__all__)


def as_function(member):
    """The function behind a member of a class, None if there is none."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "__func__", member)
    return member if inspect.isfunction(member) else None


def methods(cls):
    """Constructor, calls and public methods, with those of base classes."""
    for base in cls.__mro__:
        if not base.__module__.startswith("keras_armin."):
            continue
        for name, member in vars(base).items():
            is_public = not name.startswith("_")
            if is_public or name in ("__init__", "__call__"):
                yield as_function(member)


def public_functions():
    """Functions and methods of the public API by their names."""
    found = []
    for value in public_objects():
        if inspect.isclass(value):
            found += methods(value)
        elif inspect.isfunction(value):
            found.append(value)
    return {f"{f.__module__}.{f.__qualname__}": f for f in found if f}


def missing_annotations(function):
    signature = inspect.signature(function)
    annotations = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    }
    annotations["return"] = signature.return_annotation
    return [k for k, v in annotations.items() if v is inspect.Signature.empty]


def test_public_signatures_are_annotated():
    missing = {
        name: missing_annotations(function)
        for name, function in public_functions().items()
    }

    assert {name: names for name, names in missing.items() if names} == {}


def test_the_walk_finds_functions_methods_and_inherited_ones():
    found = public_functions()

    assert {
        "keras_armin.step_model.step_model",
        "keras_armin.armin.ARMIN.__init__",
        "keras_armin.armin.ARMIN.from_config",  # a class method
        "keras_armin.inspection.MemoryTrace.read_slots",  # a property
        "keras_armin.memory_rnn.MemoryRNN.set_state",  # inherited
        "keras_armin.memory_cell.MemoryCell.get_initial_state",  # decorated
        "keras_armin.baselines.ntm.NTMCell.use_memory",
        "keras_armin.callbacks.monitoring.SlotUsage.on_epoch_end",
        "keras_armin.callbacks.monitoring.slot_usage",
    } <= set(found)


def test_what_lacks_an_annotation_is_named():
    def function(a: int, b, *, c: int = 0, **kwargs):
        pass

    assert missing_annotations(function) == ["b", "kwargs", "return"]
