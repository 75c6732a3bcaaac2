"""From code and its knowledge graph to the token sequences of the code-graph encoder.

    [CLS] code [SEP] [ENT] root [REL] relation [ENT] tail … [SEP] [REL] relation tail [SEP]

The code is the source of a module, class or function, whose entity is the root. The middle is a
depth-first walk through the graph from the root. The end is one triple of the root that the walk
leaves out; link prediction masks its tail. Each token has an id and

rel_ids    the relation's id for relation tokens; the id of the first relation of their chain for
           entity tokens; 0 for code and special tokens
chain_ids  the number of the chain, from 1; 0 for code, [CLS] and [SEP]. A new chain begins where
           the walk backtracks. The triple at the end is a chain of its own.
depth_ids  the number of triples between the root and the token's entity, or the entity that its
           relation leads to
role_ids   a Role

[ENT] and [REL] have the chain and depth of the tokens after them. The parent of an entity at depth
d is the nearest entity before it at depth d - 1, so the walk can be recovered from the sequence.
Names in the code's own module are written without the module.

There are 12 relation ids: 0 for no relation, and 11 for the 12 relations: `calls` (of a function)
and `invokes` (of a method) share one id, but have different tokens.

A sequence longer than `seq_len` is truncated: the longer of code and walk first, each from its end,
the walk by whole triples. The root and the triple at the end always stay; of a name longer than a
quarter of `seq_len` the last tokens stay.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..errors import SpecError
from .syntax_reader import Block
from .triples import RELATIONS, Triple

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[ENT]", "[REL]")
PAD_ID, CLS_ID, SEP_ID, MASK_ID, ENT_ID, REL_ID = range(len(SPECIAL_TOKENS))
IGNORED = -100  # label of tokens without loss, as in torch.nn.functional.cross_entropy
NUM_RELATION_IDS = 12
MIN_SEQ_LEN, MAX_SEQ_LEN = 32, 4096
MAX_CHAIN = 999  # largest chain number: the encoder has 1000 chain embeddings
MAX_DEPTH = 4  # of a walk
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # every byte is a token
CHARACTERS_PER_TOKEN = 16  # more than code has: characters beyond need not be tokenized

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
Edge: TypeAlias = tuple[str, str]  # relation, tail


class Role(IntEnum):
    """The type of a token."""

    SPECIAL = 0
    CODE = 1
    ENTITY = 2
    RELATION = 3


class Example(NamedTuple):
    """One sequence: five unpadded arrays (T,) int32, as described above; T is at most `seq_len`."""

    ids: IntArray
    rel_ids: IntArray
    chain_ids: IntArray
    depth_ids: IntArray
    role_ids: IntArray


def relation_id(relation: str) -> int:
    """Return the id of a relation, from 1 to 11."""
    return _RELATION_IDS[relation]


_RELATION_IDS = {
    relation: number
    for number, relation in enumerate((word for word in RELATIONS if word != "invokes"), start=1)
}
_RELATION_IDS["invokes"] = _RELATION_IDS["calls"]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on texts; the special tokens have the first ids.

    Deterministic. The vocabulary is smaller than `vocab_size` if the texts have too few pairs to
    merge. Raises SpecError.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise SpecError("vocab_size", f"must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_examples(
    triples: Iterable[Triple],
    blocks: Iterable[Block],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
) -> Iterator[tuple[Block, Example]]:
    """Yield one sequence for each block whose entity is the head of a triple, in the given order.

    The walk follows all `triples`: to separate training and validation, call this once for each
    with its own triples and blocks. The tokenizer comes from `train_tokenizer`, or has the same
    special tokens with the same ids. Raises SpecError.
    """
    if not MIN_SEQ_LEN <= seq_len <= MAX_SEQ_LEN:
        takes = f"at least {MIN_SEQ_LEN} and at most {MAX_SEQ_LEN}"
        raise SpecError("seq_len", f"must be {takes}, got {seq_len}")
    builder = _Builder(triples, tokenizer, seq_len)
    for block in blocks:
        if block.name in builder.edges:
            yield block, builder.build(block)


def leaf_tail(example: Example) -> slice:
    """Return the slice of the tail tokens in the triple at the end."""
    end = len(example.ids) - 1  # of the last [SEP]
    start = end
    while example.role_ids[start - 1] == Role.ENTITY:
        start -= 1
    return slice(start, end)


class _Builder:
    def __init__(self, triples: Iterable[Triple], tokenizer: Tokenizer, seq_len: int) -> None:
        self.edges: dict[str, list[Edge]] = defaultdict(list)
        self.modules: dict[str, str] = {}  # head -> its module
        for head, relation, tail, qualifiers in triples:
            self.edges[head].append((relation, tail))
            self.modules[head] = qualifiers.module
        self.edges = dict(self.edges)
        # Text such as "[SEP]" in the code is tokenized as text.
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.names: dict[str, list[int]] = {}

    def build(self, block: Block) -> Example:
        module = self.modules[block.name]
        edges = self.edges[block.name]
        # The left-out triple depends on the name only, not on the order of definitions.
        left_out = edges[zlib.crc32(block.name.encode()) % len(edges)]
        root = self.name(block.name, module)
        relation, tail = left_out
        leaf = _Part(Role.RELATION, self.name(relation), relation_id(relation), 0, 1)
        end = [leaf, _Part(Role.ENTITY, self.name(tail, module), leaf.rel_id, 0, 1)]
        room = self.seq_len - 6 - len(root) - sum(len(part.ids) for part in end)
        # 6: [CLS], three [SEP], [ENT] of the root, [REL] of the end
        text = block.text[: room * CHARACTERS_PER_TOKEN]
        code = self.tokenizer.encode(text, add_special_tokens=False).ids[:room]
        walk = self.walk(block.name, module, left_out, max(room // 2, room - len(code)))
        code = code[: room - sum(1 + len(part.ids) for part in walk)]
        chain = walk[0].rel_id if walk else leaf.rel_id
        row = _SequenceBuilder()
        row.put(Role.SPECIAL, [CLS_ID])
        row.put(Role.CODE, code)
        row.put(Role.SPECIAL, [SEP_ID])
        row.put_marked(_Part(Role.ENTITY, root, chain, 1, 0))
        for part in walk:
            row.put_marked(part)
        row.put(Role.SPECIAL, [SEP_ID])
        number = walk[-1].chain + 1 if walk else 2
        row.put_marked(leaf._replace(chain=number))
        row.put(*end[1]._replace(chain=number))
        row.put(Role.SPECIAL, [SEP_ID])
        return row.example()

    def walk(self, root: str, module: str, left_out: Edge, room: int) -> list[_Part]:
        """Return relations and entities alternately, depth-first, as many triples as fit `room`."""
        parts: list[_Part] = []
        seen = {root}
        chain, chain_relation, last_depth = 0, 0, -1
        waiting = self.edges_of(root, 1, left_out)
        while waiting:
            depth, (relation, tail) = waiting.pop()
            if tail in seen:
                continue
            seen.add(tail)
            number = relation_id(relation)
            if depth != last_depth + 1:  # the walk begins, or has backtracked
                chain, chain_relation = chain + 1, number
            last_depth = depth
            step = [
                _Part(Role.RELATION, self.name(relation), number, chain, depth),
                _Part(Role.ENTITY, self.name(tail, module), chain_relation, chain, depth),
            ]
            room -= sum(1 + len(part.ids) for part in step)
            if room < 0 or chain == MAX_CHAIN:  # the triple at the end needs one more number
                break
            parts += step
            if depth < MAX_DEPTH:
                waiting += self.edges_of(tail, depth + 1)
        return parts

    def edges_of(
        self, head: str, depth: int, left_out: Edge | None = None
    ) -> list[tuple[int, Edge]]:
        """Return the edges from a head, the first one last."""
        edges = self.edges.get(head, [])
        return [(depth, edge) for edge in reversed(edges) if edge != left_out]

    def name(self, name: str, module: str = "") -> list[int]:
        """Return the tokens of a relation, or of an entity as named within a module."""
        name = name.removeprefix(f"{module}.") if module else name
        if name not in self.names:
            ids = self.tokenizer.encode(name, add_special_tokens=False).ids
            self.names[name] = ids[-(self.seq_len // 4) :]
        return self.names[name]


class _Part(NamedTuple):
    """An entity or a relation in a sequence; fields in the order of `_SequenceBuilder.put`."""

    role: Role
    ids: list[int]
    rel_id: int
    chain: int
    depth: int


class _SequenceBuilder:
    """Builds one sequence, part by part."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = [[] for _ in Example._fields]

    def put(
        self, role: Role, ids: list[int], rel_id: int = 0, chain: int = 0, depth: int = 0
    ) -> None:
        self.columns[0] += ids
        for column, value in zip(self.columns[1:], (rel_id, chain, depth, role), strict=True):
            column += [value] * len(ids)

    def put_marked(self, part: _Part) -> None:
        marker = ENT_ID if part.role is Role.ENTITY else REL_ID
        self.put(Role.SPECIAL, [marker], 0, part.chain, part.depth)
        self.put(*part)

    def example(self) -> Example:
        return Example(*(np.array(column, dtype=np.int32) for column in self.columns))
