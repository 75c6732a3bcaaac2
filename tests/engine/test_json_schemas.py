"""Constrained decoding by JSON Schema, with a random model that would generate anything."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
import torch
from daemons import Daemon
from gateways import openai_client
from hypothesis import given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control
from warmd.jobs.context import WarmModel
from warmd.jobs.engine import forms
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.grammar_checks import LIMIT_S
from warmd.jobs.engine.json_schemas import check, grammar_of, text_of
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.infer.options import InferSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
SCHEMA = json.dumps(PERSON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "bytes"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,  # more than the tokenizer has, as is usual
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    llama: Any = LlamaForCausalLM(config)
    llama.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    model.requires_grad_(False).eval()
    engine = Engine(WarmModel(name="m", path=folder, model=model, tokenizer=tiny.byte_tokenizer()))
    yield engine
    engine.close()


def make_request(engine: Engine, *, schema: str = SCHEMA, **how: Any) -> Request:
    how = {"sampling": Sampling(temperature=0), "max_tokens": 90, **how}
    return Request(ids=[40, 41, 42], grammar=forms.grammar_of(engine, json_schema=schema), **how)


def answers(engine: Engine, request: Request) -> list[tuple[str, str | None]]:
    engine.submit(request)
    choices: list[tuple[str, str | None]] = [("", None)] * request.num_completions
    while not isinstance(piece := request.pieces.get(timeout=60), End):
        choices[piece.index] = (choices[piece.index][0] + piece.text, piece.finish_reason)
    if piece.error is not None:
        raise piece.error
    return choices


def is_person(text: str) -> bool:
    read = json.loads(text)
    return (
        list(read) == ["name", "age", "mood"]
        and len(read["name"]) <= 4
        and read["age"] in range(151)
        and read["mood"] in ("good", "bad")
    )


@pytest.mark.slow
def test_every_completion_matches_the_schema_and_ends_with_it(engine):
    for seed in range(5):
        sampling = Sampling(temperature=1.5, seed=seed, top_p=0.9, top_k=40)
        for text, reason in answers(
            engine, make_request(engine, sampling=sampling, num_completions=4)
        ):
            assert reason == "stop"
            assert is_person(text), text


def test_a_truncated_completion_is_the_prefix_of_a_valid_one(engine):
    ((whole, _),) = answers(engine, make_request(engine))
    ((cut, reason),) = answers(engine, make_request(engine, max_tokens=7))
    assert reason == "length"
    assert whole.startswith(cut)


def test_unconstrained_sequences_are_not_affected_by_a_constrained_one(engine):
    def free() -> Request:
        return Request(ids=[40, 41, 42], sampling=Sampling(temperature=0), max_tokens=40)

    alone = answers(engine, free())
    unconstrained, held = free(), make_request(engine)
    engine.submit(held)
    assert answers(engine, unconstrained) == alone
    assert alone[0][0] != answers(engine, make_request(engine))[0][0][:40]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{", "must be JSON"),
        ('{"type": "objekt"}', "unsupported schema: Invalid type: objekt"),
        ('{"type": "string", "pattern": "("}', "unsupported schema: regex"),
        ('{"not": {"type": "string"}}', "unsupported schema: Unimplemented"),
        ('{"$ref": "#"}', "unsupported schema: no text satisfies it"),
        ("nowhere.json", "No such file"),
    ],
)
def test_an_unsupported_schema_is_refused_before_the_job_is_queued(schema, problem, tmp_path):
    spec = InferSpec.parse({"prompt": "a", "json_schema": schema})
    with pytest.raises(SpecError, match=problem) as caught:
        spec.located(tmp_path).check_inputs(None)
    assert caught.value.field == "json_schema"


def accepts(schema: Any, text: str) -> bool:
    """Whether a completion could have this text."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(json.dumps(schema)))
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ("date", ["0001-01-01", "2024-02-29", "2000-02-29"], ["0000-01-01", "2023-02-29"]),
        ("date", ["2023-02-28", "9999-12-31"], ["1900-02-29", "0000-02-29", "2023-04-31"]),
        ("date-time", ["2024-02-29T23:59:59.5Z"], ["0000-01-01T00:00:00Z"]),
        ("date-time", ["2023-01-01T00:00:00Z"], ["2023-01-01T12:30:60Z", "2023-02-29T00:00:00Z"]),
        ("time", ["12:30:59Z"], ["12:30:60Z"]),
    ],
)
def test_dates_and_times_are_those_that_exist(given, right, wrong):
    schemas: list[Any] = [
        {"type": "string", "format": given},
        {"type": "string", "format": given, "allOf": [{"maxLength": 40}]},
        {"$ref": "#/$defs/it", "$defs": {"it": {"type": "string", "format": given}}},
    ]
    for schema in schemas:
        assert [accepts(schema, f'"{text}"') for text in right] == [True] * len(right)
        assert [accepts(schema, f'"{text}"') for text in wrong] == [False] * len(wrong)
    inside = {"type": "array", "items": schemas[0]}
    assert accepts(inside, f'["{right[0]}"]')
    assert not accepts(inside, f'["{wrong[0]}"]')


