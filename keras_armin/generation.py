"""Text generation: token ids sampled one after the other from a model."""

import random
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_armin import backends
from keras_armin import keras_private
from keras_armin import sampling
from keras_armin import validation
from keras_armin.step_model import step_model

# Tokens that a compiled loop generates at once. More are generated piece by
# piece, so that any length takes a loop of this size and little memory.
_PIECE = 1024
# With more than this, noise times temperature may exceed float32. Logits make
# no difference long before.
_LARGEST_TEMPERATURE = 1e30
# In place of a token id where the model's logits are NaN.
_NAN = -1


def generate(
    model: keras.Model,
    prompt: Any,
    length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | Sequence[int] | None = 0,
) -> list[int] | list[list[int]]:
    """Continue a prompt with tokens sampled from a language model.

    To generate repeatedly, or token by token, use `keras_armin.Generator`,
    which compiles its loop only once.

    Args:
        model: A built functional or `Sequential` model from token ids
            `(batch, time)` to logits `(batch, time, vocabulary)`, or to those
            of the last step alone. Its layers have to be supported by
            `keras_armin.step_model`: any recurrent layer of Keras or of this
            package, and layers that process steps independently.
        prompt: Sequence of at least one token id, or a batch of such
            sequences, which may differ in length.
        length: int. Number of tokens to generate.
        temperature: float. Sampling temperature, 0 to 1e30; with 0 the most
            likely token is always taken. Defaults to `1.0`.
        top_k: int. Sample from this many most likely tokens, all if there are
            fewer. Defaults to `None`, all of them.
        seed: int, the same for every prompt, or one for each prompt of a
            batch. A prompt is continued in the same way alone and in any batch
            (up to rounding). `None` draws a new seed for each prompt, in each
            call; `keras.utils.set_random_seed` makes them reproducible.
            Defaults to `0`.

    Returns:
        List of `length` token ids, the prompt not included; for a batch of
        prompts a list of such lists.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None,), dtype="int32"),
    ...     keras.layers.Embedding(10, 4),
    ...     keras_armin.ARMIN(8, memory_slots=4, return_sequences=True),
    ...     keras.layers.Dense(10)])
    >>> len(keras_armin.generate(model, [3, 1, 4], length=5))
    5
    >>> [len(x) for x in keras_armin.generate(model, [[3, 1], [4]], length=5)]
    [5, 5]
    """
    return Generator(model)(prompt, length, temperature, top_k, seed)


class _Request(NamedTuple):
    """Checked arguments of a call."""

    prompts: list[np.ndarray]
    is_batch: bool
    length: int
    options: tuple  # temperature and top_k, as tensors
    seeds: list[int]  # one for all prompts, or one for each


