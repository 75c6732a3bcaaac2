"""What the benchmark of masked learning reports."""

from __future__ import annotations

from transformers import BertConfig

from warmd.jobs.encoder import CodeGraphConfig
from warmd.jobs.mlm_bench import measure


def test_each_kind_of_work_is_timed_in_pairs_beside_its_floor():
    encoder = CodeGraphConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    bert = BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    timings = list(measure(2, encoder=encoder, bert=bert))
    assert [timing["work"] for timing in timings] == [
        "code-graph encoder, 1 x 111",
        "code-graph encoder, 8 x 128",
        "BERT of 1 layers, 8 x 128",
    ]
    for timing in timings:
        assert 0 < timing["floor_s"] < timing["ours_s"]
        assert timing["share"] == timing["floor_s"] / timing["ours_s"]
        assert all(timing[name] > 0 for name in ("stock_s", "faster", "optimizer_s"))
