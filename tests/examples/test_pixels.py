"""Permuted pixels: the permutation, the splits, the order of the samples."""

import importlib.util
import sys

import numpy as np
import pytest

tf = pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples.support.cli import RunError  # noqa: E402
from examples.support.data import pixels  # noqa: E402
from tests.helpers.common import slow_except_on  # noqa: E402

# Data is NumPy and tf.data on every backend.
pytestmark = slow_except_on("tensorflow")


def samples(count):
    """Images of one pixel that holds the image's number, as does the label."""
    numbers = np.arange(count)
    return numbers.astype("float32")[:, None, None], numbers.astype("int32")


def labels(dataset, batches):
    return [y.tolist() for _, y in dataset.take(batches).as_numpy_iterator()]


def test_the_permutation_is_that_of_the_released_code():
    order = pixels.permutation(784)

    assert order[:6].tolist() == [649, 265, 111, 301, 339, 559]
    assert sorted(order) == list(range(784))


def test_pixels_are_scaled_and_permuted_and_each_is_a_step():
    images = np.arange(2 * 4, dtype="uint8").reshape(2, 2, 2, 1)
    found = pixels._scrambled(images, np.array([3, 4]), largest=10)

    assert found.images.dtype == "float32" and found.labels.dtype == "int32"
    order = np.random.RandomState(1).permutation(4)
    np.testing.assert_allclose(
        found.images,
        np.float32([order / 10, (4 + order) / 10])[..., None],
        rtol=1e-6,
    )


def test_standardized_pixels_are_measured_on_the_training_images():
    found = pixels.standardized(pixels.load("digits"))

    assert found.training.images.dtype == "float32"
    assert abs(found.training.images.mean()) < 1e-5
    assert abs(found.training.images.std() - 1) < 1e-5
    # The same black in each part, and no two greys alike.
    assert len({part.images.min() for part in found}) == 1
    assert len(np.unique(found.training.images)) == 17


def test_the_digits_are_cut_into_three_that_share_nothing():
    splits = pixels.load("digits")

    assert [len(part) for part in splits] == [1437, 180, 180]
    for part in splits:
        assert part.images.shape == (len(part), 64, 1)
        assert part.images.min() == 0.0 and part.images.max() == 1.0
        assert set(part.labels) == set(range(10))
    seen = [image.tobytes() for part in splits for image in part.images]
    assert len(set(seen)) == 1797


def test_each_pass_is_a_new_order_of_all_samples():
    passes = labels(pixels.training_batches(*samples(12), 4, seed=1), 3 * 3)
    first, second, third = (
        np.ravel(passes[start : start + 3]).tolist() for start in (0, 3, 6)
    )

    assert sorted(first) == sorted(second) == sorted(third) == list(range(12))
    assert first != second and second != third and first != third


def test_images_stay_with_their_labels():
    dataset = pixels.training_batches(*samples(6), 2, seed=1)
    for images, numbers in dataset.take(4).as_numpy_iterator():
        assert images.shape == (2, 1, 1)
        np.testing.assert_array_equal(images[:, 0, 0], numbers)


def test_what_does_not_fill_a_batch_is_left_out_and_not_always_the_same():
    batches = labels(pixels.training_batches(*samples(7), 3, seed=1), 2 * 8)
    left_out = set()
    for start in range(0, 16, 2):
        used = set(np.ravel(batches[start : start + 2]))
        assert len(used) == 6
        left_out |= set(range(7)) - used

    assert len(left_out) > 1


@pytest.mark.parametrize("first_step", [1, 3, 4, 8])
def test_the_stream_goes_on_from_any_step(first_step):
    """In the middle of a pass, at its end, in another."""

    def stream(count, **options):
        dataset = pixels.training_batches(*samples(10), 3, **options)
        return labels(dataset, count)

    whole = stream(10, seed=1)
    assert whole[first_step:] == stream(
        10 - first_step, seed=1, first_step=first_step
    )
    assert whole != stream(10, seed=2)


