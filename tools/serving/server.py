"""The server of the page: on this machine alone, read-only, and only for whoever has the address with its token."""

import json
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from ...pipeline.errors import DatasetError
from ...state_store.errors import StateStoreError
from ...trainer.errors import ConfigError, TrainingError
from ..printing import MAX_ERROR_CHARACTERS, plain_text
from .answers import Answers
from .catalogue import Query

HOST = "127.0.0.1"
_MAX_BODY = 64 << 20
"""Bytes of a selection that is to be downloaded: some millions of ids."""
_STATIC = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_NUMBER = re.compile("[0-9]{1,18}")
_JSON, _PARQUET = "application/json", "application/vnd.apache.parquet"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Reply(NamedTuple):
    body: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK


class PageServer(ThreadingHTTPServer):
    """Serves the answers at `address` until `shutdown`. A thread for each connection; all end with the process."""

    daemon_threads = True

    def __init__(self, answers: Answers, port: int = 0) -> None:
        """port: 0 for a free one. Raises OSError if it is taken."""
        super().__init__((HOST, port), _Handler)
        self.answers, self.token = answers, secrets.token_urlsafe(32)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.origins = {f"http://{host}" for host in self.hosts}

    @property
    def address(self) -> str:
        """Address to open in a browser; whoever has the token in its path can open it, so keep it to yourself."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "thermopile"
    sys_version = ""
    timeout = 60
    """Seconds that a silent connection keeps its thread."""
    disable_nagle_algorithm = True
    """Else an answer's body waits 40 ms for the browser to acknowledge its head."""

    def do_GET(self) -> None:
        self._answer(self._got)

    def do_POST(self) -> None:
        self._answer(self._posted)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal, and the token in the addresses, to whoever started the server."""

    def _answer(self, reply: Callable[[list[str], dict[str, str]], Reply]) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:  # such as http://[/
            return self._send(_error(f"not an address: {error}", HTTPStatus.BAD_REQUEST))
        token, *place = url.path.removeprefix("/").split("/")
        try:
            if not self._is_allowed(token):
                self._send(_error("open the address that `thermopile inspect --serve` printed", HTTPStatus.FORBIDDEN))
            else:
                self._send(reply(place, dict(parse_qsl(url.query))))
        except (ConfigError, DatasetError) as error:
            self._send(_error(error, HTTPStatus.BAD_REQUEST))
        except (TrainingError, StateStoreError, OSError, IndexError) as error:
            self._send(_error(error, HTTPStatus.INTERNAL_SERVER_ERROR))

    def _is_allowed(self, token: str) -> bool:
        """Return whether a request has the token, and comes from the page itself or from the address bar.

        A page of another site can send requests here, and by a name of its own for this machine even read the answers.
        """
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        return (
            secrets.compare_digest(token.encode(), self.server.token.encode())
            and self.headers.get("Host") in self.server.hosts
            and (origin is None or origin in self.server.origins)
            and site in ("none", "same-origin")
        )

    def _got(self, place: list[str], given: dict[str, str]) -> Reply:
        answers = self.server.answers
        match place:
            case [name] if name in _STATIC:
                file, kind = _STATIC[name]
                return Reply(Path(__file__).with_name(file).read_bytes(), kind)
            case ["about"]:
                return _json(answers.about())
            case ["samples"]:
                return _json(answers.samples(Query.of(given), _whole(given.get("start", "0"))))
            case ["found.parquet"]:
                return Reply(answers.all_found(Query.of(given)), _PARQUET)
            case ["sample", id]:
                return _json(answers.sample(_whole(id)))
            case ["neighbours", id]:
                return _json(answers.neighbours(_whole(id)))
            case ["picture", id]:
                return Reply(answers.picture(_whole(id)), "image/jpeg")
            case ["views", id]:
                return Reply(answers.views(_whole(id), _whole(given.get("epoch", "0"))), "image/png")
        return _error("there is nothing here", HTTPStatus.NOT_FOUND)

    def _posted(self, place: list[str], given: dict[str, str]) -> Reply:
        size = self.headers.get("Content-Length", "")
        if place != ["selection.parquet"] or not _NUMBER.fullmatch(size) or int(size) > _MAX_BODY:
            self.close_connection = True  # the body is not read
            return _error("only a selection can be sent here", HTTPStatus.NOT_FOUND)
        try:
            asked = json.loads(self.rfile.read(int(size)))
            return Reply(self.server.answers.selection(asked["ids"], asked["tags"]), _PARQUET)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return _error(f"not a selection: {error}", HTTPStatus.BAD_REQUEST)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        if reply.kind == _PARQUET:
            self.send_header("Content-Disposition", 'attachment; filename="selection.parquet"')
        self.end_headers()
        self.wfile.write(reply.body)


def _whole(text: str) -> int:
    """Return a number from an address. Raises ConfigError."""
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f"{plain_text(text)!r} is not a whole number")
    return int(text)


def _json(tree: object) -> Reply:
    return Reply(json.dumps(tree, allow_nan=False).encode(), _JSON)


def _error(why: object, status: HTTPStatus) -> Reply:
    words = plain_text(str(why), MAX_ERROR_CHARACTERS)
    return Reply(json.dumps({"error": words}).encode(), _JSON, status)