class Generator:
    """Generates token ids with the current weights of a model.

    A call takes the arguments of `keras_armin.generate` after the model, and
    returns the same. On TensorFlow and JAX the loop is traced once, and reused
    as long as the size of the batch and the lengths, rounded up to a power of
    two, stay the same; on torch it runs step by step. Beyond 1,024 tokens the
    loop is called again for the next ones: of a very long text only the token
    ids are kept. `stream` keeps nothing, and its first token comes at once.

    Args:
        model: As for `keras_armin.generate`.
        stepwise: As for `keras_armin.step_model`.
        jit_compile: bool. Compile with XLA on TensorFlow, and with
            `torch.compile` on PyTorch, which needs a C++ compiler and warns
            without one. That takes some seconds for each size of batch and
            makes a token several times as fast. JAX always compiles. Defaults
            to `False`.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((None,), dtype="int32"),
    ...     keras.layers.Embedding(10, 4),
    ...     keras_armin.ARMIN(8, memory_slots=4, return_sequences=True),
    ...     keras.layers.Dense(10)])
    >>> generator = keras_armin.Generator(model)
    >>> ids = generator([3, 1, 4], length=5, temperature=0.8, seed=1)
    >>> ids == list(generator.stream([3, 1, 4], 5, temperature=0.8, seed=1))
    True
    """

    def __init__(
        self,
        model: keras.Model,
        stepwise: tuple = (),
        jit_compile: bool = False,
    ) -> None:
        self._step = step_model(model, stepwise=stepwise)
        _check_model(model, self._step)
        self.vocabulary_size: int = self._step.outputs[0].shape[-1]
        # An embedding may have more tokens, such as one to start with.
        self._input_size = min(
            [
                layer.input_dim
                for layer in keras_private.all_layers(model)
                if isinstance(layer, keras.layers.Embedding)
            ],
            default=self.vocabulary_size,
        )
        if self._input_size < self.vocabulary_size:
            raise ValueError(
                "Argument `model` must take every token that it can generate. "
                f"'{model.name}' returns logits of {self.vocabulary_size} "
                f"tokens, but its Embedding has {self._input_size}."
            )
        jit_compile = validation.flag("jit_compile", jit_compile)

        def loop(function):
            return backends.compiled(function, self._step, jit_compile)

        def body(function):
            if not jit_compile:
                return function
            return backends.compiled_step(function, self._step)

        self._next_states = body(self._states_after)
        self._next = body(self._next_tokens)
        self._read = loop(self._read_prompts)
        self._write = loop(self._write_tokens)
        self._write_one = loop(self._next)

    def __call__(
        self,
        prompt: Any,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | Sequence[int] | None = 0,
    ) -> list[int] | list[list[int]]:
        request = self._check(prompt, length, temperature, top_k, seed)
        found = self._generate(request)
        return found if request.is_batch else found[0]

    def stream(
        self,
        prompt: Any,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | Sequence[int] | None = 0,
    ) -> Iterator[int] | Iterator[list[int]]:
        """Yield the tokens of a call with these arguments one by one.

        Args:
            prompt, length, temperature, top_k, seed: As for
                `keras_armin.generate`.

        Returns:
            Iterator over `length` token ids; for a batch of prompts, over
            lists with the next token id of each.
        """
        request = self._check(prompt, length, temperature, top_k, seed)
        # A function of its own: arguments are checked before the first token.
        tokens = self._stream(request)
        return tokens if request.is_batch else (ids[0] for ids in tokens)

    def _generate(self, request):
        if request.length == 0:
            return [[] for _ in request.prompts]
        rngs = [np.random.default_rng(seed) for seed in request.seeds]
        carried = self._after_all_but_last(request.prompts)
        size, written = min(_rounded_up(request.length), _PIECE), []
        for start in range(0, request.length, size):
            length = min(size, request.length - start)
            tokens, *carried = self._write(
                ops.convert_to_tensor(length, "int32"),
                ops.convert_to_tensor(self._draw_noise(rngs, length, size)),
                *request.options,
                *carried,
            )
            written.append(_checked(ops.convert_to_numpy(tokens)[:length]))
        return np.concatenate(written).T.tolist()

    def _draw_noise(self, rngs, length, size):
        """Noise for `length` tokens, in an array for `size` of them."""
        noise = np.zeros((size, len(rngs), self.vocabulary_size), "float32")
        for column, rng in enumerate(rngs):
            noise[:length, column] = sampling.gumbel_noise(
                rng, length, self.vocabulary_size
            )
        return noise

    def _stream(self, request):
        rngs = [np.random.default_rng(seed) for seed in request.seeds]
        ids, *states = self._after_all_but_last(request.prompts)
        for _ in range(request.length):
            noise = np.stack(
                [sampling.gumbel_noise(r, self.vocabulary_size) for r in rngs]
            )
            ids, *states = self._write_one(
                ops.convert_to_tensor(noise), *request.options, ids, *states
            )
            yield _checked(ops.convert_to_numpy(ids)).tolist()

    def _after_all_but_last(self, prompts):
        """The last token of each prompt, and the states before it."""
        states = self._step.initial_tensors(len(prompts))
        last = np.array([row[-1] for row in prompts], "int32")
        steps = max(len(row) for row in prompts) - 1
        if steps > 0:
            # All end together: shorter ones start later.
            size = _rounded_up(steps)
            ids = np.zeros((size, len(prompts)), "int32")
            start = np.array([size + 1 - len(row) for row in prompts], "int32")
            for column, row in enumerate(prompts):
                ids[start[column] :, column] = row[:-1]
            states = self._read(
                ops.convert_to_tensor(ids),
                ops.convert_to_tensor(start),
                *states,
            )
        return ops.convert_to_tensor(last), *states

    def _read_prompts(self, ids, start, *states):
        def one_step(time, *states):
            new_states = self._next_states(ids[time], *states)
            started = ops.expand_dims(time >= start, axis=1)
            return time + 1, *(
                ops.where(started, new, old)
                for new, old in zip(new_states, states)
            )

        _, *states = ops.while_loop(
            lambda time, *_: time < ids.shape[0],
            one_step,
            (ops.min(start), *states),
        )
        return states

    def _write_tokens(self, length, noise, temperature, top_k, ids, *states):
        places = ops.expand_dims(ops.arange(noise.shape[0], dtype="int32"), 1)

        def one_step(time, written, ids, *states):
            ids, *states = self._next(
                noise[time], temperature, top_k, ids, *states
            )
            written = ops.where(places == time, ids, written)
            return time + 1, written, ids, *states

        start = ops.zeros((), "int32")
        written = ops.zeros((noise.shape[0], ids.shape[0]), "int32")
        _, *written_and_carried = ops.while_loop(
            lambda time, *_: time < length,
            one_step,
            (start, written, ids, *states),
        )
        return written_and_carried

    def _states_after(self, ids, *states):
        _, *states = self._step([ids, *states], training=False)
        return states

    def _next_tokens(self, noise, temperature, top_k, ids, *states):
        ids = ops.maximum(ids, 0)  # a loop goes on after a `_NAN`
        logits, *states = self._step([ids, *states], training=False)
        logits = ops.cast(logits, "float32")
        ids = sampling.sample(ops, logits, noise, temperature, top_k)
        ids = ops.where(ops.any(ops.isnan(logits), axis=-1), _NAN, ids)
        return ops.cast(ids, "int32"), *states

    def _check(self, prompt, length, temperature, top_k, seed):
        prompts, is_batch = self._check_prompt(prompt)
        return _Request(
            prompts,
            is_batch,
            validation.count("length", length),
            self._check_options(temperature, top_k),
            _check_seed(seed, len(prompts), is_batch),
        )

    def _check_options(self, temperature, top_k):
        temperature = validation.between(
            "temperature", temperature, 0, _LARGEST_TEMPERATURE
        )
        top_k = validation.size_or_default("top_k", top_k, self.vocabulary_size)
        top_k = min(top_k, self.vocabulary_size)
        return (
            ops.convert_to_tensor(temperature, "float32"),
            ops.convert_to_tensor(top_k, "int32"),
        )

    def _check_prompt(self, prompt):
        """A list of arrays, and whether it was a batch."""
        given = list(_rows(prompt))
        rows = [_array(row, prompt) for row in given]
        is_batch = any(row.ndim > 0 for row in rows)
        rows = rows if is_batch else [_array(given, prompt)]
        for row in rows:
            self._check_ids(row)
        return rows, is_batch

    def _check_ids(self, row):
        if row.size == 0:
            raise ValueError(f"{_PROMPT} Received: an empty prompt")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            advice = " Encode text first." if row.dtype.kind in "US" else ""
            received = _shortened(row.tolist())
            raise TypeError(f"{_PROMPT} Received: {received}.{advice}")
        unknown = row[(row < 0) | (row >= self._input_size)]
        if unknown.size:
            raise ValueError(
                "Argument `prompt` must hold token ids from 0 to "
                f"{self._input_size - 1}, those that the model takes. "
                f"Received: {unknown.tolist()[:10]}"
            )


