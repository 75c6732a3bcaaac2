"""The warm set: loading and unloading the models that the zygote holds.

Weights stay file mappings wherever the dtype allows: they cost no private memory, and a fork
shares them. Nothing here computes: one parallel operation in the zygote would hang its children.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from ...configs.config import ModelConfig
from ...configs.units import format_size
from ...jobs.context import WarmModel
from ...jobs.errors import Conflict, JobFailed, NotFound
from ...jobs.models import adapters, response_templates
from ...jobs.models.adapters import is_adapter, model_folder
from ..host import model_files
from ..host.messages import LocalModel
from . import adapters as attached_adapters
from .adapters import Attachment, MergedModels, NotServedUnmerged
from .headers import check_loadable
from .held_files import HeldFiles
from .reading import blaming, read, read_template, stored_bytes


@dataclass
class Loaded:
    """A warm model and its known properties."""

    config: ModelConfig
    warm: WarmModel
    dtype: str
    num_parameters: int
    size_bytes: int
    seconds: float
    loaded_at: float
    files: str  # fingerprint
    weights: str  # digest
    held: HeldFiles
    base: str | None = None  # the warm base of an adapter that is served unmerged
    rank: int | None = None  # of an adapter
    why_merged: str | None = None  # of an adapter that is
    is_for_adapters: bool = False  # a base loaded only for adapters: unloaded with the last of them
    is_reloaded: bool = False  # whether it was warm already, from files that have changed since
    used_at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.config.name,
            "path": self.config.path,
            "dtype": self.dtype,
            "task": self.config.task,
            "precision": self.config.precision,
            "parameters": self.num_parameters,
            "bytes": self.size_bytes,
            "seconds": round(self.seconds, 3),
            "loaded_at": self.loaded_at,
            "weights": self.weights,
            "base": self.base,
            "rank": self.rank,
            "merged": self.why_merged,
            "left_out": list(self.warm.left_out),
            "new_head": list(self.warm.new_head),
            "unembedded": list(self.warm.unembedded),
            "appended_end": self.warm.appended_end,
            "unapplied": dict(self.warm.unapplied),
            "response_template": self.config.response_template,
            "replaced_template": self._replaced_template,
        }

    @property
    def _replaced_template(self) -> str | None:
        """Whose response template the given file takes the place of, in words."""
        if self.config.response_template is None:
            return None
        return response_templates.replaced_by_file(self.warm.tokenizer)


def _fingerprint(config: ModelConfig, folder: Path) -> str:
    """Return the fingerprint of a model's files. Raises OSError, ValueError."""
    if config.response_template is not None:
        response_templates.check_is_there(Path(config.response_template))
    return model_files.fingerprint(folder, config.response_template)


