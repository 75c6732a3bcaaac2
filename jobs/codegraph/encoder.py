"""The code-graph encoder: a transformer over code and a walk through its knowledge graph.

Post-LN layers with GELU and learned biases. A token's input is the sum of three embeddings: token,
graph position (place + 0.5 chain + 0.3 depth + 0.2 role) and relation. Each layer learns two
scalars per relation r, initially 0 and shared by all heads, which are added to the attention scores
of tokens i and j:

    leaf[r]    if both have relation r > 0 (also if i = j)
    cross[r]   if one has relation r > 0 and the other is code

`sequences.py` defines tokens, relations, chains, depths and roles. The two vocabulary heads, for
masked code (MLM) and masked nodes of the graph (MNM), are not tied to the embedding and run only at
labeled positions.

    loss = w_mlm · CE(mlm) + w_mnm · CE(mnm) + w_constraint · constraint

Importing this module registers the model with transformers' `AutoModel` and `AutoModelForMaskedLM`,
so that they load a folder written by `save_pretrained`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    initialization as init,
)
from transformers.utils.generic import ModelOutput

from .sequences import IGNORED, NUM_RELATION_IDS, PAD_ID, Role

CHAIN_SHARE, DEPTH_SHARE, ROLE_SHARE = 0.5, 0.3, 0.2  # weights in the graph position; place has 1
ANTISYMMETRY_WEIGHT = ACYCLICITY_WEIGHT = 0.2
TEMPERATURE = 0.07


class CodeGraphConfig(PreTrainedConfig):
    """The sizes of an encoder; by default 107,445,664 parameters."""

    model_type = "code_graph"

    vocab_size: int = 8000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    num_relations: int = NUM_RELATION_IDS  # including 0, no relation
    max_position_embeddings: int = 4096
    # Longest sequence in training, in tokens: later positions have untrained embeddings.
    trained_length: int | None = None
    max_chains: int = 1000
    max_depth: int = 20
    num_roles: int = len(Role)
    dropout: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = PAD_ID
    tie_word_embeddings: bool = False


@dataclass
class CodeGraphOutput(ModelOutput):
    """The encoder's output. The parts of the loss are unweighted scalars."""

    loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    mnm_loss: Tensor | None = None
    constraint_loss: Tensor | None = None
    mlm_logits: Tensor | None = None  # (labeled tokens, V), sequence by sequence
    mnm_logits: Tensor | None = None
    last_hidden_state: Tensor | None = None  # (B, T, H)


