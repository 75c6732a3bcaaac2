"""`warmd token`: adds, lists and removes named tokens."""

from __future__ import annotations

import threading

import orjson
import pytest
from click.testing import CliRunner

from warmd.cli.commands.control import note_tokens
from warmd.cli.main import warmd
from warmd.configs.config import load
from warmd.configs.tokens import digest_of, read
from warmd.configs.values import ConfigError
from warmd.daemon.client import tokens
from warmd.jobs.errors import Conflict, NotFound


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "config.yaml").write_text("http_tokens: tokens\n")
    return folder


def ran(home, *arguments):
    return CliRunner().invoke(warmd, ["token", "--home", str(home), *arguments])


def test_a_token_is_added_shown_once_listed_and_removed(home):
    added = ran(home, "ada", "--may", "read,infer")
    assert added.exit_code == 0, added.exception
    secret = added.stdout.strip()
    file = home / "tokens"
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret not in file.read_text()
    (ada,) = read(file)
    assert (ada.name, ada.may, ada.digest) == ("ada", "read,infer", digest_of(secret))
    bob = orjson.loads(ran(home, "bob", "--may", "train", "--json").stdout)
    assert read(file)[1].digest == digest_of(bob["secret"])
    file.write_text(f"# kept\n{file.read_text()}")
    assert ran(home).stdout.split() == ["NAME", "MAY", "ada", "read,infer", "bob", "train"]
    assert ran(home, "ada", "--remove").exit_code == 0
    assert [token.name for token in read(file)] == ["bob"]
    assert file.read_text().startswith("# kept\n")


def test_mistakes_are_refused_and_change_nothing(home):
    path = home / "tokens"
    tokens.add(path, "ada", "read")
    before = path.read_bytes()
    for name, may, kind in (
        ("ada", "train", Conflict),
        ("http_token", "read", Conflict),
        ("bob", "all", ConfigError),
        ("b b", "read", ConfigError),
    ):
        with pytest.raises(kind):
            tokens.add(path, name, may)
    with pytest.raises(NotFound, match="no 'bob' in"):
        tokens.remove(path, "bob")
    assert path.read_bytes() == before
    assert ran(home, "bob").exit_code == 2
    assert ran(home, "--remove").exit_code == 2
    (home / "config.yaml").unlink()
    assert "http_tokens: must be a file" in str(ran(home, "bob", "--may", "read").exception)


def test_start_says_why_no_named_token_is_let_in(home, capsys):
    config = load(home=home, environ={})
    note_tokens(config)
    assert "no named token is let in: http_tokens: cannot read" in capsys.readouterr().err
    tokens.add(home / "tokens", "ada", "read")
    note_tokens(config)
    assert capsys.readouterr().err == ""


def test_a_file_in_a_folder_of_others_or_with_mistakes_is_not_changed(home):
    path = home / "tokens"
    tokens.add(path, "ada", "read")
    path.write_text(f"{path.read_text()}broken\n")
    with pytest.raises(ConfigError, match=r"tokens:3: must be a line"):
        tokens.add(path, "bob", "read")
    path.unlink()
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="everyone may write to"):
        tokens.add(path, "bob", "read")
    assert not path.exists()


def test_concurrent_additions_are_all_kept(home):
    path = home / "tokens"
    names = [f"n{number}" for number in range(8)]
    threads = [threading.Thread(target=tokens.add, args=(path, name, "read")) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(token.name for token in read(path)) == names
    assert [one.name for one in home.iterdir() if one.name.startswith(".")] in ([], [".lock"])
