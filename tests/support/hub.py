"""A hub on this machine with one model or data set, and programs that take it for Hugging Face's."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(folder, repo, cache):
    """Serve the files below `folder` as `repo`, `org/name` or `datasets/org/name`, at SHA.

    `asked` has the names of the files that were asked for, `revisions` the revisions that were looked up.
    """
    asked, revisions = [], []
    api = f"/api/{repo if '/' in repo.partition('/')[2] else f'models/{repo}'}"

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = unquote(self.path.partition("?")[0])
            asked.append(path.rpartition("/")[2])
            files = [each for each in folder.rglob("*") if each.is_file()]
            names = {str(each.relative_to(folder)): each for each in files}
            if path.startswith(f"{api}/tree"):
                data = json.dumps([{"type": "file", "path": name, "size": each.stat().st_size, "oid": "0"}
                                   for name, each in names.items()]).encode()  # fmt: skip
            elif path.startswith(api):
                revisions.append(path.partition("/revision/")[2])
                data = json.dumps(
                    {"id": repo, "sha": SHA, "siblings": [{"rfilename": each} for each in names]}
                ).encode()
            elif path.startswith(wanted := f"/{repo}/resolve/{SHA}/"):
                data = names[path.removeprefix(wanted)].read_bytes()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.asked, server.revisions, server.cache = asked, revisions, cache
    yield server
    server.shutdown()
    server.server_close()


def run_with(hub, *words, **environment):
    """`thermopile WORDS` as a program with this hub, and a cache of its own."""
    told = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(hub.cache), "HF_HUB_OFFLINE": "0"}
    line = [sys.executable, "-m", "thermopile", *map(str, words)]
    return subprocess.run(line, env=os.environ | told | environment, capture_output=True, text=True)
