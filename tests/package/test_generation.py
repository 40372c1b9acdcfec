"""Tokens sampled from a model: compiled, step by step, and in NumPy."""

import keras
import numpy as np
import pytest

import keras_armin
from keras_armin import ARMIN
from keras_armin import generation
from keras_armin import sampling
from tests.helpers.common import BACKEND
from tests.helpers.common import array

TOKENS = 7
PROMPT = [1, 0, 2]


def randomised(model):
    """Untrained networks would say the same whatever they are given."""
    rng = np.random.default_rng(5)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model


def language_model(*layers, tokens=TOKENS):
    return randomised(
        keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(tokens, 4),
                *layers,
                keras.layers.Dense(TOKENS),
            ]
        )
    )


@pytest.fixture(scope="module")
def model():
    return language_model(ARMIN(6, memory_slots=3, return_sequences=True))


@pytest.fixture(scope="module")
def generator(model):
    return keras_armin.Generator(model)


LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], "float32"))
PROBABILITIES = {
    (1.0, 9): [0.4, 0.3, 0.2, 0.1],
    (0.5, 9): [16 / 30, 9 / 30, 4 / 30, 1 / 30],
    (1.0, 2): [4 / 7, 3 / 7, 0, 0],
    (0.0, 9): [1, 0, 0, 0],
}


@pytest.mark.parametrize("temperature, top_k", PROBABILITIES)
def test_tokens_come_as_often_as_they_should(temperature, top_k, rng):
    noise = sampling.gumbel_noise(rng, 4000, 4)
    logits = np.tile(LOGITS, (4000, 1))
    chosen = sampling.sample(np, logits, noise, temperature, top_k)
    found = np.bincount(chosen, minlength=4) / 4000
    expected = PROBABILITIES[temperature, top_k]
    np.testing.assert_allclose(found, expected, atol=0.03)


@pytest.mark.parametrize("temperature, top_k", PROBABILITIES)
def test_keras_samples_as_numpy_does(temperature, top_k, rng):
    noise = sampling.gumbel_noise(rng, 30, 4)
    logits = rng.normal(size=(30, 4)).astype("float32")
    found = sampling.sample(
        keras.ops,
        *map(keras.ops.convert_to_tensor, (logits, noise)),
        temperature,
        top_k,
    )
    expected = sampling.sample(np, logits, noise, temperature, top_k)
    np.testing.assert_array_equal(array(found), expected)


def test_noise_is_the_same_by_rows_and_at_once():
    at_once = sampling.gumbel_noise(np.random.default_rng(3), 4, 5)
    rng = np.random.default_rng(3)
    by_rows = [sampling.gumbel_noise(rng, 5) for _ in range(4)]
    np.testing.assert_array_equal(at_once, by_rows)


