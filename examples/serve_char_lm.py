"""A web page that generates text with a character model and shows its reads.

    python examples/char_lm.py --export runs/export     train and export
    python examples/serve_char_lm.py --model runs/export

Then open http://127.0.0.1:8000. This repository, the exported folder and
onnxruntime are all it needs (TensorFlow instead, for --export-format
tf_saved_model): neither Keras nor keras_armin have to be installed. Each
request has its own memory, and text is streamed as it is generated.

Other programs can use the same interface: POST /generate with JSON such as
{"prompt": "def ", "length": 200, "temperature": 0.8, "top_k": 20, "seed": 1}
returns a line of JSON for each byte, {"text": ..., "slots": [...]}.

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
MAX_BODY = 16 * 1024
MAX_PROMPT = 2000
MAX_LENGTH = 5000
MAX_TEMPERATURE = 10
MAX_SEED = 2**53 - 1  # the integers that JavaScript has
MAX_GENERATIONS = 4
MAX_CONNECTIONS = 64
# Seconds after which an idle client is disconnected.
SECONDS_OF_PATIENCE = 20
# Read and forgotten of a body that is too large: a client that is cut off
# while it sends may never see the answer.
DRAINED = 1024 * 1024
# The page needs nothing but itself, and may not be part of another.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class Refusal(Exception):
    """An answer other than what was asked for; the message is for people."""

    def __init__(self, status, message, **headers):
        super().__init__(message)
        self.status, self.headers = status, headers


class Order(NamedTuple):
    """What to write, checked."""

    prompt: list
    length: int
    temperature: float
    top_k: int
    seed: int


def parse_order(body, model):
    """An `Order` from the bytes of a request; a `Refusal` if it is none."""
    asked = _parse_json(body)
    unknown = sorted(set(asked) - set(Order._fields))
    if unknown:
        raise Refusal(
            400,
            f"Unknown: {', '.join(unknown)[:200]}. There are "
            f"{', '.join(Order._fields)}.",
        )
    symbols = len(model.vocabulary)
    return Order(
        _prompt(asked.get("prompt"), model),
        _whole_number(asked, "length", 200, 1, MAX_LENGTH),
        _temperature(asked.get("temperature", 0.8)),
        _whole_number(asked, "top_k", symbols, 1, MAX_SEED),
        _whole_number(asked, "seed", 1, 0, MAX_SEED),
    )


def _parse_json(body):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    try:
        asked = json.loads(body.decode("utf-8"), parse_constant=refuse)
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
    if not isinstance(asked, dict):
        raise Refusal(400, "The request must be a JSON object.")
    return asked


def _prompt(prompt, model):
    if not isinstance(prompt, str):
        raise Refusal(400, "prompt must be a text.")
    if not prompt:
        raise Refusal(
            400, "prompt is empty: the network needs a character to go on from."
        )
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


def _whole_number(asked, name, default, least, most):
    value = asked.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise Refusal(
            400, f"{name} must be a whole number from {least} to {most}."
        )
    return value


def _temperature(value):
    right = type(value) in (int, float) and 0 <= value <= MAX_TEMPERATURE
    if not right:
        raise Refusal(
            400, f"temperature must be a number from 0 to {MAX_TEMPERATURE}."
        )
    return float(value)


def write(model, order):
    """Yields what is to be sent: a dict for each byte, those of the prompt
    first.

    A character of several bytes is the text of its last byte, so that a text
    may be empty.
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
        raise ArithmeticError(
            "The network's numbers have grown beyond all bounds."
        )
    return logits, states, slots


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one client. All that lasts between requests is the model."""

    protocol_version = "HTTP/1.1"  # chunks are not in older ones
    server_version = "serve_char_lm"
    sys_version = ""
    timeout = SECONDS_OF_PATIENCE
    disable_nagle_algorithm = True  # send each character immediately

    def handle_one_request(self):
        # `timeout` is for each single read: byte by byte a client could go on
        # for hours.
        self._patience = threading.Timer(
            SECONDS_OF_PATIENCE, self._stop_reading
        )
        self._patience.daemon = True
        self._patience.start()
        try:
            super().handle_one_request()
        finally:
            self._patience.cancel()

    def _stop_reading(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self):
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self):
        self._answer(self._post)

    def do_other(self):
        self._answer(self._refuse_method)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_other

    def _answer(self, way):
        try:
            way()
        except Refusal as refusal:
            self._refuse(refusal)
        except OSError:
            # The client went away, or took too long.
            self.close_connection = True

    def _path(self):
        return self.path.split("?")[0]

    def _get(self):
        path = self._path()
        if path == "/":
            page = PAGE.read_bytes()
            self._send(200, page, "text/html; charset=utf-8")
        elif path == "/model":
            self._send_json(200, describe(self.server.model))
        elif path == "/generate":
            raise Refusal(405, "Send a POST to /generate.", Allow="POST")
        else:
            self._refuse_path()

    def _post(self):
        if self._path() in ("/", "/model"):
            self._refuse_method()
        if self._path() != "/generate":
            self._refuse_path()
        body = self._body()
        self._patience.cancel()  # from here on the server takes the time
        kind = self.headers.get_content_type()
        if kind != "application/json":
            # Also keeps other sites' forms out: they cannot send this type.
            raise Refusal(415, "Content-Type must be application/json.")
        order = parse_order(body, self.server.model)
        if not self.server.generations.acquire(blocking=False):
            raise Refusal(
                503,
                f"{MAX_GENERATIONS} texts are being written already. Try "
                "again in a moment.",
                **{"Retry-After": "1"},
            )
        try:
            self._stream(write(self.server.model, order))
        finally:
            self.server.generations.release()

    def _refuse_path(self):
        raise Refusal(404, "There are only /, /model and /generate.")

    def _refuse_method(self):
        raise Refusal(
            405, f"{self.command} is not for here.", Allow="GET, HEAD, POST"
        )

    def _body(self):
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise Refusal(411, "Send the body with a Content-Length.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise Refusal(411, "Content-Length must say how long the body is.")
        # Python takes its time over a number of thousands of digits.
        if len(length) > 18 or int(length) > MAX_BODY:
            self._drain(int(length[:18]))
            raise Refusal(413, f"The limit of a request is {MAX_BODY} bytes.")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise Refusal(408, "The body ended early, or came too slowly.")
        return body

    def _drain(self, length):
        self.close_connection = True
        left = min(length, DRAINED)
        while left and (some := self.rfile.read1(min(left, 65536))):
            left -= len(some)

    def _stream(self, lines):
        chunked = self.request_version != "HTTP/1.0"
        self.send_response(200)
        self._send_headers("application/x-ndjson; charset=utf-8")
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()
        for line in _until_error(lines):
            data = json.dumps(line).encode() + b"\n"
            if chunked:
                data = b"%x\r\n%s\r\n" % (len(data), data)
            self.wfile.write(data)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, refusal):
        try:
            self._send_json(
                refusal.status, {"error": str(refusal)}, refusal.headers
            )
        except OSError:
            self.close_connection = True

    def send_error(self, code, message=None, explain=None):
        """What `http.server` itself refuses, in the form of all refusals."""
        self.close_connection = True
        self._refuse(Refusal(code, message or self.responses[code][0]))

    def _send_json(self, status, content, headers=()):
        data = json.dumps(content).encode() + b"\n"
        self._send(status, data, "application/json", headers)

    def _send(self, status, data, kind, headers=()):
        self.send_response(status)
        self._send_headers(kind)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_headers(self, kind):
        for name, value in {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)


def _until_error(lines):
    """The lines; what goes wrong on the way is the last of them."""
    try:
        yield from lines
    except Exception as error:
        print(f"error while writing: {error!r}", file=sys.stderr)
        known = isinstance(error, ArithmeticError)
        yield {"error": str(error) if known else "The server made a mistake."}


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, up to a limit."""

    # Set by the base class to 5, which turns a crowd away before it is seen.
    request_queue_size = 128

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
        """Clients that disconnect are not reported."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def describe(model):
    """What the page has to know."""
    return {
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
        required=True,
        metavar="FOLDER",
        help="what `char_lm.py --export FOLDER` wrote",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts the whole network "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="0 takes a free one (default: %(default)s)",
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
    print(f"open http://{host}:{port} (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
