"""The options of the kind `lines`. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from warmd.jobs.errors import SpecError
from warmd.jobs.spec import HttpMethod, option, override, path_of
from warmd.jobs.training.options import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class LinesSpec(TrainingSpec):
    """Train a decoder on the lines of a text file."""

    kind: ClassVar[str] = "lines"
    run_module: ClassVar[str | None] = "warmd_lines.kind"
    http: ClassVar[HttpMethod | None] = HttpMethod(type="lines", training_file="dataset")

    dataset: str = option("lines.txt", "text file, one sample per line", group="data")
    model: str = option("demo", "warm model to train", group="model")
    learning_rate: float = override(TrainingSpec, "learning_rate", default=1e-3)
    steps: int = override(TrainingSpec, "steps", default=10)
    batch_size: int = override(TrainingSpec, "batch_size", default=4)

    @property
    def steps_total(self) -> int:
        return self.steps

    def located(self, folder: Path) -> "LinesSpec":
        return replace(self, dataset=str(path_of("dataset", self.dataset, folder)))

    def check_inputs(self, model_config) -> None:
        super().check_inputs(model_config)
        if not Path(self.dataset).is_file():
            raise SpecError("dataset", f"must be a text file, got {self.dataset}")
