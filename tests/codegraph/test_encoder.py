"""The code-graph encoder: its size, bias and losses, compared with manual calculations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from warmd.jobs.codegraph.encoder import (
    CodeGraphConfig,
    CodeGraphEncoder,
    RelationBias,
    constraint,
    new_encoder,
)
from warmd.jobs.codegraph.sequences import IGNORED, Role

# [CLS] code code [SEP] [ENT] root [REL] calls [ENT] tail [SEP] [REL] raises E E [SEP]
S, C, E, R = Role
ROLES = [S, C, C, S, S, E, S, R, S, E, S, S, R, E, E, S]
RELATIONS = [0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 2, 2, 2, 0]
DEPTHS = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
CHAINS = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0]


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "initializer_range": 0.2,
    }
    encoder: Any = CodeGraphEncoder
    return encoder(CodeGraphConfig(**{**sizes, **changes})).eval()


def batch(rows: int = 2) -> dict[str, Tensor]:
    """Copies of the sequence above with random tokens and labels; the second is shorter."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, 50, (rows, len(ROLES)), generator=generator)
    role, rel = torch.tensor(ROLES).repeat(rows, 1), torch.tensor(RELATIONS).repeat(rows, 1)
    chance = torch.rand(ids.shape, generator=generator)
    is_mlm = (role == Role.CODE) & ((chance < 0.5) | (torch.arange(len(ROLES)) == 1))
    is_mnm = (rel > 0) & ((chance < 0.5) | (torch.arange(len(ROLES)) == 5))
    return {
        "input_ids": ids,
        "rel_ids": rel,
        "chain_ids": torch.tensor(CHAINS).repeat(rows, 1),
        "depth_ids": torch.tensor(DEPTHS).repeat(rows, 1),
        "role_ids": role,
        "mlm_labels": ids.where(is_mlm, IGNORED),
        "mnm_labels": ids.where(is_mnm, IGNORED),
    }


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_the_encoder_of_the_default_sizes_has_107_445_664_parameters():
    with torch.device("meta"):
        model: Any = CodeGraphEncoder(CodeGraphConfig())
    embedding = model.embedding
    positions = (embedding.place, embedding.chain, embedding.depth, embedding.role)
    assert count(model.layers.parameters()) == 85_054_752
    assert count(embedding.token.parameters()) == 6_144_000
    assert sum(count(part.parameters()) for part in positions) == 3_932_160
    assert count(embedding.relation.parameters()) == 9_216
    assert count(model.final_norm.parameters()) == 1_536
    assert count(model.mlm_head.parameters()) == 6_152_000
    assert count(model.mnm_head.parameters()) == 6_152_000
    assert count(model.parameters()) == 107_445_664


def test_the_relation_bias_equals_a_manual_calculation():
    # [SEP], two code tokens, two of relation 2, one of relation 1
    role = torch.tensor([[S, C, C, R, E, E]])
    rel = torch.tensor([[0, 0, 0, 2, 2, 1]])
    bias = RelationBias(3)
    bias.leaf.data = torch.tensor([100.0, 1.0, 2.0])  # of relation 0: never used
    bias.cross.data = torch.tensor([100.0, 10.0, 20.0])
    related = F.one_hot(rel, 3).float() * (rel > 0).unsqueeze(-1)
    is_code = (role == Role.CODE).unsqueeze(-1).float()
    expected = [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 20, 20, 10],
        [0, 0, 0, 20, 20, 10],
        [0, 20, 20, 2, 2, 0],
        [0, 20, 20, 2, 2, 0],
        [0, 10, 10, 0, 0, 1],
    ]
    scores = bias(related, is_code)
    assert scores.tolist() == [expected]
    # The gradient of a scalar is the sum over the pairs that it is added to.
    (scores * torch.arange(36.0).view(6, 6)).sum().backward()
    assert bias.leaf.grad is not None
    assert bias.cross.grad is not None
    assert bias.leaf.grad.tolist() == [0, 35, 21 + 22 + 27 + 28]
    assert bias.cross.grad.tolist() == [
        0,
        11 + 17 + 31 + 32,
        9 + 10 + 15 + 16 + 19 + 20 + 25 + 26,
    ]


def test_a_layer_is_post_ln_attention_with_the_bias_and_an_mlp():
    model = tiny()
    layer = model.layers[0]
    torch.nn.init.normal_(layer.relation_bias.leaf)
    torch.nn.init.normal_(layer.relation_bias.cross)
    rel, role = torch.tensor([RELATIONS]), torch.tensor([ROLES])
    x = torch.randn(1, len(ROLES), 16)
    related = F.one_hot(rel, 12).float() * (rel > 0).unsqueeze(-1)
    is_code = (role == Role.CODE).unsqueeze(-1).float()
    bias = layer.relation_bias(related, is_code)
    heads = []
    for columns in (slice(0, 8), slice(8, 16)):
        q, k, v = (part[..., columns] for part in layer.query_key_value(x).split(16, dim=-1))
        heads.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(8) + bias, dim=-1) @ v)
    y = layer.attention_norm(x + layer.attention_output(torch.cat(heads, dim=-1)))
    expected = layer.output_norm(y + layer.output(F.gelu(layer.intermediate(y))))
    torch.testing.assert_close(layer(x, related, is_code, None), expected)


