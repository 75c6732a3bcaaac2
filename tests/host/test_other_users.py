"""Other users of the machine cannot read or change a home, or change caches of code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from breadth import mostly_slow
from needs import needs
from other_users import OTHER, another_user, as_other, open_to_others
from shell import warmd

from warmd.configs import ownership
from warmd.configs.config import load
from warmd.configs.values import ConfigError
from warmd.daemon.host.home import Home
from warmd.daemon.notify.delivery import deliver, sample
from warmd.jobs.compute import cache
from warmd.jobs.files import umask
from warmd.jobs.files.atomic import make_folder, whole_file, whole_folder


@pytest.fixture
def wide_umask() -> Iterator[None]:
    """Programs that create files for everyone."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter; those of pytest are for their owner only."""
    with tempfile.TemporaryDirectory(prefix="warmd-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_home_of_another_user_is_refused_before_its_config_is_read(public: Path):
    another_user()
    home, mark = public / "home", public / "mark"
    public.chmod(0o1777)
    config = f"notify: touch {mark}\nunknown: 1\n"
    assert as_other("sh", "-c", f"mkdir {home} && printf '{config}' > {home}/config.yaml")
    for command in (["start"], ["status"], ["submit", "grpo"]):
        done = warmd(*command, home=home)
        assert done.is_refusal(2)
        assert f"{home} belongs to user {OTHER}" in done.err
        assert "WARMD_SINGLE_USER=on" in done.err
    assert not mark.exists()


@pytest.mark.parametrize("entry", ["config.yaml", "cache", "runs", "sockets"])
def test_an_entry_of_another_user_is_refused(entry: str, public: Path):
    another_user()
    home = public / "home"
    Home(home).create()
    path = home / entry
    shutil.rmtree(path, ignore_errors=True)
    home.chmod(0o777)
    made = as_other("touch" if "." in entry else "mkdir", str(path))
    assert made.returncode == 0, made.stderr
    done = warmd("start", home=home)
    assert done.code == 2
    assert f"{path} belongs to user {OTHER}" in done.err


@pytest.mark.parametrize("way", ["option", "variable", "config", "default"])
def test_a_home_that_is_a_link_of_another_user_is_refused(way: str, public: Path):
    """Its owner could lead the next command to another folder of this user."""
    another_user()
    public.chmod(0o1777)
    link, home = public / "warmd", public / "ours"
    home.mkdir(mode=0o700)
    made = as_other("ln", "-s", str(home), str(link))
    assert made.returncode == 0, made.stderr
    (public / "own.yaml").write_text(f"home: {link}\n")
    environ = {
        "option": {},
        "variable": {"WARMD_HOME": str(link)},
        "config": {"WARMD_CONFIG": str(public / "own.yaml")},
        "default": {"XDG_STATE_HOME": str(public)},
    }[way]
    given = link if way == "option" else None
    with pytest.raises(ConfigError, match=f"home: .*{link} belongs to user {OTHER}"):
        load(home=given, environ=environ)
    os.chown(link, os.geteuid(), -1, follow_symlinks=False)
    assert load(home=given, environ=environ).home == home


@pytest.mark.parametrize("place", ["folder above", "link", "target of a link"])
def test_every_folder_and_link_on_the_way_counts(place: str, public: Path):
    another_user()
    (public / "above" / "home").mkdir(parents=True)
    home = public / "above" / "home"
    if place == "folder above":
        os.chown(public / "above", OTHER, OTHER)
    else:
        home = public / "link"
        home.symlink_to(public / "above" / "home")
        changed = home if place == "link" else public / "above" / "home"
        os.chown(changed, OTHER, OTHER, follow_symlinks=False)
    assert str(ownership.problem(home)).endswith(f"belongs to user {OTHER}")


def test_a_wide_home_is_narrowed_in_one_line_and_not_refused(public: Path, caplog):
    home = public / "state" / "home"
    (home / "cache" / "corpora").mkdir(parents=True)
    Home(home).code_caches.mkdir()
    (Home(home).code_caches / "planted").write_bytes(b"a pickle")
    (home / "config.yaml").write_text("http_port: off\n")
    (home / "config.yaml").chmod(0o666)
    for folder in (home.parent, home, home / "cache"):
        folder.chmod(0o777)
    Home(home).create()
    (line,) = caplog.messages
    assert f"{home.parent} 1777 (before: 0777)" in line
    assert f"{home} 0700 (before: 0777)" in line
    assert not Home(home).code_caches.exists()  # what libraries would read
    assert open_to_others(home) == {"cache/corpora": f"{0o755:04o}"}  # which nobody can enter
    assert list(ownership.exposures(home)) == []
    caplog.clear()
    Home(home).create()
    assert caplog.messages == []


def test_groups_with_other_members_count_and_sticky_folders_do_not(public: Path):
    above, home = public / "above", public / "above" / "home"
    home.mkdir(parents=True)
    above.chmod(0o1777)
    assert list(ownership.exposures(home)) == []
    above.chmod(0o775)
    os.chown(above, -1, os.getegid())
    has_others = ownership._group(os.getegid()) is not None
    assert bool(list(ownership.exposures(home))) is has_others
    another_user()
    os.chown(above, -1, OTHER)  # a group without an entry in the group database
    (exposed,) = ownership.exposures(home)
    assert exposed.reason == f"group {OTHER} may write to {above} (mode 0775)"


@pytest.mark.parametrize("mode", mostly_slow([0o777, 0o2777, 0o775], but=[0o777]))
def test_a_wide_folder_of_root_is_refused_for_other_users(mode: int, public: Path):
    """As Kubernetes hands over an emptyDir; root itself would narrow it."""
    another_user()
    python = shutil.which("python3", path="/usr/bin:/bin")
    needs(python, "the system's python3, which every user may run")
    (public / "configs").mkdir()
    for name in ("ownership.py", "values.py"):
        shutil.copy(Path(ownership.__file__).parent / name, public / "configs")
    home = public / "home"
    home.mkdir()
    os.chown(home, 0, OTHER + 1)
    home.chmod(mode)
    command = f"from pathlib import Path; from configs.ownership import *; h = Path('{home}'); "
    done = as_other(
        *(str(python), "-I", "-c"),
        f"import sys; sys.path.insert(0, '{public}'); {command}print(problem(h), narrow(h))",
    )
    writers = "everyone" if mode & 0o002 else f"group {OTHER + 1}"
    assert done.stdout == f"{writers} may write to {home} (mode {mode:04o}) []\n", done.stderr


def test_folders_that_are_created_are_for_their_owner_only(public: Path, wide_umask: None):
    home = public / "a" / "b" / "home"
    Home(home).create()
    assert open_to_others(public / "a") == {}
    with whole_folder(public / "c" / "d" / "corpus"):
        pass
    assert open_to_others(public / "c") == {}


def test_files_are_for_their_owner_only_and_those_of_users_get_their_umask(
    public: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("_WARMD_UMASK", "")
    before = os.umask(0o027)
    try:
        umask.restrict()
        with whole_file(public / "ours") as file:
            file.write(b"1")
        with whole_file(public / "output", mode=umask.file_mode()) as file:
            file.write(b"1")
        with open(public / "appended", "ab", opener=umask.for_user) as appended:
            appended.write(b"1")
        with umask.users():
            (public / "of user code").touch()
        assert deliver(f"touch '{public}/of a notification'", sample()) is None
        (public / "after").touch()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in public.iterdir()}
    of_user = dict.fromkeys(["output", "appended", "of user code", "of a notification"], 0o640)
    assert modes == {"ours": 0o600, "after": 0o600, **of_user}


def test_an_existing_file_of_a_user_keeps_its_mode(public: Path):
    path = public / "output"
    path.touch()
    path.chmod(0o604)
    with open(path, "ab", opener=umask.for_user) as file:
        file.write(b"1")
    assert path.stat().st_mode & 0o777 == 0o604


def test_a_cache_of_code_that_others_could_change_is_emptied(public: Path):
    code = public / "cache"
    assert cache.protect(code)
    (code / "index").write_bytes(b"ours")
    assert cache.protect(code)
    assert (code / "index").exists()
    code.chmod(0o777)
    (code / "planted").write_bytes(b"a pickle")
    assert cache.protect(code)
    assert list(code.iterdir()) == []
    assert code.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_what_another_user_plants_in_machine_code_is_gone_before_it_is_read(public: Path):
    another_user()
    root = Path(__file__).parents[2]
    for part in ("configs", "jobs"):
        shutil.copytree(root / part, public / "warmd" / part)
    (public / "warmd" / "__init__.py").touch()
    command = "from warmd.jobs.compute import cache; print(cache.folder(), end='')"
    environ = {**os.environ, "PYTHONPATH": str(public), "PYTHONDONTWRITEBYTECODE": "1"}

    def folder() -> Path:
        found = subprocess.check_output([sys.executable, "-c", command], env=environ, text=True)
        return Path(found)

    index = folder() / "loops.nbi"  # a pickle, as numba writes it
    assert index.is_relative_to(public)
    index.write_bytes(b"ours")
    for path in (index.parent.parent, index.parent, index):
        path.chmod(0o777)  # as a start under umask 000 left them
    planted = as_other("sh", "-c", f"rm {index} && echo planted > {index}")
    assert planted.returncode == 0, planted.stderr
    assert folder() == index.parent
    assert list(index.parent.iterdir()) == []
    assert as_other("touch", str(index)).returncode != 0
    assert as_other("mv", str(index.parent), f"{index.parent}-mine").returncode != 0


def test_a_cache_of_code_with_a_file_of_another_user_is_emptied(public: Path):
    another_user()
    code = public / "cache"
    make_folder(code)
    (code / "planted").write_bytes(b"a pickle")
    os.chown(code / "planted", OTHER, OTHER)
    assert cache.protect(code)
    assert list(code.iterdir()) == []


def test_a_cache_of_code_below_a_folder_of_another_user_is_not_used(public: Path):
    another_user()
    os.chown(public, OTHER, OTHER)
    assert not cache.protect(public / "cache")


def test_libraries_cache_code_where_nobody_else_can_change_it(
    public: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_me")  # as torch sets it
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("HF_MODULES_CACHE", "")
    cache.keep_library_caches(public / "own")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(public / "own" / "torchinductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(public / "own" / "triton")
    assert os.environ["HF_MODULES_CACHE"] == str(public / "own" / "huggingface_modules")


def test_sockets_of_a_long_path_are_where_nobody_can_be_first(public: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(public))
    home = Home(public / ("long" * 30))
    assert home.sockets == home.path / "sockets"  # there is nothing yet
    home.create()
    made = home.sockets
    assert made.parent == public
    assert made.stat().st_mode & 0o777 == 0o700
    home.create()
    assert home.sockets == made
    made.chmod(0o777)  # as if another user had made a folder of this name
    assert home.sockets == home.path / "sockets"
    home.create()
    assert home.sockets not in (made, home.path / "sockets")


def test_a_copy_of_a_home_with_a_long_path_has_sockets_of_its_own(public: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(public))
    first, second = Home(public / ("long" * 30)), Home(public / ("copy" * 30))
    first.create()
    shutil.copytree(first.path, second.path, symlinks=True)
    second.create()
    assert first.sockets != second.sockets
    moved = Home(public / "short")
    first.path.rename(moved.path)
    moved.create()
    assert moved.sockets == moved.path / "sockets"
    assert not moved.sockets.is_symlink()


def test_a_running_daemon_of_an_earlier_version_is_found(public: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(public))
    home = Home(public / ("long" * 30))
    home.path.mkdir()
    digest = home._socket_prefix.removeprefix("warmd-").removesuffix("-")
    former = public / f"warmd-{os.getuid()}-{digest}"
    former.mkdir(mode=0o700)
    assert home.sockets == former
    lock = home.lock()
    home.create()
    assert home.sockets == former
    os.close(lock)
    home.create()
    assert home.sockets != former


def test_on_a_machine_without_other_users_nothing_is_refused_or_changed(
    public: Path, monkeypatch: pytest.MonkeyPatch
):
    another_user()
    home = public / "home"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    home.chmod(0o2777)
    monkeypatch.setenv("WARMD_SINGLE_USER", "on")
    Home(home).create()
    assert home.stat().st_mode & 0o7777 == 0o2777
    assert warmd("status", home=home).code == 3  # no daemon
    monkeypatch.setenv("WARMD_SINGLE_USER", "maybe")
    done = warmd("status", home=home)
    assert done.is_refusal(2)
    assert "WARMD_SINGLE_USER: must be one of on, off, got 'maybe'" in done.err