@pytest.mark.slow("jax")
def test_the_most_likely_text_is_that_of_the_whole_model(model, generator):
    ids = generator(PROMPT, length=6, temperature=0)

    logits = model.predict_on_batch(np.array([[*PROMPT, *ids]]))
    most_likely = np.asarray(logits)[0].argmax(axis=-1)
    assert ids == most_likely[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.slow("jax")
@pytest.mark.slow_after(1, "tensorflow")
def test_numpy_generates_the_same_from_the_step_model(model, generator):
    step = keras_armin.step_model(model)

    def one_step(token, states):
        logits, *states = step([np.array([token]), *states])
        return array(logits)[0], states, "more"

    found = sampling.generate_steps(
        one_step, step.initial_states(), PROMPT, 20, 0.9, 4, seed=1
    )
    expected = generator(PROMPT, 20, 0.9, top_k=4, seed=1)
    assert list(found) == [(token, "more") for token in PROMPT + expected]


def test_a_seed_gives_one_text_and_another_seed_another(model, generator):
    first = generator(PROMPT, 20, seed=1)
    assert len(first) == 20 and set(first) <= set(range(TOKENS))
    assert generator(PROMPT, 20, seed=1) == first
    assert generator(PROMPT, 20, seed=2) != first
    assert generator(PROMPT, 20, top_k=1) == generator(
        PROMPT, 20, temperature=0
    )
    assert generator(PROMPT, 20, top_k=99) == generator(PROMPT, 20)
    assert keras_armin.generate(model, PROMPT, 20, seed=1) == first


@pytest.mark.slow("jax", "tensorflow")
def test_without_a_seed_every_text_is_new(model, generator):
    first = generator([PROMPT] * 2, 20, seed=None)
    assert first[0] != first[1]
    assert generator(PROMPT, 20, seed=None) not in first
    assert list(generator.stream(PROMPT, 20, seed=None)) not in first

    keras.utils.set_random_seed(1)
    drawn = generator(PROMPT, 20, seed=None)
    keras.utils.set_random_seed(1)
    assert keras_armin.generate(model, PROMPT, 20, seed=None) == drawn


def test_new_weights_are_used(model, generator):
    before = model.get_weights()
    first = generator(PROMPT, 20, seed=1)
    try:
        rng = np.random.default_rng(1)
        model.set_weights([rng.normal(size=w.shape) for w in before])
        assert generator(PROMPT, 20, seed=1) != first
    finally:
        model.set_weights(before)
    assert generator(PROMPT, 20, seed=1) == first


PROMPTS = [[1, 0, 2], [4], [6, 5, 4, 3, 2, 1], [1, 0, 2]]


@pytest.mark.slow("jax", "tensorflow")
def test_a_prompt_is_continued_alone_as_in_a_batch(generator):
    together = generator(PROMPTS, 12, seed=3)
    assert together == [generator(prompt, 12, seed=3) for prompt in PROMPTS]
    assert together[0] == together[3] != together[1]

    seeds = [3, 4, 5, 6]
    together = generator(PROMPTS, 12, top_k=5, seed=seeds)
    assert together[0] != together[3]
    assert together == [
        generator(prompt, 12, top_k=5, seed=seed)
        for prompt, seed in zip(PROMPTS, seeds)
    ]


def test_a_stream_yields_what_a_call_returns(generator):
    options = {"temperature": 0.8, "top_k": 5, "seed": 2}
    tokens = generator.stream(PROMPT, 12, **options)
    expected = generator(PROMPT, 12, **options)
    assert next(tokens) == expected[0]
    assert list(tokens) == expected[1:]

    steps = list(generator.stream(PROMPTS, 5, **options))
    assert [list(x) for x in zip(*steps)] == generator(PROMPTS, 5, **options)


@pytest.mark.slow("jax", "tensorflow")
def test_prompts_may_be_arrays_and_tensors(generator):
    expected = generator([[1, 2], [3, 4]], 4)
    ids = np.array([[1, 2], [3, 4]], "uint8")
    assert generator(ids, 4) == expected
    assert generator(keras.ops.convert_to_tensor(ids), 4) == expected
    assert generator(bytes([3, 4]), 4) == expected[1]
    assert generator(ids[0], np.int64(4), seed=np.int64(0)) == expected[0]


def test_nothing_is_generated_if_nothing_is_asked_for(generator):
    assert generator(PROMPT, 0) == list(generator.stream(PROMPT, 0)) == []
    assert generator(PROMPTS, 0) == [[]] * 4


def test_long_texts_are_generated_in_pieces(generator, monkeypatch):
    expected = generator(PROMPT, 20, seed=1)
    monkeypatch.setattr(generation, "_PIECE", 8)
    assert generator(PROMPT, 20, seed=1) == expected


def test_ten_million_tokens_start_at_once(generator, monkeypatch):
    tokens = generator.stream(PROMPT, 10_000_000, seed=1)
    expected = generator(PROMPT, 20, seed=1)
    assert [next(tokens) for _ in range(3)] == expected[:3]

    drawn = []

    def interrupted(rng, *shape):
        drawn.append(shape)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return np.zeros(shape, "float32")

    monkeypatch.setattr(generation, "_PIECE", 8)
    monkeypatch.setattr(sampling, "gumbel_noise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator(PROMPT, 10_000_000)
    assert drawn == [(8, TOKENS)] * 3


def test_extreme_options_have_their_limits_as_results(generator):
    most_likely = generator(PROMPT, 20, temperature=0)
    assert generator(PROMPT, 20, temperature=1e-300) == most_likely
    assert len(set(generator(PROMPT, 20, temperature=1e30))) > 3
    assert generator(PROMPT, 20, top_k=10**12) == generator(PROMPT, 20)
    assert generator(PROMPT, 20, seed=2**200) != generator(PROMPT, 20)
    assert generator(range(3), 20) == generator([0, 1, 2], 20)


@pytest.mark.skipif(BACKEND == "torch", reason="the loop is not compiled")
def test_similar_lengths_share_a_compiled_loop(model, monkeypatch):
    traced = []
    sample = sampling.sample

    def counted(*arguments):
        traced.append(arguments)
        return sample(*arguments)

    monkeypatch.setattr(sampling, "sample", counted)
    generator = keras_armin.Generator(model)
    generator([1] * 5, 12)
    count = len(traced)
    assert count > 0
    assert len(generator([2] * 4, 16)) == 16
    assert len(traced) == count


def with_reset_and_state():
    ids = keras.Input(batch_shape=(2, None), dtype="int32", name="ids")
    reset = keras.Input(batch_shape=(2,), dtype="bool", name="reset")
    x = keras.layers.Embedding(TOKENS, 4)(ids)
    layer = ARMIN(
        6, memory_slots=3, stateful=True, return_sequences=True, zoneout=0.1
    )
    logits = keras.layers.Dense(TOKENS)(layer(x, reset=reset))
    return randomised(keras.Model({"ids": ids, "reset": reset}, logits))


MODELS = {
    "LSTM": lambda: language_model(keras.layers.LSTM(6, return_sequences=True)),
    "last step": lambda: language_model(
        keras.layers.SimpleRNN(6, return_sequences=True),
        keras.layers.Dropout(0.5),
        keras.layers.GRU(6),
    ),
    "stateful": with_reset_and_state,
}


@pytest.mark.slow_after(1, "jax", "tensorflow")
@pytest.mark.parametrize("name", MODELS)
def test_any_recurrent_model_of_tokens_generates(name):
    model = MODELS[name]()
    ids = keras_armin.generate(model, PROMPT, length=4, temperature=0)

    sequence = np.array([[*PROMPT, *ids[:-1]]] * 2, "int32")
    inputs = sequence
    if name == "stateful":
        inputs = {"ids": sequence, "reset": np.ones(2, bool)}
    logits = np.asarray(model.predict_on_batch(inputs))[0]
    last = logits if logits.ndim == 1 else logits[-1]
    assert ids[-1] == last.argmax()


def test_mixed_precision_generates():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = language_model(keras.layers.SimpleRNN(6, return_sequences=True))
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(keras_armin.generate(model, PROMPT, 4)) == 4


def test_a_prompt_may_hold_tokens_that_are_never_generated():
    model = language_model(keras.layers.SimpleRNN(6), tokens=TOKENS + 1)
    ids = keras_armin.generate(model, [TOKENS, 1], 30)
    assert len(ids) == 30 and max(ids) < TOKENS
    with pytest.raises(ValueError, match=r"from 0 to 7.*Received: \[8\]"):
        keras_armin.generate(model, [TOKENS + 1], 30)


@pytest.mark.parametrize("call", ["__call__", "stream"])
@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, "`prompt`.*at least one.*empty", {"prompt": []}),
        (ValueError, "`prompt`.*at least one.*empty", {"prompt": [[1], []]}),
        (ValueError, r"from 0 to 6.*\[7, 9\]", {"prompt": [7, 6, 9]}),
        (ValueError, r"from 0 to 6.*\[-1\]", {"prompt": [[1], [-1]]}),
        (TypeError, "`prompt`.*Encode text first", {"prompt": "abc"}),
        (TypeError, "`prompt`.*Encode text first", {"prompt": ["abc"]}),
        (TypeError, r"`prompt`.*\[1.5\]\.$", {"prompt": [1.5]}),
        (TypeError, "`prompt`", {"prompt": [1, [2]]}),
        (TypeError, "`prompt`", {"prompt": [[[1]]]}),
        (TypeError, r"`prompt`.*\[4\]\]\]$", {"prompt": [[1, 2], [3, [4]]]}),
        (TypeError, "`prompt`.*Received: None$", {"prompt": None}),
        (TypeError, "`prompt`.*Received: 5$", {"prompt": 5}),
        (TypeError, r"`prompt`.*\[None\]", {"prompt": [None]}),
        (TypeError, r"`prompt`.*\[True\]", {"prompt": [True]}),
        (TypeError, r"`prompt`.*\.{4} Encode", {"prompt": "x" * 9999}),
        (ValueError, "`prompt`.*empty", {"prompt": np.zeros((0, 3), "int32")}),
        (ValueError, "`prompt`.*empty", {"prompt": np.zeros((2, 0), "int32")}),
        (ValueError, "`length`.*Received: length=-1", {"length": -1}),
        (TypeError, "`length`.*Received: length=None", {"length": None}),
        (TypeError, "`length`", {"length": 1.5}),
        (ValueError, "`temperature`.*-0.1", {"temperature": -0.1}),
        (ValueError, "`temperature`.*nan", {"temperature": float("nan")}),
        (ValueError, "`temperature`.*=inf", {"temperature": float("inf")}),
        (ValueError, r"from 0 to 1e\+30.*1e\+39", {"temperature": 1e39}),
        (TypeError, "`temperature`.*'hot'", {"temperature": "hot"}),
        (ValueError, "`top_k`.*Received: top_k=0", {"top_k": 0}),
        (TypeError, "`top_k`.*Received: top_k=2.5", {"top_k": 2.5}),
        (TypeError, "`seed`.*Received: seed='a'", {"seed": "a"}),
        (TypeError, "`seed`.*Received: seed=1.5", {"seed": 1.5}),
        (ValueError, "`seed`.*Received: seed=-1", {"seed": -1}),
        (TypeError, "`seed`", {"seed": [1]}),
        (ValueError, "`seed`.*2 prompts", {"prompt": [[1]] * 2, "seed": [1]}),
    ],
)
def test_bad_arguments_are_explained(generator, call, error, words, arguments):
    with pytest.raises(error, match=words):
        getattr(generator, call)(**{"prompt": [1], "length": 3, **arguments})