_PROMPT = (
    "Argument `prompt` must be a sequence of at least one token id, or a batch "
    "of such sequences."
)


def _rows(prompt):
    """What a prompt consists of: token ids, or sequences of them."""
    if isinstance(prompt, (str, bytes, list, tuple, range)):
        return prompt
    if np.ndim(prompt) == 0:
        raise TypeError(f"{_PROMPT} Received: {_shortened(prompt)}")
    return ops.convert_to_numpy(prompt)


def _array(row, prompt):
    try:
        return np.asarray(row)
    except ValueError as error:  # sequences of different lengths
        raise TypeError(f"{_PROMPT} Received: {_shortened(prompt)}") from error


def _shortened(value):
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_seed(seed, size, is_batch):
    """A list of seeds: of one for all, or of one for each prompt."""
    if seed is None:
        # Like Keras, from the generator that `set_random_seed` seeds.
        return [random.getrandbits(32) for _ in range(size)]
    if not is_batch or not isinstance(seed, (list, tuple, range, np.ndarray)):
        return [validation.count("seed", seed)]
    if len(seed) != size:
        raise ValueError(
            "Argument `seed` must be an integer, one integer for each of the "
            f"{size} prompts, or None. Received: {len(seed)} of them"
        )
    return [validation.count("seed", one) for one in seed]


def _checked(tokens):
    if (tokens == _NAN).any():
        raise FloatingPointError(
            "The logits of the model are NaN, which leaves nothing to sample "
            "from. Check its weights: did training diverge?"
        )
    return tokens


def _rounded_up(length):
    """To a power of two, so that few lengths need compiling."""
    return 1 << (length - 1).bit_length()


def _check_model(model, step):
    inputs = step.inputs[: len(step.inputs) - step.num_states]
    shapes = [tuple(x.shape) for x in inputs]
    if len(shapes) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "Argument `model` must take one sequence of token ids, (batch, "
            f"time). '{model.name}' takes per step: {shapes}"
        )
    outputs = [tuple(x.shape) for x in step.outputs[: step.num_outputs]]
    if len(outputs) != 1 or len(outputs[0]) != 2:
        raise ValueError(
            "Argument `model` must return one tensor of logits, (batch, time, "
            f"vocabulary). '{model.name}' returns per step: {outputs}"
        )
    last = model.layers[-1]
    activation = getattr(last, "activation", None)
    if (
        isinstance(last, keras.layers.Softmax)
        or activation is keras.activations.softmax
    ):
        raise ValueError(
            f"Argument `model` must return logits. The last layer of "
            f"'{model.name}', '{last.name}', applies a softmax: remove it, and "
            "train with a loss that has `from_logits=True`."
        )
