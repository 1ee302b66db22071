"""Some load on a cluster, and what came of it: clients ask prompts that share long beginnings. Standard library alone.

Usage: load.py URL [REQUESTS]     (KVTIER_ROUTER__TOKEN: the router's token, where it has one)
"""

import http.client
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

CLIENTS = 4
PREFIXES, PREFIX_TOKENS, TAIL_TOKENS, ANSWER_TOKENS = 8, 480, 32, 8
TOKENS = range(10, 200)  # every model has them
DEADLINE = 120.0  # seconds


def ask(method: str, path: str, body: object = None) -> Any:
    """The answer's JSON. Whatever is wrong ends the program with a line."""
    url = urlsplit(sys.argv[1])
    headers = {"content-type": "application/json"}
    if token := os.environ.get("KVTIER_ROUTER__TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=DEADLINE)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status} {text[:300].decode('utf-8', 'replace')}")
    return json.loads(text)


def one(model: str, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds for a prompt and a short answer, and how much of the prompt was cached."""
    begun = time.perf_counter()
    usage = ask("POST", "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS})["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return time.perf_counter() - begun, cached, usage["prompt_tokens"]


def main() -> None:
    """Ask, and print a line for each quarter of the requests: the first has seen nothing yet."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    model = ask("GET", "/v1/models")["data"][0]["id"]
    numbers = random.Random()
    prefixes = [numbers.choices(TOKENS, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
    prompts = [numbers.choice(prefixes) + numbers.choices(TOKENS, k=TAIL_TOKENS) for _ in range(count)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        results = list(clients.map(lambda prompt: one(model, prompt), prompts))
    for first in range(0, count, count // 4):
        times, cached, total = zip(*results[first : first + count // 4], strict=True)
        print(
            f"requests {first + 1:3}–{first + len(times):3}: median {statistics.median(times) * 1000:6.0f} ms, "
            f"slowest {max(times) * 1000:6.0f} ms, {sum(cached) / sum(total):.0%} of the prompts cached"
        )


if __name__ == "__main__":
    main()
