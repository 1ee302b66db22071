"""Takes the pictures of docs/operate.md, of a cluster that works while they are taken: `kvtier cluster up` first.

    python benchmarks/_screenshots.py [--router URL] [--node URL] [--seconds N]

Needs chromium and chromedriver (Debian: chromium-driver), and the extra `dev`. `kvtier bench` asks meanwhile.
"""

import argparse
import base64
import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Final

from PIL import Image

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "rigs"))

from browser_rig import browser, missing  # noqa: E402

DOCS: Final = ROOT / "docs"
MOST_BYTES: Final = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="http://127.0.0.1:7400")
    parser.add_argument("--node", default="http://127.0.0.1:7411")
    parser.add_argument("--seconds", type=int, default=90, help="of load that a page is shown before its picture")
    options = parser.parse_args()
    if missing():
        raise SystemExit(missing())
    pages = (("node", options.node, "dark"), ("router", options.router, "light"))  # the router last: it knows most then
    with browser() as page, loaded(options.router):
        for name, url, scheme in pages:
            page.be(scheme=scheme)
            page.open(url)
            page.wait_for("●")
            time.sleep(options.seconds)
            picture = small(base64.b64decode(page.picture()))
            if len(picture) > MOST_BYTES:
                raise SystemExit(f"{name}: a picture of {len(picture)} bytes; more than {MOST_BYTES} is too much")
            (DOCS / f"dashboard_{name}.png").write_bytes(picture)
            print(f"docs/dashboard_{name}.png: {len(picture)} bytes")


@contextmanager
def loaded(url: str) -> Iterator[None]:
    ended = threading.Event()

    def ask() -> None:
        for seed in takewhile(lambda _: not ended.is_set(), count()):  # other prompts each time
            command = [sys.executable, "-m", "kvtier.cli", "bench", url, "--seed", str(seed)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
                while load.poll() is None and not ended.wait(0.1):
                    pass
                load.kill()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def small(picture: bytes) -> bytes:
    """The same with at most 256 colours: a page has few."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(packed, "PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    main()
