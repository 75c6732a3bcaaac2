"""Agents that talk to a gateway: what is learned of their requests, and how their episodes end."""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import tiny
from gateways import Gateway
from grpo_jobs import rows, same_weights, steps, weights
from running import running
from waiting import wait_until

from warmd.jobs.environments import playing
from warmd.jobs.environments.agent_keys import URL_FILE, Keys, checked
from warmd.jobs.environments.endpoint import Endpoint
from warmd.jobs.environments.journal import FOLDER, EpisodeJournal
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.eval.kind import run as evaluate
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

HERE = Path(__file__).parent
AGENTS = str(HERE.parent / "support")  # `talkers` and `openai_talkers`
TIMES = {"environment_s", "waited_s"}
_trained: dict[str, tiny.Surroundings] = {}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def spec(**options: Any) -> GrpoSpec:
    """A job of 3 steps, each of 2 groups of 4 episodes."""
    small = {
        "agent": "talkers:vowels",
        "samples": 6,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_turn_length": 12,
        "learning_rate": 1e-2,
        "save_every": 2,
        "keep": 100,
    }
    return GrpoSpec.parse(small | options)


def surroundings(gateway: Gateway, name: str) -> tiny.Surroundings:
    model, tokenizer = tiny.chatting()
    made = tiny.surroundings(gateway.home.runs / name, model)
    cast(tiny.Models, made.ctx.models).tokenizer = tokenizer
    made.ctx = replace(made.ctx, code_folders=(AGENTS,), job_id=f"grpo-{name}")
    return made


def trained(job: GrpoSpec, gateway: Gateway, name: str) -> tiny.Surroundings:
    made = surroundings(gateway, name)
    run(job, made.ctx)
    return made


@pytest.fixture
def plain(gateway: Gateway) -> tiny.Surroundings:
    """The job without options, trained once."""
    if "plain" not in _trained:
        _trained["plain"] = trained(spec(), gateway, "plain")
    return _trained["plain"]


def measured(made: tiny.Surroundings) -> dict[int, dict[str, Any]]:
    found = steps(made.events)
    return {step: {k: v for k, v in one.items() if k not in TIMES} for step, one in found.items()}


def kept(made: tiny.Surroundings) -> list[dict[str, Any]]:
    lines = (made.ctx.run_dir / "completions.jsonl").read_bytes().splitlines()
    return [orjson.loads(line) for line in lines]


def name_of(request: Any) -> str:
    return f"{abs(hash(request.node.name)):x}"


def test_an_agent_learns_what_the_same_environment_learns(gateway, plain, request):
    same = spec(agent=None, environment="talkers:Vowels")
    wanted = trained(same, gateway, name_of(request))
    shown = [[(one["turns"], one["reward"]) for one in kept(made)] for made in (plain, wanted)]
    texts = [
        [[turn["content"] for turn in turns if turn["role"] == "assistant"] for turns, _ in of]
        for of in shown
    ]
    assert texts[0] == texts[1]
    assert [reward for _, reward in shown[0]] == [reward for _, reward in shown[1]]
    assert any(len(of) == 3 for of in texts[0])
    assert same_weights(weights(plain.ctx.run_dir / "model"), weights(wanted.ctx.run_dir / "model"))
    (begin,) = plain.of_type("begin")
    assert (begin["agent"], begin["interface"], begin["tasks"]) == ("talkers:vowels", "agent", 6)
    assert all(one["ends"] == {"returned": 8} for one in measured(plain).values())
    assert any(one["grad_norm"] > 0 for one in steps(plain.events).values())


OTHER_WAYS = pytest.mark.nightly(
    part="episodes", catches="a way to request a turn that changes what an agent learns"
)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 3, "agent": "talkers:slow_vowels"},
        pytest.param({"agent": "openai_talkers:vowels"}, marks=OTHER_WAYS),
        pytest.param({"agent": "openai_talkers:streaming"}, marks=OTHER_WAYS),
        pytest.param({"agent": "openai_talkers:by_responses"}, marks=OTHER_WAYS),
        pytest.param({"concurrency": 1}, marks=OTHER_WAYS),
    ],
)
def test_the_same_bits_whatever_runs_at_once_and_however_it_asks(gateway, plain, request, options):
    found = trained(spec(**options), gateway, name_of(request))
    assert measured(found) == measured(plain)
    assert same_weights(weights(found.ctx.run_dir / "model"), weights(plain.ctx.run_dir / "model"))