def test_a_batch_larger_than_the_data_is_explained():
    with pytest.raises(RunError, match="--batch-size 4 .* train with: 3"):
        pixels.training_batches(*samples(3), 4, seed=1)


@pytest.mark.parametrize(
    ("count", "size"), [(180, 180), (600, 300), (7, 7), (509, 1)]
)
def test_evaluation_sees_all_samples_once_in_batches_of_one_shape(count, size):
    batches = labels(pixels.evaluation_batches(*samples(count)), -1)

    assert np.ravel(batches).tolist() == list(range(count))
    assert {len(batch) for batch in batches} == {size}


class FakeBuilder:
    URL = "https://localhost/"

    def __init__(self, prepared, as_dataset):
        self.is_prepared = lambda: prepared
        self.as_dataset = as_dataset

    def download_and_prepare(self):
        raise OSError("no network\nand more lines")


@pytest.fixture
def fake_tfds(monkeypatch):
    """TensorFlow Datasets whose builder and data a test can set."""
    tfds = pytest.importorskip("tensorflow_datasets")

    def set_to(prepared, load):
        builder = FakeBuilder(prepared, load)
        monkeypatch.setattr(tfds, "builder", lambda *_, **__: builder)
        monkeypatch.setattr(tfds, "as_numpy", lambda data: data)
        monkeypatch.setattr("requests.head", lambda *_, **__: None)

    return set_to


def test_mnist_is_cut_where_it_should_be(fake_tfds, monkeypatch):
    # One pixel each: the whole of MNIST would take its time.
    def numbered(count):
        images = (np.arange(count) % 256).astype("uint8")
        return images.reshape(count, 1, 1, 1), np.arange(count)

    fake_tfds(True, lambda *_, **__: (numbered(60_000), numbered(10_000)))
    splits = pixels.load("mnist")

    assert [len(part) for part in splits] == [54_000, 6_000, 10_000]
    assert splits.training.labels[-1] == 53_999
    assert splits.validation.labels[[0, -1]].tolist() == [54_000, 59_999]
    assert splits.test.images[255].item() == 1.0


def test_mnist_that_cannot_be_fetched_is_explained(fake_tfds):
    fake_tfds(False, None)
    with pytest.raises(RunError) as caught:
        pixels.load("mnist", "somewhere")

    message = str(caught.value)
    assert "MNIST could not be loaded from somewhere" in message
    assert "\n" not in message
    assert "OSError: no network" in message
    assert "--data-dir" in message and "--data digits" in message


def test_without_a_network_there_is_no_waiting(fake_tfds, monkeypatch):
    fake_tfds(False, None)

    def unreachable(url, timeout):
        raise ConnectionError(f"{url} in {timeout} s")

    monkeypatch.setattr("requests.head", unreachable)
    monkeypatch.delattr(FakeBuilder, "download_and_prepare")
    with pytest.raises(RunError, match="ConnectionError: https://localhost/"):
        pixels.load("mnist", "somewhere")


def test_damaged_files_of_mnist_are_explained(fake_tfds, tmp_path):
    def broken(*_, **__):
        raise tf.errors.DataLossError(None, None, "truncated record")

    fake_tfds(True, broken)
    why = "DataLossError: truncated record.*damaged.*--data digits"
    with pytest.raises(RunError, match=why):
        pixels.load("mnist", tmp_path)


def test_real_files_that_are_damaged_are_explained(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text('{"name"')

    with pytest.raises(RunError, match="JSON.*damaged"):
        pixels.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("data", "module"),
    [("digits", "sklearn"), ("mnist", "tensorflow_datasets")],
)
def test_a_missing_library_is_named_with_what_installs_it(
    data, module, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=rf"{module}.*keras-armin\[examples\]"):
        pixels.load(data)


def test_what_tfds_needs_to_download_is_installed():
    # It does not declare this one itself.
    assert importlib.util.find_spec("importlib_resources")
