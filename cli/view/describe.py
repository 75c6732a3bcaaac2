"""Events in words, one line each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from . import render

# Fields of a step that fit on a line; `--json` has all.
_STEP_FIELDS = (
    *("loss", "reward", "reward_std", "kl", "rewards/margins", "rewards/accuracies"),
    *("grad_norm", "completion_length"),
)
_HIDDEN = {"seq", "execution", "time", "type", "step", "steps_total", "traceback"}

Event = Mapping[str, Any]


def describe(event: Event) -> str:
    """Describe an event on one line that begins with the time of day."""
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    if event["type"] in _SENTENCES:
        return f"{at}  {render.one_line(_SENTENCES[event['type']](event))}"
    parts = [at, _headline(event)]
    names = _STEP_FIELDS if event["type"] == "step" else [n for n in event if n not in _HIDDEN]
    if event["type"] == "finished":
        parts += _values(event.get("result") or {})
    parts += _values({name: event.get(name) for name in names})
    return "  ".join(parts)


def _headline(event: Event) -> str:
    step, total = event.get("step"), event.get("steps_total")
    at = f"{step}/{total}" if step is not None and total else step
    if event["type"] == "step":
        return f"step {at}"
    if event["type"] == "started":
        return f"started (execution {event['execution']})"
    return str(event["type"]) if step is None else f"{event['type']} at step {step}"


def _values(fields: Mapping[str, Any]) -> list[str]:
    """Names and values of single words and numbers; no lists, objects or empty values."""
    shown = []
    for name, value in fields.items():
        if isinstance(value, bool) or (isinstance(value, str) and value):
            shown.append(f"{name} {render.one_line(value)}")
        elif isinstance(value, int | float):
            if name == "seconds":
                shown.append(render.duration(value))
            elif name.endswith("_s"):
                shown.append(f"{name.removesuffix('_s')} {render.duration(value)}")
            elif name == "unscored" and "completions" in fields:
                shown.append(f"unscored: {value} of {fields['completions']}")
            elif name == "completions" and "unscored" in fields:
                pass  # shown there
            elif name == "bytes":
                shown.append(render.size(value))
            elif name.endswith("_bytes"):
                shown.append(f"{name.removesuffix('_bytes')} {render.size(value)}")
            else:
                shown.append(f"{name} {render.number(value)}")
    return shown


# Events that get a sentence. Fields that an event of another version lacks are left out.


def _stall(event: Event) -> str:
    text = f"stalled: {_after(event)} the {event.get('activity', 'step')} has taken "
    text += f"{render.duration(event.get('seconds'))} and has not ended"
    if event.get("median_s") is not None:
        text += f"; the median is {render.duration(event['median_s'])}"
    if event.get("message"):  # which of several processes hangs
        text += f"; {render.one_line(event['message'])}"
    elif event.get("stack"):
        text += f"; stack: {render.one_line(event['stack'])}"
    elif event.get("state"):
        text += f"; no stack came: its process is in state {render.one_line(event['state'])}"
    return text


def _divergence(event: Event) -> str:
    text = f"diverges at step {event['step']}: {event.get('metric', 'the loss')} is "
    text += _number(event.get("value"))
    if event.get("median") is not None:
        text += f", its median {_number(event['median'])}"
    return text


def _paused(event: Event) -> str:
    if event.get("released"):
        return f"paused {_after(event)}, saved, and its memory released, until `warmd resume`"
    return f"paused {_after(event)}, in memory, until `warmd resume`"


def _unpaused(event: Event) -> str:
    return f"continues {_after(event)}"


def _revised(event: Event) -> str:
    return f"revised: {'; '.join(_changes(event)) or 'its options'}"


def _extended(event: Event) -> str:
    return f"extended: {'; '.join(_changes(event)) or 'to more steps'}"


def _plan(event: Event) -> str:
    steps = event.get("steps_total")
    text = f"plan: {steps} steps" if steps is not None else "plan"
    if event.get("step_s") is not None:
        text += f", {render.duration(event['step_s'])} each"
    if steps is not None and event.get("step") == steps:
        text += ": no further step fits"
    elif event.get("left_s") is not None:
        text += f", until {render.clock(event['time'] + event['left_s'], now=event['time'])}"
    if event.get("limit_s") is not None:
        text += f" (time limit {render.duration(event['limit_s'])}"
        if event.get("running_s") is not None:
            text += f", {render.duration(event['running_s'])} used"
        text += ")"
    return text


def _save_failed(event: Event) -> str:
    text = f"no checkpoint of step {event['step']}: {event.get('error') or 'it failed'}"
    if event.get("seconds") is not None:
        text += f" (after {render.duration(event['seconds'])})"
    return text


def _progress(event: Event) -> str:
    text = f"{event['activity']}: " if event.get("activity") else ""
    if event.get("done") is not None:
        total = f"/{event['total']}" if event.get("total") else ""
        # The first report of an activity says how much there is; a short one has no other.
        done = event["total"] if total and event["done"] == 0 else f"{event['done']}{total}"
        text += f"{done} {event.get('unit', 'records')}"
    return text.removesuffix(": ") or "progress"


def _waiting(event: Event) -> str:
    reason = event.get("reason")
    return f"waits for {event.get('what', 'space')}" + (f": {reason}" if reason else "")


def _waited(event: Event) -> str:
    return f"continues after {render.duration(event.get('seconds'))} of waiting"


def _warning(event: Event) -> str:
    return f"warning: {event.get('message') or 'no reason given'}"


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "progress": _progress,
    "warning": _warning,
    "waiting": _waiting,
    "waited": _waited,
    "stall": _stall,
    "divergence": _divergence,
    "paused": _paused,
    "unpaused": _unpaused,
    "revised": _revised,
    "extended": _extended,
    "plan": _plan,
    "save_failed": _save_failed,
}


def _after(event: Event) -> str:
    return f"after step {event['step']}" if event.get("step") else "before the first step"


def _changes(event: Event) -> list[str]:
    """The changed options: one field each with its old and new value, or one field with all."""
    changes = []
    for name, value in event.items():
        if name in _HIDDEN:
            continue
        if isinstance(value, dict):
            changes += _changes(value)
        elif isinstance(value, list | tuple) and len(value) == 2:
            changes.append(f"{name} {_value(value[0])} -> {_value(value[1])}")
    return changes


def _value(value: Any) -> str:
    """The value of an option; None: it is not given."""
    return "default" if value is None else _number(value)


def _number(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return render.number(value) if is_number else str(value)
