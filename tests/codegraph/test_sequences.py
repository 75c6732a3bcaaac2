"""Sequences of code and graph, on a graph small enough to walk by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from warmd.jobs.codegraph.sequences import (
    CLS_ID,
    ENT_ID,
    MAX_DEPTH,
    NUM_RELATION_IDS,
    REL_ID,
    SEP_ID,
    SPECIAL_TOKENS,
    Example,
    Role,
    build_examples,
    leaf_tail,
    relation_id,
    train_tokenizer,
)
from warmd.jobs.codegraph.syntax_reader import Block
from warmd.jobs.codegraph.triples import RELATIONS, Qualifiers, Triple
from warmd.jobs.errors import SpecError

TEXTS = ["def main(path):\n    return load(path).run()\n" * 3, *RELATIONS * 3, "naïve 数 \t"]
WHERE = Qualifiers("python", "m.py", "m")
# Which triple of the root goes to the end is chosen by its name: the first of three for `m.f`.
TRIPLES = [
    Triple("m.f", "returns", "int", WHERE),
    Triple("m.f", "calls", "m.g", WHERE),
    Triple("m.f", "raises", "E", WHERE),
    Triple("m.g", "catches", "m.h", WHERE),
    Triple("m.g", "calls", "m.f", WHERE),
    Triple("m.h", "invokes", "run", WHERE),
]
BLOCK = Block("m.f", "pass", "m.py")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


def one(tokenizer, triples=TRIPLES, block=BLOCK, seq_len=256) -> Example:
    ((_, example),) = build_examples(triples, [block], tokenizer, seq_len=seq_len)
    return example


def parts(example: Example, tokenizer) -> list[tuple[str, int, int, int, int]]:
    """Runs of tokens of the same kind as (text, rel, chain, depth, role)."""
    found: list[tuple[list[int], tuple[int, ...]]] = []
    for token, *features in zip(*example, strict=True):
        if found and found[-1][1] == tuple(features) and features[3] != Role.SPECIAL:
            found[-1][0].append(token)
        else:
            found.append(([token], tuple(features)))
    return [(tokenizer.decode(ids, skip_special_tokens=False), *f) for ids, f in found]


def test_the_sequence_is_code_then_walk_then_one_triple_left_out(tokenizer):
    calls, catches, raises = map(relation_id, ("calls", "catches", "raises"))
    special, code, entity, relation = Role
    assert parts(one(tokenizer), tokenizer) == [
        ("[CLS]", 0, 0, 0, special),
        ("pass", 0, 0, 0, code),
        ("[SEP]", 0, 0, 0, special),
        ("[ENT]", 0, 1, 0, special),
        ("f", calls, 1, 0, entity),
        ("[REL]", 0, 1, 1, special),
        ("calls", calls, 1, 1, relation),
        ("[ENT]", 0, 1, 1, special),
        ("g", calls, 1, 1, entity),
        ("[REL]", 0, 1, 2, special),
        ("catches", catches, 1, 2, relation),
        ("[ENT]", 0, 1, 2, special),
        ("h", calls, 1, 2, entity),
        ("[REL]", 0, 1, 3, special),
        ("invokes", calls, 1, 3, relation),
        ("[ENT]", 0, 1, 3, special),
        ("run", calls, 1, 3, entity),
        ("[REL]", 0, 2, 1, special),
        ("raises", raises, 2, 1, relation),
        ("[ENT]", 0, 2, 1, special),
        ("E", raises, 2, 1, entity),
        ("[SEP]", 0, 0, 0, special),
        ("[REL]", 0, 3, 1, special),
        ("returns", relation_id("returns"), 3, 1, relation),
        ("int", relation_id("returns"), 3, 1, entity),
        ("[SEP]", 0, 0, 0, special),
    ]


def test_link_prediction_finds_the_tail_of_the_triple_at_the_end(tokenizer):
    example = one(tokenizer)
    assert tokenizer.decode(example.ids[leaf_tail(example)]) == "int"


def test_an_entity_with_one_triple_has_only_its_root_in_the_walk(tokenizer):
    seen = parts(one(tokenizer, TRIPLES[:1]), tokenizer)
    texts = " ".join(part[0] for part in seen)
    assert texts == "[CLS] pass [SEP] [ENT] f [SEP] [REL] returns int [SEP]"
    chains = [part[2] for part in seen]
    assert chains == [0, 0, 0, 1, 1, 0, 2, 2, 2, 0]


def test_the_twelve_relations_have_ids_from_1_to_11(tokenizer):
    assert {relation_id(relation) for relation in RELATIONS} == set(range(1, NUM_RELATION_IDS))
    assert relation_id("calls") == relation_id("invokes")


def test_names_of_other_modules_are_fully_qualified(tokenizer):
    elsewhere = [Triple("m.f", "calls", "n.g", WHERE)]
    example = one(tokenizer, elsewhere)
    assert tokenizer.decode(example.ids[leaf_tail(example)]) == "n.g"


def test_only_entities_that_are_heads_have_sequences_in_the_order_of_the_blocks(tokenizer):
    blocks = [Block(name, "x", "m.py") for name in ("m.h", "m.unknown", "m.f")]
    built = build_examples(TRIPLES, blocks, tokenizer, seq_len=64)
    assert [block.name for block, _ in built] == ["m.h", "m.f"]


def test_special_tokens_in_code_are_tokenized_as_text(tokenizer):
    text = "x = '[SEP]' + '[MASK]'"
    example = one(tokenizer, block=BLOCK._replace(text=text))
    is_code = example.role_ids == Role.CODE
    assert (example.ids[is_code] >= len(SPECIAL_TOKENS)).all()
    assert tokenizer.decode(example.ids[is_code]) == text


def test_a_long_sequence_is_truncated_at_its_longer_part_first(tokenizer):
    long_code = BLOCK._replace(text="x " * 1000)
    wide = [Triple("m.f", "calls", f"m.g{i}", WHERE) for i in range(200)]
    both = one(tokenizer, wide, long_code, 128)
    num_code = (both.role_ids == Role.CODE).sum()
    assert len(both.ids) == 128
    assert 45 < num_code < 75  # about half of what the fixed parts leave
    code_only = one(tokenizer, TRIPLES, long_code, 128)
    whole_walk = one(tokenizer).role_ids != Role.CODE
    assert (code_only.role_ids != Role.CODE).sum() == whole_walk.sum()
    assert len(code_only.ids) == 128
    walk_only = one(tokenizer, wide, BLOCK, 128)
    assert 118 < len(walk_only.ids) <= 128  # by whole triples
    assert (walk_only.role_ids == Role.CODE).sum() == len(tokenizer.encode(BLOCK.text).ids)


def test_a_walk_ends_at_its_greatest_depth_and_enters_no_entity_twice(tokenizer):
    ring = [Triple(f"m.e{i}", "calls", f"m.e{(i + 1) % 3}", WHERE) for i in range(3)]
    line = [Triple(f"m.e{i}", "imports", f"m.e{i + 1}", WHERE) for i in range(20)]
    start = Block("m.e0", "x", "m.py")
    example = one(tokenizer, [*line, *ring, Triple("m.e0", "raises", "E", WHERE)], start)
    walked = [text for text, *_, role in parts(example, tokenizer) if role == Role.ENTITY][:-1]
    assert len(walked) == len(set(walked))
    assert example.depth_ids.max() <= MAX_DEPTH


names = st.text("abcdef.", min_size=1, max_size=40).map(lambda name: f"m.{name}")
some_triples = st.lists(
    st.builds(Triple, names, st.sampled_from(RELATIONS), names, st.just(WHERE)), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(triples=some_triples, text=st.text(max_size=300), seq_len=st.integers(32, 200))
def test_every_sequence_fits_and_its_walk_can_be_recovered(triples, text, seq_len, tokenizer):
    blocks = [Block(triples[0].head, text, "m.py")]
    ((_, example),) = build_examples(triples, blocks, tokenizer, seq_len=seq_len)
    ids, rel_ids, chain_ids, depth_ids, role_ids = example
    assert len(ids) <= seq_len
    assert {column.dtype for column in example} == {np.dtype(np.int32)}
    assert ids[0] == CLS_ID
    assert ids[-1] == SEP_ID
    assert list(ids[role_ids == Role.SPECIAL]).count(SEP_ID) == 3
    is_special = ids < len(SPECIAL_TOKENS)
    assert ((role_ids == Role.SPECIAL) == is_special).all()
    assert ((rel_ids > 0) == (role_ids >= Role.ENTITY)).all()
    is_graph = (role_ids >= Role.ENTITY) | (ids == ENT_ID) | (ids == REL_ID)
    assert ((chain_ids > 0) == is_graph).all()
    assert rel_ids.max() < NUM_RELATION_IDS
    depths = depth_ids[(ids == ENT_ID)]
    assert depths[0] == 0
    assert all(depth > 0 for depth in depths[1:])
    assert (np.diff(depths) <= 1).all()  # each hangs on one that stands before it
    tail = leaf_tail(example)
    assert (role_ids[tail] == Role.ENTITY).all()
    assert tail.start < tail.stop


def test_the_same_input_gives_the_same_sequence(tokenizer):
    again = train_tokenizer(iter(TEXTS), 400)
    assert again.to_str() == tokenizer.to_str()
    for first, second in zip(one(tokenizer), one(again), strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_tokenizer_takes_any_text_and_has_the_special_tokens_first(tokenizer):
    assert [tokenizer.id_to_token(i) for i in range(6)] == list(SPECIAL_TOKENS)
    for text in ("", " \x00\n\t", "naïve 数 🐍", *TEXTS):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= 400


def test_impossible_sizes_are_refused_by_name(tokenizer):
    with pytest.raises(SpecError, match=r"^vocab_size: must be at least 262, got 100$"):
        train_tokenizer(TEXTS, 100)
    with pytest.raises(SpecError, match=r"^seq_len: must be at least 32 and at most 4096, got 16$"):
        one(tokenizer, seq_len=16)
