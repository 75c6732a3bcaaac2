"""Runs the stages of a curriculum, one job after another, and decides at the gates.

A decision follows from the paired comparison of both models' answers to the same questions
(Student's paired t test, `jobs/intervals.py`):

  worse      roll back to the stage's beginning, with half the learning rate, at most twice
  undecided  compare on twice as many questions, up to a limit; then as not worse
  else       continue with the next stage

Each comparison at a gate spends a part of the gate's error (`level_of`), so that in all of them
together equally good models are told apart in at most 5 % of the gates.

Ids of jobs are on disk before the jobs are submitted, and decisions before they take effect: a
process that is killed anywhere is continued by the next one, without a job queued twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...configs.config import ModelConfig
from ...jobs import spec_class
from ...jobs.ids import fresh_id
from ...jobs.intervals import STUDENT, UNDECIDED, WORSE, unscored_words
from ..lifecycle import submit
from ..lifecycle.places import Places
from ..lifecycle.queueing import AT_ONCE, Queueing
from ..queue.jobs import ENDED, JobStatus
from ..runs import events
from ..runs.events import EventLog
from ..runs.rundir import RunDir
from .curriculum import (
    CONTINUE,
    FAILED,
    FINISHED,
    GIVE_UP,
    ROLL_BACK,
    Attempt,
    Curriculum,
    CurriculumFolder,
    Round,
    State,
)
from .folder import RUNNING

log = logging.getLogger(__name__)

MOST_ROLLBACKS = 2  # of one stage
_EVAL = "eval"  # the kind of the evaluations


def proceed(places: Places, folder: CurriculumFolder) -> bool:
    """Do the due actions; return whether more follow. Raises RedisError."""
    plan = folder.read()
    while (state := folder.state()).phase == RUNNING and _advance(places, folder, plan, state):
        pass
    _report(folder, plan, state)
    return state.phase == RUNNING


def _advance(places: Places, folder: CurriculumFolder, plan: Curriculum, state: State) -> bool:
    """Do one thing; return whether the state has changed."""
    attempt = state.attempts[-1]
    if not _has_finished(places, folder, plan, state, attempt.job):
        return folder.state() != state
    if plan.gate is None or not plan.stages[attempt.stage].has_gate:
        _decide(folder, plan, state, CONTINUE, None)
        return True
    if not attempt.rounds:
        _begin_round(folder, plan, state, plan.questions)
        return True
    last = attempt.rounds[-1]
    for job_id in (last.before, last.after):
        if not _has_finished(places, folder, plan, state, job_id):
            return folder.state() != state
    comparison = _comparison(places.rundir(last.after), level_of(plan, attempt.rounds))
    comparison |= _change_of_test(plan, state, comparison)
    if comparison["verdict"] == UNDECIDED and last.questions < plan.most_questions:
        _begin_round(folder, plan, state, min(2 * last.questions, plan.most_questions))
    elif comparison["verdict"] != WORSE:
        _decide(folder, plan, state, CONTINUE, comparison)
    elif attempt.number < MOST_ROLLBACKS:
        _decide(folder, plan, state, ROLL_BACK, comparison)
    else:
        _decide(folder, plan, state, GIVE_UP, comparison)
    return True


def level_of(plan: Curriculum, rounds: Sequence[Round]) -> float | None:
    """Return the significance level of the latest comparison at a gate; None: its own, 5 %.

    The error is spent as a function of the share t of the most questions: level * t^2 up to it
    (Lan & DeMets 1983; this function: Kim & DeMets 1987, Biometrika 74). A comparison gets what is
    spent since the one before; by the union bound all together do not exceed the level. Early ones
    get little, so the last one decides nearly as often as if it were the only one.
    """
    if plan.gate_level is None:
        return None
    before, now = ([0, *(one.questions for one in rounds)][i] for i in (-2, -1))
    return plan.gate_level * (now**2 - before**2) / plan.most_questions**2


def _comparison(rundir: RunDir, level: float | None) -> dict[str, Any]:
    """The comparison in an evaluation's result, by its first metric, decided at a level."""
    result = rundir.read_result() or {}
    metric, found = next(iter((result["comparison"]).items()))
    if level is None:
        return {"metric": metric, **found}
    found = {"metric": metric, **found, "level": level}
    is_open = found["verdict"] == UNDECIDED or found["p"] < level
    words = f"{UNDECIDED} at the level of this comparison, {level:.2g}"
    words += unscored_words(found.get("unscored", 0), found["n"])
    return found if is_open else {**found, "verdict": UNDECIDED, "words": words}


