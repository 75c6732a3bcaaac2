"""Homes of earlier versions: unpacked at another path, and finished by the version that runs.

Run directories and Redis' file hold absolute paths, so a home is unpacked to a folder whose path
has the same length as ORIGINAL, which is replaced everywhere.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import xxhash
from daemons import Daemon
from s3_servers import BUCKET, S3Server
from waiting import wait_until

from warmd.configs import config
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.queue import totals
from warmd.daemon.runs import events

# Where a home is made; as long as what mkdtemp makes, which ends in eight characters.
ORIGINAL = Path("/tmp/warmd-old-original")
OBJECTS = "objects.json"  # of the bucket: key, file and checksum of each
_CHECKSUM = "xxh3-128"  # the metadata of an object that no index names
_SEAL_PREFIX = "xxh3:"


class OldHome(Daemon):
    """The daemon of this version in a home of an earlier one."""

    def __init__(self, folder: Path, home: str = "home") -> None:
        """`folder`: with the home and `project`, where `jobs.json` has the ids of its jobs."""
        self.config = config.load(home=folder / home, environ={})
        self.home = Home(self.config.home)
        self.client = Client(self.config)
        self.folder = folder
        every = orjson.loads((folder / "project" / "jobs.json").read_bytes())
        self.jobs: dict[str, str] = every.get(home, every)
        self.before = {name: self.logged(name) for name in self.jobs}

    def logged(self, name: str) -> list[dict[str, Any]]:
        """The events of a job, without Redis; those of a group are its decisions."""
        return list(events.read(self.home.runs / self.jobs[name] / "events.jsonl"))

    def job(self, name: str) -> dict[str, Any]:
        return self.client.jobs.get(self.jobs[name])

    def status_of(self, name: str) -> str:
        return str(self.job(name)["status"])

    def finish(self, name: str) -> None:
        """Wait until a job has finished; check that nothing of it was lost or done twice."""
        job = self.wait(self.jobs[name], timeout_s=120)
        assert job["status"] == "finished", job["error"]
        logged, before = self.logged(name), self.before[name]
        assert logged[: len(before)] == before
        assert [event["seq"] for event in logged] == list(range(1, len(logged) + 1))
        assert [event["type"] for event in logged].count("finished") == 1
        steps = [event["step"] for event in logged if event["type"] == "step"]
        assert steps == list(range(1, (job["steps_total"] or 0) + 1))

    def resumed_from(self, name: str) -> int | None:
        """The checkpoint from which the last execution of a job resumed."""
        found: int | None = [e for e in self.logged(name) if e["type"] == "begin"][-1][
            "resumed_from"
        ]
        return found

    def group(self, name: str) -> dict[str, Any]:
        """Wait until a sweep or a curriculum has ended; return it."""
        read = self.client.groups.sweep if name == "sweep" else self.client.groups.curriculum

        def ended() -> dict[str, Any] | None:
            found = read(self.jobs[name])
            return found if found["status"] in ("finished", "failed", "stopped") else None

        found: dict[str, Any] = wait_until(ended, timeout_s=120)
        return found

    def finish_all(self) -> dict[str, Any]:
        """Continue and resume what waits for a user, wait until all has ended; return the outcome.

        `weights` are the jobs with final weights, by name; those of groups by number. `ended` has
        the number of jobs that have ended, by kind and status, since the home was made.
        """
        for name in self.jobs:
            if name.startswith(("held", "released")):
                self.client.jobs.unpause(self.jobs[name])
            if name == "stopped":
                self.client.jobs.resume(self.jobs[name])
        weights: dict[str, str] = {}
        statuses: dict[str, str] = {}
        scores: dict[str, dict[str, float]] = {}
        resumed_from: dict[str, int] = {}
        outcome: dict[str, Any] = {
            "weights": weights,
            "statuses": statuses,
            "scores": scores,
            "resumed_from": resumed_from,
        }
        for name, job_id in self.jobs.items():
            if name == "sweep":
                found = self.group(name)
                members = [job for point in found["points"] for job in point["jobs"]]
                best = found["points"][found["best"]]["values"]
                outcome["sweep"] = {"status": found["status"], "best": best}
            elif name == "curriculum":
                found = self.group(name)
                members = [{"id": one["job"], "status": "finished"} for one in found["attempts"]]
                decisions = [one["decision"] for one in found["attempts"]]
                outcome["curriculum"] = {"status": found["status"], "decisions": decisions}
            else:
                job = self.wait(job_id, timeout_s=120)
                members = []
                statuses[name] = job["status"]
                begun = [e for e in self.logged(name) if e["type"] == "begin"]
                if begun and begun[-1].get("resumed_from"):
                    resumed_from[name] = begun[-1]["resumed_from"]
                if job["status"] == "finished" and job_id.startswith("eval"):
                    metrics = (self.client.jobs.result(job_id) or {})["metrics"]
                    scores[name] = {m: found["value"] for m, found in metrics.items()}
                elif job["status"] == "finished":
                    weights[name] = job_id
            ended = [member["id"] for member in members if member["status"] == "finished"]
            weights |= {f"{name}_{number}": one for number, one in enumerate(ended)}
        durations = totals.read(self.client.connection).durations.items()
        outcome["ended"] = {
            f"{kind} {how}": sum(one.counts.values()) for (kind, how), one in durations
        }
        return outcome

    def weights(self, job_id: str) -> Path:
        """The file with the final weights, or with those of the adapter."""
        if self.client.remote is not None:
            self.client.models.fetch_weights(job_id, final=True)
        (found,) = (self.home.runs / job_id / "model").glob("*model.safetensors")
        return found


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Unpack an archive to a folder for its paths; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="warmd-old-", dir="/tmp") as folder:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        relocate(Path(folder))
        yield Path(folder)


def relocate(folder: Path) -> None:
    """Replace the path where the home was made; Redis' file needs one of the same length."""
    original, here = str(ORIGINAL).encode(), str(folder).encode()
    assert len(here) == len(original)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        if original in content:
            path.write_bytes(_resealed(content.replace(original, here)))
    files = {str(path): path for path in folder.rglob("*")}
    for path in folder.rglob("manifest.json"):
        _recheck_manifest(files, f"{path.parent}/")
    for path in folder.rglob(OBJECTS):
        _recheck_bucket(path.parent)