def test_tokens_without_a_relation_get_no_relation_bias():
    model = tiny()
    inputs = batch()
    before = model(**inputs).last_hidden_state
    for layer in model.layers:
        layer.relation_bias.leaf.data[0] = layer.relation_bias.cross.data[0] = 5.0
    assert torch.equal(model(**inputs).last_hidden_state, before)
    layer.relation_bias.leaf.data[1] = 5.0
    assert not torch.equal(model(**inputs).last_hidden_state, before)


def test_the_input_is_token_plus_weighted_graph_position_plus_relation():
    embedding = tiny().embedding
    found = embedding(*(torch.tensor([[0, value]]) for value in (7, 3, 2, 4, 1)))[0, 1]
    expected = (
        embedding.token.weight[7]
        + embedding.place.weight[1]
        + 0.5 * embedding.chain.weight[2]
        + 0.3 * embedding.depth.weight[4]
        + 0.2 * embedding.role.weight[1]
        + embedding.relation.weight[3]
    )
    torch.testing.assert_close(found, expected)


def test_heads_at_labels_give_the_loss_and_gradients_of_heads_everywhere():
    model = tiny()
    inputs = batch()
    output = model(**inputs, mnm_weight=0.7, constraint_weight=0.0)
    output.loss.backward()
    sparse = gradients(model)
    hidden = model(**inputs).last_hidden_state
    everywhere = [
        F.cross_entropy(head(hidden).flatten(0, 1), inputs[labels].flatten())
        for head, labels in ((model.mlm_head, "mlm_labels"), (model.mnm_head, "mnm_labels"))
    ]
    torch.testing.assert_close(output.mlm_loss, everywhere[0])
    torch.testing.assert_close(output.mnm_loss, everywhere[1])
    (everywhere[0] + 0.7 * everywhere[1]).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(sparse[name], gradient, msg=name)
    is_labelled = inputs["mlm_labels"] != IGNORED
    torch.testing.assert_close(output.mlm_logits, model.mlm_head(hidden[is_labelled]))


def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_step():
    model = tiny()
    inputs = batch(rows=4)
    whole = model(**inputs)
    whole.loss.backward()
    expected = gradients(model)
    counts = {
        "num_mlm": (inputs["mlm_labels"] != IGNORED).sum(),
        "num_mnm": (inputs["mnm_labels"] != IGNORED).sum(),
        "num_rows": 4,
    }
    total = torch.zeros(())
    for rows in (slice(0, 1), slice(1, 4)):
        part = model(**{name: value[rows] for name, value in inputs.items()}, **counts)
        part.loss.backward()
        total += part.loss.detach()
    torch.testing.assert_close(total, whole.loss.detach())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_padding_changes_nothing():
    model = tiny()
    inputs = batch()
    padded = {name: F.pad(v, (0, 3), value=0) for name, v in inputs.items()}
    for labels in ("mlm_labels", "mnm_labels"):
        padded[labels][:, -3:] = IGNORED
    mask = (torch.arange(len(ROLES) + 3) < len(ROLES)).repeat(2, 1)
    plain, longer = model(**inputs), model(**padded, attention_mask=mask)
    torch.testing.assert_close(longer.last_hidden_state[:, :-3], plain.last_hidden_state)
    for part in ("loss", "mlm_loss", "mnm_loss", "constraint_loss"):
        torch.testing.assert_close(longer[part], plain[part])


