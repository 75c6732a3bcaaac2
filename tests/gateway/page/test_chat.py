"""Conversations with models in the dashboard, in a real browser; the test acts as the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from dashboard import HOSTILE, WIDTHS, Page, assert_clean
from gateways import Execution, Gateway
from waiting import wait_until

pytestmark = pytest.mark.nightly(
    part="page", catches="a chat that attributes, loses or sends something else than is shown"
)

ENTER, SHIFT, ESCAPE = "\ue007", "\ue008", "\ue00c"
TOOL = '[{"type": "function", "function": {"name": "add"}}]'
TEMPLATE = """{{ tools }}{% for one in messages %}{{ one.role }}: {{ one.content }}
{{ one.tool_calls }} {{ one.tool_call_id }}{% endfor %}"""  # it uses all that calls need
MARKDOWN = """Some **bold** text and `code`:

1. first
2. second

- a dot
```python
print("**no bold**")
```
<b>no element</b>"""


@pytest.fixture
def gateway(make_gateway) -> Gateway:
    made: Gateway = make_gateway()  # its model `tiny` has a chat template
    return made


@pytest.fixture
def chat(browser: Browser, gateway: Gateway) -> Iterator[Browser]:
    browser.resize(1280)
    opened = Page(browser, gateway.url).open("chat")
    opened.wait("document.querySelector('label[for=prompt]')?.innerText === 'Message'")
    yield opened
    opened.open("about:blank")


def ask(browser: Browser, gateway: Gateway, text: str) -> Execution:
    """Send a message by the keyboard and take its job."""
    browser.type("textarea[name=prompt]", text)
    browser.keys(ENTER)
    return gateway.take()


def answer(browser: Browser, job: Execution, text: str) -> None:
    job.write(text)
    job.finish(text)
    browser.wait_for("2 tokens")
    browser.wait("document.querySelector('.chat-turns').ariaBusy === 'false'")


def messages(job: Execution) -> Any:
    return json.loads(job.spec["messages"])


def choose_settings(browser: Browser, **texts: str) -> None:
    browser.press("Settings")
    for name, text in texts.items():
        browser.js("document.querySelector('#chat-settings details').open = true")
        browser.type(f"#chat-settings [name={name}]", text)
    browser.press("Settings")


def test_a_conversation_is_sent_whole_and_kept_over_a_reload(chat, gateway):
    choose_settings(chat, system="Be brief.", max_tokens="7")
    job = ask(chat, gateway, "1+1?")
    assert messages(job) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
    ]
    assert job.spec["max_tokens"] == 7
    answer(chat, job, "two")
    chat.js("location.reload()")
    chat.wait_for("two")
    job = ask(chat, gateway, "and one?")
    sent = [(message["role"], message["content"]) for message in messages(job)]
    assert sent[1:] == [("user", "1+1?"), ("assistant", "two"), ("user", "and one?")]
    answer(chat, job, "three")
    chat.press("New conversation")
    chat.wait("document.querySelector('.turn') === null")
    chat.press("Delete 1+1?")
    chat.press("Delete the conversation")
    chat.wait("!document.querySelector('.chat-list').innerText.includes('1+1?')")
    kept = chat.js("return Object.keys(localStorage)")
    assert not [key for key in kept if key.startswith("warmd-chat")]


def test_shift_enter_begins_a_new_line(chat, gateway):
    chat.click("textarea[name=prompt]")
    down, up = {"type": "keyDown", "value": SHIFT}, {"type": "keyUp", "value": SHIFT}
    chat.type("textarea[name=prompt]", "a")
    press = [{"type": kind, "value": ENTER} for kind in ("keyDown", "keyUp")]
    chat._call("actions", actions=[{"type": "key", "id": "k", "actions": [down, *press, up]}])
    chat.keys("b", ENTER)
    job = gateway.take()
    assert messages(job)[0]["content"] == "a\nb"
    answer(chat, job, "c")


def test_an_empty_answer_and_a_failed_one_keep_what_was_asked(chat, gateway):
    ask(chat, gateway, "1+1?").finish("")
    chat.wait_for("(empty: the model ended at once)")
    assert "1+1?" in chat.js("return document.querySelector('.turn .user').innerText")
    ask(chat, gateway, "and now?").fail("out of order")
    chat.wait_for("out of order")
    chat.press("Regenerate")
    answer(chat, gateway.take(), "two")
    assert "out of order" not in chat.text()


def test_an_answer_is_stopped_and_generated_again(chat, gateway):
    job = ask(chat, gateway, "1+1?")
    job.write("tw")
    chat.wait_for("tw")
    chat.press("Stop")
    chat.wait_for("stopped")
    wait_until(lambda: job.stop_asked == "cancel")
    chat.press("Regenerate")
    again = gateway.take()
    assert [message["content"] for message in messages(again)] == ["1+1?"]
    answer(chat, again, "two")
    chat.press("Edit")
    assert chat.js("return document.querySelector('textarea[name=prompt]').value") == "1+1?"
    assert chat.js("return document.querySelector('.turn')") is None
    job = ask(chat, gateway, "2+2?")
    chat.keys(ESCAPE)
    wait_until(lambda: job.stop_asked == "cancel")


def test_thinking_is_folded_and_calls_are_answered(chat, gateway):
    Path(gateway.config.models[0].path, "chat_template.jinja").write_text(TEMPLATE)
    choose_settings(chat, tools=TOOL)
    job = ask(chat, gateway, "1+2?")
    assert job.spec["tools"] is not None
    job.finish_with_calls()
    chat.wait_for("Calls add")
    assert chat.js("return document.querySelector('.thinking').open") is False
    assert chat.js("return document.querySelector('.thinking pre').textContent") == "hm"
    chat.type("input[name=result-0]", "3")
    chat.type("input[name=result-1]", "7")
    assert_clean(chat)
    chat.press("Send the results")
    job = gateway.take()
    assert [(one["role"], one["content"]) for one in messages(job)] == [
        ("user", "1+2?"),
        ("assistant", "Let me"),
        ("tool", "3"),
        ("tool", "7"),
    ]
    answer(chat, job, "3 and 7")


def test_tools_that_are_not_json_are_refused_in_words(chat):
    chat.press("Settings")
    chat.press_summary("Tools")
    chat.type("textarea[name=tools]", "{")
    chat.wait_for("tools: must be JSON")
    chat.type("textarea[name=prompt]", "1+1?")
    assert chat.js("return document.querySelector('.composer .primary').disabled")


def test_what_a_model_writes_is_text_with_markdown_as_elements(chat, gateway, tmp_path):
    answer(chat, ask(chat, gateway, HOSTILE), f"{MARKDOWN}\n{HOSTILE}")
    inside = "document.querySelector('.markdown')"
    assert chat.js(f"return {inside}.querySelector('strong').innerText") == "bold"
    assert chat.js(f"return {inside}.querySelectorAll('ol li').length") == 2
    assert chat.js(f"return {inside}.querySelector('pre').innerText") == 'print("**no bold**")'
    assert "<b>no element</b>" in chat.text()
    assert HOSTILE in chat.js(f"return {inside}.innerText")
    assert chat.js("return window.hacked") is None
    for width in WIDTHS:
        chat.resize(width)
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            chat.cdp("Emulation.setEmulatedMedia", features=media)
            chat.screenshot(tmp_path / f"chat-{width}-{scheme}.png")
            assert_clean(chat)
    chat.press("Settings")
    assert_clean(chat)
    chat.click("input[name=plain]")
    chat.wait("document.querySelector('.markdown') === null")
    chat.cdp("Emulation.setEmulatedMedia", features=[])


def test_answers_stay_with_the_model_that_gave_them(page, daemon):
    browser = page.open("chat?model=tiny")
    browser.type("textarea[name=prompt]", "1+1=")
    browser.keys(ENTER)
    done = "[...document.querySelectorAll('.text-step')].at(-1)?.innerText.includes('tokens')"
    browser.wait(done, timeout_s=60)
    assert browser.js("return document.querySelector('.text-step .given').innerText") == "1+1="
    browser.choose("select[name=second]", "tiny")
    browser.type("textarea[name=prompt]", "2+2=")
    browser.keys(ENTER)
    browser.wait("document.querySelectorAll('.text-step').length === 3")  # one is folded
    browser.wait_for("1 earlier text, not sent again")
    browser.wait(done, timeout_s=60)
    job_id = daemon.submit(name="called-so")
    assert daemon.wait(job_id)["status"] == "finished"
    browser.open("about:blank")
    browser.open(f"{page.url}/#/chat")
    listed = (
        "[...document.querySelectorAll('select[name=NAME] option')].map((one) => one.innerText)"
    )
    browser.wait(listed.replace("NAME", "model") + ".includes('called-so')")
    seconds = browser.js("return " + listed.replace("NAME", "second"))
    assert seconds[0] == "none"
    assert {"tiny", "called-so"} <= {*seconds}
    browser.choose("select[name=model]", job_id)
    browser.wait_for(f"Answer with {job_id}")
    named = "return [...document.querySelectorAll('.text-step h2')].at(-1).innerText"
    assert browser.js(named) == "tiny"
    assert_clean(browser)