def test_a_property_or_a_constant_named_like_a_keyword_is_none():
    schema = {
        "type": "object",
        "properties": {"format": {"enum": [{"format": "date"}]}, "patternProperties": {}},
        "required": ["format"],
        "additionalProperties": False,
    }
    assert accepts(schema, '{"format":{"format":"date"}}')


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"patternProperties": {"^a": {"type": "integer"}}}, "patternProperties: keys could be"),
        (
            {"items": {"patternProperties": {"^a": {}}}},
            "patternProperties: keys could be duplicated",
        ),
        ({"type": "object", "minProperties": 2}, "minProperties above 1 needs"),
    ],
)
def test_a_schema_that_a_repeated_key_would_break_is_refused(schema, problem):
    with pytest.raises(SpecError, match=f"^json_schema: unsupported schema: {problem}"):
        grammar_of(json.dumps(schema))


NAMES = st.text(st.sampled_from('abé/"\\\n\b\x01\x7f\u2028😀'), max_size=3)
SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n", "\b": "\\b"}


@st.composite
def spelled(draw: Any, text: str) -> str:
    """A text as a JSON string, with each character raw or escaped, where JSON allows it."""
    parts = []
    for character in text:
        units = character.encode("utf-16-be").hex()
        code = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        ways = [code, code.replace("a", "A"), SHORT.get(character, code)]
        if character not in '"\\' and character >= " ":
            ways.append(character)
        parts.append(draw(st.sampled_from(ways)))
    return f'"{"".join(parts)}"'


@st.composite
def objects(draw: Any) -> tuple[list[str], str]:
    """The names that an object declares, and a text with these and other keys."""
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=3))
    others = draw(st.lists(st.one_of(st.sampled_from(names), NAMES), max_size=3))
    declared = [json.dumps(name, ensure_ascii=False) for name in names if draw(st.booleans())]
    keys = [*declared, *(draw(spelled(name)) for name in others)]
    return names, "{" + ",".join(f"{key}:1" for key in keys) + "}"


FORMS: tuple[Any, ...] = (
    lambda properties: {"type": "object", "properties": properties},
    lambda properties: {"properties": properties, "additionalProperties": {"type": "integer"}},
    lambda properties: {"allOf": [{"properties": {n: {}}} for n in properties], "type": "object"},
    lambda properties: {"anyOf": [{"type": "object", "properties": properties}, {"type": "null"}]},
    lambda properties: {"type": "object", "required": [*properties]},
)


@settings(deadline=None, max_examples=300)
@given(objects(), st.sampled_from(FORMS))
def test_no_declared_key_is_given_twice_in_any_spelling(made, form):
    names, text = made
    if accepts(form({name: {} for name in names}), text):
        json.loads(text, object_pairs_hook=lambda pairs: check_unique(names, pairs))


