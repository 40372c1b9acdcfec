"""Text as batches: written out by hand, and files that are not right."""

import gzip
import hashlib
import io
import zipfile

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from examples.support.cli import RunError
from examples.support.data import text
from tests.helpers.common import slow_except_on

# Data is NumPy and tf.data on every backend.
pytestmark = slow_except_on("tensorflow")


def batches(dataset, count):
    return list(dataset.take(count).as_numpy_iterator())


def test_lanes_and_chunks_written_out_by_hand():
    ids = np.arange(17, dtype="uint8")  # lanes 0..7 and 8..15
    found = batches(text.pipeline(ids, batch_size=2, steps=3), 3)

    assert text.chunks(ids, 2, 3) == 2
    np.testing.assert_array_equal(
        [inputs["ids"] for inputs, _ in found],
        [
            [[0, 1, 2], [8, 9, 10]],
            [[3, 4, 5], [11, 12, 13]],
            [[0, 1, 2], [8, 9, 10]],  # the second pass
        ],
    )
    for inputs, targets in found:
        np.testing.assert_array_equal(targets, inputs["ids"] + 1)
        assert inputs["ids"].dtype == targets.dtype == np.int32
    resets = [inputs["reset"].tolist() for inputs, _ in found]
    assert resets == [[True, True], [False, False], [True, True]]


def test_the_last_chunk_needs_a_character_after_it():
    assert text.chunks(np.zeros(2 * 7), 2, 3) == 2
    assert text.chunks(np.zeros(2 * 6), 2, 3) == 1


def test_a_pipeline_begins_at_any_step():
    ids = np.random.default_rng(1).integers(0, 9, 50).astype("uint8")
    whole = batches(text.pipeline(ids, 2, 3), 12)
    rest = batches(text.pipeline(ids, 2, 3, first_step=9), 3)

    for (x, y), (x_later, y_later) in zip(whole[9:], rest):
        np.testing.assert_array_equal(x["ids"], x_later["ids"])
        np.testing.assert_array_equal(x["reset"], x_later["reset"])
        np.testing.assert_array_equal(y, y_later)
    assert rest[0][0]["ids"].tolist() != whole[0][0]["ids"].tolist()


def test_one_pass_ends():
    ids = np.arange(50, dtype="uint8")
    found = list(text.one_pass(ids, 2, 3).as_numpy_iterator())

    assert len(found) == text.chunks(ids, 2, 3) == 8
    assert [inputs["reset"][0] for inputs, _ in found] == [True] + 7 * [False]


def test_to_the_end_leaves_no_character_out():
    ids = np.arange(1, 9, dtype="uint8")
    found = list(text.to_the_end(ids, steps=3).as_numpy_iterator())
    inputs, targets, weights = zip(*found)
    fed = [x["ids"] for x in inputs]

    np.testing.assert_array_equal(np.ravel(fed), [1, 2, 3, 4, 5, 6, 7, 8, 0])
    np.testing.assert_array_equal(
        np.ravel(targets), [2, 3, 4, 5, 6, 7, 8, 0, 0]
    )
    np.testing.assert_array_equal(
        np.ravel(weights), [1, 1, 1, 1, 1, 1, 1, 0, 0]
    )
    assert fed[0].shape == targets[0].shape == weights[0].shape == (1, 3)
    assert [x["reset"].tolist() for x in inputs] == [[True], [False], [False]]


def test_a_short_text_is_refused_with_its_size():
    with pytest.raises(RunError, match=r"1,000 .* 20 .* 50 .* 1,020"):
        text.pipeline(np.zeros(1000, "uint8"), 20, 50)


def test_the_most_frequent_byte_comes_first():
    assert text.by_frequency(b"banana bb") == b"abn "


def test_a_file_is_split_and_indexed(tmp_path):
    whole = b"a" * 25 + b"b" * 12 + b"c\xc3"  # 39: a twentieth is 1
    (tmp_path / "some.txt").write_bytes(whole)
    corpus = text.load(str(tmp_path / "some.txt"), tmp_path)

    assert corpus.vocabulary == b"abc\xc3"
    assert [len(part) for part in corpus[:3]] == [37, 1, 1]
    # Neither c nor \xc3 occurs in what is trained on.
    np.testing.assert_array_equal(np.concatenate(corpus[:3])[-3:], [1, 2, 3])
    assert corpus.train.dtype == np.uint8
    np.testing.assert_array_equal(corpus.encode(b"cab", "this"), [2, 0, 1])
    assert corpus.decode([2, 0, 3]) == "ca\N{REPLACEMENT CHARACTER}"
    with pytest.raises(RunError, match=r"b'xy', which --prompt has"):
        corpus.encode(b"yaxxa", "--prompt")


def test_python_source_needs_no_file_and_is_always_the_same(tmp_path):
    corpus = text.load("stdlib", tmp_path)
    again = text.load("stdlib", tmp_path)

    assert len(corpus.train) > 100_000
    assert {*b"abc (=:\n"} <= {*corpus.vocabulary}
    assert corpus.decode(corpus.train[:10_000]).count("import") > 1
    for part, part_again in zip(corpus[:3], again[:3]):
        np.testing.assert_array_equal(part, part_again)