class GraphEmbedding(nn.Module):
    """The input embedding: token + graph position + relation."""

    def __init__(self, config: CodeGraphConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.token = nn.Embedding(config.vocab_size, width)
        self.place = nn.Embedding(config.max_position_embeddings, width)
        self.chain = nn.Embedding(config.max_chains, width)
        self.depth = nn.Embedding(config.max_depth, width)
        self.role = nn.Embedding(config.num_roles, width)
        self.relation = nn.Embedding(config.num_relations, width)

    def forward(self, ids: Tensor, rel: Tensor, chain: Tensor, depth: Tensor, role: Tensor) -> Any:
        position = (
            self.place.weight[: ids.shape[1]]
            + CHAIN_SHARE * self.chain(chain)
            + DEPTH_SHARE * self.depth(depth)
            + ROLE_SHARE * self.role(role)
        )
        return self.token(ids) + position + self.relation(rel)


class RelationBias(nn.Module):
    """The two scalars per relation that one layer adds to its attention scores."""

    def __init__(self, num_relations: int) -> None:
        super().__init__()
        self.leaf = nn.Parameter(torch.zeros(num_relations))
        self.cross = nn.Parameter(torch.zeros(num_relations))

    def forward(self, related: Tensor, is_code: Tensor) -> Tensor:
        """Return the bias (B, T, T).

        related: (B, T, R), one-hot, all 0 for relation 0; is_code: (B, T, 1), 0 or 1.
        """
        # A GEMM of two thin matrices, whose gradient is also a GEMM and not a scatter into T x T.
        cross = (related @ self.cross).unsqueeze(-1)
        left = torch.cat([related * self.leaf, cross, is_code], dim=-1)
        right = torch.cat([related, is_code, cross], dim=-1)
        return left @ right.transpose(1, 2)


class EncoderLayer(nn.Module):
    """A Post-LN layer: attention and an MLP, each with a residual, then LayerNorm."""

    def __init__(self, config: CodeGraphConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.relation_bias = RelationBias(config.num_relations)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(width, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(
        self, hidden: Tensor, related: Tensor | None, is_code: Tensor, padding: Tensor | None
    ) -> Tensor:
        rows, length, width = hidden.shape
        # (3, B, heads, T, width of a head)
        qkv = self.query_key_value(hidden).view(rows, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = padding
        if related is not None:
            bias = self.relation_bias(related, is_code).unsqueeze(1)
            mask = bias if padding is None else bias + padding
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout
        )
        context = context.transpose(1, 2).reshape(rows, length, width)
        hidden = self.attention_norm(hidden + self._drop(self.attention_output(context)))
        inner = F.gelu(self.intermediate(hidden))
        return cast(Tensor, self.output_norm(hidden + self._drop(self.output(inner))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class CodeGraphEncoder(PreTrainedModel):
    """The encoder with its MLM and MNM heads."""

    config_class = CodeGraphConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: CodeGraphConfig) -> None:
        super().__init__(config)
        self.embedding = GraphEmbedding(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.mnm_head = nn.Linear(config.hidden_size, config.vocab_size)
        cast(Any, self).post_init()

    def _init_weights(self, module: nn.Module) -> None:
        cast(Any, super())._init_weights(module)
        if isinstance(module, RelationBias):
            init.zeros_(module.leaf)
            init.zeros_(module.cross)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.token

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        rel_ids: Tensor | None = None,
        chain_ids: Tensor | None = None,
        depth_ids: Tensor | None = None,
        role_ids: Tensor | None = None,
        mlm_labels: Tensor | None = None,
        mnm_labels: Tensor | None = None,
        *,
        mlm_weight: float = 1.0,
        mnm_weight: float = 1.0,
        constraint_weight: float = 1.0,
        num_mlm: int | Tensor | None = None,
        num_mnm: int | Tensor | None = None,
        num_rows: int | Tensor | None = None,
    ) -> CodeGraphOutput:
        """Encode sequences, and compute the losses for which there are labels.

        All tensors are (B, T) int64, padded on the right: ids with PAD_ID, labels with IGNORED,
        the others with 0. Without rel_ids, chain_ids, depth_ids and role_ids all tokens are code.

        `num_mlm`, `num_mnm`, `num_rows`: the denominators of the losses: labels and sequences of
        all micro-batches of a step, so that their losses add up to the step's; None: of this batch.
        """
        hidden = self.encode(input_ids, attention_mask, rel_ids, chain_ids, depth_ids, role_ids)
        output = CodeGraphOutput(last_hidden_state=hidden)
        parts: list[Tensor] = []
        if mlm_labels is not None:
            output.mlm_logits, output.mlm_loss = _predict(
                self.mlm_head, hidden, mlm_labels, num_mlm
            )
            parts.append(mlm_weight * output.mlm_loss)
        if mnm_labels is not None:
            output.mnm_logits, output.mnm_loss = _predict(
                self.mnm_head, hidden, mnm_labels, num_mnm
            )
            parts.append(mnm_weight * output.mnm_loss)
        has_graph = rel_ids is not None and depth_ids is not None and role_ids is not None
        if parts and has_graph and constraint_weight:
            with torch.autocast(
                hidden.device.type, enabled=False
            ):  # bfloat16 is too imprecise here
                sums = constraint(
                    hidden.float(),
                    cast(Tensor, rel_ids),
                    cast(Tensor, depth_ids),
                    cast(Tensor, role_ids),
                )
            rows = len(input_ids) if num_rows is None else num_rows
            output.constraint_loss = sums.sum() / rows
            parts.append(constraint_weight * output.constraint_loss)
        output.loss = sum(parts[1:], parts[0]) if parts else None
        return output

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        rel_ids: Tensor | None = None,
        chain_ids: Tensor | None = None,
        depth_ids: Tensor | None = None,
        role_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, H) after the last layer; arguments as in `forward`."""
        zeros = torch.zeros_like(input_ids)
        rel = zeros if rel_ids is None else rel_ids
        chain = zeros if chain_ids is None else chain_ids
        depth = zeros if depth_ids is None else depth_ids
        role = torch.full_like(input_ids, Role.CODE) if role_ids is None else role_ids
        hidden = self.embedding(input_ids, rel, chain, depth, role)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        related = None
        if rel_ids is not None:
            related = F.one_hot(rel, self.config.num_relations).to(hidden.dtype)
            related = related * (rel > 0).unsqueeze(-1)  # 0: no relation
        is_code = (role == Role.CODE).unsqueeze(-1).to(hidden.dtype)
        padding = None
        if attention_mask is not None:
            lowest = torch.finfo(hidden.dtype).min
            padding = (attention_mask == 0)[:, None, None, :].to(hidden.dtype) * lowest
        for layer in self.layers:
            hidden = layer(hidden, related, is_code, padding)
        return cast(Tensor, self.final_norm(hidden))


def new_encoder(config: CodeGraphConfig) -> CodeGraphEncoder:
    """Make an encoder with new weights, from torch's generator."""
    # Without this, weights would be initialized twice.
    with init.no_init_weights():
        model = CodeGraphEncoder(config)
    cast(Any, model).init_weights()
    return model


AutoConfig.register(CodeGraphConfig.model_type, CodeGraphConfig)
AutoModel.register(CodeGraphConfig, CodeGraphEncoder)
AutoModelForMaskedLM.register(CodeGraphConfig, CodeGraphEncoder)


def _predict(
    head: nn.Linear, hidden: Tensor, labels: Tensor, count: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits (labeled tokens, V) and their summed cross-entropy divided by `count`."""
    is_labeled = labels != IGNORED
    logits = head(hidden[is_labeled])
    total = F.cross_entropy(logits.float(), labels[is_labeled], reduction="sum")
    return logits, total / (max(1, len(logits)) if count is None else count)


def constraint(hidden: Tensor, rel_ids: Tensor, depth_ids: Tensor, role_ids: Tensor) -> Tensor:
    """Return the constraint loss of each sequence, (B,), from hidden states (B, T, H).

        0.2 antisymmetry + 0.2 acyclicity + contrastive

    Antisymmetry and acyclicity compare the entities of a sequence. Entity k has the mean hidden
    state of its tokens, whose first half s_k represents it as the source of edges, and the second,
    t_k, as the target. The affinity a(j, k) = s_j · t_k / sqrt(H / 2) scores an edge from j to k.

        antisymmetry = mean over edges h -> t        of softplus(a(t, h) - a(h, t))
        acyclicity   = mean over paths j -> … -> k   of softplus(a(k, j))

    An edge should score higher than its reverse, and an edge from the end of a path (of two or more
    edges) back to its start should score low. The edges are those of the walk, recovered from the
    depths.

    Contrastive is the supervised contrastive loss L_out of Khosla et al. (arXiv:2004.11362),
    equation 2, with the relation as the class. z_i is the normalized state of a token with
    rel_id > 0; P(i) are the other tokens of the sequence with the same relation; a runs over all
    others with any relation; tau = 0.07.

        contrastive = mean over i of -1/|P(i)| sum over p in P(i) of
                      log(exp(z_i · z_p / tau) / sum over a of exp(z_i · z_a / tau))

    A token i counts only if the sequence has other tokens of its relation and tokens of another
    relation. A mean over nothing is 0. The loss of a sequence does not depend on the batch.
    """
    entities, is_edge, is_path = _walk(hidden, depth_ids, role_ids)
    source, target = entities.chunk(2, dim=-1)
    affinity = source @ target.transpose(1, 2) / math.sqrt(source.shape[-1])
    back = affinity.transpose(1, 2)
    antisymmetry = _mean_where(is_edge, F.softplus(back - affinity))
    acyclicity = _mean_where(is_path, F.softplus(back))
    return (
        ANTISYMMETRY_WEIGHT * antisymmetry
        + ACYCLICITY_WEIGHT * acyclicity
        + _contrastive(hidden, rel_ids)
    )


def _walk(hidden: Tensor, depth_ids: Tensor, role_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entities of each sequence and how they are connected in the walk.

    entities: (B, N, H), in their order; is_edge: (B, from, to) bool, one edge; is_path:
    (B, from, to) bool, a path of two or more edges.
    """
    is_entity = role_ids == Role.ENTITY
    begins = is_entity & ~F.pad(is_entity, (1, 0))[:, :-1]
    number = begins.cumsum(1) * is_entity  # from 1; markers separate consecutive entities
    numbers = torch.arange(1, int(number.max()) + 1, device=hidden.device)
    is_of = number.unsqueeze(1) == numbers[:, None]  # (B, N, T)
    exists = is_of.any(-1)
    members = is_of.to(hidden.dtype)
    entities = members @ hidden / members.sum(-1, keepdim=True).clamp(min=1)
    depth = (is_of * depth_ids.unsqueeze(1)).sum(-1) // is_of.sum(-1).clamp(min=1)
    # j is above k if it comes before k and all entities after j, up to k, are deeper than j.
    is_later = numbers[:, None] < numbers
    deepest = depth.new_full((), torch.iinfo(depth.dtype).max)
    least = torch.where(is_later, depth.unsqueeze(1), deepest).cummin(-1).values
    is_above = is_later & exists.unsqueeze(1) & (least > depth.unsqueeze(2))
    is_next = depth.unsqueeze(1) == depth.unsqueeze(2) + 1
    return entities, is_above & is_next, is_above & ~is_next


def _contrastive(hidden: Tensor, rel_ids: Tensor) -> Tensor:
    z = F.normalize(hidden, dim=-1)
    similarity = z @ z.transpose(1, 2) / TEMPERATURE
    is_related = rel_ids > 0
    itself = torch.eye(rel_ids.shape[1], dtype=torch.bool, device=hidden.device)
    is_other = is_related.unsqueeze(2) & is_related.unsqueeze(1) & ~itself
    is_same = is_other & (rel_ids.unsqueeze(2) == rel_ids.unsqueeze(1))
    lowest = torch.finfo(similarity.dtype).min
    total = similarity.masked_fill(~is_other, lowest).logsumexp(-1, keepdim=True)
    counts = is_same.any(-1) & (is_other & ~is_same).any(-1)
    return _mean_where(counts, _mean_where(is_same, total - similarity, dims=1))


def _mean_where(mask: Tensor, values: Tensor, dims: int | None = None) -> Tensor:
    """Return the mean of `values` where `mask`, over the last `dims` dimensions; 0 for an empty
    mask.

    `dims` None: all dimensions except the first.
    """
    over = tuple(range(1 if dims is None else mask.ndim - dims, mask.ndim))
    return torch.where(mask, values, 0).sum(over) / mask.sum(over).clamp(min=1)