def check_unique(names: list[str], pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    assert all(keys.count(name) <= 1 for name in names)


def test_a_key_has_one_spelling():
    schema = {"type": "object", "properties": {"a": {}, "\n": {}, "\x01": {}}}
    assert accepts(schema, r'{"a":1,"\n":1,"\u0001":1,"b":1,"\t":1}')
    for text in (
        r'{"a":1,"\u0061":1}',
        r'{"\u0061":1}',
        r'{"a":1,"a":1}',
        r'{"\n":1,"\u000a":1}',
        r'{"\u0001":1,"\u0001":1}',
        r'{"b":{"\u0061":1}}',
    ):
        assert not accepts(schema, text), text
    loosened = {**schema, "x-guidance": {"json_allowed_escapes": 'u"', "lenient": False}}
    assert not accepts(loosened, r'{"a":1,"\u0061":1}')


@pytest.mark.parametrize("schema", [{"const": "\x01"}, {"enum": ["a", {"b": ["\x1f"]}]}])
def test_a_value_that_no_completion_can_have_is_refused(schema):
    with pytest.raises(SpecError, match=r"has a control character other than \\b, \\f") as caught:
        grammar_of(json.dumps({"items": schema}))
    assert caught.value.field == "json_schema"
    assert accepts({"const": {"\n": "\t"}}, r'{"\n":"\t"}')


@pytest.mark.parametrize("levels", [101, 900, 100_000])
def test_a_schema_of_too_many_nested_levels_is_refused_in_one_line(levels):
    with pytest.raises(SpecError, match=r"^json_schema: must have at most 100 nested levels, got"):
        grammar_of('{"items":' * levels + "{}" + "}" * levels)


INT64 = 2**63


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": [2**53, -(2**53), 1e-7, 2.5]}, [2**53, -(2**53), 0.0000001, 2.5], [1]),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 5}, [2**53 + 2, 2**53 + 4], [2**53, 2**53 + 6]),
        ({"minimum": -(2**53) - 5, "maximum": -(2**53) - 1}, [-(2**53) - 4], [-(2**53)]),
        ({"minimum": -INT64, "maximum": INT64 - 1}, [0, -(2**62), 2**62], [INT64, -INT64 - 1]),
        ({"minimum": 0, "maximum": 2 * INT64 - 1}, [0, 2**62], [-1, 2 * INT64]),
        ({"maximum": INT64 - 1}, [0, -(2**70), 2**62], [INT64]),
    ],
)
def test_large_numbers_are_within_their_bounds(schema, right, wrong):
    schema = {"type": "integer", **schema} if "enum" not in schema else schema
    for number in right:
        assert accepts(schema, json.dumps(number).replace("1e-07", "0.0000001"))
    for number in wrong:
        assert not accepts(schema, json.dumps(number))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"const": -INT64},
            r"const: integers must be from -2\^53 to 2\^53, got -9223372036854775808",
        ),
        ({"const": [{"a": 2**53 + 1}]}, "const: integers must be from .* got 9007199254740993"),
        ({"enum": ["a", 1e30]}, r"enum: integers must be from -2\^53 to 2\^53, got 1e\+30"),
        ({"exclusiveMinimum": 2**53}, "exclusiveMinimum: integers must be between"),
        ({"exclusiveMaximum": -INT64}, "exclusiveMaximum: integers must be between"),
        ({"minimum": -INT64 - 1, "maximum": -INT64 - 1}, "minimum: integers must be at least -2"),
        ({"minimum": -INT64, "maximum": -INT64}, "maximum: integers must be at least -92"),
        ({"maximum": -1e30}, "maximum: integers must be at least"),
        ({"anyOf": [{"const": -INT64}, {}]}, "const: integers must be"),
    ],
)
def test_numbers_that_llguidance_would_change_are_refused(schema, problem):
    with pytest.raises(SpecError, match=rf"^json_schema: unsupported schema: {problem}"):
        grammar_of(json.dumps(schema))
    for name, value in (("const", "[1e400]"), ("minimum", "1e400"), ("maximum", "1e400")):
        with pytest.raises(SpecError, match="must have numbers that float64 can hold"):
            grammar_of(f'{{"{name}": {value}}}')