PTB = {
    "ptb.train.txt": b" a bank bans \n",
    "ptb.valid.txt": b" sank \n",
    "ptb.test.txt": b" b \n",
}


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def small_ptb(monkeypatch):
    hashes = {name: md5(content) for name, content in PTB.items()}
    monkeypatch.setattr(text, "PTB_MD5", hashes)


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("enwik8", content)
    return file.getvalue()


@pytest.fixture
def small_enwik8(monkeypatch):
    content = bytes(range(60)) * 2
    monkeypatch.setattr(text, "ENWIK8_MD5", md5(content))
    monkeypatch.setattr(text, "ENWIK8_ZIP_SHA256", md5(zipped(content)))
    return content


@pytest.fixture
def web(tmp_path_factory, monkeypatch):
    """What the addresses of the data sets lead to: files of a folder."""
    folder = tmp_path_factory.mktemp("web")
    monkeypatch.setattr(text, "PTB_URL", folder.as_uri())
    monkeypatch.setattr(text, "ENWIK8_URL", f"{folder.as_uri()}/enwik8.zip")
    return folder


@pytest.mark.parametrize("folder", [".", "ptb"])
def test_ptb_is_found_in_its_folder(small_ptb, web, tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in PTB.items():
        (tmp_path / folder / name).write_bytes(content)
    corpus = text.load("ptb", tmp_path)

    assert corpus.vocabulary == b" abn\nks"  # of the training part
    assert corpus.decode(corpus.test) == " b \n"


def test_ptb_is_downloaded(small_ptb, web, tmp_path):
    for name, content in PTB.items():
        (web / name).write_bytes(content)

    assert text.load("ptb", tmp_path / "data").decode([1, 2]) == "ab"
    kept = (tmp_path / "data" / "ptb").iterdir()
    assert sorted(path.name for path in kept) == sorted(PTB)


def test_a_foreign_ptb_file_is_refused_and_left_alone(small_ptb, web, tmp_path):
    for name, content in PTB.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "ptb.valid.txt").write_bytes(b" s a n k _")

    with pytest.raises(RunError, match="10 bytes.*expected") as e:
        text.load("ptb", tmp_path)
    assert str(tmp_path / "ptb.valid.txt") in str(e.value)
    assert (tmp_path / "ptb.valid.txt").read_bytes() == b" s a n k _"


def test_a_download_that_fails_is_explained(
    small_ptb, small_enwik8, web, tmp_path
):
    (tmp_path / "ptb.train.txt").write_bytes(PTB["ptb.train.txt"])
    with pytest.raises(RunError, match="ptb.valid.txt could not be") as e:
        text.load("ptb", tmp_path)
    assert "No such file" in str(e.value) and "--data-dir" in str(e.value)
    with pytest.raises(RunError, match="enwik8.zip could not be downloaded"):
        text.load("enwik8", tmp_path)
    (web / "ptb.valid.txt").write_bytes(b"<html>")
    with pytest.raises(RunError, match="corrupted"):
        text.load("ptb", tmp_path)
    (tmp_path / "taken").write_bytes(b"")  # a file where a folder is wanted
    with pytest.raises(RunError, match="--data-dir"):
        text.load("enwik8", tmp_path / "taken")


def test_enwik8_is_read_in_every_form(small_enwik8, web, tmp_path):
    (web / "enwik8.zip").write_bytes(zipped(small_enwik8))
    folder = tmp_path / "enwik8"
    for name, content in {
        "enwik8.zip": None,  # is downloaded
        "enwik8.gz": gzip.compress(small_enwik8),
        "enwik8": small_enwik8,
    }.items():
        if content:
            (folder / name).write_bytes(content)
        corpus = text.load("enwik8", tmp_path)
        assert [len(part) for part in corpus[:3]] == [108, 6, 6]
        assert len(corpus.vocabulary) == 60
        (folder / name).unlink()


@pytest.mark.parametrize("name", ["enwik8", "enwik8.gz", "enwik8.zip"])
def test_a_truncated_enwik8_is_refused(small_enwik8, web, tmp_path, name):
    content = small_enwik8
    if name == "enwik8.gz":
        content = gzip.compress(content)
    (tmp_path / name).write_bytes(content[:50])

    with pytest.raises(RunError) as e:
        text.load("enwik8", tmp_path)
    assert str(tmp_path / name) in str(e.value)
    assert text.ENWIK8_URL in str(e.value)


def test_a_path_that_is_not_there_is_explained(tmp_path):
    with pytest.raises(RunError, match="No such file.* stdlib, ptb, enwik8"):
        text.load(str(tmp_path / "nothing.txt"), tmp_path)
    with pytest.raises(RunError, match="cannot be read"):
        text.load(str(tmp_path), tmp_path)