def test_models_that_do_not_generate_are_explained():
    ids = keras.Input((None,))
    x = keras.layers.Embedding(TOKENS, 4)(ids)
    rnn = keras.layers.SimpleRNN(4, return_sequences=True)
    with pytest.raises(ValueError, match="must take one sequence of token ids"):
        inputs = keras.Input((None, 3))
        keras_armin.Generator(keras.Model(inputs, rnn(inputs)))
    rnn = keras.layers.SimpleRNN(4, return_sequences=True)
    y = rnn(x)
    with pytest.raises(ValueError, match="must return one tensor of logits"):
        keras_armin.Generator(keras.Model(ids, [y, y]))
    softmax = keras.layers.Dense(TOKENS, activation="softmax", name="head")
    with pytest.raises(ValueError, match="'head', applies a softmax: remove"):
        keras_armin.Generator(keras.Model(ids, softmax(y)))
    with pytest.raises(ValueError, match="'head', applies a softmax: remove"):
        softmax = keras.layers.Softmax(name="head")
        keras_armin.Generator(keras.Model(ids, softmax(y)))


def test_tokens_that_the_model_cannot_take_are_not_generated():
    model = language_model(keras.layers.SimpleRNN(4), tokens=TOKENS - 1)
    with pytest.raises(ValueError, match="logits of 7.*Embedding has 6"):
        keras_armin.Generator(model)


