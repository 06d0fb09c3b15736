"""moto's S3 server, on loopback, in a process of its own, in memory."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import obstore
from free_port import free_port
from obstore.store import S3Store

BUCKET = "models"


class S3Server:
    """A restart keeps the port, not the contents."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.environ = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self._http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            try:
                self._http.put(f"/{BUCKET}").raise_for_status()
            except httpx.TransportError:
                time.sleep(0.1)
            else:
                break
        self._store: Any = S3Store(
            BUCKET,
            endpoint=self.url,
            client_options={"allow_http": True},
            region="us-east-1",
            access_key_id="a",
            secret_access_key="b",
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(120)

    def close(self) -> None:
        self.kill()
        self._http.close()

    def refuse(self, after: float = 0) -> None:
        """Refuse all credentials after this number of requests; ``inf``: never."""
        self._http.post("/moto-api/reset-auth", content=str(after)).raise_for_status()

    def uploading(self) -> bool:
        """Whether a multipart upload is in progress."""
        return "<UploadId>" in self._http.get(f"/{BUCKET}?uploads").text

    def sent(self, path: str) -> int:
        """Number of completed uploads of a file."""
        return self._log.read_text().count(f"PUT /{BUCKET}/{path} HTTP")

    def read(self, path: str) -> int:
        """Number of successful reads of an object, or of parts of it."""
        return len(re.findall(rf'"GET /{BUCKET}/{re.escape(path)} HTTP/[\d.]+" 20', self._log.read_text()))

    def paths(self) -> list[str]:
        """Of all objects."""
        return [entry["path"] for page in obstore.list(self._store) for entry in page]

    def objects(self) -> dict[str, bytes]:
        found = {}
        for path in self.paths():
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[path] = bytes(obstore.get(self._store, path).bytes())
        return found

    def written(self, path: str) -> Any:
        return obstore.head(self._store, path)["last_modified"]
