"""Files of other projects that are part of this one: unchanged, and with their licenses."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "daemon" / "gateway" / "page" / "site"
FOLDERS = [SITE / "vendor", ROOT / "tests" / "support" / "vendor"]


def entries(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads((folder / "VENDORED.json").read_bytes())
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=["page", "tests"])
def test_every_vendored_file_is_recorded_and_unchanged(folder):
    found = {entry["file"]: entry for entry in entries(folder)}
    licenses = {entry["license_file"] for entry in found.values()}
    assert {path.name for path in folder.iterdir()} == {*found, *licenses, "VENDORED.json"}
    for name, entry in found.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert entry["version"]
        assert entry["license"] in {"MIT", "Apache-2.0", "MPL-2.0"}
        assert (folder / entry["license_file"]).stat().st_size > 500


def test_the_page_loads_nothing_from_elsewhere():
    for path in SITE.rglob("*"):
        if path.suffix in {".html", ".css", ".js"} and path.parent.name != "vendor":
            text = path.read_text()
            assert not re.search(r"""(src|href|from|import|url)\W{1,3}https?:""", text), path
            assert "innerHTML" not in text, path
