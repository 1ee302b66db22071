"""Some load on a cluster, and what came of it: clients ask prompts that share long beginnings. Standard library alone.

KVTIER_ROUTER__TOKEN is the router's token, where it has one.
"""

import argparse
import http.client
import json
import os
import random
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

CLIENTS = 4
PREFIXES, PREFIX_TOKENS, TAIL_TOKENS, ANSWER_TOKENS = 8, 480, 32, 8
TOKENS = range(10, 200)  # every model has them
DEADLINE = 120.0  # seconds


def address(text: str) -> SplitResult:
    url = urlsplit(text)
    if url.scheme != "http" or not url.hostname or not re.fullmatch(r".*:\d+", url.netloc):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as in http://127.0.0.1:7400")
    return url


def number(text: str) -> int:
    """From 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")
    return int(text)


def ask(url: SplitResult, path: str, body: object = None) -> Any:
    """The answer's JSON. Whatever is wrong ends the program with a line."""
    headers = {"content-type": "application/json"}
    if token := os.environ.get("KVTIER_ROUTER__TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=DEADLINE)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(f"{url.geturl()}: {error}; is the cluster up?") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status} {text[:300].decode('utf-8', 'replace')}")
    return json.loads(text)


def one(url: SplitResult, model: str, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds for a prompt and a short answer, and how much of the prompt was cached."""
    begun = time.perf_counter()
    usage = ask(url, "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS})["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return time.perf_counter() - begun, cached, usage["prompt_tokens"]


def main() -> None:
    """Ask, and print a line for each quarter of the requests: the first has seen nothing yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", type=address, help="the router's, as in http://127.0.0.1:7400")
    parser.add_argument("requests", type=number, nargs="?", default=64, help="how many, from 1 on (64)")
    given = parser.parse_args()
    count = given.requests
    models = ask(given.url, "/v1/models")["data"]
    if not models:
        raise SystemExit(f"{given.url.geturl()}: it has no model; is a replica up?")
    model = models[0]["id"]
    numbers = random.Random()
    prefixes = [numbers.choices(TOKENS, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
    prompts = [numbers.choice(prefixes) + numbers.choices(TOKENS, k=TAIL_TOKENS) for _ in range(count)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        results = list(clients.map(lambda prompt: one(given.url, model, prompt), prompts))
    quarter = -(-count // 4)
    for first in range(0, count, quarter):
        times, cached, total = zip(*results[first : first + quarter], strict=True)
        print(
            f"requests {first + 1:3}–{first + len(times):3}: median {statistics.median(times) * 1000:6.0f} ms, "
            f"slowest {max(times) * 1000:6.0f} ms, {sum(cached) / sum(total):.0%} of the prompts cached"
        )


if __name__ == "__main__":
    main()