def _resealed(content: bytes) -> bytes:
    """Renew the digest that a JSON document has of its other fields."""
    if f'"{_SEAL_PREFIX}'.encode() not in content or not content.startswith(b"{\n"):
        return content
    document = orjson.loads(content)
    document.pop("digest")
    digest = f"{_SEAL_PREFIX}{xxhash.xxh3_64_hexdigest(orjson.dumps(document))}"
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps({**document, "digest": digest}, option=options)


def _recheck_manifest(files: Mapping[str, Path], checkpoint: str) -> None:
    """Renew the checksums of a checkpoint's manifest: of its files, and of itself."""
    path = files[f"{checkpoint}manifest.json"]
    manifest = orjson.loads(path.read_bytes())["manifest"]
    for name, file in manifest["files"].items():
        if (content := files.get(checkpoint + name)) is not None:
            file["xxh3_128"] = xxhash.xxh3_128_hexdigest(content.read_bytes())
    checksum = xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))
    path.write_bytes(orjson.dumps({"manifest": manifest, "xxh3_128": checksum}))


def _recheck_bucket(folder: Path) -> None:
    """Renew the checksums of the bucket's indexes, and of the objects that have one themselves."""
    objects = orjson.loads((folder / OBJECTS).read_bytes())
    paths = {one["key"]: folder / one["file"] for one in objects}
    for key, path in paths.items():
        prefix, *rest = key.split("/")
        if rest[-1:] == ["index.json"]:
            document = orjson.loads(path.read_bytes())
            files = {n: paths[f"{prefix}/{f['key']}"] for n, f in document["files"].items()}
            for name in files:
                if name.endswith("/manifest.json"):
                    _recheck_manifest(files, name.removesuffix("manifest.json"))
            for name, file in document["files"].items():
                file["xxh3_128"] = xxhash.xxh3_128_hexdigest(files[name].read_bytes())
            path.write_bytes(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
    for one in objects:
        if one["checksum"] is not None:
            one["checksum"] = xxhash.xxh3_128_hexdigest(paths[one["key"]].read_bytes())
    (folder / OBJECTS).write_bytes(orjson.dumps(objects))


def save_bucket(server: S3Server, folder: Path) -> None:
    """Write all objects of the bucket to files."""
    import obstore

    folder.mkdir()
    store, objects = _store(server), []
    keys = sorted(meta["path"] for page in obstore.list(store) for meta in page)
    for number, key in enumerate(keys):
        found = obstore.get(store, key)
        checksum = found.attributes.get(_CHECKSUM)
        (folder / f"{number}").write_bytes(bytes(found.bytes()))
        objects.append({"key": key, "file": f"{number}", "checksum": checksum})
    (folder / OBJECTS).write_bytes(orjson.dumps(objects))


def load_bucket(server: S3Server, folder: Path) -> None:
    """Put the objects of `save_bucket` into the bucket."""
    import obstore

    store = _store(server)
    for one in orjson.loads((folder / OBJECTS).read_bytes()):
        attributes = {} if one["checksum"] is None else {_CHECKSUM: one["checksum"]}
        content = (folder / one["file"]).read_bytes()
        obstore.put(store, one["key"], content, attributes=attributes, use_multipart=False)


def _store(server: S3Server) -> Any:
    from obstore.store import S3Store

    endpoint = f"http://127.0.0.1:{server.proxy.port}"
    options: dict[str, Any] = {"endpoint": endpoint, "region": "us-east-1"}
    return S3Store(BUCKET, client_options={"allow_http": True}, **options)