def _change_of_test(
    plan: Curriculum, state: State, comparison: Mapping[str, Any]
) -> dict[str, str]:
    """Return words that report the t test at the first gate that it decides, if others did not.

    {} for a curriculum that was submitted under these rules, and at its later gates.
    """
    earlier = [attempt.comparison or {} for attempt in state.attempts]
    is_first = not any(one.get("test") == STUDENT for one in earlier)
    rules = plan.stages[0].document.get("rules", 0)  # see RULES
    if rules >= 2 or comparison.get("test") != STUDENT or not is_first:
        return {}
    name = plan.stages[state.attempts[-1].stage].name
    return {
        "words": f"{comparison['words']}; from this gate ({name}) on by Student's paired t test: "
        "the version that began the curriculum used McNemar's test or the bootstrap"
    }


def _begin_round(folder: CurriculumFolder, plan: Curriculum, state: State, questions: int) -> None:
    """Choose the evaluations of a comparison; existing ones are reused."""
    attempt = state.attempts[-1]
    known = {
        (weights, one.questions): job_id
        for earlier in state.attempts
        for one in earlier.rounds
        for weights, job_id in (
            (state.begin_of(earlier.stage), one.before),
            (earlier.job, one.after),
        )
    }
    # An evaluation that was itself compared with another one can be compared with again.
    before = known.get((state.begin_of(attempt.stage), questions)) or fresh_id(_EVAL)
    new = Round(questions, before, fresh_id(_EVAL))
    _replace_last(folder, state, replace(attempt, rounds=[*attempt.rounds, new]))


def _replace_last(folder: CurriculumFolder, state: State, attempt: Attempt, **parts: Any) -> State:
    return folder.update(attempts=[*state.attempts[:-1], attempt], **parts)


def _decide(
    folder: CurriculumFolder,
    plan: Curriculum,
    state: State,
    decision: str,
    comparison: dict[str, Any] | None,
) -> None:
    """Record a decision at the end of an attempt, with the attempt that follows from it."""
    attempt = replace(state.attempts[-1], decision=decision, comparison=comparison)
    is_last = attempt.stage == len(plan.stages) - 1
    following: list[Attempt] = []
    parts: dict[str, Any] = {}
    if decision == GIVE_UP:
        name = plan.stages[attempt.stage].name
        times = attempt.number + 1
        parts = {"phase": FAILED, "problem": f"{name}: worse than before it, {times} times"}
    elif decision == ROLL_BACK:
        following = [Attempt(attempt.stage, attempt.number + 1, fresh_id(plan.kind))]
    elif is_last:
        parts = {"phase": FINISHED}
    else:
        following = [Attempt(attempt.stage + 1, 0, fresh_id(plan.kind))]
    folder.update(attempts=[*state.attempts[:-1], attempt, *following], **parts)


def _report(folder: CurriculumFolder, plan: Curriculum, state: State) -> None:
    """Append an event for each decision that has none yet."""
    known = 0
    with suppress(FileNotFoundError):
        known = sum(event["type"] == "gate" for event in events.read(folder.events))
    decided = [attempt for attempt in state.attempts if attempt.decision is not None]
    with EventLog(folder.events, execution=1) as written:
        for attempt in decided[known:]:
            written.emit(
                "gate",
                stage=plan.stages[attempt.stage].name,
                attempt=attempt.number + 1,
                job=attempt.job,
                decision=attempt.decision,
                **(attempt.comparison or {}),
            )
            log.info("%s: %s: %s", plan.id, plan.stages[attempt.stage].name, attempt.decision)


# --- jobs ---------------------------------------------------------------------------------------