class WarmModels:
    """The models in this process, at most `budget_bytes` of them."""

    def __init__(
        self, budget_bytes: int, *, holds_files: bool = False, digests: Path | None = None
    ) -> None:
        """`holds_files`: whether this process handles SIGIO; `digests`: the folder of digests."""
        self.budget_bytes = budget_bytes
        self.loaded: dict[str, Loaded] = {}
        self.merged = MergedModels()
        self.conflict: Conflict | None = None  # why a fork cannot use its mapping of the model
        self._holds_files = holds_files
        self._digests = digests
        self._root: str | None = None  # in a fork: its model, or the base of it
        self._attaching = Lock()  # jobs run in threads of a fork

    def ensure(self, config: ModelConfig, folder: Path, *, in_use: Collection[str]) -> Loaded:
        """Return the model, loading it from `folder` if it is not warm, or if that folder now has
        another model.

        A model whose files have other content is loaded again; running horses keep the old weights.
        To make room, the least recently used models are unloaded, never one `in_use`. Raises
        JobFailed with the sizes if it cannot fit, or if the folder holds no model; Conflict if a
        model of that name is in use with other settings, or if its files are being written.
        """
        in_use = {*in_use, *self.bases(in_use)}
        with blaming(config, folder):
            files = _fingerprint(config, folder)
        found = self.loaded.get(config.name)
        if found is not None:
            if found.config == config and self._is_same(found, folder, files):
                self._touch(found)
                return found
            if found.config != config and config.name in in_use:
                raise Conflict(
                    f"model: {config.name} is in use with other settings: wait, or rename"
                )
            self._remove(config.name)
        begun = time.perf_counter()
        try:
            loaded = self._load(config, folder, in_use)
        finally:
            if found is not None and found.base is not None:  # its base may have changed
                self._drop_if_unused(found.base)
        loaded.seconds = time.perf_counter() - begun
        loaded.is_reloaded = found is not None and found.config == config
        self._touch(loaded)
        # A collection in a child would otherwise write to every page that holds an object.
        gc.collect()
        gc.freeze()
        return loaded

    def _is_same(self, found: Loaded, folder: Path, files: str) -> bool:
        """Whether a folder, with this fingerprint, still has the content that was loaded.

        A hard link to a file (`--init-from`), a copy of it in its place or a change of its mode
        changes the fingerprint and not the model.
        """
        if found.files == files:
            return True
        try:
            if model_files.digest(folder, self._digests) != found.weights:
                return False
            if read_template(found.config) != found.warm.response_template:
                return False
        except (OSError, ValueError):
            return False  # the load that follows reports the error
        found.files = files
        return True

    def _load(self, config: ModelConfig, folder: Path, in_use: Collection[str]) -> Loaded:
        why_merged = None
        if is_adapter(folder):
            with blaming(config, folder):
                adapters.check_files(folder)
                base_digest = model_files.weights_digest(model_folder(folder), self._digests)
                adapters.check_base(folder, base_digest)
                why_merged = adapters.why_not_plain(folder)
            if why_merged is None:
                try:
                    return self._load_unmerged(config, folder, in_use)
                except NotServedUnmerged as error:
                    why_merged = str(error)
        with self._holding(model_files.weights(folder)) as held:
            return self._load_whole(config, folder, held, in_use, why_merged)

    @contextmanager
    def _holding(self, paths: Collection[Path]) -> Iterator[HeldFiles]:
        """Hold files; release them if the block raises."""
        held = HeldFiles(paths if self._holds_files else ())
        try:
            yield held
        except BaseException:
            held.release()
            raise

    def _load_whole(
        self,
        config: ModelConfig,
        folder: Path,
        held: HeldFiles,
        in_use: Collection[str],
        why_merged: str | None,
    ) -> Loaded:
        with blaming(config, folder):
            files = _fingerprint(config, folder)
            check_loadable(model_folder(folder))
            weights = model_files.digest(folder, self._digests)
            of_weights = model_files.weights_digest(folder, self._digests)
            needed = stored_bytes(model_folder(folder), config.dtype)
        self._make_room(config, needed, in_use)
        with blaming(config, folder):
            warm = read(config, folder, may_pack=self._has_room_twice(needed))
            if _fingerprint(config, folder) != files:
                raise ValueError("its files were changed while they were read: try again")
        tensors_of = [*warm.model.parameters(), *warm.model.buffers()]
        return self._add(
            Loaded(
                config=config,
                warm=replace(warm, weights=weights, weights_digest=of_weights),
                dtype=str(warm.model.dtype).removeprefix("torch."),
                num_parameters=sum(p.numel() for p in warm.model.parameters()),
                size_bytes=sum(t.numel() * t.element_size() for t in tensors_of),
                seconds=0.0,
                loaded_at=time.time(),
                files=files,
                weights=weights,
                held=held,
                rank=adapters.rank_of(folder) if is_adapter(folder) else None,
                why_merged=why_merged,
            )
        )

    # --- Adapters -----------------------------------------------------------------------------

    def _load_unmerged(self, config: ModelConfig, folder: Path, in_use: Collection[str]) -> Loaded:
        """Load an adapter next to its base, which is loaded if it is not warm.

        Raises as `ensure` does, and NotServedUnmerged.
        """
        base = self._warm_base(config, folder, in_use)
        try:
            attached_adapters.check_base_model(base.warm.model)
            self._make_room(config, stored_bytes(folder, "float32"), {*in_use, base.config.name})
            return self._attach(config, folder, base)
        except BaseException:
            self._drop_if_unused(base.config.name)
            raise

    def attach_in_fork(self, model: LocalModel) -> None:
        """Attach an adapter of the base that this process was forked with, unless it is attached.

        Called for every job. Raises JobFailed and Conflict.
        """
        with self._attaching:
            config, found = model.config, self.loaded.get(model.config.name)
            is_current = found is not None and found.config == config
            if found is not None and (
                found.base is None or (is_current and found.files == model.files)
            ):
                return
            if found is not None:
                self._remove(config.name)
            assert model.folder is not None
            assert self._root is not None
            try:
                self._attach(config, Path(model.folder), self.loaded[self._root])
            except NotServedUnmerged as error:  # it has just changed
                raise Conflict(f"model: {config.name} has changed: submit again") from error

    def unload_in_fork(self, name: str) -> None:
        """Unload an adapter in this fork; jobs that run with it keep it."""
        with self._attaching:
            if name in self.loaded and self.loaded[name].base is not None:
                self._remove(name)

    def _attach(self, config: ModelConfig, folder: Path, base: Loaded) -> Loaded:
        with self._holding(model_files.weights(folder, with_base=False)) as held:
            with blaming(config, folder):
                files = _fingerprint(config, folder)
                weights = model_files.digest(folder, self._digests)
                template = read_template(config)
                attachment = attached_adapters.attach(base.warm, config, folder, template)
                if _fingerprint(config, folder) != files:
                    raise ValueError("its files were changed while they were read: try again")
            return self._add(self._adapter(config, attachment, base, files, weights, held))

    @staticmethod
    def _adapter(
        config: ModelConfig,
        attachment: Attachment,
        base: Loaded,
        files: str,
        weights: str,
        held: HeldFiles,
    ) -> Loaded:
        return Loaded(
            config=config,
            warm=replace(attachment.warm, weights=weights),
            dtype=base.dtype,
            num_parameters=attachment.num_parameters,
            size_bytes=attachment.size_bytes,
            seconds=0.0,
            loaded_at=time.time(),
            files=files,
            weights=weights,
            held=held,
            base=base.config.name,
            rank=attachment.rank,
        )

    def _warm_base(self, config: ModelConfig, folder: Path, in_use: Collection[str]) -> Loaded:
        """Return the base of an adapter with its dtype and task, loading it if none is warm."""
        with blaming(config, folder):
            place = model_folder(folder).resolve()
        for loaded in list(self.loaded.values()):
            known = loaded.config
            is_same = (known.dtype, known.task) == (config.dtype, config.task)
            if is_same and loaded.base is None and loaded.warm.path.resolve() == place:
                is_for_adapters = loaded.is_for_adapters
                base = self.ensure(known, place, in_use=in_use)
                break
        else:
            is_for_adapters = True
            wanted = attached_adapters.base_config(config, folder, {*self.loaded, config.name})
            base = self.ensure(wanted, place, in_use=in_use)
        base.is_for_adapters = is_for_adapters
        return base

    def adapters_of(self, name: str) -> list[str]:
        """Return the names of the warm adapters that are served on a base."""
        return [adapter for adapter, loaded in self.loaded.items() if loaded.base == name]

    def bases(self, names: Collection[str]) -> set[str]:
        """Return the names of the bases of those models that are adapters."""
        found = (self.loaded[name].base for name in names if name in self.loaded)
        return {base for base in found if base is not None}

    def root(self, loaded: Loaded) -> Loaded:
        """Return the base of an adapter that is served unmerged; any other model itself."""
        return loaded if loaded.base is None else self.loaded[loaded.base]

    def _touch(self, loaded: Loaded) -> None:
        """Note the use of a model, then that of its base, which is unloaded after its adapters."""
        loaded.used_at = time.time()
        self.root(loaded).used_at = time.time()
        loaded.is_for_adapters = False

    def _add(self, loaded: Loaded) -> Loaded:
        self.loaded[loaded.config.name] = loaded
        return loaded

    # --- Files and memory ---------------------------------------------------------------------

    def hold_in_fork(self, name: str | None) -> None:
        """Hold the files of one model and of its base for this process, a fork, and no others.

        Other adapters of the base are attached again when a job names them. If the files were
        written since the fork, the job that takes the model gets an error.
        """
        held = set() if name is None else {name, *self.bases([name])}
        self._root = None if name is None else self.root(self.loaded[name]).config.name
        for loaded in list(self.loaded.values()):
            if loaded.config.name not in held:
                loaded.held.close()
                if loaded.base is not None:
                    del self.loaded[loaded.config.name]
        try:
            for one in held:
                self.loaded[one].held.renew()
        except Conflict as error:
            self.conflict = error

    def keep_as_mapped(self) -> None:
        """Copy the mappings of files that another process waits to write. Raises MemoryError."""
        for loaded in list(self.loaded.values()):
            loaded.held.copy_wanted()

    def unload(self, name: str) -> list[str]:
        """Unload a model. Horses that run with it keep their own mapping. Raises NotFound.

        A base with warm adapters stays until the last of them is unloaded; returns their names.
        """
        if name not in self.loaded:
            raise NotFound(
                f"model: {name!r} is not warm; warm are: {', '.join(self.loaded) or '-'}"
            )
        if found := self.adapters_of(name):
            self.loaded[name].is_for_adapters = True
            return found
        self.drop(name)
        return []

    def drop(self, name: str) -> None:
        """Unload a model, the adapters on it, and a base that was loaded only for it."""
        base = self.loaded[name].base
        self._remove(name)
        if base is not None:
            self._drop_if_unused(base)

    def _remove(self, name: str) -> None:
        for removed in (*self.adapters_of(name), name):
            self.loaded.pop(removed).held.release()
        if self._root is not None:
            return  # in a fork a collection would copy every page that holds an object
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _drop_if_unused(self, base: str) -> None:
        found = self.loaded.get(base)
        if found is not None and found.is_for_adapters and not self.adapters_of(base):
            self.drop(base)

    def _has_room_twice(self, needed: int) -> bool:
        """Whether the budget has room for a model and for a packed copy, which a horse may make."""
        held = sum(model.size_bytes * (1 + model.warm.may_pack) for model in self.loaded.values())
        return held + 2 * needed <= self.budget_bytes

    def _make_room(self, config: ModelConfig, needed: int, in_use: Collection[str]) -> None:
        held = sum(model.size_bytes for model in self.loaded.values())
        idle = sorted(
            (m for name, m in self.loaded.items() if name not in in_use),
            key=lambda m: (m.used_at, m.base is None),
        )
        freeable = sum(model.size_bytes for model in idle)
        if held - freeable + needed > self.budget_bytes:
            raise JobFailed(
                f"model: {config.name} needs {format_size(needed)}, but of the memory budget of "
                f"{format_size(self.budget_bytes)} only "
                f"{format_size(self.budget_bytes - held + freeable)} can "
                "be freed: raise memory_budget, unload a model, or choose a smaller dtype"
            )
        for model in idle:
            if sum(model.size_bytes for model in self.loaded.values()) + needed <= (
                self.budget_bytes
            ):
                return
            if self.loaded.get(model.config.name) is model:  # not unloaded with its last adapter
                self.drop(model.config.name)