def test_a_rewritten_history_opens_a_context_and_each_turn_is_learned_once(gateway, request):
    made = trained(spec(agent="talkers:rewriting"), gateway, name_of(request))
    found = measured(made)
    assert all(one["contexts"] == 3 and one["turns"] == 3 for one in found.values())
    assert any(one["grad_norm"] > 0 for one in found.values())
    turns = kept(made)[0]["turns"]
    roles = [turn["role"] for turn in turns]
    assert roles == ["assistant", *["context", "user", "assistant"] * 2]
    # What was sampled, and nothing else, has a loss.
    assert all(one["tokens"] > 0 for one in kept(made))


OTHER_OPTIONS = pytest.mark.nightly(
    part="episodes", catches="an option with which several contexts depend on the concurrency"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"replay": 2, "resample": 1},
        pytest.param({"lora": 2, "base_precision": "int8"}, marks=OTHER_OPTIONS),
        pytest.param({"rollout_dtype": "int8"}, marks=OTHER_OPTIONS),
        pytest.param({"beta": 0.1, "num_iterations": 2}, marks=OTHER_OPTIONS),
    ],
    ids=["replay", "adapter on int8", "int8", "several iterations"],
)
def test_several_contexts_go_with_other_options_and_give_the_same_bits(gateway, request, options):
    name = name_of(request)
    made = [
        trained(spec(agent="talkers:rewriting", concurrency=n, **options), gateway, f"{name}{n}")
        for n in (1, 4)
    ]
    assert measured(made[0]) == measured(made[1])
    assert any(one["grad_norm"] > 0 for one in measured(made[0]).values())
    assert all(one["contexts"] == 3 for one in measured(made[0]).values())


@pytest.mark.slow
def test_several_contexts_are_read_from_the_journal_after_a_kill(gateway, request, monkeypatch):
    name, job = name_of(request), spec(agent="talkers:rewriting")
    whole = trained(job, gateway, f"{name}a")
    add, written = EpisodeJournal.add, list[Any]()

    def cut(journal: EpisodeJournal, episode: Any) -> None:
        if len(written) == 13:  # five of the second step
            raise KeyboardInterrupt
        written.append(episode)
        add(journal, episode)

    monkeypatch.setattr(EpisodeJournal, "add", cut)
    with pytest.raises(KeyboardInterrupt):
        trained(job, gateway, f"{name}b")
    monkeypatch.setattr(EpisodeJournal, "add", add)
    again = trained(job, gateway, f"{name}b")
    done = again.of_type("begin")[0]["resumed_from"] or 0
    expected = measured(whole)
    assert measured(again) == {step: expected[step] for step in range(done + 1, 4)}
    assert same_weights(weights(again.ctx.run_dir / "model"), weights(whole.ctx.run_dir / "model"))


@pytest.mark.slow
def test_conversations_at_the_same_time_are_contexts_of_one_episode(gateway, request):
    made = trained(spec(agent="openai_talkers:at_once"), gateway, name_of(request))
    assert all(one["contexts"] == 4 == one["turns"] for one in measured(made).values())


def test_rewards_in_parts_are_added_up_and_shown(gateway, request):
    made = trained(spec(agent="talkers:in_parts"), gateway, name_of(request))
    for step in measured(made).values():
        assert set(step["parts"]) == {"vowels", "length"}
        assert step["reward"] == pytest.approx(sum(step["parts"].values()), abs=1e-6)
    for one in kept(made):
        assert one["reward"] == pytest.approx(sum(one["rewards"].values()), abs=1e-6)


def test_other_parts_than_those_of_its_siblings_end_the_job(gateway, request):
    with pytest.raises(JobFailed, match=r"agent: must return the same rewards .*'even'.*'odd'"):
        trained(spec(agent="talkers:with_other_parts"), gateway, name_of(request))


OTHER_FAULTS = pytest.mark.nightly(
    part="episodes", catches="a fault of an agent that ends the job or is taken for a result"
)


