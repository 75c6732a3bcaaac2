"""The setting `runs`."""

from __future__ import annotations

import pytest

from warmd.configs.config import ConfigError, load
from warmd.configs.run_store import Location, parse_location
from warmd.daemon.host.home import Home
from warmd.jobs.errors import Conflict


def test_a_bucket_has_a_prefix_an_endpoint_and_a_region():
    url = "s3://my-bucket/a/b?endpoint=https://s3.example.com:9000&region=eu-central-1"
    assert parse_location(url) == Location(
        "my-bucket", "a/b", "https://s3.example.com:9000", "eu-central-1"
    )
    assert parse_location("s3://my-bucket") == Location("my-bucket", "", None, None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "the bucket must be"),
        ("s3://UPPER/x", "the bucket must be"),
        ("s3://bucket/a/../b", "the prefix must be"),
        ("s3://bucket?endpoint=ftp://host", "endpoint must be"),
        ("s3://bucket?endpoint=http://host:99999", "Port out of range"),
        ("s3://bucket?region=a&region=b", "must be given once"),
        ("S3://bucket/x", "got another kind of URL"),
        ("s3:bucket/x", "got another kind of URL"),
        ("gs://key:s3cret@bucket/x", "got another kind of URL"),
        ("file:///srv/runs", "got another kind of URL"),
        ("s3://bucket?region=a%20b", "region must be"),
        ("s3://key:s3cret@bucket/x", "keys and tokens belong into the variables"),
        ("s3://bucket?secret_access_key=s3cret", "keys and tokens belong into the variables"),
        ("s3://bucket?endpoint=http://u:s3cret@host", "endpoint must be"),
    ],
)
def test_a_wrong_url_is_one_line_that_shows_no_key(tmp_path, url, problem):
    with pytest.raises(ConfigError) as caught:
        load(home=tmp_path, environ={"WARMD_RUNS": url})
    text = str(caught.value)
    assert text.startswith("WARMD_RUNS: runs: must be a folder, or s3://")
    assert problem in text
    assert "s3cret" not in text


def test_a_folder_makes_the_runs_of_a_home_a_link_to_it(tmp_path):
    config = load(home=tmp_path / "home", environ={"WARMD_RUNS": str(tmp_path / "shared")})
    assert config.run_store is None
    assert config.runs_folder == tmp_path / "shared"
    home = Home(config.home)
    home.create()
    for _ in range(2):
        home.link_runs(tmp_path / "shared")
        assert home.runs.resolve() == tmp_path / "shared"


def test_a_home_with_jobs_is_not_linked_elsewhere(tmp_path):
    home = Home(tmp_path / "home")
    home.create()
    (home.runs / "grpo-20261124-100000-abcd").mkdir()
    with pytest.raises(Conflict, match=r"runs: .*/home/runs has jobs: move them to"):
        home.link_runs(tmp_path / "shared")
