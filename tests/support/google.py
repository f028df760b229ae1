"""A stub of Google's store: the part of its XML interface, and of its batches, that obstore and icechunk use.

It was written from their requests and Google's documentation; a real store may differ.
"""

import json
import re
import ssl
import threading
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.certificates import certified

PAGE = 300
"""Objects in an answer to a listing."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        _, _, key = unquote(url.path).removeprefix("/").partition("/")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with self.server.lock:
            if url.path.startswith("/batch/"):
                self.delete_many(body)
            elif not key:
                self.list(query)
            else:
                getattr(self, f"on_{self.command.lower()}")(key, query, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815  the names are http.server's

    def reply(self, status, body=b"", stored=None, **headers):
        self.send_response(status)
        if stored:
            headers |= {
                "ETag": stored.tag,
                "x-goog-generation": stored.generation,
                "Last-Modified": formatdate(usegmt=1),
            }
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def on_put(self, key, query, body):
        objects, before = self.server.objects, self.server.objects.get(key)
        if "partNumber" in query:
            self.server.parts.setdefault(query["uploadId"], {})[int(query["partNumber"])] = body
            return self.reply(200, ETag='"part"')
        if source := self.headers.get("x-goog-copy-source"):
            body = objects[unquote(source).removeprefix("/").partition("/")[2]].data
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (before.generation if before else 0):
            return self.reply(412)
        objects[key] = _Stored(body)
        return self.reply(200, stored=objects[key])

    def on_post(self, key, query, body):
        if "uploads" in query:
            upload = f"<InitiateMultipartUploadResult><UploadId>{key}</UploadId></InitiateMultipartUploadResult>"
            return self.reply(200, upload.encode())
        parts = self.server.parts.pop(query["uploadId"])
        self.server.objects[key] = stored = _Stored(b"".join(parts[number] for number in sorted(parts)))
        done = f"<CompleteMultipartUploadResult><ETag>{escape(stored.tag)}</ETag></CompleteMultipartUploadResult>"
        return self.reply(200, done.encode(), stored)

    def on_get(self, key, query, body):
        if (stored := self.server.objects.get(key)) is None:
            return self.reply(404)
        if self.headers.get("if-match", stored.tag) != stored.tag:
            return self.reply(412)
        if not (asked := re.fullmatch("bytes=([0-9]+)-([0-9]*)", self.headers.get("range", ""))):
            return self.reply(200, stored.data, stored)
        start, end = int(asked[1]), min(int(asked[2] or len(stored.data)), len(stored.data) - 1)
        where = f"bytes {start}-{end}/{len(stored.data)}"
        return self.reply(206, stored.data[start : end + 1], stored, Content_Range=where)

    on_head = on_get

    def on_delete(self, key, query, body):
        self.reply(204 if self.server.objects.pop(key, None) else 404)

    def list(self, query):
        after = query.get("continuation-token") or query.get("start-after", "")
        below = sorted(key for key in self.server.objects if key.startswith(query.get("prefix", "")) and key > after)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size><ETag>{escape(stored.tag)}</ETag>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key in below[:PAGE]
            for stored in (self.server.objects[key],)
        )
        more = f"<NextContinuationToken>{escape(below[PAGE - 1])}</NextContinuationToken>" if below[PAGE:] else ""
        self.reply(200, f"<ListBucketResult>{found}{more}</ListBucketResult>".encode())

    def delete_many(self, body):
        answers = []
        for number, path in re.findall(rb"Content-ID: <?([^\r>]*)>?.*?DELETE [^ ]*/o/([^ ]*)", body, re.DOTALL):
            gone = self.server.objects.pop(unquote(path.decode()), None) is not None
            status = "204 No Content" if gone else "404 Not Found"
            answers.append(
                f"--b\r\nContent-Type: application/http\r\nContent-ID: <response-{number.decode()}>\r\n\r\n"
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        self.reply(200, ("".join(answers) + "--b--").encode(), Content_Type="multipart/mixed; boundary=b")

    def log_message(self, *arguments):
        """Say nothing."""


class _Stored:
    generations = count(1)

    def __init__(self, data):
        self.data, self.generation, self.tag = data, next(self.generations), f'"{md5(data).hexdigest()}"'


@contextmanager
def google_server(folder):
    """Serve a bucket of any name; yield variables that lead to it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Request) as server:
        certificate, key, authority = certified(folder, "IP:127.0.0.1")
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.daemon_threads, server.lock, server.objects, server.parts = True, threading.Lock(), {}, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {"gcs_base_url": f"https://127.0.0.1:{server.server_port}", "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        (folder / "account.json").write_text(json.dumps(account))
        yield {"GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"), "SSL_CERT_FILE": str(authority)}
        server.shutdown()
