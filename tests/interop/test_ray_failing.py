"""What our application does with requests that end engines, and with engines that refuse: `make test-ray`."""

import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

from ray_rig import application, pids, ray_cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OURS = "kvtier.service.ray.request_router:KVTierRequestRouter"
DEADLY = """
import http.server, os, sys
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200 if self.path == "/v1/models" else 404 if self.path == "/readyz" else 200, b'{"data": []}')
    def do_POST(self):
        if b"deadly" in self.rfile.read(int(self.headers["content-length"])):
            os._exit(1)
        self.answer(429, b'{"error": {"code": "busy"}}')
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
address = sys.argv[sys.argv.index("--http") + 1]
http.server.ThreadingHTTPServer(("127.0.0.1", int(address.rpartition(":")[2])), Engine).serve_forever()
"""


def test_a_request_that_ends_engines_ends_two_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(DEADLY)
    program = (sys.executable, str(tmp_path / "engine.py"))
    options: dict[str, Any] = {"replicas": 4, "resources": {"num_cpus": 0.5}, "options": ()}
    with ray_cluster(2) as cluster, application(cluster, tmp_path, program=program, router=OURS, **options) as app:
        until(lambda: len(engines_of(tmp_path)) == 4)
        before = engines_of(tmp_path)
        answer = httpx2.post(f"{app.url}/v1/completions", json={"prompt": "deadly"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broken")
        assert len(before - engines_of(tmp_path)) == 2
        # What an engine says tells more than that others fail: busy before broken.
        answers = [httpx2.post(f"{app.url}/v1/completions", json={"prompt": "busy"}, timeout=60) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {429}


def engines_of(folder: Path) -> set[int]:
    """The pids of the engines that this folder's program runs as."""
    return set(pids(lambda words: str(folder / "engine.py") in words and "tied" not in words[2]))
