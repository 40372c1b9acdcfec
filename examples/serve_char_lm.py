"""A web page that generates text with a character model and shows its reads.

    python examples/serve_char_lm.py                    the model in trained/

    python examples/char_lm.py --export runs/export     train and export
    python examples/serve_char_lm.py --model runs/export

Then open http://127.0.0.1:8000. This repository, the exported folder and
onnxruntime are all it needs (TensorFlow instead, for --export-format
tf_saved_model): neither Keras nor keras_armin have to be installed. Each
request has its own memory, and text is streamed as it is generated. The page
opens with a text, if the model knows the characters of its prompt.

Other programs can use the same interface: POST /generate with JSON such as
{"prompt": "def ", "length": 200, "temperature": 0.8, "top_k": 20, "seed": 1}
returns a line of JSON for each byte, those of the prompt first:
{"text": ..., "slots": [...]} with the slot that each layer read. The last line
has "done", or "error" if something went wrong on the way. All but the prompt
may be left out; GET /model returns the limits. A request that cannot be served
gets a status of 400 or more and {"error": ...}.

Meant for a few users on one machine: by default it listens on 127.0.0.1 only,
and it has neither accounts nor encryption.
"""

import argparse
import codecs
import contextlib
import functools
import http.server
import json
import pathlib
import runpy
import socket
import sys
import threading
from typing import NamedTuple

# Lets the script run from anywhere, without the examples being installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np

from examples.support import exported

ROOT = pathlib.Path(__file__).resolve().parents[1]
# By its path, since importing the package imports Keras.
SAMPLING = runpy.run_path(str(ROOT / "keras_armin" / "sampling.py"))
PAGE = ROOT / "examples" / "serve_char_lm.html"
TRAINED = ROOT / "examples" / "trained" / "text"
FIRST_PROMPT = "def "  # of the text with which the page opens
METHODS = {
    "/": ("GET", "HEAD"),
    "/model": ("GET", "HEAD"),
    "/generate": ("POST",),
}
MAX_BODY = 16 * 1024
MAX_PROMPT = 2000
MAX_LENGTH = 5000
MAX_TEMPERATURE = 10
MAX_SEED = 2**53 - 1  # the integers that JavaScript has
MAX_GENERATIONS = 4
MAX_CONNECTIONS = 64
CLIENT_TIMEOUT = 20  # seconds
# Bytes to read of a body that is too large: a client that is disconnected
# while it sends may never see the answer.
DRAINED = 1024 * 1024
# The page needs no other resources, and may not be embedded in another.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class Refusal(Exception):
    """An HTTP error, with a message for the user."""

    def __init__(self, status, message, **headers):
        super().__init__(message)
        self.status, self.headers = status, headers


class Order(NamedTuple):
    """A validated request to generate text."""

    prompt: list
    length: int
    temperature: float
    top_k: int
    seed: int


def parse_order(body, model):
    """An `Order` from the body of a request, or a `Refusal`."""
    request = _parse_json(body)
    unknown = sorted(set(request) - set(Order._fields))
    if unknown:
        raise Refusal(
            400,
            f"Unknown: {', '.join(unknown)[:200]}. Valid fields: "
            f"{', '.join(Order._fields)}.",
        )
    temperature = request.get("temperature", 0.8)
    if not _is_number(temperature, (int, float), 0, MAX_TEMPERATURE):
        raise Refusal(
            400, f"temperature must be a number from 0 to {MAX_TEMPERATURE}."
        )
    symbols = len(model.vocabulary)
    return Order(
        _prompt(request.get("prompt"), model),
        _integer(request, "length", 200, 1, MAX_LENGTH),
        float(temperature),
        _integer(request, "top_k", symbols, 1, MAX_SEED),
        _integer(request, "seed", 1, 0, MAX_SEED),
    )


def _parse_json(body):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    try:
        request = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise Refusal(
            400,
            f"The request is not UTF-8: byte {error.start} is "
            f"0x{body[error.start]:02X}.",
        ) from error
    except RecursionError as error:
        raise Refusal(400, "The request is nested too deeply.") from error
    except ValueError as error:
        raise Refusal(400, f"The request is not JSON: {error}.") from error
    if not isinstance(request, dict):
        raise Refusal(400, "The request must be a JSON object.")
    return request


def _prompt(prompt, model):
    if not isinstance(prompt, str):
        raise Refusal(400, "prompt must be a string.")
    if not prompt:
        raise Refusal(400, "prompt is empty: it needs at least one character.")
    if len(prompt) > MAX_PROMPT:
        raise Refusal(
            413,
            f"prompt has {len(prompt):,} characters; the limit is "
            f"{MAX_PROMPT:,}.",
        )
    try:
        return model.encode(prompt)
    except ValueError as error:
        raise Refusal(400, f"prompt: {error}.") from error


def _integer(request, name, default, low, high):
    value = request.get(name)
    if value is None:
        return default
    if not _is_number(value, (int,), low, high):
        raise Refusal(400, f"{name} must be an integer from {low} to {high}.")
    return value


def _is_number(value, types, low, high):
    return type(value) in types and low <= value <= high


