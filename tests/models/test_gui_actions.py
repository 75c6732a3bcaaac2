"""A GUI agent's text parsed to actions: correct for valid text, and no exception for any text."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, strategies as st

from warmd.jobs.errors import SpecError
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models.gui_actions import ACTIONS, DIRECTIONS, parse_screen, read

SCREEN = (1920, 1080)


def only(text: str, screen: Any = SCREEN) -> dict[str, Any]:
    found = read(f"Thought: so.\nAction: {text}", screen)
    assert found["errors"] == []
    (action,) = found["actions"]
    assert isinstance(action, dict)
    return action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click(start_box='(500,250)')", {"type": "click", "start": [960, 270]}),
        (
            "left_double(start_box='<|box_start|>(0,1000)<|box_end|>')",
            {"type": "left_double", "start": [0, 1079]},
        ),
        ('right_single( start_box = "(10 , 20.5)")', {"type": "right_single", "start": [19, 22]}),
        ("click(start_box='[100, 200, 300, 400]')", {"type": "click", "start": [384, 324]}),
        (
            "drag(start_box='(0,0)', end_box='(1000,1000)')",
            {"type": "drag", "start": [0, 0], "end": [1919, 1079]},
        ),
        ("hotkey(key='ctrl shift t')", {"type": "hotkey", "keys": ["ctrl", "shift", "t"]}),
        (
            r"type(content='it\'s \"so\"\n')",
            {"type": "type", "content": "it's \"so\"\n"},
        ),
        ("type(content='it's (so), isn't it')", {"type": "type", "content": "it's (so), isn't it"}),
        (r"type(content='C:\\new \d')", {"type": "type", "content": "C:\\new \\d"}),
        (
            "scroll(start_box='(500,500)', direction='down')",
            {"type": "scroll", "start": [960, 540], "direction": "down"},
        ),
        ("scroll(direction='up')", {"type": "scroll", "direction": "up"}),
        ("wait()", {"type": "wait"}),
        ("finished()", {"type": "finished"}),
        ("finished(content='')", {"type": "finished", "content": ""}),
        ("call_user()", {"type": "call_user"}),
    ],
)  # fmt: skip
def test_every_action_is_read(text, action):
    assert only(text) == action


def test_without_a_screen_size_points_are_fractions():
    found = read("Action: click(start_box='(500,250)')", None)
    assert found["screen"] is None
    assert found["actions"] == [{"type": "click", "start": [0.5, 0.25]}]


def test_thought_and_several_actions_are_separated():
    found = read(
        "Thought: first I click.\nAction: is what follows, then I type.\n"
        "Action: click(start_box='(1,1)')\n\ntype(content='a\nb'); wait()",
        SCREEN,
    )
    assert found["thought"] == "first I click."
    assert [a["type"] for a in found["actions"]] == ["click", "type", "wait"]
    assert [e["text"] for e in found["errors"]] == ["is what follows, then I type."]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I would click there.", "no line that begins with Action:"),
        ("Thought: hm.\nAction:", "nothing behind Action:"),
        ("Action: jump(height='3')", "jump is none of click, "),
        ("Action: click there", "not written as name"),
        ("Action: click()", "click must have start_box"),
        ("Action: click(start_box='(1,2)', start_box='(1,2)')", "start_box twice"),
        ("Action: click(start_box='(1,2)', end_box='(1,2)')", "takes no end_box"),
        ("Action: click(start_box='(1001,2)')", "within 0 and 1000"),
        ("Action: click(start_box='(1;2)')", "a box must be"),
        ("Action: click(start_box=(1,2))", "key='text'"),
        ("Action: click(start_box='(50", "key='text'"),
        ("Action: hotkey(key=' ')", "must name keys"),
        ("Action: scroll(direction='away')", "one of up, down, left, right"),
    ],
)
def test_an_unreadable_action_becomes_an_error(text, words):
    found = read(text, SCREEN)
    assert found["actions"] == []
    (error,) = found["errors"]
    assert words in error["error"]
    assert error["text"] in text


def test_an_error_hides_no_other_action():
    found = read("Action: wait()\njump()\nclick(start_box='(0,0)')", SCREEN)
    assert [a["type"] for a in found["actions"]] == ["wait", "click"]
    assert [e["text"] for e in found["errors"]] == ["jump()"]


@given(st.text(alphabet=string.printable + "é图\ud800"), st.none() | st.just(SCREEN))
def test_any_text_is_parsed_without_an_exception(text, screen):
    for whole in (text, f"Action: {text}", f"Action: click(start_box='{text}')"):
        found = read(whole, screen)
        assert found["actions"] or found["errors"]


boxes = st.tuples(st.integers(0, 1000), st.integers(0, 1000))
contents = st.text()
# The first text of a checkout waits a second for a table of all characters: longer than Hypothesis
# lets a draw take.
contents.validate()


@st.composite
def written(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An action as a well-behaved model generates it, and its meaning."""
    name = draw(st.sampled_from(sorted(ACTIONS)))
    action: dict[str, Any] = {"type": name}
    parts = []
    for argument in ACTIONS[name]:
        key = argument.strip("[]")
        if argument != key and draw(st.booleans()):
            continue
        if key.endswith("_box"):
            x, y = draw(boxes)
            text = f"({x},{y})"
            action[key.removesuffix("_box")] = [x / 1000, y / 1000]
        elif key == "key":
            keys = draw(st.lists(st.sampled_from(["ctrl", "alt", "f4", "a"]), min_size=1))
            text, action["keys"] = " ".join(keys), keys
        elif key == "direction":
            text = action["direction"] = draw(st.sampled_from(DIRECTIONS))
        else:
            action["content"] = draw(contents)
            text = action["content"].replace("\\", "\\\\").replace("'", "\\'")
            text = text.replace('"', '\\"').replace("\n", "\\n")
        parts.append(f"{key}='{text}'")
    return f"{name}({', '.join(parts)})", action


