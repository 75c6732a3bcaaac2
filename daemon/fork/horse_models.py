"""The warm models as a job sees them: in a horse, on its device."""

from __future__ import annotations

from ...configs.gpus import CPU
from ...jobs.context import WarmModel
from ...jobs.errors import NotFound
from .models import WarmModels
from .placement import Placement


class HorseModels:
    """The warm models as a job sees them (jobs.context.Models); lives in the horse.

    `copies`: whether the job gets its own copy: a training in a horse with other jobs. A horse with
    a single job changes its own pages anyway, and all other kinds only read: they share a model and
    objects that are derived from it, such as the engine. `placement`: the device of the horse, on
    which the job gets its models.
    """

    def __init__(
        self,
        warm: WarmModels,
        names: dict[str, str],
        *,
        copies: bool,
        takes_adapters: bool,
        placement: Placement,
    ) -> None:
        """`names`: a model as named in the job's spec (perhaps a folder) -> its warm name.

        `takes_adapters`: of the job's Spec; if false, it gets merged models.
        """
        self._warm = warm
        self._names = names
        self._copies = copies
        self._takes_adapters = takes_adapters
        self.placement = placement

    def take(self, name: str) -> WarmModel:
        loaded = self._warm.loaded.get(self._names.get(name, name))
        if loaded is None:
            raise NotFound(f"model: {name!r} is not warm")
        if self._warm.conflict is not None:
            raise self._warm.conflict
        warm = loaded.warm
        # Decode steps of fixed shapes on a GPU do not support adapters.
        if not self._takes_adapters or self.placement.device != CPU:
            warm = self._warm.merged.of(warm)
        place = self.placement.copied if self._copies else self.placement.shared
        return place(warm)

    def weights(self, precision: str | None) -> dict[str, str] | None:
        """The job's warm model: its folder, the digest of its files, and the precision of answers.

        `precision`: as requested by the job; None: the model's.
        """
        for name in self._names.values():
            loaded = self._warm.loaded[name]
            return {
                "folder": str(loaded.warm.path),
                "digest": loaded.weights,
                "precision": precision or loaded.config.precision,
            }
        return None

    def left_out(self) -> list[str]:
        """The tensors in the files of the job's warm model that it does not use."""
        return [t for name in self._names.values() for t in self._warm.loaded[name].warm.left_out]

    def num_parameters(self) -> int | None:
        """The number of parameters of the job's warm model; None if it creates its own model."""
        found = [self._warm.loaded[name] for name in self._names.values()]
        sizes = [loaded.num_parameters for loaded in found]
        sizes += [self._warm.root(one).num_parameters for one in found if one.base is not None]
        return sum(sizes) if sizes else None
