"""The episodes of a step that have ended, on disk: after a kill they are not played again.

One file per step and rank in the run directory: `rollouts/STEP.jsonl` of rank 0, `STEP-RANK.jsonl`
of the others; STEP is the number of steps done before. A file has a header, which says of which
weights and sources the episodes are, and a line with a checksum for each episode that has ended or
failed. It is kept until checkpoints cover its step. Imports no torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files.journal import Journal
from .episodes import Episode, Key
from .pool import Failure

FOLDER = "rollouts"
SCHEMA = 2


class EpisodeJournal(Journal):
    """The episodes of one step, by key; `add` appends those that end.

    `header`: what the episodes depend on, as plain JSON. A file with another header is begun anew:
    `is_outdated` says so. `segment` makes a segment of its fields. Raises OSError.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        header: Mapping[str, Any],
        segment: Callable[..., Any],
        *,
        rank: int = 0,
    ) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / (f"{step}-{rank}.jsonl" if rank else f"{step}.jsonl")
        self.known: dict[Key, Episode] = {}
        first = _line({"schema": SCHEMA, "step": step, **header})
        kept, is_first = 0, True
        self.is_outdated = False
        for line in _lines(path):
            if is_first and line != first:
                self.is_outdated = True
                break
            if not is_first:
                episode = episode_of(json.loads(line.partition(b" ")[2]), segment)
                self.known[episode.key] = episode
            kept, is_first = kept + len(line), False
        super().__init__(path, kept)
        if is_first or self.is_outdated:
            self.write(first)

    def add(self, episode: Episode) -> None:
        """Append an episode that has ended or failed. Raises OSError (a full disk)."""
        self.write(_line(plain(episode)))


def remove_before(run_dir: Path, step: int) -> None:
    """Remove the files of the steps that begin before `step` steps are done. Raises OSError.

    The folder stays: another rank may be about to create its file.
    """
    for path in (run_dir / FOLDER).glob("*.jsonl"):
        number = path.stem.partition("-")[0]
        if number.isdigit() and int(number) < step:
            path.unlink(missing_ok=True)


def remove(run_dir: Path, step: int) -> None:
    """Remove the folder of a job that has ended after `step` steps. Raises OSError."""
    remove_before(run_dir, step)
    with suppress(OSError):  # it is not there, or has other files
        (run_dir / FOLDER).rmdir()


def _line(value: Mapping[str, Any]) -> bytes:
    content = json.dumps(value).encode()  # lone surrogates too, which orjson refuses
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file up to the first one that a crash has damaged."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            checksum, _, content = line.removesuffix(b"\n").partition(b" ")
            is_whole = line.endswith(b"\n") and checksum == b"%08x" % zlib.crc32(content)
            if not is_whole:
                return
            yield line


def plain(episode: Episode) -> dict[str, Any]:
    """Return an episode as JSON values."""
    return {
        "key": list(episode.key),
        "prompt": episode.prompt,
        "written": [
            {
                "ids": one.ids,
                "entropies": one.entropies,
                "logps": one.logps,
                "is_given": one.is_given,
                **({} if one.prompt is None else {"prompt": one.prompt}),
            }
            for one in episode.written
        ],
        "messages": episode.messages,
        "rewards": episode.rewards,
        "reward": episode.reward,
        "parts": episode.parts,
        "success": episode.success,
        "turns": episode.turns,
        "reason": episode.reason,
        "failure": None if episode.failure is None else asdict(episode.failure),
        "environment_s": episode.environment_s,
    }


def episode_of(found: dict[str, Any], segment: Callable[..., Any]) -> Episode:
    """Return the episode that `plain` made these values of; `segment` makes a segment of fields."""
    failure = found.pop("failure")
    return Episode(
        key=Key(*found.pop("key")),
        written=[segment(**fields) for fields in found.pop("written")],
        failure=None if failure is None else Failure(**failure),
        **found,
    )