@pytest.mark.parametrize(
    ("agent", "reason", "words"),
    [
        ("raising", "agent_error", "LookupError: no such page"),
        ("not_a_number", "agent_error", "must be a finite number"),
        pytest.param("endlessly_worth", "agent_error", "must be at most 1e+15", marks=OTHER_FAULTS),
        pytest.param("oddly_named", "agent_error", "must be printable text", marks=OTHER_FAULTS),
        pytest.param("canceled", "agent_error", "CancelledError", marks=OTHER_FAULTS),
        pytest.param(
            "hanging", "timeout", "the episode took longer than 3 s", marks=pytest.mark.slow
        ),
        pytest.param("dying", "process_died", "exit code 3", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_fails_is_left_out_and_none_is_left(gateway, request, agent, reason, words):
    job = spec(
        agent=f"talkers:{agent}",
        samples=2,
        environment_attempts=1,
        environment_timeout=3 if agent == "hanging" else 60,
    )
    made = trained(job, gateway, name_of(request))
    failed = made.of_type("episode_failed")
    assert len(failed) == 8
    assert all(one["reason"] == reason and words in one["message"] for one in failed)
    (step,) = measured(made).values()
    assert step["ends"] == {reason: 8}
    assert (step["left_out"], step["grad_norm"]) == (2, 0)
    wait_until(lambda: not running("warmd.jobs.environments.server"), timeout_s=5)


def test_a_failed_attempt_is_repeated_in_another_process(gateway, request, tmp_path):
    tasks = [{"file": str(tmp_path / f"{n}.txt")} for n in range(2)]
    dataset = rows(tmp_path / "tasks.jsonl", *tasks)
    job = spec(agent="talkers:once_raising", dataset=dataset, samples=2)
    made = trained(job, gateway, name_of(request))
    (step,) = measured(made).values()
    assert step["retried"] >= 2
    assert step["ends"] == {"returned": 8}


def test_an_agent_without_a_reward_is_left_out(gateway, request):
    made = trained(spec(agent="talkers:without_reward", samples=2), gateway, name_of(request))
    (step,) = measured(made).values()
    assert step["ends"] == {"returned": 8}
    assert (step["left_out"], step["grad_norm"]) == (2, 0)


def test_an_agent_that_requests_nothing_has_its_reward(gateway, request):
    made = trained(spec(agent="talkers:silent", samples=2), gateway, name_of(request))
    (step,) = measured(made).values()
    assert (step["reward"], step["turns"], step["grad_norm"]) == (1, 0, 0)


@pytest.mark.nightly(part="episodes", catches="an agent that has more turns than the job allows")
def test_more_turns_than_allowed_are_refused(gateway, request):
    made = trained(spec(agent="openai_talkers:bounded", max_turns=2), gateway, name_of(request))
    assert all(one["turns"] == 2 and one["reward"] == 0.5 for one in measured(made).values())


@pytest.mark.parametrize("reward", [-1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_an_agent_that_raises_at_a_limit_has_ended_by_it(gateway, request, reward):
    job = spec(agent="talkers:endless", max_turns=2, samples=2, timeout_reward=reward)
    made = trained(job, gateway, name_of(request))
    (step,) = measured(made).values()
    assert step["ends"] == {"max_turns": 8}
    assert step["retried"] == 0
    assert step.get("left_out", 0) == (2 if reward is None else 0)
    assert reward is None or step["reward"] == -1


def test_a_conversation_without_room_is_refused_as_openai_does(gateway, request):
    job = spec(agent="talkers:endless", max_completion_length=20, max_turns=1000, samples=2)
    made = trained(job, gateway, name_of(request))
    (step,) = measured(made).values()
    assert step["ends"] == {"length": 8}
    assert "leaves no room for a turn" in made.of_type("episode_failed")[0]["message"]


@pytest.mark.slow
def test_a_request_that_is_left_behind_disturbs_nobody(gateway, request):
    made = trained(spec(agent="talkers:leaving_one"), gateway, name_of(request))
    assert all(one["ends"] == {"returned": 8} for one in measured(made).values())
    assert all(len(one["turns"]) == 1 for one in kept(made))


@pytest.mark.slow
def test_a_turn_that_the_agent_has_given_up_is_not_learned(gateway, request):
    made = trained(spec(agent="talkers:aborting"), gateway, name_of(request))
    assert all(one["ends"] == {"returned": 8} for one in measured(made).values())
    texts = [turn["content"] for one in kept(made) for turn in one["turns"]]
    assert not any("y?y?" in text for text in [*texts, *(one["prompt"] for one in kept(made))])


@pytest.mark.nightly(
    part="episodes", catches="a key with which an agent has turns after its episode"
)
def test_a_key_ends_with_its_episode(gateway, request):
    made = trained(spec(agent="openai_talkers:late", concurrency=2), gateway, name_of(request))
    assert all(one["ends"] == {"returned": 8} for one in measured(made).values())


@pytest.mark.slow
def test_what_an_agent_cannot_have_is_refused_by_name(gateway, request, tmp_path):
    task = {"found": str(tmp_path / "found.txt"), "image": PICTURE}
    dataset = rows(tmp_path / "tasks.jsonl", task, task)
    made = trained(
        spec(agent="openai_talkers:refused", dataset=dataset, samples=2), gateway, name_of(request)
    )
    (step,) = measured(made).values()
    assert step["ends"] == {"returned": 8}
    found = (tmp_path / "found.txt").read_text().splitlines()
    begins = [line.partition(" must")[0] for line in found]
    assert [line.partition(":")[0] for line in begins] == [
        "400 n",
        "400 response_format",
        "400 logit_bias",
        "400 logprobs",
        "400 messages",
        "403 /v1/models",
        "403 /v1/embeddings",
    ]


def test_the_job_decides_how_turns_are_sampled_and_says_so_once(gateway, request):
    made = trained(spec(agent="talkers:hot"), gateway, name_of(request))
    words = [one["message"] for one in made.of_type("warning") if "temperature" in one["message"]]
    assert words == ["agent: a request has temperature 0; turns are sampled with the job's, 1"]
    texts = {one["turns"][0]["content"] for one in kept(made)}
    assert len(texts) > 4


@pytest.mark.nightly(
    part="episodes", catches="a sampling option of a request that is ignored without a word"
)
def test_a_sampling_option_that_the_job_has_not_set_is_named_too(gateway, request):
    made = trained(spec(agent="openai_talkers:cold", samples=2), gateway, name_of(request))
    words = [one["message"] for one in made.of_type("warning") if "min_p" in one["message"]]
    assert words == ["agent: a request has min_p 0.5; turns are sampled with the job's, 0"]


@pytest.mark.nightly(
    part="episodes", catches="a message that no template takes and that ends the episode or the job"
)
def test_a_message_that_the_template_refuses_is_refused_to_the_agent_only(gateway, request):
    made = trained(spec(agent="openai_talkers:with_a_refused_message"), gateway, name_of(request))
    assert all(one["ends"] == {"returned": 8} for one in measured(made).values())


@pytest.mark.slow
def test_old_conversations_are_begun_anew_and_recent_ones_continued(gateway, request):
    job = spec(agent="talkers:branching", samples=2, max_turns=30)
    made = trained(job, gateway, name_of(request))
    (step,) = measured(made).values()
    assert step["ends"] == {"returned": 8}
    assert step["turns"] == 23
    assert 22 <= step["contexts"] <= 23


def test_tools_need_a_model_whose_calls_can_be_read(gateway, request):
    made = trained(
        spec(agent="talkers:with_tools", samples=2, environment_attempts=1),
        gateway,
        name_of(request),
    )
    failed = made.of_type("episode_failed")
    assert len(failed) == 8
    assert all("response template" in one["message"] for one in failed)


@pytest.mark.slow
def test_a_turn_that_a_text_has_ended_is_not_continued(gateway, request):
    made = trained(spec(agent="talkers:stopping"), gateway, name_of(request))
    found = measured(made)
    assert all(one["ends"] == {"returned": 8} for one in found.values())
    assert any(one.get("contexts", 1) > 1 for one in found.values())


@pytest.mark.nightly(
    part="episodes",
    catches="an episode that a killed job plays twice, or a turn that it learns differently",
)
def test_a_killed_job_ends_with_the_same_bits_and_no_episode_twice(gateway, request, tmp_path):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_agents, pathlib\n"
        "class Home: pass\n"
        "home = Home(); home.home = Home(); home.home.runs = pathlib.Path(sys.argv[3])\n"
        "job = test_agents.spec(dataset=sys.argv[5])\n"
        "test_agents.trained(job, home, sys.argv[4])\n"
    )
    name = name_of(request)

    def dataset(of: str) -> tuple[str, Path]:
        log = tmp_path / f"{of}.txt"
        return rows(tmp_path / f"{of}.jsonl", *[{"file": str(log)}] * 6), log

    whole_rows, whole_log = dataset("whole")
    whole = trained(spec(dataset=whole_rows), gateway, f"{name}a")
    killed_rows, killed_log = dataset("killed")
    command = [sys.executable, "-c", script, str(HERE), AGENTS, str(gateway.home.runs)]
    process = subprocess.Popen([*command, f"{name}b", killed_rows])
    folder = gateway.home.runs / f"{name}b" / FOLDER
    try:
        wait_until(
            lambda: any(len(file.read_bytes().splitlines()) >= 3 for file in folder.glob("*")),
            timeout_s=120,
        )
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    again = trained(spec(dataset=killed_rows), gateway, f"{name}b")
    done = again.of_type("begin")[0]["resumed_from"] or 0
    expected = measured(whole)
    assert measured(again) == {step: expected[step] for step in range(done + 1, 4)}
    assert same_weights(weights(again.ctx.run_dir / "model"), weights(whole.ctx.run_dir / "model"))
    over = [log.read_text().splitlines().count("over") for log in (whole_log, killed_log)]
    assert over[0] == 24
    assert 24 <= over[1] <= 24 + 8  # those that were over and not yet in the journal


@pytest.mark.nightly(
    part="episodes",
    catches="an agent that fails, or learns differently, because the gateway was killed",
)
def test_a_killed_gateway_costs_a_retry(gateway, plain, request):
    made = surroundings(gateway, name_of(request))

    def kill() -> None:
        wait_until(lambda: made.of_type("step"))
        gateway.kill()
        port = gateway.url.rpartition(":")[2]
        gateway.config = replace(gateway.config, http_port=int(port))
        gateway.start()
        done.wait()  # the gateway ends with the thread that has started it

    killer, done = threading.Thread(target=kill), threading.Event()
    killer.start()
    try:
        run(spec(agent="openai_talkers:patient_vowels"), made.ctx)
    finally:
        done.set()
        killer.join()
        gateway.process.wait()
    assert measured(made) == measured(plain)


@pytest.mark.slow
def test_an_agent_is_evaluated(gateway, request):
    job = EvalSpec.parse(
        {"agent": "talkers:vowels", "samples": 4, "repeats": 2, "temperature": 1.0}
        | {"max_turn_length": 12}
    )
    made = surroundings(gateway, name_of(request))
    result = evaluate(job.located(Path.cwd()), made.ctx)
    metrics = result["metrics"]
    assert 2 < metrics["turns"]["value"] <= 3
    assert metrics["reward"]["n"] == 4
    lines = (made.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()
    one = orjson.loads(lines[0])["completions"][0]
    assert one["finish_reason"] == "returned"
    assert len(one["messages"]) == 2 * one["turns"]


def test_an_evaluation_without_a_single_turn_says_why(gateway, request):
    # Agents that never come to a turn: the engine has computed nothing.
    job = EvalSpec.parse({"agent": "talkers:canceled", "samples": 3, "environment_attempts": 1})
    made = surroundings(gateway, name_of(request))
    with pytest.raises(JobFailed, match="must score at least one completion, got None"):
        evaluate(job.located(Path.cwd()), made.ctx)


def test_parts_of_a_reward_are_metrics_of_an_evaluation(gateway, request):
    job = EvalSpec.parse({"agent": "talkers:in_parts", "samples": 3, "max_turn_length": 12})
    made = surroundings(gateway, name_of(request))
    metrics = evaluate(job.located(Path.cwd()), made.ctx)["metrics"]
    assert {"reward", "vowels", "length"} <= set(metrics)


def test_a_model_without_chat_template_is_refused(gateway, request):
    made = surroundings(gateway, name_of(request))
    cast(tiny.Models, made.ctx.models).tokenizer = tiny.tokenizer()
    with pytest.raises(JobFailed, match="agent: needs a model with a chat template"):
        run(spec(), made.ctx)


@pytest.fixture
def without_gateway(tmp_path: Path) -> tiny.Surroundings:
    """A job in a home without a gateway."""
    for name in ("runs", "sockets"):
        (tmp_path / "home" / name).mkdir(parents=True)
    model, tokenizer = tiny.chatting()
    made = tiny.surroundings(tmp_path / "home" / "runs" / "job", model)
    cast(tiny.Models, made.ctx.models).tokenizer = tokenizer
    made.ctx = replace(made.ctx, code_folders=(AGENTS,))
    return made


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1"])  # of a gateway that was killed
def test_without_a_gateway_the_job_says_what_it_needs(without_gateway, monkeypatch, url):
    monkeypatch.setattr(playing, "GATEWAY_S", 0.5)
    if url is not None:
        (without_gateway.ctx.sockets_dir / URL_FILE).write_text(url)
    with pytest.raises(JobFailed, match=r"agent: needs the HTTP API .* set http_port"):
        run(spec(), without_gateway.ctx)


def test_a_job_waits_for_a_gateway_that_starts_later_and_can_be_stopped(without_gateway):
    stopping = threading.Timer(1, without_gateway.stop.set)
    stopping.start()
    with pytest.raises(Stopped):
        run(spec(), without_gateway.ctx)
    stopping.join()


@pytest.mark.slow
def test_a_job_that_begins_before_the_gateway_finds_it(gateway, request):
    file = gateway.home.sockets / URL_FILE
    url = file.read_text()
    file.unlink()
    late = threading.Timer(2, file.write_text, [url])
    late.start()
    made = trained(spec(agent="talkers:silent", samples=2), gateway, name_of(request))
    late.join()
    assert len(measured(made)) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": "games:Digits"}, "agent: must not go with environment"),
        ({"reward": ["math"]}, "reward: must not go with agent"),
        ({"environment_step_timeout": 3}, "environment_step_timeout: must go with environment"),
        ({"stop": ["x"]}, "stop: must go with environment"),
    ],
)
def test_options_that_do_not_go_with_an_agent_are_refused(options, words):
    with pytest.raises(SpecError, match=words):
        spec(**options)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("talkers", "agent: must be module:function, got 'talkers'"),
        ("talkers:nothing", "agent: talkers:nothing must be a function, got no such name"),
        ("talkers:TOOL", "agent: talkers:TOOL must be a function, got a dict"),
        ("openai_talkers:client", "agent: openai_talkers:client must take one argument, the task"),
        ("no_such_module:f", "agent: no_such_module:f must import, got ModuleNotFoundError"),
    ],
)
def test_what_is_no_agent_is_refused_at_submission(monkeypatch, agent, words):
    monkeypatch.chdir(AGENTS)
    with pytest.raises(SpecError, match=words):
        spec(agent=agent).check_played([])


def test_a_key_is_valid_for_its_running_job_only(tmp_path):
    keys, others = Keys(tmp_path, "grpo-a", 0), Keys(tmp_path, "grpo-b", 0)
    key = keys.new()
    assert checked(tmp_path, key) is None
    for one in (keys, others):
        one.publish()
    found = checked(tmp_path, key)
    assert found is not None
    assert found.socket == keys.socket
    assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("*.key")} == {0o600}
    forged = others.new()
    name, other = key.split("-")[2], forged.split("-")[2]
    assert checked(tmp_path, forged.replace(other, name)) is None
    assert checked(tmp_path, key[:-1]) is None
    assert checked(tmp_path, key + "0") is None
    assert checked(tmp_path, f"warmd-agent-../../x-{'0' * 16}-{'0' * 32}") is None
    keys.revoke()
    assert checked(tmp_path, key) is None
    again = Keys(tmp_path, "grpo-b", 0)  # the next execution of a job that was killed
    again.publish()
    assert checked(tmp_path, forged) is None
    others.revoke()  # not what is another execution's
    assert checked(tmp_path, again.new()) is not None


