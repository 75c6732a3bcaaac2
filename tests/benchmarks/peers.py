#!/usr/bin/env python3
"""warmd's engine compared with llama.cpp and OpenVINO GenAI: same weights, two threads.

    python tests/benchmarks/peers.py MODEL --peers-venv DIR [--quick] [--rounds 3] [--json]
        [--only decode-1,prefill-512] [--skip openvino] [--llama-cpp wheel|source]

MODEL is a folder with a Qwen2 or Llama model in safetensors. The first call installs the peers into
DIR and writes their GGUF files there. llama.cpp is the `xllamacpp` wheel, compiled for AVX2; on a
processor with AVX-512 it is compiled on this machine from `llama-cpp-python`, whose quantizer also
writes the files of 4 bits.

One child process for each runtime and format, all loaded at once (8 GB of memory for 0.5B); one
computes at a time, and all compute the same prompts in a round: random tokens, new every time.

- decode-N: new tokens per second of N sequences, from the first new token to the 32nd, after
  prompts of 100 tokens that are in the prefix cache already. Greedy, no early end.
- requests-N: N * 32 new tokens by the seconds that prompts and decoding take together.
- prefill-N: tokens of one prompt by the seconds until its first new token.

Then the same concurrently with a process that only computes. Prints a table in Markdown: medians of
the rounds; in parentheses warmd's rate divided by the peer's, the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer_child import THREADS, Answer, Memory

os.environ["OMP_NUM_THREADS"] = str(THREADS)  # before torch is imported, here and in children

import torch

from warmd.configs.precision import NATIVE
from warmd.daemon.host.parent_death import tied_to_parent
from warmd.jobs.bench import machine
from warmd.jobs.bench.apart import apart
from warmd.jobs.compute.device import processor_name
from warmd.jobs.compute.levels import instructions
from warmd.jobs.errors import WarmdError
from warmd.jobs.models.gguf.writing import write_model

HERE = Path(__file__).parent
WHEEL = ("xllamacpp==2026.10.11549",)
SOURCE = ("llama-cpp-python==0.3.36",)
BUILD = ("cmake==4.4.4", "ninja==1.13.2", "scikit-build-core==1.1.2")
CMAKE_ARGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"
COMMON = ("gguf==0.19.0", "tokenizers==0.23.3")
OPENVINO = ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0")
NEW_TOKENS, PROMPT = 32, 100
TOKENS = range(1000, 100_000)  # plain words of both vocabularies


@dataclass(frozen=True)
class Side:
    """A runtime with the weights in one format; it is compared with warmd at the same `bits`."""

    runtime: str
    format: str
    bits: int

    def __str__(self) -> str:
        return f"{self.runtime} {self.format}"


SIDES = (
    Side("warmd", NATIVE, 32),
    Side("llama.cpp", "F32", 32),
    Side("warmd", "bf16", 16),
    Side("llama.cpp", "F16", 16),
    Side("openvino", "F16", 16),
    Side("warmd", "int8", 8),
    Side("llama.cpp", "Q8_0", 8),
    Side("openvino", "Q8_0", 8),
    Side("warmd", "int4", 4),
    Side("llama.cpp", "Q4_0", 4),
    Side("llama.cpp", "Q4_K_M", 4),
)
QUANTIZED = ("Q4_0", "Q4_K_M")  # by llama.cpp's own quantizer
BURSTS = {"decode-1": (1, PROMPT), "decode-8": (8, PROMPT), "decode-16": (16, PROMPT)}
PREFILLS = {"prefill-128": (1, 128), "prefill-512": (1, 512)}
QUICK = ("decode-1", "prefill-128")
MEMORY = {
    "anonymous": "anonymous memory at the end",
    "files": "pages of mapped files at the end",
    "shared": "of both, shared with other processes",
}


class Trouble(Exception):
    """An error of the benchmark: one line with what to do about it."""


@dataclass
class Found:
    """Rates in tokens per second: figure, then side, one for each round in which all gave one."""

    rates: dict[str, dict[Side, list[float]]] = field(default_factory=dict)
    same_text: dict[Side, list[bool]] = field(default_factory=dict)  # as of warmd's most bits
    peak_bytes: dict[Side, int] = field(default_factory=dict)
    memory: dict[Side, Memory] = field(default_factory=dict)  # after the latest answer

    def add(self, figure: str, side: Side, rate: float) -> None:
        self.rates.setdefault(figure, {}).setdefault(side, []).append(rate)


class Child:
    """A runtime in its own process; its log goes to a file."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ready(self) -> str:
        """Return the runtime's description of itself. Raises Trouble if it does not start."""
        reply = self._read()
        if "error" in reply:
            raise Trouble(reply["error"])
        return str(reply["ready"])

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: so does its stdout
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        reply = self._read()
        return Answer(**{**reply, "memory": Memory(**reply["memory"])})

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Trouble(f"exit status {self._process.wait()}; see {self._log}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*BURSTS, *PREFILLS]
    parser.add_argument("model", type=Path)
    parser.add_argument("--peers-venv", type=Path, required=True, help="folder for the peers")
    parser.add_argument("--rounds", type=int, default=3, help="on an idle machine (default: 3)")
    parser.add_argument("--busy-rounds", type=int, default=1, help="beside a process (default: 1)")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(every)}")
    parser.add_argument(
        "--skip", action="append", default=[], help="a runtime or a format: openvino, F32, ..."
    )
    parser.add_argument("--llama-cpp", choices=["wheel", "source"], help="default: by processor")
    parser.add_argument("--quick", action="store_true", help=f"one round of {' and '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = args.only.split(",") if args.only else list(QUICK if args.quick else every)
    if unknown := set(figures) - set(every):
        parser.error(f"--only: must be of {', '.join(every)}, got {', '.join(sorted(unknown))}")
    if args.quick:
        args.rounds, args.busy_rounds = 1, 0
        args.skip += ["openvino", "F32"]
    sides = [side for side in SIDES if not {side.runtime, side.format} & set(args.skip)]
    if not (args.model / "config.json").is_file():
        parser.error(f"MODEL: must be a model's folder, {args.model} has no config.json")
    try:
        compare(args, sides, figures)
    except Trouble as trouble:
        sys.exit(f"peers: {trouble}")


def compare(args: argparse.Namespace, sides: list[Side], figures: list[str]) -> None:
    processor, level = processor_name(), instructions()
    wheel = (args.llama_cpp or ("source" if "AVX-512" in level else "wheel")) == "wheel"
    commands = prepare(args.peers_venv.resolve(), args.model.resolve(), sides, wheel)
    torch.set_num_threads(THREADS)
    found = {"idle": Found(), "busy": Found()}
    with ExitStack() as running:
        children: dict[Side, Child] = {}
        words = {}
        for side, command in commands.items():
            child = Child(command, args.peers_venv / f"{side}.log".replace(" ", "-"))
            running.callback(child.close)
            try:
                words[side.runtime] = child.ready()
            except Trouble as trouble:
                note(f"{side}: left out: {trouble}")
            else:
                children[side] = child
        before = apart(machine.measure)
        for number in range(args.rounds):
            one_round(children, figures, found["idle"], number, "idle")
        after = apart(machine.measure)
        with busy_process():
            for number in range(args.busy_rounds):
                one_round(children, figures, found["busy"], number, "busy")
    rates: dict[str, list[float]] = {
        "GFLOP/s": [round(rate.flops / 1e9) for rate in (before, after)],
        "GB/s": [round(rate.bytes_s / 1e9, 1) for rate in (before, after)],
    }
    if args.json:
        whole = {
            "processor": processor, "level": level, "threads": THREADS, "machine": rates,
            "runtimes": words, **{state: plain(some) for state, some in found.items()},
        }  # fmt: skip
        sys.stdout.write(json.dumps(whole) + "\n")
        return
    heading = f"{processor}, {level}, {THREADS} threads; " + "; ".join(words.values())
    measured = "; ".join(f"{' and '.join(map(str, two))} {unit}" for unit, two in rates.items())
    sys.stdout.write(f"{heading}.\nBefore and after the idle rounds: {measured}.\n\n")
    for line in table(list(children), found):
        sys.stdout.write(line + "\n")


def one_round(
    children: dict[Side, Child], figures: list[str], found: Found, number: int, state: str
) -> None:
    """Measure each figure once on each side; every second round in reverse order."""
    order = list(children.items())[:: -1 if number % 2 else 1]
    for figure in figures:
        count, length = {**BURSTS, **PREFILLS}[figure]
        prompts = [random.choices(TOKENS, k=length) for _ in range(count)]
        texts: dict[Side, list[str]] = {}
        for side, child in order:
            first = latest = child.ask(prompts, 1)
            if figure in PREFILLS:
                found.add(figure, side, length / first.first_s[0])
            else:
                latest = child.ask(prompts, NEW_TOKENS)
                decode_s = max(latest.last_s) - min(latest.first_s)
                found.add(figure, side, count * (NEW_TOKENS - 1) / decode_s)
                whole_s = max(first.last_s) + max(latest.last_s)
                requests = figure.replace("decode", "requests")
                found.add(requests, side, count * NEW_TOKENS / whole_s)
            found.peak_bytes[side], found.memory[side] = latest.peak_bytes, latest.memory
            texts[side] = first.texts
        rates = (f"{side} {found.rates[figure][side][-1]:.1f}" for side in children)
        note(f"{state} round {number + 1}: {figure}: {', '.join(rates)}")
        reference = texts[max(texts, key=lambda side: (side.runtime == "warmd", side.bits))]
        for side, some in texts.items():
            found.same_text.setdefault(side, []).extend(
                mine == theirs for mine, theirs in zip(some, reference, strict=True)
            )


def table(sides: list[Side], found: dict[str, Found]) -> Iterator[str]:
    """The lines of a table in Markdown."""

    def line(*cells: object) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    yield line("tokens per second", *sides)
    yield line("---", *("---" for _ in sides))
    for state, some in found.items():
        for figure, rates in some.rates.items():
            name = figure if state == "idle" else f"{figure}, busy"
            yield line(name, *(cell(side, rates) for side in sides))
    peaks, same = found["idle"].peak_bytes, found["idle"].same_text
    yield line("most resident memory, GB", *(f"{peaks[side] / 1e9:.2f}" for side in sides))
    for part, words in MEMORY.items():
        figures = (getattr(found["idle"].memory[side], part) / 1e9 for side in sides)
        yield line(f"{words}, GB", *(f"{figure:.2f}" for figure in figures))
    yield line("same first token", *(f"{sum(same[side])} of {len(same[side])}" for side in sides))


def cell(side: Side, rates: dict[Side, list[float]]) -> str:
    mine = opposite(side, rates)
    middle = f"{statistics.median(rates[side]):.1f}"
    if mine is None:
        return middle
    ratios = [own / theirs for own, theirs in zip(rates[mine], rates[side], strict=True)]
    return f"{middle} ({statistics.median(ratios):.2f})"


def opposite(side: Side, rates: dict[Side, list[float]]) -> Side | None:
    """What a peer is compared with: warmd of as many bits or, where that is not served, of more."""
    own = [other for other in rates if other.runtime == "warmd" and other.bits >= side.bits]
    return None if side.runtime == "warmd" or not own else min(own, key=lambda other: other.bits)


def plain(found: Found) -> dict[str, Any]:
    return {
        "tokens_s": {
            figure: {str(side): some for side, some in rates.items()}
            for figure, rates in found.rates.items()
        },
        "peak_bytes": {str(side): peak for side, peak in found.peak_bytes.items()},
        "memory_bytes": {str(side): asdict(memory) for side, memory in found.memory.items()},
        "same_first_token": {str(side): sum(some) for side, some in found.same_text.items()},
    }


def prepare(folder: Path, model: Path, sides: list[Side], wheel: bool) -> dict[Side, list[str]]:
    """Install what the sides need, write their files, and return their commands."""
    python = folder / "venv" / "bin" / "python"
    runtimes = {side.runtime for side in sides}
    wanted = [*COMMON] if runtimes - {"warmd"} else []
    if "llama.cpp" in runtimes:
        wanted += WHEEL if wheel else SOURCE
    if wheel and any(side.format in QUANTIZED for side in sides):
        wanted += SOURCE
    if "openvino" in runtimes:
        wanted += OPENVINO
    marker = folder / "venv" / "installed.json"
    installed = json.loads(marker.read_text()) if marker.is_file() else []
    if missing := [package for package in wanted if package not in installed]:
        note(f"installing {', '.join(missing)} into {folder}")
        if not python.is_file():
            venv.create(folder / "venv", with_pip=True)
        if set(missing) & set(SOURCE):
            pip(python, *BUILD)
            path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # its cmake and ninja
            build = ("--no-binary", "llama-cpp-python", "--no-build-isolation")
            pip(python, *build, *SOURCE, CMAKE_ARGS=CMAKE_ARGS, PATH=path)
        pip(python, *missing)
        marker.write_text(json.dumps([*installed, *missing]))
    commands: dict[Side, list[str]] = {}
    for side in sides:
        if side.runtime == "warmd":
            own = [sys.executable, str(HERE / "peer_warmd.py"), str(model), side.format]
            commands[side] = own
            continue
        gguf = folder / f"{model.name}-{side.format}.gguf"
        if not gguf.is_file() or gguf.stat().st_mtime < modified(model):
            note(f"writing {gguf}")
            write_gguf(python, model, gguf, side.format)
        if side.runtime == "openvino":
            script = ["peer_openvino.py", str(gguf), str(model)]
        else:
            package = "xllamacpp" if wheel else "llama-cpp-python"
            script = ["peer_llamacpp.py", package, str(gguf), str(model)]
        commands[side] = [str(python), str(HERE / script[0]), *script[1:]]
    return commands


def write_gguf(python: Path, model: Path, gguf: Path, kind: str) -> None:
    """Write the model's GGUF file, with packages that are installed for `python`."""
    if kind in QUANTIZED:
        write_by_llamacpp(python, model, gguf, kind)
    else:
        write_by_warmd(python, model, gguf, kind)


def write_by_llamacpp(python: Path, model: Path, gguf: Path, kind: str) -> None:
    """Write the model's GGUF file by llama.cpp's quantizer."""
    whole = gguf.with_name(gguf.name.replace(kind, "F32"))
    if not whole.is_file() or whole.stat().st_mtime < modified(model):
        write_by_warmd(python, model, whole, "F32")
    script = [str(python), str(HERE / "peer_quantize.py"), str(whole), kind, str(gguf)]
    run(script, f"cannot write {gguf}")


def write_by_warmd(python: Path, model: Path, gguf: Path, kind: str) -> None:
    """Write the model's GGUF file as warmd does, by the package `gguf`."""
    [packages] = python.parent.parent.glob("lib/python3*/site-packages")
    sys.path.append(str(packages))  # behind warmd's own
    partial = gguf.with_suffix(".part")
    try:
        write_model(model, partial, kind.lower(), name=model.name)
    except WarmdError as error:
        raise Trouble(f"cannot write {gguf}: {error}") from error
    finally:
        sys.path.remove(str(packages))
    partial.rename(gguf)


def modified(model: Path) -> float:
    """When the weights in a model's folder were written, in seconds since the epoch."""
    return max(path.stat().st_mtime for path in model.glob("*.safetensors"))


def pip(python: Path, *packages: str, **variables: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    run(command, f"cannot install {' '.join(packages)}; or --skip its runtime", **variables)


def run(command: Sequence[str], trouble: str, **variables: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Trouble(f"{trouble}: {last}")


@contextmanager
def busy_process() -> Iterator[None]:
    """One process that does nothing but compute."""
    with subprocess.Popen(tied_to_parent([sys.executable, "-c", "while True: pass"])) as process:
        try:
            yield
        finally:
            process.kill()


def note(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