def test_logits_that_are_nan_are_an_error():
    model = language_model(keras.layers.SimpleRNN(4))
    generator = keras_armin.Generator(model)
    rows, *others = model.get_weights()
    rows[2] = np.nan  # only after that token
    model.set_weights([rows, *others])
    assert len(generator([1, 0], 1, temperature=0)) == 1
    with pytest.raises(FloatingPointError, match="logits of the model are NaN"):
        generator([1, 2, 0], 1)
    with pytest.raises(FloatingPointError, match="logits of the model are NaN"):
        next(generator.stream([[1], [2]], 3))


def test_what_is_no_model_of_sequences_is_explained():
    for wrong in (None, "model.keras", ARMIN(4, memory_slots=2)):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"`model`.*Received: {kind}"):
            keras_armin.generate(wrong, [1], 3)
    head = keras.layers.Dense(TOKENS)
    with pytest.raises(ValueError, match="`model`.*that is built"):
        keras_armin.generate(keras.Sequential([head]), [1], 3)
    with pytest.raises(ValueError, match="`model` must have a recurrent layer"):
        keras_armin.generate(language_model(), [1], 3)
    both = keras.layers.Bidirectional(keras.layers.SimpleRNN(4))
    with pytest.raises(ValueError, match="Bidirectional.*starts from the end"):
        keras_armin.generate(language_model(both), [1], 3)