def write(model, order):
    """Yields a dict for each byte, those of the prompt first.

    The text of a character of several bytes comes with its last byte; that of
    the others is empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = SAMPLING["generate_steps"](
        functools.partial(_finite_step, model),
        model.initial_states(),
        *order,
    )
    for index, slots in written:
        text = decoder.decode(model.vocabulary[index : index + 1])
        yield {"text": text, "slots": slots}
    rest = decoder.decode(b"", final=True)
    yield {"text": rest, "done": True}


def _finite_step(model, index, states):
    logits, states, slots = model.step(index, states)
    if not np.isfinite(logits).all():
        raise ArithmeticError("The network's outputs are not finite.")
    return logits, states, slots


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request. Only the model is shared between requests.

    The base class speaks HTTP/1.0: a connection ends with its response, which
    therefore needs no length and can be streamed.
    """

    server_version = "serve_char_lm"
    sys_version = ""
    timeout = CLIENT_TIMEOUT
    disable_nagle_algorithm = True  # send each character immediately

    def handle_one_request(self):
        # `timeout` applies to a single read: a client that sends byte by byte
        # could otherwise continue for hours.
        self._timer = threading.Timer(CLIENT_TIMEOUT, self._stop_reading)
        self._timer.daemon = True
        self._timer.start()
        try:
            super().handle_one_request()
        finally:
            self._timer.cancel()

    def _stop_reading(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def handle_method(self):
        # An OSError: the client went away, or took too long.
        with contextlib.suppress(OSError):
            try:
                self._handle()
            except Refusal as refusal:
                self._refuse(refusal)

    do_GET = do_HEAD = do_POST = handle_method
    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = handle_method

    def _handle(self):
        path = self.path.split("?")[0]
        body = self._body() if self.command == "POST" else b""
        self._timer.cancel()  # the client has sent everything
        if path not in METHODS:
            raise Refusal(404, f"There are only {', '.join(METHODS)}.")
        if self.command not in METHODS[path]:
            allowed = ", ".join(METHODS[path])
            raise Refusal(405, f"{path} takes {allowed}.", Allow=allowed)
        if path == "/":
            self._send(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif path == "/model":
            self._send_json(200, describe(self.server.model))
        else:
            self._generate(body)

    def _generate(self, body):
        if self.headers.get_content_type() != "application/json":
            # Also keeps forms of other sites out: they cannot send this type.
            raise Refusal(415, "Content-Type must be application/json.")
        order = parse_order(body, self.server.model)
        if not self.server.generations.acquire(blocking=False):
            raise Refusal(
                503,
                f"{MAX_GENERATIONS} texts are being generated. Try again in a "
                "moment.",
                **{"Retry-After": "1"},
            )
        try:
            self._start(200, "application/x-ndjson; charset=utf-8")
            for line in _until_error(write(self.server.model, order)):
                self.wfile.write(json.dumps(line).encode() + b"\n")
        finally:
            self.server.generations.release()

    def _body(self):
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not (
            length.isascii() and length.isdigit()
        ):
            raise Refusal(411, "Send the body with a Content-Length.")
        # Python is slow to convert thousands of digits.
        if len(length) > 18 or int(length) > MAX_BODY:
            self._drain(int(length[:18]))
            raise Refusal(413, f"A request may have {MAX_BODY} bytes.")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Refusal(408, "The body ended early, or came too slowly.")
        return body

    def _drain(self, length):
        left = min(length, DRAINED)
        while left and (some := self.rfile.read1(min(left, 65536))):
            left -= len(some)

    def _refuse(self, refusal):
        error = {"error": str(refusal)}
        self._send_json(refusal.status, error, refusal.headers)

    def send_error(self, code, message=None, explain=None):
        """Errors of `http.server` itself, in the same form."""
        with contextlib.suppress(OSError):
            self._refuse(Refusal(code, message or self.responses[code][0]))

    def _send_json(self, status, content, headers=()):
        data = json.dumps(content).encode() + b"\n"
        self._send(status, data, "application/json", headers)

    def _send(self, status, data, content_type, headers=()):
        length = {"Content-Length": str(len(data))}
        self._start(status, content_type, {**length, **dict(headers)})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _start(self, status, content_type, headers=()):
        self.send_response(status)
        for name, value in {
            "Content-Type": content_type,
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()


def _until_error(lines):
    """The lines; an error on the way is the last of them."""
    try:
        yield from lines
    except Exception as error:
        print(f"error while generating: {error!r}", file=sys.stderr)
        known = isinstance(error, ArithmeticError)
        yield {"error": str(error) if known else "Internal server error."}


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, up to a limit."""

    request_queue_size = 128  # 5 in the base class, too few for a rush

    def __init__(self, address, model):
        self.model = model
        self.generations = threading.BoundedSemaphore(MAX_GENERATIONS)
        self.connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request, client_address):
        if self.connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                b"Content-Length: 0\r\nConnection: close\r\n\r\n"
            )
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request, client_address):
        """Does not report clients that disconnect."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def describe(model):
    """What the page needs to know."""
    known = set(FIRST_PROMPT.encode()) <= set(model.vocabulary)
    return {
        "first_prompt": FIRST_PROMPT if known else None,
        "memories": [memory._asdict() for memory in model.memories],
        "symbols": len(model.vocabulary),
        "max_length": MAX_LENGTH,
        "max_prompt": MAX_PROMPT,
        "max_temperature": MAX_TEMPERATURE,
        "max_seed": MAX_SEED,
    }


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=pathlib.Path,
        default=TRAINED,
        metavar="FOLDER",
        help="folder written by `char_lm.py --export` (default: a model of "
        "Python's library in examples/trained)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for the whole network "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="0 for any free port (default: %(default)s)",
    )
    return parser.parse_args(argv)


def _port(text):
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, not {text}")
    return int(text)


def main(argv=None):
    arguments = parse_arguments(argv)
    try:
        model = exported.load(arguments.model)
    except exported.ExportError as error:
        sys.exit(f"error: {error}")
    try:
        server = Server((arguments.host, arguments.port), model)
    except OSError as error:
        sys.exit(
            f"error: cannot listen on {arguments.host}:{arguments.port}: "
            f"{error.strerror}"
        )
    host, port = server.server_address[:2]
    print(f"open http://{host}:{port} (Ctrl-C to stop)", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