def test_files_of_killed_jobs_go_with_the_next_job(tmp_path):
    killed = Keys(tmp_path, "grpo-killed", 0)
    killed.publish()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(killed.socket))
    with Endpoint(tmp_path, "grpo-a", 0) as running:
        assert killed.socket.exists()  # it may have been bound a moment ago
        long_ago = time.time() - 3600
        for path in tmp_path.iterdir():
            os.utime(path, (long_ago, long_ago))
        with Endpoint(tmp_path, "grpo-b", 0):
            assert len(list(tmp_path.iterdir())) == 4
            assert not killed.socket.exists()
            assert checked(tmp_path, running.new_key()) is not None
    assert not list(tmp_path.iterdir())


def test_the_gateway_says_where_it_listens_while_it_does(gateway):
    file = gateway.home.sockets / URL_FILE
    assert file.read_text() == gateway.url
    gateway.process.terminate()
    gateway.process.wait()
    assert not file.exists()


@pytest.mark.slow
def test_an_endpoint_ends_with_all_its_sockets_while_connections_arrive(tmp_path):
    path = Path(Keys(tmp_path, "grpo-a", 0).socket)
    for number in range(100):
        with ExitStack() as clients, Endpoint(tmp_path, "grpo-a", 0):
            for sent in (b"", b'{"x": 1}\n', b"{"):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(path))
                client.sendall(sent)
            if number % 2:
                time.sleep(0.002)
    gc.collect()  # a socket that is left is a warning, and so an error


def test_an_endpoint_may_end_as_soon_as_it_has_begun(tmp_path):
    for _ in range(200):
        with Endpoint(tmp_path, "grpo-a", 0):
            pass
    assert not list(tmp_path.iterdir())
