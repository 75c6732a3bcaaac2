"""`warmd submit`: sources of options, their precedence, and errors."""

import os
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, settings, strategies as st
from shell import Done, warmd

from warmd.jobs import KINDS, spec_class
from warmd.jobs.spec import GROUPS
from warmd.jobs.training.options import TrainingSpec

ROWS = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(100)]


class Shell:
    """A folder with a model and data, in which `warmd` is typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text('{"max_position_embeddings": 256}')
        (folder / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, ROWS)))

    def warmd(self, *arguments: str) -> Done:
        return warmd(*arguments, home=self.home, folder=self.folder)

    def dry_run(self, *arguments: str) -> dict[str, Any]:
        """Return the spec that these options make."""
        files = ("--model", "model", "--dataset", "rows.jsonl")
        done = self.warmd("submit", "grpo", *files, *arguments, "--dry-run", "--json")
        assert (done.code, done.err) == (0, "")
        spec: dict[str, Any] = done.objects[0]["spec"]
        return spec


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in [name for name in os.environ if name.startswith("WARMD_")]:
        monkeypatch.delenv(name)
    return Shell(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_help_lists_every_option_of_a_kind_under_the_heading_of_its_group(shell, kind):
    shown = shell.warmd("submit", kind, "--help").out
    headings = [heading for heading in GROUPS.values() if f"\n{heading}:\n" in shown]
    order = [shown.index(f"\n{heading}:\n") for heading in headings]
    assert order == sorted(order)
    for name, info in spec_class(kind).options().items():
        section = shown.split(f"\n{GROUPS[info.group]}:\n")[1].split("\n\n")[0]
        assert (f"  --{name.replace('_', '-')} " in section) == (info.former is None)


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_dry_run_shows_the_first_prompt_which_is_the_text_of_its_record(shell, kind):
    words = ("submit", kind, "--model", "model", "--dataset", "rows.jsonl", "--dry-run")
    assert '# first prompt: "0 + 1?"\n' in shell.warmd(*words).out
    template = ("--template", "Q: {question}\nA:")
    assert '# first prompt: "Q: 0 + 1?\\nA:"\n' in shell.warmd(*words, *template).out
    assert shell.warmd(*words, *template, "--json").objects[0]["first_prompt"] == "Q: 0 + 1?\nA:"
    sweep = shell.warmd(*words, *template, "--sweep", "learning_rate=1e-5,1e-4")
    assert '# first prompt: "Q: 0 + 1?\\nA:"\n' in sweep.out


def test_a_dry_run_shows_a_chat_as_its_template_renders_it(shell):
    (shell.folder / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    jinja = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (shell.folder / "model" / "chat_template.jinja").write_text(jinja)
    words = ("submit", "sft", "--model", "model", "--dataset", "rows.jsonl", "--dry-run")
    shown = shell.warmd(*words, "--chat-template", "--system", "Add.").out
    assert '# first prompt: "<system>Add.<user>0 + 1?<assistant>"\n' in shown


@pytest.mark.parametrize("kind", ["grpo", "mlm"])
def test_options_of_every_training_kind_have_the_same_type_and_group(kind):
    shared, own = TrainingSpec.options(), spec_class(kind).options()
    for name, info in shared.items():
        assert (own[name].type, own[name].group) == (info.type, info.group)


def test_a_dry_run_queues_nothing_and_prints_a_spec_that_config_reads_back(shell):
    arguments = ["submit", "grpo", "--model", "model", "--dataset", "rows.jsonl"]
    done = shell.warmd(*arguments, "--samples", "7", "--beta", "1e-3", "--dry-run")
    assert (done.code, done.err) == (0, "")
    printed = yaml.safe_load(done.out)
    assert (printed["samples"], printed["beta"]) == (7, 0.001)
    assert printed["dataset"] == str(shell.folder / "rows.jsonl")
    assert not shell.home.exists()

    (shell.folder / "again.yaml").write_text(done.out)
    assert shell.warmd("submit", "grpo", "--config", "again.yaml", "--dry-run") == done


def test_options_win_over_set_over_the_file_over_the_defaults_of_the_home(shell):
    shell.home.mkdir()
    (shell.home / "config.yaml").write_text(
        "defaults: {grpo: {seed: 1, samples: 1, epochs: 1, num_generations: 3, temperature: 0.5}}"
    )
    (shell.folder / "run.yaml").write_text("seed: 2\nsamples: 2\nepochs: 2\nnum-generations: 4\n")
    sets = ("--set", "seed=3", "--set", "samples=3")
    spec = shell.dry_run("--config", "run.yaml", *sets, "--seed", "4")
    assert [spec[name] for name in ("seed", "samples", "epochs", "num_generations")] == [4, 3, 2, 4]
    assert spec["temperature"] == 0.5
    assert spec["top_p"] == spec_class("grpo").options()["top_p"].default


def test_a_list_option_is_repeated_and_replaces_the_configured_list(shell):
    (shell.folder / "run.yaml").write_text("reward: [math, general, reasoning]\n")
    from_file = ("--config", "run.yaml")
    assert shell.dry_run(*from_file)["reward"] == ["math", "general", "reasoning"]
    twice = ("--reward", "math=0.5", "--reward", "correctness")
    assert shell.dry_run(*from_file, *twice)["reward"] == ["math=0.5", "correctness"]
    sets = ("--set", "reward=math", "--set", "reward=general")
    assert shell.dry_run(*from_file, *sets)["reward"] == ["math", "general"]


def test_a_boolean_has_an_option_for_yes_and_one_for_no(shell):
    assert shell.dry_run()["chat_template"] is False
    assert shell.dry_run("--chat-template")["chat_template"] is True
    on = ("--set", "chat-template=true")
    assert shell.dry_run(*on)["chat_template"] is True
    assert shell.dry_run(*on, "--no-chat-template")["chat_template"] is False


def test_none_unsets_an_optional_value(shell):
    (shell.folder / "run.yaml").write_text("learning_rate: 1e-5\n")
    assert shell.dry_run("--config", "run.yaml")["learning_rate"] == 1e-5
    again = ("--config", "run.yaml", "--learning-rate", "none")
    assert shell.dry_run(*again)["learning_rate"] is None


def test_a_users_reward_module_is_found_in_the_current_folder(shell):
    (shell.folder / "my_cli_rewards.py").write_text(
        "def brief(prompts, completions, answers):\n    return [-len(c) for c in completions]\n"
    )
    assert shell.dry_run("--reward", "my_cli_rewards:brief")["reward"] == ["my_cli_rewards:brief"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--samples", "x"],
            "samples: must be an integer of at least 1 and at most 1000000000, or all, got 'x'",
        ),
        (
            ["--set", "samples=x"],
            "samples: must be an integer of at least 1 and at most 1000000000, or all, got 'x'",
        ),
        (["--samples", "101"], "samples: must be at most 100"),
        (["--set", "smaples=3"], "smaples: unknown option of grpo; did you mean samples?"),
        (["--set", "samples"], "set: must be KEY=VALUE, got 'samples'"),
        (["--set", "seed=1", "--set", "seed=2"], "seed: must be set once"),
        (["--smaples", "3"], "No such option '--smaples'"),
        (["--set", "fsdp=full_shard"], "fsdp: unknown option of grpo; the weights of a model are "),
        (["--fsdp-config", "x.json"], "No such option '--fsdp-config': the weights of a model are"),
        (["--config", "missing.yaml"], "missing.yaml: "),
        (["--config", "broken.yaml"], "broken.yaml:2: "),
        (["--config", "list.yaml"], "list.yaml: "),
        (["--config", "."], "."),
        (["--dataset", "missing.jsonl"], "dataset: must be"),
        (["--dataset", "broken.yaml"], "broken.yaml"),
        (["--model", "missing"], "model: must be a warm model"),
        (["--model", "."], "config.json"),
        (["--reward", "nope"], "reward: must be one of"),
        (["--reward", "no_such_module:f"], "reward: "),
        (["--at", "yesterday"], "at: must be a time to come"),
        (["--at", "18:00", "--in", "1h"], "at: must not be given together with --in"),
        (["--in", "soon"], "in: must be a duration"),
        (["--timeout", "0s"], "timeout: must be above 0"),
        (["--retries", "-1"], "--retries"),
    ],
)
def test_a_wrong_option_is_one_line_exits_with_2_and_leaves_nothing(shell, arguments, line):
    (shell.folder / "broken.yaml").write_text("seed: 1\nsamples: ]\n")
    (shell.folder / "list.yaml").write_text("- seed\n")
    files = ("--model", "model", "--dataset", "rows.jsonl")
    done = shell.warmd("submit", "grpo", *files, *arguments)
    assert done.is_refusal(2)
    assert line in done.err
    assert not shell.home.exists()


def test_without_redis_a_valid_job_is_refused_with_3_and_leaves_nothing(shell):
    files = ("--model", "model", "--dataset", "rows.jsonl")
    done = shell.warmd("submit", "grpo", *files)
    assert done.is_refusal(3)
    assert "warmd start" in done.err
    assert not shell.home.exists()


NAMES = list(spec_class("grpo").options())
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "none", "true", "math", "rows.jsonl", "../../x", "1e-5", "{question}"]),
    st.text(max_size=20),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([*NAMES, "nonsense"]), VALUES), max_size=6), st.data())
def test_any_values_give_a_checked_spec_or_a_one_line_error(pairs, data):
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        arguments = ["--set", "model=model", "--set", "samples=3"]
        arguments += [part for name, value in pairs for part in ("--set", f"{name}={value}")]
        if data.draw(st.booleans()):
            content = data.draw(st.binary(max_size=60))
            (shell.folder / "any.yaml").write_bytes(content)
            arguments += ["--config", "any.yaml"]
        done = shell.warmd("submit", "grpo", *arguments, "--dry-run", "--json")
        if done.code == 0:
            spec = done.objects[0]["spec"]
            assert spec_class("grpo").parse(spec).to_json() == spec
        else:
            assert done.is_refusal(2)
        assert not shell.home.exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--at", "25:00", "at: must be a time to come"),
        ("--in", "-5s", "in: must be"),
        ("--timeout", "5", "timeout: must have a unit"),
        ("--after", "nosuchjob", "job: no job"),
    ],
)
def test_a_dry_run_refuses_what_queueing_refuses(shell, option, value, message):
    words = ("submit", "grpo", "--model", "model", "--dataset", "rows.jsonl", "--samples", "7")
    done = shell.warmd(*words, option, value, "--dry-run")
    assert done.is_refusal(2)
    assert message in done.err


@pytest.mark.parametrize("words", [("jobs", "--limit"), ("plot", "--smooth")])
def test_a_number_without_bounds_is_refused(shell, words):
    done = shell.warmd(*words, "9" * 30)
    assert done.is_refusal(2)
    assert "is not in the range" in done.err
