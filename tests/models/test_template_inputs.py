"""Templates get tools and arguments as from transformers; what they would ignore is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tool_chats
from breadth import mostly_slow
from tool_chats import FAMILIES, TOOLS, source_of, tokenizer
from transformers import AutoTokenizer

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.files.chats import Chat, TemplateInputs
from warmd.jobs.models.chat_templates import (
    ChatTemplate,
    Refused,
    TooLarge,
    TooSlow,
    check_used,
    known_to,
    render,
    unused,
    with_effort,
)
from warmd.jobs.models.tokenizer_folder import TokenizerFolder

USER = {"role": "user", "content": "What is 1+2?"}
QUESTION = Chat([USER])
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REASONED = {"role": "assistant", "content": "3", "reasoning_content": "1, 2, 3"}
EXAMPLES = {
    "question": QUESTION,
    "tools": Chat([USER], TemplateInputs(TOOLS)),
    "calls": Chat(tool_chats.chat(), TemplateInputs(TOOLS)),
    "calls, then a question": Chat([*tool_chats.chat(), USER], TemplateInputs(TOOLS)),
    "no thinking": Chat([USER], TemplateInputs(None, {"enable_thinking": False})),
    "effort": Chat([USER], TemplateInputs(None, {"reasoning_effort": "low"})),
    "reasoning": Chat([USER, REASONED]),
    "result of no call": Chat([USER, {"role": "tool", "content": "3"}]),
}


def outcome(work: Any) -> str | None:
    """The text, or None for a template that raises an error."""
    try:
        text: str = work()
    except Exception:
        return None
    return text


# Templates that take longest, of families of which another one stays in the tests of every change.
NIGHTLY: tuple[str, ...] = (
    "gemma4",
    "gemma4_v2",
    "gemma4_v4",
    "gemma4_v5",
    "lfm2_2_5",
    "nemotron_3_nano",
)
NIGHTLY += ("nemotron_3_super", "nemotron_3_ultra", "qwen3_5_think", "qwen3_6", "qwen3_8")
OTHERS = pytest.mark.nightly(
    part="oracles", catches="a family of templates whose text differs from that of transformers"
)


@pytest.mark.parametrize(
    "family",
    mostly_slow(
        [pytest.param(one, marks=OTHERS if one in NIGHTLY else ()) for one in FAMILIES],
        but=("cohere2", "gemma3", "gptoss", "llama3_1", "phi3", "qwen2_5", "qwen3", "qwen3_vl"),
    ),
)
def test_chats_are_rendered_as_by_transformers_or_refused_by_name(family):
    for chat in EXAMPLES.values():
        check(chat, tokenizer(source_of(family)))


def check(chat: Chat, theirs: Any) -> None:
    template = ChatTemplate.of(theirs)

    def expected(messages: Any, inputs: TemplateInputs) -> str | None:
        given = {"tools": inputs.tools, **inputs.arguments}
        how = {"add_generation_prompt": True, "tokenize": False}
        return outcome(lambda: theirs.apply_chat_template(messages, **given, **how))

    whole = expected(chat.messages, chat.inputs)
    if (problem := unused(template, chat.parts)) is None:
        assert outcome(lambda: render(template, chat)) == whole
        return
    with pytest.raises(JobFailed, match=problem[0]) as refused:
        render(template, chat, field="line 1")
    assert isinstance(refused.value.__cause__, Refused)
    # Transformers drops it: the text is that without it.
    plain = [{k: m.get(k, "") for k in ("role", "content")} for m in chat.messages]
    if problem[0] != "messages":
        assert whole == expected(chat.messages, TemplateInputs())
    elif "role tool" in problem[1]:
        other = [{**m, "content": "x"} if m["role"] == "tool" else m for m in chat.messages]
        assert whole == expected(other, chat.inputs)
    elif "tool" not in problem[1]:
        assert whole == expected(plain, chat.inputs)


@pytest.mark.slow
def test_families_differ_in_what_they_use():
    templates = {one: ChatTemplate.of(tokenizer(source_of(one))) for one in FAMILIES}
    used = {
        name: {family for family, template in templates.items() if not unused(template, p)}
        for name, p in {
            "tools": {"tools"},
            "calls": {"tool_calls"},
            "reasoning": {"reasoning_content"},
            "results": {"role tool"},
            "names": {"name"},
            "no thinking": {"chat_template_kwargs.enable_thinking"},
        }.items()
    }
    for name in used.keys() - {"names"}:
        assert "qwen3" in used[name]
    assert {"llama3_1", "gptoss", "qwen2_5", "lfm2"} <= used["tools"]
    assert used["tools"].isdisjoint({"gemma3", "llama3", "phi3", "deepseekv3", "smolvlm"})
    assert "lfm2" not in used["calls"]
    assert "qwen2_5" not in used["reasoning"]
    assert "phi3" not in used["results"]
    assert "qwen2_5" not in used["no thinking"]
    assert used["names"] == set()  # names of functions are other ones


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("tools", "tools: the chat template does not use them"),
        (
            "chat_template_kwargs.enable_thinking",
            "chat_template_kwargs: the chat template has no variable enable_thinking",
        ),
        # A function of all templates is no variable of one.
        ("chat_template_kwargs.namespace", "chat_template_kwargs: the chat template has no"),
        ("tool_calls", "messages: the chat template does not use tool_calls"),
        ("reasoning_content", "messages: the chat template does not use reasoning_content"),
        ("name", "messages: the chat template does not use name"),
    ],
)
def test_an_unused_part_is_refused_at_submit(part, problem):
    with pytest.raises(SpecError) as refused:
        check_used(ChatTemplate(CHATML, {}), {part}, "dataset", "f, line 3")
    assert str(refused.value).startswith(f"dataset: f, line 3: {problem}")


def test_a_template_that_prints_whole_messages_uses_all_of_them():
    parts = {"tool_calls", "reasoning_content", "name", "role tool"}
    assert unused(ChatTemplate("{{ messages }}", {}), parts) is None
    assert unused(ChatTemplate("{{ messages | tojson }}", {}), {*parts, "tools"}) == (
        "tools",
        "the chat template does not use them",
    )


def test_messages_of_role_tool_are_refused_where_the_text_does_not_depend_on_them():
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    assert unused(ChatTemplate(CHATML, {}), {"role tool"}) is None
    assert unused(ChatTemplate(deaf, {}), {"role tool"}) == (
        "messages",
        "the chat template does not use messages of role tool",
    )


# Named templates.


@pytest.mark.parametrize("form", ["files", "config"])
def test_a_chat_with_tools_gets_the_template_that_transformers_picks(tmp_path, form):
    named = {"default": CHATML, "tool_use": "{{ tools | length }}" + CHATML}
    tokenizer(named).save_pretrained(tmp_path, save_jinja_files=form == "files")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    found = TokenizerFolder(tmp_path).chat_template()
    assert found is not None
    for template in (found, ChatTemplate.of(loaded)):
        for chat in (QUESTION, EXAMPLES["tools"]):
            expected = loaded.apply_chat_template(
                chat.messages,
                tools=chat.inputs.tools,  # type: ignore[arg-type]
                add_generation_prompt=True,
                tokenize=False,
            )
            assert render(template, chat) == expected
    assert render(found, EXAMPLES["tools"]).startswith("1<user>")


# Reasoning effort.


@pytest.mark.parametrize(
    ("family", "effort", "name", "value"),
    [
        ("qwen3", "none", "enable_thinking", False),
        ("gptoss", "low", "reasoning_effort", "low"),
    ],
)
def test_an_effort_sets_the_variable_that_the_template_has_for_it(family, effort, name, value):
    chat = with_effort(QUESTION, effort, ChatTemplate(source_of(family), {}))
    assert chat.inputs.arguments == {name: value}


@pytest.mark.parametrize(
    ("source", "effort"),
    [
        (CHATML, "none"),
        (CHATML, "low"),
        (source_of("qwen3"), "low"),
        # A variable that the template sets itself turns nothing off.
        ("{% if false %}{{ thinking }}{% endif %}" + CHATML, "none"),
    ],
)
def test_an_effort_without_a_variable_is_refused(source, effort):
    with pytest.raises(JobFailed, match=r"^reasoning_effort: the chat template has no variable"):
        with_effort(QUESTION, effort, ChatTemplate(source, {}))


# Hostile templates and tools.


def test_a_large_tool_ends_within_the_limits_of_the_process():
    tools: Any = [{"name": "a", "parameters": {f"p{n}": {"type": "object"} for n in range(30_000)}}]
    template = ChatTemplate("{% for t in tools %}{{ t | tojson }}{% endfor %}", {})
    assert len(render(template, Chat([USER], TemplateInputs(tools)))) > 500_000
    greedy = ChatTemplate("{{ tools | string * 1000 }}", {})
    with pytest.raises(TooLarge):
        render(greedy, Chat([USER], TemplateInputs(tools)))


def test_a_recursive_schema_costs_what_its_template_makes_of_it():
    tools: Any = [{"name": "a", "parameters": {"$ref": "#", "$defs": {"b": {"$ref": "#/$defs/b"}}}}]
    assert '"$ref": "#"' in render(
        ChatTemplate(source_of("qwen3"), {}), Chat([USER], TemplateInputs(tools))
    )
    endless = "{% macro f(t) %}{{ f(t) }}{% endmacro %}{{ f(tools) }}"
    with pytest.raises(JobFailed, match=r"the chat template says: RecursionError"):
        render(ChatTemplate(endless, {}), Chat([USER], TemplateInputs(tools)))


def test_a_template_that_fails_in_a_trial_is_judged_by_its_own_error():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    )
    template = ChatTemplate(source + "{% endfor %}", {})
    assert known_to(template).takes_tool_role
    with pytest.raises(JobFailed, match=r"^messages: the chat template says: no$"):
        render(template, Chat(tool_chats.chat()[-2:]))


def test_a_template_that_cannot_be_read_is_left_to_the_job_at_submit():
    broken = ChatTemplate("{% if %}", {})
    check_used(broken, {"tools"}, "dataset", "f, line 1")
    with pytest.raises(JobFailed, match="the chat template says"):
        render(broken, EXAMPLES["tools"])


def test_a_trial_is_limited_in_time(monkeypatch):
    monkeypatch.setattr("warmd.jobs.models.chat_templates.LIMIT_S", 0.5)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(TooSlow):
        known_to(ChatTemplate(endless + "{{ tools }}", {}))


def test_the_files_of_templates_are_there():
    assert len(FAMILIES) > 20
    assert all(Path(tool_chats.TEMPLATES / f"{one}.jinja").is_file() for one in FAMILIES)
