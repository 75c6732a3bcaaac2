#!/usr/bin/env python3
"""Many clients, a large request and an upload over HTTP: gateways of several versions compared.

    python tests/benchmarks/clients.py MODEL URL [URL …] [--rounds 5] [--upload-mb 1000] [--json]

Every URL is a gateway that runs already and serves the model by this name, each of another version;
they take turns in every round. Measured are

- clients: 32 at a time, each with 10 requests of 5 tokens: latency (median, 95 %) and requests/s;
- batch: one request of 1,024 prompts, 16 tokens each: seconds;
- upload: one file: seconds. It is deleted afterwards.

Prints medians over the rounds, and the ratio of each to the first URL's in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import httpx2 as httpx
import orjson

CLIENTS, REQUESTS, TOKENS = 32, 10, 5
PROMPTS, BATCH_TOKENS = 1024, 16
PATIENCE_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--upload-mb", type=int, default=1000, help="megabytes; 0: no upload")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rounds: list[list[dict[str, float]]] = []
    with tempfile.TemporaryFile() as file:
        for _ in range(given.upload_mb):
            file.write(b"x" * 1_000_000)
        for url in given.urls:  # warms up
            clients(url, given.model)
        for _ in range(given.rounds):
            rounds.append([measure(url, given.model, file, given.upload_mb) for url in given.urls])
    names = rounds[0][0]
    found = {
        url: {
            name: {
                "median": statistics.median(one[place][name] for one in rounds),
                "ratio": statistics.median(one[place][name] / one[0][name] for one in rounds),
            }
            for name in names
        }
        for place, url in enumerate(given.urls)
    }
    if given.json:
        sys.stdout.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    for name in names:
        for url, of_url in found.items():
            median, ratio = of_url[name]["median"], of_url[name]["ratio"]
            sys.stdout.write(f"{name:16} {url:32} {median:9.3f} x{ratio:.3f}\n")


def measure(url: str, model: str, file: IO[bytes], upload_mb: int) -> dict[str, float]:
    found = clients(url, model)
    begun = time.perf_counter()
    prompts = [f"{number} and" for number in range(PROMPTS)]
    complete(url, {"model": model, "prompt": prompts, "max_tokens": BATCH_TOKENS, "seed": 1})
    found["batch_s"] = time.perf_counter() - begun
    if upload_mb:
        found["upload_s"] = upload(url, file)
    return found


def clients(url: str, model: str) -> dict[str, float]:
    def client(number: int) -> list[float]:
        latencies = []
        with httpx.Client(timeout=PATIENCE_S, verify=False, trust_env=False) as connection:
            for seed in range(REQUESTS):
                begun = time.perf_counter()
                body = {"model": model, "prompt": f"{number}", "max_tokens": TOKENS, "seed": seed}
                connection.post(f"{url}/v1/completions", json=body).raise_for_status()
                latencies.append(time.perf_counter() - begun)
        return latencies

    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        latencies = sorted(one for found in pool.map(client, range(CLIENTS)) for one in found)
    seconds = time.perf_counter() - begun
    return {
        "latency_s": statistics.median(latencies),
        "latency_95_s": latencies[int(0.95 * len(latencies))],
        "requests_per_s": len(latencies) / seconds,
    }


def complete(url: str, body: dict[str, object]) -> None:
    with httpx.Client(timeout=PATIENCE_S, verify=False, trust_env=False) as connection:
        connection.post(f"{url}/v1/completions", json=body).raise_for_status()


def upload(url: str, file: IO[bytes]) -> float:
    """Upload the file, and return how long it took."""
    file.seek(0)
    with httpx.Client(timeout=PATIENCE_S, verify=False, trust_env=False) as connection:
        begun = time.perf_counter()
        answer = connection.post(
            f"{url}/v1/files",
            files={"file": ("rows.jsonl", file)},
            data={"purpose": "fine-tune"},
        ).raise_for_status()
        seconds = time.perf_counter() - begun
        connection.delete(f"{url}/v1/files/{answer.json()['id']}").raise_for_status()
    return seconds


if __name__ == "__main__":
    main()
