"""An exported model and a server for tests, and how to ask it."""

import contextlib
import http.client
import json
import os
import pathlib
import subprocess
import sys

from examples import char_lm
from examples.support import exporting

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = b"abc \n\xc3\xa4"


def small_model(*options):
    arguments = char_lm.parse_arguments(
        ["--units", "6", "--slots", "3", "--embedding", "4", *options]
    )
    return char_lm.build_model(arguments, len(VOCABULARY), 2, updates=1)


def export(folder, format="onnx"):
    exporting.export(small_model(), VOCABULARY, folder, format)
    return folder


def command(*arguments):
    script = ROOT / "examples" / "serve_char_lm.py"
    return [sys.executable, str(script), *map(str, arguments)]


@contextlib.contextmanager
def running(folder, *options):
    """The port of a server process, and the process. It has no Keras.

    It serves the export in `folder`, unless there are other options.
    """
    hidden = folder.parent / "hidden"
    hidden.mkdir(exist_ok=True)
    (hidden / "keras.py").write_text("raise ImportError('not for a server')")
    process = subprocess.Popen(
        command(*(options or ("--model", folder)), "--port", 0),
        cwd=folder,  # the repository is not the working directory
        env={**os.environ, "PYTHONPATH": str(hidden)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield int(line.split(" (")[0].rsplit(":")[-1]), process
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def post(port, body, **headers):
    """The open response to a request; to close it is to hang up."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/generate", body, headers)
    return connection.getresponse()


def lines(port, **order):
    """All lines of a text."""
    with post(port, {"prompt": "ab", **order}) as response:
        assert response.status == 200, response.read()
        return [json.loads(line) for line in response]


def text(port, **order):
    return "".join(line["text"] for line in lines(port, **order))


def refusal(port, body, **headers):
    """Status and words of an answer that is an error."""
    with post(port, body, **headers) as response:
        return response.status, json.load(response)["error"]
