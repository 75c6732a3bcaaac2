"""The command line for people: help, errors in one line, exit codes; no daemon needed."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import orjson
import pytest
from breadth import mostly_slow
from safetensors.numpy import save_file

from warmd.cli.commands.doctor import Check, check_models, check_requirements
from warmd.cli.main import COMMANDS, warmd
from warmd.configs.config import DaemonConfig, ModelConfig


def run(
    *arguments: str, home: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `warmd` with these arguments, as from a shell without a terminal."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WARMD_")}
    if home is not None:
        environ["WARMD_HOME"] = str(home)
    return subprocess.run(
        [sys.executable, "-m", "warmd.cli", *arguments],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


ALL = [("warmd", warmd), *commands(warmd, "warmd")]


@pytest.mark.parametrize(("path", "command"), ALL, ids=[path for path, _ in ALL])
def test_every_command_and_option_has_help_and_takes_home_json_and_debug(path, command):
    assert command.help
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options), path
    assert {"--home", "--json", "--debug"} <= {name for option in options for name in option.opts}
    names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
    assert len(names) == len(set(names)), path


def test_the_list_of_commands_matches_the_help_of_each_command():
    ctx = click.Context(warmd)
    for name, (_, line) in COMMANDS.items():
        command = warmd.get_command(ctx, name)
        assert command is not None
        assert (command.help or "").split("\n", 1)[0] == line


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["completion", "bash"]])
def test_help_imports_neither_torch_nor_redis(arguments):
    script = (
        "import sys\nfrom warmd.cli.main import main\nmain(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'trl', 'redis', 'rq', 'yaml', 'psutil', 'numpy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "warmd" in done.stdout


def test_commands_that_show_jobs_do_not_import_msgspec(desk):
    ended, waiting = desk.train(), desk.submit("--name", "waiting", "--tag", "a")
    script = (
        "import sys\nfrom warmd.cli.main import main\nmain(sys.argv[1:])\n"
        "sys.exit('msgspec' if 'msgspec' in sys.modules else 0)"
    )
    for arguments in (["show", ended], ["show", waiting], ["result", ended], ["jobs"], ["queue"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments, "--home", str(desk.home.path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (arguments, done.stderr)


def test_help_takes_little_longer_than_importing_click():
    def cpu_s(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Alternately: on a busy machine both take more processor time; 35 and 65 ms on an idle one.
    pairs = [(cpu_s("-c", "import click"), cpu_s("-m", "warmd.cli", "--help")) for _ in range(5)]
    library, ours = (min(side) for side in zip(*pairs, strict=True))
    assert ours < 2.2 * library, pairs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "No such command 'nope'"),
        (["help"], "Did you mean 'warmd --help'?"),
        (["wait", "job"], "Did you mean 'warmd tail'?"),
        (["start", "--modle", "x"], "'--model'"),
        (["jobs", "--status", "asleep"], "'asleep' is not one of"),
        (["jobs", "--limit", "0"], "--limit"),
        (["submit", "nope"], "kind: must be one of grpo"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["tail", "a", "b"], "unexpected extra argument"),
    ],
)
def test_bad_usage_is_one_line_and_exits_with_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    "command",
    mostly_slow(
        ["status", "stop", "models", "models --unload x", "load x=/tmp"],
        but=["status", "load x=/tmp"],
    ),
)
def test_without_a_daemon_the_line_says_how_to_start_one_and_the_code_is_3(command, tmp_path):
    done = run(*command.split(), home=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert "warmd start" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broken_setting_names_file_and_line_and_exits_with_2(tmp_path):
    (tmp_path / "config.yaml").write_text("models: []\nworkers: [\n")
    done = run("status", home=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}/config.yaml:" in done.stderr
    assert done.stderr.count("\n") == 1


def test_debug_adds_the_traceback_before_or_after_the_command(tmp_path):
    for arguments, environ in (
        (["--debug", "status"], {}),
        (["status", "--debug"], {}),
        (["status"], {"WARMD_DEBUG": "1"}),
    ):
        done = run(*arguments, home=tmp_path, **environ)
        assert done.returncode == 3
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("Error: ")


def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "warmd.cli", "completion", "bash"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", mostly_slow([">&-", "2>&-", ">&- 2>&-"], but=[">&- 2>&-"]))
def test_a_closed_output_is_not_an_error(closed, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    words = f"{sys.executable} -m warmd.cli data show {tmp_path}/rows.jsonl --home {tmp_path}"
    found = subprocess.run(
        ["bash", "-c", f"{words} {closed}"], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.slow
def test_doctor_says_what_it_found_and_what_to_do_about_it(tmp_path):
    done = run("doctor", "--json", "--home", str(tmp_path / "new"))
    checks = {check["check"]: check for check in map(orjson.loads, done.stdout.splitlines())}
    assert set(checks) >= {"python", "libraries", "home", "redis", "memory", "fork", "threads"}
    assert checks["daemon"]["result"] == "warn"
    assert "warmd start" in checks["daemon"]["advice"]
    assert not (tmp_path / "new").exists()


def test_doctor_says_which_library_is_missing_or_of_the_wrong_version():
    check = check_requirements(["click>=8", "rq<1", "no-such-library>=2", 'nope; extra == "x"'])
    assert check.result == "fail"
    assert "no-such-library missing" in check.found
    assert check.advice == "pip install 'rq<1' 'no-such-library>=2'"
    assert check_requirements(["click>=8", "rq>=2.10,<4"]).result == "ok"


def test_doctor_fails_on_an_unusable_home(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = run("doctor", home=file / "below")
    assert done.returncode == 1
    assert "fail  config      home: must be a folder, got " in done.stdout


def test_doctor_distinguishes_models_adapters_and_other_folders(tmp_path):
    base, adapter, gone = (tmp_path / name for name in ("base", "adapter", "gone"))
    base.mkdir()
    (base / "config.json").write_text("{}")
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_bytes(orjson.dumps(settings))

    def check(*folders: Path) -> Check:
        models = tuple(ModelConfig(name=folder.name, path=str(folder)) for folder in folders)
        return check_models(DaemonConfig(home=tmp_path, models=models))

    assert check(base, adapter).result == "ok"
    for folder in (gone, tmp_path / ("long" * 100)):  # no file system has room for such a name
        missing = check(base, folder)
        assert (missing.result, str(folder) in missing.found) == ("fail", True)
    save_file({"_orig_mod.lm_head.weight": np.ones(2)}, base / "model.safetensors")
    wrapped = check(adapter)
    assert wrapped.result == "fail"
    assert "model: adapter: all tensors are missing" in wrapped.found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell):
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_WARMD_COMPLETE" in done.stdout
    assert done.stderr == ""


def test_job_ids_complete_from_the_run_directories_the_newest_first(tmp_path):
    old, new = "grpo-20261120-090000-aaaa", "grpo-20261121-184200-x7f2"
    for name in (old, new, ".new-grpo-20261121-184200-x7f3", "stray"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    shell = {"_WARMD_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    done = run(home=tmp_path, COMP_WORDS="warmd tail grpo-2026", **shell)
    assert done.stdout.splitlines() == [f"plain,{new}", f"plain,{old}"]
    done = run(home=tmp_path, COMP_WORDS="warmd tail grpo-20261120", **shell)
    assert done.stdout.splitlines() == [f"plain,{old}"]


def test_logs_show_the_last_lines_of_the_daemon_as_text_and_json(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "daemon.log").write_text("".join(f"line {n}\n" for n in range(9)))
    assert run("logs", "-n", "2", home=tmp_path).stdout == "line 7\nline 8\n"
    done = run("logs", "-n", "1", "--json", home=tmp_path)
    assert orjson.loads(done.stdout) == {"line": "line 8"}


def test_logs_follow_whole_lines_also_after_a_rotation(tmp_path):
    log = tmp_path / "logs" / "daemon.log"
    log.parent.mkdir()
    log.write_text("old\nhal")
    command = [sys.executable, "-m", "warmd.cli", "logs", "-f", "--home", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "old\n"
        with log.open("a") as file:
            file.write("f\n")
        assert process.stdout.readline() == "half\n"
        log.rename(log.with_name("daemon.log.1"))
        log.write_text("rotated\n")
        assert process.stdout.readline() == "rotated\n"
        process.terminate()


@pytest.mark.parametrize(
    "job", mostly_slow(["../../x", "grpo-20261121-184200-x7f2", "x" * 300, "\n"], but=["../../x"])
)
def test_logs_of_an_unknown_job_exit_with_2(job, tmp_path):
    done = run("logs", job, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