def test_schema_of_a_file_is_kept_with_the_job(tmp_path):
    (tmp_path / "person.json").write_text(SCHEMA)
    spec = InferSpec.parse({"prompt": "a", "json_schema": "person.json"}).located(tmp_path)
    spec.check_inputs(None)
    assert spec.json_schema == SCHEMA


def test_an_unsupported_tokenizer_is_named(folder):
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    engine = Engine(WarmModel(name="m", path=folder, model=model, tokenizer=tiny.tokenizer()))
    with pytest.raises(JobFailed, match=r"json_schema: unsupported tokenizer \(m\)"):
        forms.grammar_of(engine, json_schema=SCHEMA)
    engine.close()


@pytest.fixture(scope="module")
def served(shared_daemon: Daemon, folder: Path) -> Iterator[openai.OpenAI]:
    daemon = shared_daemon
    control.load_model(daemon.config, ModelConfig(name="bytes", path=str(folder)))
    with openai_client(wait_until(lambda: daemon.status()["http"]["url"])) as client:
        yield client
    control.unload_model(daemon.config, "bytes")


def chat(client: openai.OpenAI, response_format: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "who?"}], max_tokens=90,
        response_format=response_format, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_response_format_of_openai_is_served(served):
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    answer = chat(served, wanted, seed=3)
    assert is_person(answer.choices[0].message.content)
    chunks = chat(served, wanted, seed=3, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content
    assert chat(served, {"type": "json_object"}).choices[0].message.content.startswith("{")
    assert chat(served, {"type": "text"}, temperature=0).choices[0].message.content


def test_an_unsupported_response_format_is_refused_by_its_name(served):
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match="objekt") as caught:
        chat(served, wanted)
    assert caught.value.param == "response_format"


EXPLOSIVE = {
    "alternatives": {
        "allOf": [
            {"anyOf": [{"type": "string", "pattern": f".{{{i}}}"}, {"type": "integer"}]}
            for i in range(1, 40)
        ]
    },
    "a large divisor": {"type": "integer", "multipleOf": 99999989},
    "intersections": {
        "allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]
    },
}


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_schema_that_explodes_is_refused_by_name_and_the_next_one_is_compiled(name):
    check("{}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(SpecError, match="json_schema: must be a schema that compiles in time"):
        check(json.dumps(EXPLOSIVE[name]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, as other tests may run at the same time, with the start of the process.
    assert after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime < LIMIT_S + 3
    check('{"type": "integer"}')


def test_a_schema_that_becomes_too_large_with_the_first_bytes_of_a_text_is_refused():
    objects = [
        {
            "type": "object",
            "properties": {f"key{number}": {"type": "string"}},
            "additionalProperties": {"type": "string", "pattern": f"a.{{{number}}}b"},
        }
        for number in range(300)
    ]
    with pytest.raises(SpecError, match=r"json_schema: unsupported schema: .* row has 3300 items"):
        check(json.dumps({"anyOf": objects}))


def test_schemas_are_compiled_while_others_explode():
    check("{}")
    with ThreadPoolExecutor(2) as pool:
        exploding = [pool.submit(check, json.dumps(EXPLOSIVE["a large divisor"])) for _ in range(2)]
        compiled = 0
        while not all(one.done() for one in exploding):
            check('{"type": "integer"}')
            compiled += 1
        assert all(isinstance(one.exception(), SpecError) for one in exploding)
    assert compiled > 2


def test_a_schema_of_more_than_a_million_characters_is_refused_at_once():
    schema = json.dumps({"enum": ["e" * 100 + str(n) for n in range(10_000)]})
    problem = f"json_schema: must have at most 1,048,576 characters, got {len(schema):,}"
    with pytest.raises(SpecError, match=problem):
        check(schema)


def test_a_schema_is_read_from_a_regular_file_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("pipe", "a named pipe"), ("/dev/zero", "a device")):
        with pytest.raises(SpecError, match=f"json_schema: .*must be a regular file, got {kind}"):
            text_of("json_schema", name, tmp_path)
