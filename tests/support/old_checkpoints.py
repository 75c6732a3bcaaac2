"""Checkpoints as earlier versions wrote them."""

from __future__ import annotations

from pathlib import Path

import orjson
import xxhash


def written_by_an_earlier_version(checkpoint: Path) -> None:
    """Remove from a checkpoint what only later versions write."""
    path = checkpoint / "manifest.json"
    manifest = orjson.loads(path.read_bytes())["manifest"]
    del manifest["about"]["rules"]
    checksum = xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))
    path.write_bytes(orjson.dumps({"manifest": manifest, "xxh3_128": checksum}))