@given(st.lists(written(), min_size=1, max_size=4))
def test_quotes_and_escapes_in_actions_are_read_correctly(many):
    text = "Thought: so.\nAction: " + "\n\n".join(text for text, _ in many)
    found = read(text, None)
    assert found["errors"] == []
    assert found["actions"] == [action for _, action in many]


@given(boxes, st.integers(1, 5000), st.integers(1, 5000))
def test_points_are_on_the_screen_and_where_they_should_be(box, width, height):
    x, y = only(f"click(start_box='({box[0]},{box[1]})')", (width, height))["start"]
    assert 0 <= x < width
    assert 0 <= y < height
    assert abs(x - box[0] * width / 1000) <= 1
    assert abs(y - box[1] * height / 1000) <= 1


# --- in a job -------------------------------------------------------------------------------------


def test_a_job_parses_actions_if_requested(tmp_path: Path):
    job = tiny.surroundings(tmp_path / "job", tiny.model(positions=512))
    spec = {"prompt": "1+1=", "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": 1}
    plain = run(InferSpec.parse(spec), job.ctx)
    result = run(InferSpec.parse({**spec, "actions": "ui-tars", "screen": "800x600"}), job.ctx)
    assert all("actions" not in choice for choice in plain["choices"])
    for choice, same in zip(result["choices"], plain["choices"], strict=True):
        assert choice["text"] == same["text"]
        assert choice["actions"] == read(choice["text"], (800, 600))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"actions": "voodoo"}, "actions"),
        ({"screen": "800x600"}, "screen"),
        ({"actions": "ui-tars", "screen": "800"}, "screen"),
        ({"actions": "ui-tars", "screen": "0x600"}, "screen"),
    ],
)
def test_wrong_options_name_their_field(options, field):
    with pytest.raises(SpecError) as caught:
        InferSpec.parse({"prompt": "a", **options})
    assert caught.value.field == field


def test_screen_is_read():
    assert parse_screen("1920x1080") == (1920, 1080)
