"""The memory estimate of a job holds when the job runs."""

from __future__ import annotations

from typing import Any

import mlm_jobs
import orjson
import pytest
import torch
from breadth import mostly_slow

from warmd.daemon.reports.estimate import estimate
from warmd.daemon.runs import events
from warmd.jobs import spec_class
from warmd.jobs.bench.floor import ModelSize
from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
from warmd.jobs.mlm.options import MlmSpec

ROWS = {
    "grpo": [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(8)],
    "sft": [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(8)],
    "dpo": [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "?"} for n in range(8)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 3, "max_completion_length": 7, "reward": ["correctness"]},
    "sft": {"batch_size": 3},
    "dpo": {"batch_size": 3},
}


def spec_of(kind: str, folder: Any) -> Any:
    if kind == "mlm":
        return mlm_jobs.text_spec(mlm_jobs.make_home(folder), steps=4, seq_len=24)
    data = folder / "rows.jsonl"
    data.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in ROWS[kind]))
    values = {"model": "tiny", "dataset": str(data), "samples": 6, **OPTIONS[kind]}
    return spec_class(kind).parse(values)


@pytest.mark.parametrize("kind", mostly_slow(["grpo", "sft", "dpo", "mlm"], but=["grpo"]))
def test_the_peak_memory_of_a_job_is_within_the_estimate(shared_daemon, tmp_path, kind):
    client, spec = shared_daemon.client, spec_of(kind, tmp_path)
    computed = estimate(client, spec, client.jobs.check(spec)).peak_bytes
    assert computed is not None
    assert computed.source == "computed"
    job_id = client.jobs.submit(spec)
    assert shared_daemon.wait(job_id)["status"] == "finished"
    (finished,) = events.newest(shared_daemon.client.rundir(job_id).events, 1)
    assert computed.low < finished["peak_bytes"] < computed.high
    measured = estimate(client, spec, client.jobs.check(spec))
    assert measured.jobs == (job_id,)
    peak = measured.peak_bytes
    assert peak is not None
    assert peak.source == "measured"
    assert peak.low < finished["peak_bytes"] < peak.high


@pytest.mark.parametrize("sizes", [{}, {"layers": 2, "hidden_size": 96, "ffn_size": 200}])
def test_the_size_of_a_new_model_is_known_before_it_is_made(sizes):
    spec = MlmSpec.parse({"heads": 6, **sizes})
    with torch.device("meta"):
        model = CodeGraphEncoder(CodeGraphConfig(vocab_size=spec.vocab_size, **spec.sizes))
    size = ModelSize.of_new(spec)
    assert size is not None
    assert size.parameters == pytest.approx(model.num_parameters(), rel=0.05)
