"""What W&B's own client talks to in tests of its online mode: the few requests that it makes, answered from memory.

This shows what the client sends, what it asks before it continues with a run, and that what it does with the answers fits
together. It shows nothing of W&B's server: that a row replaces the one of the same line, that a history and a summary are
answered from what was sent last, are the things taken on trust. Whatever else is asked is refused.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

KEY: Final = "0" * 40
_ENTITY: Final = "team"


class WandbStandIn(ThreadingHTTPServer):
    """One run of project ``p``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.run = ""
        self.config: dict[str, Any] = {}
        self.lines: list[str] = []
        """The history, a row each."""
        self.summary = "{}"
        self.refused: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def history(self) -> list[dict[str, Any]]:
        with self.lock:
            return [json.loads(line) for line in self.lines]

    def answer(self, operation: str, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The data of a GraphQL operation; None: refused."""
        project = {"id": "P", "name": "p", "entity": {"id": "E", "name": _ENTITY}}
        match operation:
            case "RunResumeStatus":
                return {"model": {**project, "bucket": self._bucket() if self.run else None}}
            case "UpsertBucket":
                inserted, self.run = not self.run, self.run or variables["name"]
                self.config |= json.loads(variables["config"] or "{}")
                return {
                    "upsertBucket": {"bucket": {**self._bucket(), "project": project}, "inserted": inserted}
                }
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"entity": None}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "Viewer":
                return {"viewer": {"id": "V", "entity": _ENTITY, "username": _ENTITY, "flags": "{}"}}
            case "" if "query GetDefaultEntity" in query:
                return {"viewer": {"id": "V", "entity": _ENTITY}}
            case "" if "query Run(" in query and variables["name"] == self.run:
                return {"project": {"run": self._bucket()}}
            case "" if "query RunSampledHistory(" in query and variables["name"] == self.run:
                (spec,) = map(json.loads, variables["specs"])
                rows = [json.loads(line) for line in self.lines]
                found = [{k: row[k] for k in spec["keys"]} for row in rows if row.keys() >= set(spec["keys"])]
                assert len(found) <= spec["samples"]
                return {"project": {"run": {"sampledHistory": [found]}}}
        return None

    def _bucket(self) -> dict[str, Any]:
        return {
            "id": "R",
            "name": self.run,
            "displayName": self.run,
            "summaryMetrics": self.summary,
            "logLineCount": 0,
            "historyLineCount": len(self.lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(self.lines[-1:]),
            "eventsTail": "[]",
            "config": json.dumps(self.config),
            "tags": [],
            "state": "running",
            "systemMetrics": "{}",
            "sweepName": None,
            "user": {"name": _ENTITY, "username": _ENTITY},
            "wandbConfig": json.dumps(self.config["_wandb"]["value"] if self.run else {}),
        }

    def take(self, files: dict[str, Any]) -> bool:
        """Of a run's stream, the history and the summary; False: lines between those that are there and those that came are
        missing."""
        sent = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        begin, rows = sent["offset"], sent["content"]
        if begin > len(self.lines):
            return False
        self.lines[begin : begin + len(rows)] = rows
        self.summary = files.get("wandb-summary.json", {"content": [self.summary]})["content"][-1]
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbStandIn

    def do_POST(self) -> None:
        body = self._body()
        if not self.path.startswith(("/graphql", "/files/")):
            self._send(404, b"")  # telemetry of its client
            return
        message = json.loads(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        with self.server.lock:
            if self.path == "/graphql":
                data = self.server.answer(
                    message.get("operationName", ""), message["query"], message.get("variables", {})
                )
                answer = None if data is None else {"data": data}
            else:
                whole = self.path == f"/files/{_ENTITY}/p/{self.server.run}/file_stream"
                answer = {} if whole and self.server.take(message.get("files") or {}) else None
            if answer is None:
                self.server.refused.append(f"{self.path} {json.dumps(message)[:500]}")
        self._send(400 if answer is None else 200, json.dumps(answer or {}).encode())

    def do_PUT(self) -> None:
        self._body()
        self._send(200 if self.path == "/upload" else 404, b"")

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def wandb_stand_in() -> Iterator[WandbStandIn]:
    """One that listens while the context lasts."""
    with WandbStandIn() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