def _has_finished(
    places: Places,
    folder: CurriculumFolder,
    plan: Curriculum,
    state: State,
    job_id: str,
) -> bool:
    """Whether a job has finished; it is queued if it was not. A job that failed ends the phase."""
    rundir, job = places.rundir(job_id), places.store.fetch(job_id)
    if job is None:
        if rundir.path.is_dir() and rundir.read_result() is not None:
            return True  # Redis has lost its data
        _submit(places, folder, plan, state, job_id)
        return False
    status = job.get_status(refresh=False)
    if status == JobStatus.FINISHED:
        return _has_result(places, rundir)
    if status in ENDED:
        folder.update(phase=FAILED, problem=f"{job_id} {status.value}")
    return False


def _has_result(places: Places, rundir: RunDir) -> bool:
    """Whether the result of a finished job is on this machine.

    From another machine it comes by the run store, for an evaluation after its end in Redis.
    """
    if places.remote is not None and rundir.read_result() is None:
        places.refresh(rundir.path.name)
        return rundir.read_result() is not None
    return True


def _submit(
    places: Places,
    folder: CurriculumFolder,
    plan: Curriculum,
    state: State,
    job_id: str,
) -> None:
    """Queue the job of an attempt, or an evaluation."""
    attempt = next(
        a for a in state.attempts if job_id in (a.job, *(i for r in a.rounds for i in _ids(r)))
    )
    is_training = job_id == attempt.job
    if is_training:
        document = _training(places, plan, state, attempt)
    else:
        document = _evaluation(places.runs, plan, state, attempt, job_id)
    document |= {"origin": plan.origin, "curriculum": plan.id}
    stage = plan.stages[attempt.stage].name
    retry = f"~{attempt.number + 1}" if attempt.number else ""
    name = f"{plan.name}/{stage}{retry}".replace("~", "+") if plan.name and is_training else None
    asked = Queueing.from_json(plan.queueing) if is_training else AT_ONCE
    queueing = replace(asked, name=name, tags=(*plan.tags, plan.id))
    from_cli = is_training and plan.origin == "cli"
    submit.submit_as(places, job_id, document, queueing, from_cli=from_cli)


def _ids(one: Round) -> tuple[str, str]:
    return one.before, one.after


def _training(places: Places, plan: Curriculum, state: State, attempt: Attempt) -> dict[str, Any]:
    """The spec.json of an attempt: that of the stage, from the weights of the stage before."""
    document = plan.stages[attempt.stage].document
    document = _on_weights(places.runs, plan.kind, document, state.begin_of(attempt.stage))
    if attempt.number:
        first = next(a.job for a in state.attempts if a.stage == attempt.stage)
        places.refresh(first)  # it may have run on another machine: its events may not be here
        rate = _learning_rate(places.rundir(first)) / 2**attempt.number
        document["spec"] = {**document["spec"], "learning_rate": rate}
    return document


def _evaluation(
    runs: Path,
    plan: Curriculum,
    state: State,
    attempt: Attempt,
    job_id: str,
) -> dict[str, Any]:
    """The spec.json of an evaluation at the gate of an attempt."""
    assert plan.gate is not None
    one = next(found for found in attempt.rounds if job_id in _ids(found))
    is_after = job_id == one.after
    weights = attempt.job if is_after else state.begin_of(attempt.stage)
    document = _on_weights(runs, _EVAL, plan.gate, weights)
    against = one.before if is_after else None
    changes = {"samples": one.questions, "against": against}
    return {**document, "spec": {**document["spec"], **changes}}


def _on_weights(
    runs: Path, kind: str, document: Mapping[str, Any], job_id: str | None
) -> dict[str, Any]:
    """Return a spec.json on the final model of a job; None: on its own model, or a new one."""
    if job_id is None:
        return dict(document)
    model = ModelConfig(name=job_id, path=str(runs / job_id / "model")).__dict__
    found = {name: value for name, value in document.items() if name != "init_from"}
    spec = spec_class(kind)
    # A model that exists has these already.
    changes = {name: spec.options()[name].default for name in spec.of_new_model}
    return {**found, "spec": {**document["spec"], **changes, "model": job_id}, "model": model}


def _learning_rate(rundir: RunDir) -> float:
    """The learning rate that a job began with, also where it was chosen by the model's size."""
    begins = (event for event in events.read(rundir.events) if event["type"] == "begin")
    return float(next(begins)["learning_rate"])
