"""The running horses as the zygote knows them: their workers, models and connections.

A resident horse lives as long as its base model: when that is unloaded or loaded again, the horse
retires. Its worker then gives it no more jobs, and it ends with its last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..host import memory
from ..host.channel import Channel
from ..host.messages import DropAdapter, RetireHorse, RunJob
from .models import Loaded


class Horse:
    """A running horse."""

    def __init__(
        self, channel: Channel, request: RunJob, model: Loaded | None, root: Loaded | None
    ) -> None:
        """`root`: the base of an adapter, any other model itself."""
        self.channel = channel
        self.model = model.config.name if model is not None else None
        self.root = root.config.name if root is not None else None
        self.root_loaded_at = root.loaded_at if root is not None else None
        self.adapters: dict[str, float] = {}  # that it has: when each was loaded
        self.is_resident = request.isolation == "resident"
        self.is_retired = False
        self.worker = request.worker
        if model is not None:
            self.note(model)

    def serves(self, worker: str, root: Loaded) -> bool:
        """Whether it runs jobs of a worker with a base or its adapters."""
        is_current = self.is_resident and not self.is_retired and self.worker == worker
        is_same = self.root == root.config.name and self.root_loaded_at == root.loaded_at
        return is_current and is_same

    def note(self, model: Loaded) -> None:
        """Record that it received a job with a model."""
        if model.base is not None:
            self.adapters[model.config.name] = model.loaded_at

    def retire(self) -> None:
        """Send its worker a RetireHorse: no more jobs for this horse."""
        self.is_retired = True
        self.channel.send_nowait(RetireHorse())

    def drop_adapters(self, loaded: Mapping[str, Loaded]) -> None:
        """Make it drop adapters that were unloaded or loaded again."""
        for name, loaded_at in list(self.adapters.items()):
            adapter = loaded.get(name)
            if adapter is None or adapter.loaded_at != loaded_at:
                del self.adapters[name]
                self.channel.send_nowait(DropAdapter(name))


class Horses:
    """All running horses, by process id."""

    def __init__(self) -> None:
        self._running: dict[int, Horse] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Horse]:
        return iter(self._running.values())

    def add(self, pid: int, horse: Horse) -> None:
        self._running[pid] = horse

    def remove(self, pid: int) -> Horse | None:
        """Remove a process that has ended; return its horse, None if it was none."""
        return self._running.pop(pid, None)

    def pids(self) -> list[int]:
        return list(self._running)

    def serving(self, worker: str, root: Loaded) -> tuple[int, Horse] | None:
        """Return the resident horse of a worker that has a base model, with its process id."""
        found = ((pid, one) for pid, one in self._running.items() if one.serves(worker, root))
        return next(found, None)

    def models_in_use(self) -> set[str]:
        """Return the models that must stay loaded.

        Not those of resident horses: such a horse may be idle, and retires if its model is
        unloaded.
        """
        return {one.model for one in self if one.model is not None and not one.is_resident}

    def retire_outdated(self, loaded: Mapping[str, Loaded]) -> None:
        """Retire resident horses whose base is no longer `loaded`, and drop their adapters."""
        for one in self._residents():
            if one.root is None:
                continue
            root = loaded.get(one.root)
            if root is None or root.loaded_at != one.root_loaded_at:
                one.retire()
            else:
                one.drop_adapters(loaded)

    def retire_all(self) -> None:
        """Retire all resident horses."""
        for one in self._residents():
            one.retire()

    def _residents(self) -> list[Horse]:
        return [one for one in self if one.is_resident and not one.is_retired]

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"pid": pid, "worker": one.worker, "memory_bytes": memory.resident_bytes(pid)}
            for pid, one in self._running.items()
        ]