@pytest.mark.skipif(BACKEND != "torch", reason="others compile the whole loop")
class TestCompiledSteps:
    @pytest.fixture
    def model(self):
        return language_model(ARMIN(6, memory_slots=3, return_sequences=True))

    @pytest.fixture
    def eager_compiler(self, monkeypatch):
        """Traces as `torch.compile` does, and leaves out the C++ compiler."""
        import torch

        calls = []

        def compiler(graph, inputs):
            calls.append(graph)
            return graph.forward

        compile = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda graph: compile(graph, backend=compiler)
        )
        return calls

    def test_they_write_the_same_text(self, model, eager_compiler):
        prompts, seeds = [PROMPT, [4]], [1, 2]
        expected = keras_armin.generate(model, prompts, 20, top_k=4, seed=seeds)
        generator = keras_armin.Generator(model, jit_compile=True)

        assert generator(prompts, 20, top_k=4, seed=seeds) == expected
        assert len(eager_compiler) == 2  # reading and writing, without a break
        stream = list(generator.stream(prompts, 20, top_k=4, seed=seeds))
        assert [list(row) for row in zip(*stream)] == expected
        assert len(eager_compiler) == 2

    def test_they_use_the_current_weights(self, model, eager_compiler):
        generator = keras_armin.Generator(model, jit_compile=True)
        before = generator(PROMPT, 20)
        model.set_weights([-w for w in model.get_weights()])

        assert generator(PROMPT, 20) == keras_armin.generate(model, PROMPT, 20)
        assert generator(PROMPT, 20) != before

    def test_without_a_compiler_there_is_a_warning(self, model, monkeypatch):
        import torch

        def no_compiler(graph, inputs):
            raise RuntimeError("No working C++ compiler found")

        compile = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda graph: compile(graph, backend=no_compiler)
        )
        generator = keras_armin.Generator(model, jit_compile=True)
        with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler"):
            found = generator(PROMPT, 5)

        assert found == keras_armin.generate(model, PROMPT, 5)


@pytest.mark.slow("jax", "torch")  # JAX always compiles
def test_compiled_it_writes_the_same_text(model):
    generator = keras_armin.Generator(model, jit_compile=True)

    expected = keras_armin.generate(model, PROMPT, 20, seed=1)
    assert generator(PROMPT, 20, seed=1) == expected


def test_the_flag_to_compile_is_checked(model):
    with pytest.raises(TypeError, match="jit_compile"):
        keras_armin.Generator(model, jit_compile="yes")
