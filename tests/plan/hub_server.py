"""A hub on loopback: serves directories as repositories, by the routes that snapshot_download asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serves `models/org/name` and `datasets/org/name`; yields the endpoint and the paths that were asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            asked.append(self.path)
            status, body, kind = self.found(self.path.split("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def found(self, path: str) -> tuple[int, bytes, str]:
            for name, directory in repositories.items():
                files = sorted(each.name for each in directory.iterdir())
                if path.startswith(f"/api/{name}/tree/"):
                    tree = [
                        {"type": "file", "path": each, "oid": "0" * 40, "size": (directory / each).stat().st_size}
                        for each in files
                    ]
                    return 200, json.dumps(tree).encode(), "application/json"
                if path.startswith(f"/api/{name}/"):
                    short = name.split("/", 1)[1]
                    about = {"id": short, "sha": COMMIT, "siblings": [{"rfilename": each} for each in files]}
                    return 200, json.dumps(about).encode(), "application/json"
                prefix = f"/{name.removeprefix('models/')}/resolve/{COMMIT}/"
                if path.startswith(prefix) and path.removeprefix(prefix) in files:
                    return 200, (directory / path.removeprefix(prefix)).read_bytes(), "application/octet-stream"
            return 404, b"{}", "application/json"

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