def test_every_parameter_learns():
    model = tiny()
    model(**batch()).loss.backward()
    found = gradients(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    unused = {name for name, gradient in found.items() if not gradient.any()}
    assert unused == set()


def test_code_without_a_graph_is_encoded_and_trained_on():
    model = tiny()
    inputs = batch()
    output = model(inputs["input_ids"], mlm_labels=inputs["mlm_labels"])
    assert output.mnm_loss is None
    assert output.constraint_loss is None
    torch.testing.assert_close(output.loss, output.mlm_loss)
    assert model(inputs["input_ids"]).loss is None
    zeros = torch.zeros_like(inputs["input_ids"])
    same = model(
        inputs["input_ids"],
        rel_ids=zeros,
        chain_ids=zeros,
        depth_ids=zeros,
        role_ids=zeros + Role.CODE,
    )
    torch.testing.assert_close(output.last_hidden_state, same.last_hidden_state)


def test_sequences_without_labels_do_not_change_the_loss():
    inputs = batch()
    for labels in ("mlm_labels", "mnm_labels"):
        inputs[labels][:] = IGNORED
    output = tiny()(**inputs, constraint_weight=0.0)
    assert output.loss == 0
    assert output.mlm_logits.shape == (0, 50)


def by_hand(hidden: Tensor) -> float:
    """The constraint of the sequence above: root -> tail at 9, root -> E at 13 and 14."""
    entities = [hidden[5], hidden[9], hidden[13:15].mean(0)]
    half = hidden.shape[1] // 2

    def affinity(j: int, k: int) -> Tensor:
        return entities[j][:half] @ entities[k][half:] / math.sqrt(half)

    edges = [(0, 1), (0, 2)]
    antisymmetry = sum(F.softplus(affinity(t, h) - affinity(h, t)) for h, t in edges) / 2
    z = F.normalize(hidden, dim=-1)
    places = [i for i, rel in enumerate(RELATIONS) if rel]
    terms = []
    for i in places:
        others = [a for a in places if a != i]
        total = sum(torch.exp(z[i] @ z[a] / 0.07) for a in others)
        same = [p for p in others if RELATIONS[p] == RELATIONS[i]]
        logs = [torch.log(torch.exp(z[i] @ z[p] / 0.07) / total) for p in same]
        terms.append(-sum(logs) / len(same))
    return float(0.2 * antisymmetry + sum(terms) / len(terms))


def test_the_constraint_loss_equals_a_manual_calculation():
    torch.manual_seed(2)
    hidden = torch.randn(2, len(ROLES), 8, dtype=torch.float64)
    rel, depth, role = (torch.tensor([row] * 2) for row in (RELATIONS, DEPTHS, ROLES))
    found = constraint(hidden, rel, depth, role)
    assert found.tolist() == pytest.approx([by_hand(hidden[0]), by_hand(hidden[1])])


def test_reversed_edges_and_closed_paths_are_penalized():
    # root -> a -> b, root -> c, one token each between markers; all of one relation, so that
    # there is nothing to contrast.
    role = torch.tensor([[S, E, S, E, S, E, S, E]])
    depth = torch.tensor([[0, 0, 1, 1, 2, 2, 1, 1]])
    rel = (role == Role.ENTITY).long()
    hidden = torch.randn(1, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    root, a, b, c = hidden[0, 1::2]

    def affinity(j: Tensor, k: Tensor) -> Tensor:
        return j[:3] @ k[3:] / math.sqrt(3)

    edges = [(root, a), (a, b), (root, c)]
    antisymmetry = sum(F.softplus(affinity(t, h) - affinity(h, t)) for h, t in edges) / 3
    closed = F.softplus(affinity(b, root))
    expected = float(0.2 * antisymmetry + 0.2 * closed)
    assert float(constraint(hidden, rel, depth, role)) == pytest.approx(expected)


def test_the_constraint_loss_of_code_without_a_graph_is_zero_with_finite_gradients():
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    zeros = torch.zeros(2, 5, dtype=torch.long)
    loss = constraint(hidden, zeros, zeros, zeros + Role.CODE)
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.slow
def test_training_lowers_every_part_of_the_loss():
    model = tiny(dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = batch(rows=4)
    first = None
    for _ in range(60):
        output = model(**inputs)
        first = first or output
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first is not None
    for part in ("mlm_loss", "mnm_loss", "constraint_loss"):
        assert output[part] < first[part], part


def test_a_saved_encoder_loads_unchanged(tmp_path: Path):
    model = tiny()
    torch.nn.init.normal_(model.layers[1].relation_bias.leaf)
    model.save_pretrained(tmp_path)
    again: Any = CodeGraphEncoder.from_pretrained(tmp_path)
    for setting in ("vocab_size", "hidden_size", "dropout", "num_relations", "max_chains"):
        assert getattr(again.config, setting) == getattr(model.config, setting)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    inputs = batch()
    assert torch.equal(again(**inputs).loss, model(**inputs).loss)


def test_the_initial_weights_follow_the_configuration():
    model = tiny(initializer_range=0.02, hidden_size=64, intermediate_size=256)
    for layer in model.layers:
        assert not layer.relation_bias.leaf.any()
        assert not layer.relation_bias.cross.any()
        assert float(layer.intermediate.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        assert not layer.intermediate.bias.any()
    assert float(model.embedding.token.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_new_weights_follow_from_the_seed_and_are_distributed_like_those_of_a_plain_one():
    config = CodeGraphConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain = CodeGraphEncoder(config).state_dict()
        made = []
        for _ in range(2):
            torch.manual_seed(3)
            # What is not filled keeps what the memory held: here, something else each time.
            made.append(new_encoder(config).state_dict())
    assert made[0].keys() == plain.keys()
    for name, weight in made[0].items():
        assert torch.equal(weight, made[1][name]), name
        assert float(weight.std()) == pytest.approx(float(plain[name].std()), abs=5e-3), name
        assert float(weight.mean()) == pytest.approx(float(plain[name].mean()), abs=5e-3), name
