"""The web server of an exported model, with valid and invalid requests."""

import concurrent.futures
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time

import pytest

pytest.importorskip(
    "tensorflow", reason="the examples' data pipelines are tf.data"
)

from tests.helpers import serving
from tests.helpers.common import BACKEND

pytestmark = pytest.mark.skipif(
    BACKEND != "tensorflow",
    reason="the server does not know which backend wrote the export; "
    "tests/examples/test_generation.py exports on each",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serving.export(tmp_path_factory.mktemp("serve") / "exported")


@pytest.fixture(scope="module")
def port(folder):
    with serving.running(folder) as (port, process):
        yield port
        assert process.poll() is None, "the server did not survive the tests"


def test_text_arrives_while_it_is_written(port):
    started = time.monotonic()
    with serving.post(port, {"prompt": "a", "length": 4000}) as response:
        response.readline()
        first = time.monotonic() - started
        rest = response.read().splitlines()
        last = time.monotonic() - started

    assert len(rest) == 4000 + 1 and json.loads(rest[-1])["done"]
    assert first < last / 4


def test_lines_hold_text_and_slots(port):
    lines = serving.lines(port, prompt="ab \u00e4", length=30, temperature=2)

    assert len(lines) == 5 + 30 + 1  # the last character is two bytes
    assert [x["text"] for x in lines[:5]] == ["a", "b", " ", "", "\u00e4"]
    for line in lines[:-1]:
        (slot,) = line["slots"]
        assert slot in range(3)
    assert "slots" not in lines[-1]


def test_visitors_have_memories_of_their_own(port):
    orders = [
        {"prompt": prompt, "length": 300, "seed": seed}
        for prompt, seed in (("ab", 1), ("ba c", 2), ("ab", 1))
    ]
    alone = [serving.lines(port, **order) for order in orders]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        together = list(
            pool.map(lambda order: serving.lines(port, **order), orders)
        )

    assert together == alone
    assert alone[0] == alone[2] != alone[1]


def test_options_do_what_they_say(port):
    assert serving.text(port, temperature=0) == serving.text(port, top_k=1)
    assert serving.text(port, seed=1) != serving.text(port, seed=2)
    assert serving.text(port, top_k=None) == serving.text(port, top_k=7)


@pytest.mark.parametrize(
    "order, status, words",
    [
        (b"{", 400, "not JSON"),
        (b"[" * 9000, 400, "nested too deeply"),
        (b"[]", 400, "JSON object"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8: byte 12 is 0xFF"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature must"),
        (b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}", 400, "not JSON"),
        ({}, 400, "prompt must be a string"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": 7}, 400, "prompt must be a string"),
        ({"prompt": "abX\u2603"}, 400, "'X' (U+0058), '\\u2603' (U+2603)"),
        ({"prompt": "\ud800"}, 400, "(U+D800)"),
        ({"prompt": "a\0"}, 400, "(U+0000)"),
        ({"prompt": "a" * 2001}, 413, "the limit is 2,000"),
        ({"prompt": "a", "length": 0}, 400, "length must be"),
        ({"prompt": "a", "length": 10**9}, 400, "from 1 to 5000"),
        ({"prompt": "a", "length": "9"}, 400, "length must be"),
        ({"prompt": "a", "length": True}, 400, "length must be"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature must be"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature must be"),
        ({"prompt": "a", "temperature": None}, 400, "temperature must be"),
        ({"prompt": "a", "top_k": 0}, 400, "top_k must be"),
        ({"prompt": "a", "top_k": 1.5}, 400, "top_k must be"),
        ({"prompt": "a", "seed": -1}, 400, "seed must be"),
        ({"prompt": "a", "colour": "red"}, 400, "Unknown: colour"),
        (b"x" * 20_000, 413, "16384 bytes"),
        (b"x" * 3_000_000, 413, "16384 bytes"),
    ],
)
def test_what_makes_no_sense_is_explained(port, order, status, words):
    try:
        found, message = serving.refusal(port, order)
    except (BrokenPipeError, ConnectionResetError):
        # So much was sent that the server hung up on it.
        assert len(order) > 1_000_000
    else:
        assert found == status and words in message
    assert len(serving.text(port, length=3)) >= 3


def ask(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def test_the_page_and_what_it_asks_for(port):
    status, headers, page = ask(port, "GET", "/?from=here")
    assert status == 200 and page.startswith(b"<!DOCTYPE html>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    # Nothing comes from elsewhere.
    assert b"http:" not in page and b"https:" not in page
    assert ask(port, "HEAD", "/")[::2] == (200, b"")
    model = json.loads(ask(port, "GET", "/model")[2])
    assert model["memories"] == [{"layer": "layer_1", "slots": 3}]


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/favicon.ico", 404),
        ("POST", "/nowhere", 404),
        ("GET", "/generate", 405),
        ("POST", "/", 405),
        ("DELETE", "/generate", 405),
        ("BREW", "/generate", 501),
        ("GET", "/" + "x" * 70_000, 414),
    ],
)
def test_other_paths_and_methods_are_refused(port, method, path, status):
    found, headers, body = ask(port, method, path)
    assert found == status and json.loads(body)["error"]
    assert ("Allow" in headers) == (status == 405)


def test_only_json_with_its_length_is_taken(port):
    order = {"prompt": "a"}
    kind = {"Content-Type": "text/plain"}
    assert serving.refusal(port, order, **kind)[0] == 415
    wrong = {"Content-Length": "-3"}
    assert ask(port, "POST", "/generate", **wrong)[0] == 411
    chunked = {"Transfer-Encoding": "chunked"}
    assert ask(port, "POST", "/generate", **chunked)[0] == 411


def test_no_more_texts_at_once_than_the_limit(port):
    order = {"prompt": "a", "length": 5000}
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(9):
            answers.append(stack.enter_context(serving.post(port, order)))
        statuses = [x.status for x in answers]
        refused = answers[statuses.index(503)]
        assert statuses[:4] == [200] * 4
        assert refused.headers["Retry-After"] == "1"
        assert "Try again" in json.load(refused)["error"]
    # All of them hang up: there is room again before the texts would end.
    assert eventually(lambda: serving.post(port, order).status == 200)


def eventually(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_clients_that_break_off_or_say_nothing_do_no_harm(port):
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(9)]
    half = b"POST /generate HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"
    for sent in (b"", b"\r\n", b"\x16\x03\x01\x02\xff", b"GET", half):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(sent)
    with serving.post(port, {"prompt": "a", "length": 5000}) as response:
        response.readline()

    assert len(serving.text(port, length=3)) >= 3
    for client in silent:
        client.close()


def test_a_crowd_is_told_to_come_back(port):
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            client = socket.create_connection(("127.0.0.1", port), timeout=9)
            stack.callback(client.close)
        assert b" 503 " in client.recv(100)
    assert eventually(lambda: ask(port, "GET", "/model")[0] == 200)


def test_an_old_client_gets_plain_lines(port):
    body = b'{"prompt": "a", "length": 2}'
    with socket.create_connection(("127.0.0.1", port), timeout=9) as client:
        client.sendall(
            b"POST /generate HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = client.makefile("rb").read()
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert len([json.loads(line) for line in rest.splitlines()]) == 4


def test_keras_is_not_there(folder):
    code = (
        "import sys; sys.argv[0] = sys.argv[1]; import runpy; "
        "runpy.run_path(sys.argv[1]); "
        "from examples.support import exported; exported.load(sys.argv[2]); "
        "loaded = {name.split('.')[0] for name in sys.modules}; "
        "print(sorted(loaded & {'keras', 'keras_armin', 'tensorflow', "
        "'torch', 'jax', 'onnxruntime'}))"
    )
    python, script = serving.command()
    done = subprocess.run(
        [python, "-c", code, script, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.stdout == "['onnxruntime']\n", done.stderr


def test_without_arguments_the_trained_model_is_served(tmp_path):
    with serving.running(tmp_path, "--host", "127.0.0.1") as (port, _):
        model = json.loads(ask(port, "GET", "/model")[2])
        prompt = model["first_prompt"]
        lines = serving.lines(port, prompt=prompt, length=100)

    assert prompt == "def " and model["memories"][0]["slots"] == 10
    assert "".join(x["text"] for x in lines).startswith(prompt)
    assert len({x["slots"][0] for x in lines[:-1]}) > 3


def test_a_prompt_the_model_does_not_know_is_not_offered(port):
    assert json.loads(ask(port, "GET", "/model")[2])["first_prompt"] is None


@pytest.mark.slow("tensorflow")
def test_a_saved_model_is_served_too(tmp_path):
    serving.export(tmp_path / "exported", "tf_saved_model")
    with serving.running(tmp_path / "exported") as (port, _):
        assert len(serving.lines(port, length=4)) == 2 + 4 + 1


def without_description(folder):
    (folder / "model.json").unlink()


def cut_short(folder):
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:1000])


def without_model(folder):
    (folder / "model.onnx").unlink()


def foreign(folder):
    (folder / "model.json").write_text('{"kind": "recipe"}')


def no_json(folder):
    (folder / "model.json").write_bytes(b"\xff\x00")


def newer(folder):
    change(folder, version=2)


def other_vocabulary(folder):
    change(folder, vocabulary=[1, 2])


def part_missing(folder):
    change(folder, states=[{}])


def change(folder, **changes):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "damage, words",
    [
        (without_description, "there is no model.json"),
        (cut_short, "model.onnx cannot be read"),
        (without_model, "model.onnx is missing"),
        (foreign, "does not describe"),
        (no_json, "cannot be read"),
        (newer, "has version 2"),
        (other_vocabulary, "do not fit"),
        (part_missing, "is damaged: KeyError('name')"),
    ],
)
def test_a_folder_that_is_no_use_ends_it_with_a_line(
    folder, tmp_path, damage, words
):
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")

    done = subprocess.run(
        serving.command("--model", tmp_path / "copy", "--port", 0),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_ends_it_with_a_line(folder, port):
    done = subprocess.run(
        serving.command("--model", folder, "--port", port),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
