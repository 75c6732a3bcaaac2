"""The job kinds as the zygote prepares them for its horses."""

from __future__ import annotations

import pytest

from warmd.jobs import KINDS, import_all, spec, spec_class


@pytest.mark.parametrize("kind", KINDS)
def test_horse_need_not_read_the_annotations_of_a_spec(kind: str, monkeypatch: pytest.MonkeyPatch):
    spec._options.cache_clear()
    import_all(kind)  # the zygote's part; what follows is the horse's

    def refuse(*_: object) -> None:
        raise AssertionError("reads annotations, which takes 4 ms")

    monkeypatch.setattr(spec, "get_type_hints", refuse)
    assert spec_class(kind).options()
