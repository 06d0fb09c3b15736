"""The part of a hub's API that a download needs, on loopback, with faults: slow, wrong or cut-off files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "cafe"
CHUNK = 1 << 14


class HubModels:
    """Serves ``files`` of one repository at :data:`COMMIT` and at ``main``. Weights are large files, as on a hub.

    seconds_a_chunk: pause after each chunk of weights.
    wrong: how many more times a file is sent with other bytes of the same number.
    downloads: complete answers by file.
    """

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name, self.files = name, files
        self.seconds_a_chunk = 0.0
        self.wrong: Counter[str] = Counter()
        self.downloads: Counter[str] = Counter()
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)(\?.*)?", self.path):
                    return self.listing(*found.group(1, 2))
                found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
                if found is None or found[1] != hub.name or found[2] not in (COMMIT, "main"):
                    return self.missing("RepoNotFound")
                if found[3] not in hub.files:
                    return self.missing("EntryNotFound")
                return self.file(found[3], body)

            def listing(self, name: str, revision: str) -> None:
                if name != hub.name or revision not in (COMMIT, "main"):
                    self.missing("RepoNotFound" if name != hub.name else "RevisionNotFound")
                    return
                text = json.dumps(
                    {"id": name, "sha": COMMIT, "siblings": [sibling(*i) for i in hub.files.items()]}
                )
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def missing(self, code: str) -> None:
                self.send_response(404)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def file(self, name: str, body: bool) -> None:
                content = hub.files[name]
                if body and hub.wrong[name]:
                    hub.wrong[name] -= 1
                    content = bytes(255 - b for b in content)
                part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                whole = part is None
                if part is not None:
                    content = content[int(part[1]) : int(part[2]) + 1]
                self.send_response(200 if whole else 206)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(hub.files[name]).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if not body:
                    return
                try:
                    for start in range(0, len(content), CHUNK):
                        if whole and start + CHUNK >= len(content):  # counted before the client goes on
                            hub.downloads[name] += 1
                        self.wfile.write(content[start : start + CHUNK])
                        if name.endswith(".safetensors"):
                            time.sleep(hub.seconds_a_chunk)
                except OSError:  # the client was killed
                    return

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sibling(name: str, content: bytes) -> dict[str, Any]:
    """A file in a hub's listing with ``blobs=true``."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith(".safetensors"):
        entry["lfs"] = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "pointerSize": 130,
        }
    return entry
