"""The daemon's settings: their sources, and errors for wrong values."""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from warmd.configs import config as config_module
from warmd.configs.config import (
    SETTINGS,
    ConfigError,
    DaemonConfig,
    ModelConfig,
    WorkerConfig,
    load,
    parse_model,
    read_mapping,
    redacted_url,
)
from warmd.configs.memory import available_bytes, memory_bytes
from warmd.configs.values import duration_s, size_bytes

SHIPPED = Path(config_module.__file__).parent / "default.yaml"


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def loaded(home, text="", *, environ=None, **overrides):
    (home / "config.yaml").write_text(text)
    return load(home=home, environ=environ or {}, overrides=overrides)


def refusal(home, text="", *, environ=None, **overrides):
    with pytest.raises(ConfigError) as caught:
        loaded(home, text, environ=environ, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{home}/")


@contextmanager
def refused_in_one_line_if_at_all():
    try:
        yield
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message


# --- Where a setting comes from


def test_shipped_default_yaml_has_the_defaults_of_the_code(home):
    assert load(home=home, config_file=SHIPPED, environ={}) == DaemonConfig(home=home)


def test_shipped_default_yaml_shows_every_setting_but_the_config_file_itself():
    keys = {setting.name for setting in SETTINGS if setting.field}
    assert keys - set(read_mapping(SHIPPED)) == {"home"}
    assert "# home:" in SHIPPED.read_text()


def test_defaults_in_the_table_of_settings_read_as_the_defaults_of_the_code(home):
    by_variable = {
        s.variable: s.default for s in SETTINGS if s.variable and s.name not in ("home", "config")
    }
    assert load(home=home, environ=by_variable) == DaemonConfig(home=home)


def test_without_any_setting_the_demo_model_and_two_workers_are_served(home):
    config = load(home=home, environ={})
    assert [model.path for model in config.models] == ["builtin:demo"]
    assert [worker.queue for worker in config.workers] == ["train", "infer"]
    assert config.redis_url is None


def test_an_endless_settings_file_is_refused():
    with pytest.raises(ConfigError, match="must have at most 1,000,000 bytes"):
        read_mapping(Path("/dev/zero"))


def test_http_on_other_addresses_needs_a_token(home):
    with pytest.raises(ConfigError, match=r"^http_token: must be set to listen on 0\.0\.0\.0"):
        loaded(home, "http_host: 0.0.0.0")
    assert loaded(home, "http_host: 0.0.0.0\nhttp_port: off").http_port is None
    config = loaded(home, "http_host: 0.0.0.0", environ={"WARMD_HTTP_TOKEN": "correct-horse"})
    assert config.http_token == "correct-horse"
    assert "correct-horse" not in repr(config)
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert loaded(home, http_host=host).http_token is None


def test_the_public_origin_is_read_as_browsers_send_it_and_needs_a_token(home):
    read = partial(loaded, home, http_token="correct-horse")
    assert read().http_origin == ()
    assert read("http_origin: none").http_origin == ()
    assert read("http_origin: HTTPS://Warmd.Example.com:443").http_origin == (
        "https://warmd.example.com",
    )
    several = "http_origin: [https://a.test:8443, 'http://[fd00::1]:80', https://a.test:08443]"
    assert read(several).http_origin == ("https://a.test:8443", "http://[fd00::1]")
    config = read(environ={"WARMD_HTTP_ORIGIN": "https://a.test, https://b.test"})
    assert config.http_origin == ("https://a.test", "https://b.test")
    assert DaemonConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match=r"^http_token: must be set for http_origin https://a"):
        loaded(home, "http_origin: https://a.test")


@pytest.mark.parametrize(
    "value",
    [
        *("a.test", "https://a.test/", "https://a.test/page", "ftp://a.test", "https://u@a.test"),
        *("https://a.test:0", "https://a.test:65536", "https://*.a.test", "https://", "*", "null"),
        *("https://a.test?b", "https://bücher.test", 8443, [], [7], "https://a.test,", True),
    ],
)
def test_what_is_no_origin_is_refused(home, value):
    with pytest.raises(ConfigError, match=r"^http_origin: must be https://HOST\[:PORT\] without"):
        loaded(home, http_token="correct-horse", http_origin=value)


def test_error_messages_do_not_show_the_token(home):
    for token in ("short", "with space in it", "ünïcödéünïcödé", 12345678):
        with pytest.raises(ConfigError) as caught:
            loaded(home, http_token=token)
        assert str(token) not in str(caught.value)


def test_option_overrides_variable_overrides_file_overrides_default(home):
    text, environ = "stop_grace: 1s", {"WARMD_STOP_GRACE": "2s"}
    assert loaded(home).stop_grace_s == 120
    assert loaded(home, text).stop_grace_s == 1
    assert loaded(home, text, environ=environ).stop_grace_s == 2
    assert loaded(home, text, environ=environ, stop_grace="3s").stop_grace_s == 3


def test_options_that_were_not_used_and_empty_variables_do_not_count(home):
    config = loaded(
        home, "log_files: 7", environ={"WARMD_LOG_FILES": ""}, log_files=None, models=()
    )
    assert config.log_files == 7
    assert config.models == DaemonConfig(home=home).models


def test_a_list_replaces_the_list_of_a_lower_source(home):
    config = loaded(home, "models: [a=org/a, b=org/b]", environ={"WARMD_MODELS": "c=org/c"})
    assert [model.name for model in config.models] == ["c"]
    assert loaded(home, "models: []").models == ()


def test_a_higher_source_can_reset_a_setting_to_automatic(home):
    text = "redis_url: redis://localhost\nmemory_budget: 1GB\nredis_binary: redis-server"
    assert loaded(home, text).redis_url == "redis://localhost"
    back = loaded(home, text, redis_url="embedded", memory_budget="auto", redis_binary="auto")
    assert (back.redis_url, back.memory_budget_bytes, back.redis_binary) == (None, None, None)


def test_config_file_is_the_option_else_the_variable_else_the_one_in_the_home(home, tmp_path):
    (home / "config.yaml").write_text("log_files: 1")
    by_variable, by_option = tmp_path / "variable.yaml", tmp_path / "option.yaml"
    by_variable.write_text("log_files: 2")
    by_option.write_text("log_files: 3")
    environ = {"WARMD_CONFIG": str(by_variable)}
    assert load(home=home, environ={}).log_files == 1
    assert load(home=home, environ=environ).log_files == 2
    assert load(home=home, environ=environ, config_file=by_option).log_files == 3


def test_home_is_the_option_else_the_variable_else_in_the_file_else_below_xdg_state(tmp_path):
    environ = {"HOME": str(tmp_path / "me")}
    assert load(environ=environ).home == tmp_path / "me/.local/state/warmd"
    environ["XDG_STATE_HOME"] = "relative/does/not/count"
    assert load(environ=environ).home == tmp_path / "me/.local/state/warmd"
    environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    assert load(environ=environ).home == tmp_path / "state/warmd"
    file = tmp_path / "file.yaml"
    file.write_text("home: in-file")
    assert load(environ=environ, config_file=file).home == tmp_path / "in-file"
    environ["WARMD_HOME"] = str(tmp_path / "variable")
    assert load(environ=environ, config_file=file).home == tmp_path / "variable"
    assert load(environ=environ, home=tmp_path / "option").home == tmp_path / "option"


def test_config_file_in_a_home_cannot_name_another_home(home):
    assert refusal(home, "home: /elsewhere").startswith("config.yaml: home: must be left out")


def test_settings_survive_a_round_trip_through_json(home):
    text = """
        redis_url: redis://:secret@localhost:6380/1
        models: [{name: a, path: org/a, dtype: bfloat16, task: causal-lm}]
        workers: ['w=train,isolation=resident,threads=2']
        defaults: {grpo: {learning_rate: 1e-5, reward: [math, correctness=2]}}
    """
    config = loaded(home, text)
    assert DaemonConfig.from_json(orjson.loads(orjson.dumps(config.to_json()))) == config


# --- Models and workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen=org/Qwen2-0.5B", ("qwen", "org/Qwen2-0.5B", "float32", "auto")),
        ("org/Qwen2-0.5B", ("Qwen2-0.5B", "org/Qwen2-0.5B", "float32", "auto")),
        ("gpt2", ("gpt2", "gpt2", "float32", "auto")),
        ("builtin:demo", ("demo", "builtin:demo", "float32", "auto")),
        ("m=BASE/folder,dtype=bfloat16", ("m", "BASE/folder", "bfloat16", "auto")),
        ("m=folder,task=masked-lm,dtype=auto", ("m", "BASE/folder", "auto", "masked-lm")),
        ("folder/", ("folder", "BASE/folder", "float32", "auto")),
        ("./missing", ("missing", "BASE/missing", "float32", "auto")),
        ("../up", ("up", "PARENT/up", "float32", "auto")),
        ("BASE/a=b,c", ("x", "BASE/a=b,c", "float32", "auto")),
    ],
)
def test_model_line_names_a_folder_or_a_hub_id(tmp_path, text, expected):
    base = tmp_path / "base"
    (base / "folder").mkdir(parents=True)
    real = text.replace("BASE", str(base))
    if "a=b" in real:
        real = f"x={real}"
    model = parse_model(real, base)
    path = model.path.replace(str(base), "BASE").replace(str(tmp_path), "PARENT")
    assert (model.name, path, model.dtype, model.task) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m=x,dtpye=float32", "model.dtpye: unknown key; did you mean dtype?"),
        (
            "m=x,dtype=int4",
            "model.dtype: must be one of auto, float32, bfloat16, float16, got 'int4'",
        ),
        (
            "m=x,precision=int3",
            "model.precision: must be one of native, bf16, int8, int4, got 'int3'",
        ),
        ("m=x,response_template=", "model.response_template: must be a path, got ''"),
        ("m=x,dtype=auto,dtype=auto", "model.dtype: must stand once"),
        ("m=x,name=y", "model.name: must stand once"),
        ("my model=x", "model.name: must be 1 to 64 of A-Z a-z 0-9 . _ -"),
        ("..=x", "model.name: must be 1 to 64 of A-Z a-z 0-9 . _ -"),
        ("m=", "model.path: must be a local folder, a hub id like org/name, or builtin:demo"),
        ("m=a\nb", "model.path: must be a local folder"),
        ("m=~nobody-here/x", "model.path: must be a path, got '~nobody-here/x'"),
        ("builtin:dmeo", "model.path: must be one of builtin:demo, got 'builtin:dmeo'"),
    ],
)
def test_wrong_model_line_is_refused_by_the_key(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_model(text, Path("/"))
    assert str(caught.value).startswith(message)


def test_former_names_of_the_native_precision_are_read(home):
    (model,) = loaded(home, "models: [{name: m, path: builtin:demo, precision: own}]").models
    assert model.precision == "native"
    assert parse_model("m=builtin:demo,precision=own", Path("/")).precision == "native"
    # As the file of warm models and the records of jobs of earlier versions have it.
    assert ModelConfig(name="m", path="builtin:demo", precision="own").precision == "native"


def test_a_setting_may_have_the_name_of_earlier_versions(home, caplog):
    with caplog.at_level("WARNING"):
        config = loaded(home, "server_binary: redis-server")
    assert config.redis_binary == "redis-server"
    (line,) = caplog.messages
    assert line.endswith("config.yaml: server_binary is now called redis_binary")
    old = {"WARMD_SERVER_BINARY": "valkey-server"}
    assert loaded(home, environ=old).redis_binary == "valkey-server"
    new = {**old, "WARMD_REDIS_BINARY": "redis-server"}
    assert loaded(home, environ=new).redis_binary == "redis-server"
    with pytest.raises(ConfigError, match="server_binary: must be left out: redis_binary is given"):
        loaded(home, "server_binary: a\nredis_binary: b")
    # What a daemon of an earlier version passes to its children after an upgrade.
    values = config.to_json()
    values["server_binary"] = values.pop("redis_binary")
    assert DaemonConfig.from_json(values) == config


def test_paths_in_a_file_start_from_its_folder_and_others_from_the_current_one(
    home, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert loaded(home, "models: [m=./x]").models[0].path == str(home / "x")
    assert loaded(home, models=["m=./x"]).models[0].path == str(tmp_path / "x")
    assert loaded(home, "redis_binary: ./x").redis_binary == str(home / "x")
    assert loaded(home, "redis_binary: redis-server").redis_binary == "redis-server"


def test_variables_hold_several_lines_with_semicolons_between(home):
    environ = {
        "WARMD_MODELS": "a=org/a,dtype=bfloat16; b=org/b;",
        "WARMD_WORKERS": "t=train,threads=2,nice=5,device=cuda:1,gpu_memory=40%,"
        "copy_threads=4,standby=on;"
        "i=infer,isolation=resident,slots=8",
    }
    config = loaded(home, environ=environ)
    assert config.models == (
        ModelConfig(name="a", path="org/a", dtype="bfloat16"),
        ModelConfig(name="b", path="org/b"),
    )
    assert config.workers == (
        WorkerConfig(
            name="t",
            queue="train",
            threads=2,
            nice=5,
            device="cuda:1",
            gpu_memory=40,
            copy_threads=4,
            standby=True,
        ),
        WorkerConfig(name="i", queue="infer", isolation="resident", slots=8),
    )


@pytest.mark.parametrize(
    ("options", "gpus", "takes_part"),
    [
        ({}, "", True),
        ({}, "0", False),
        ({"device": "cpu"}, "0", True),
        ({"device": "cuda:0"}, "0", False),
        ({"isolation": "resident"}, "", False),
        ({"queue": "infer"}, "", False),
    ],
)
def test_workers_that_fork_on_a_cpu_take_part_in_jobs_of_several_nodes(
    monkeypatch, options, gpus, takes_part
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert WorkerConfig(**{"name": "t", "queue": "train", **options}).takes_part is takes_part


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("0,2", ["cuda:0", "cuda:1"]), ("MIG-1", ["cuda:0"]), ("", ["auto"])],
)
def test_workers_auto_is_one_worker_of_queue_train_per_gpu(home, monkeypatch, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    *training, answering = loaded(home, "workers: auto").workers
    assert [worker.device for worker in training] == devices
    assert [worker.name for worker in training] == [f"train-{i}" for i in range(len(devices))]
    assert answering == DaemonConfig(home=home).workers[-1]


# --- What is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modles: []", "modles: unknown key; did you mean models?"),
        ("config: x.yaml", "config: unknown key"),
        ("on: 1", "True: unknown key"),
        ("models: [{name: a, dtpye: auto}]", "models[0].dtpye: unknown key; did you mean dtype?"),
        ("models: [{name: a}]", "models[0].path: must be a local folder"),
        ("models: [3]", "models[0]: must be a line NAME=PATH or keys, got 3"),
        ("models: 3", "models: must be a list, got 3"),
        ("models: [a=org/x, a=org/y]", "models[1].name: must be unique, got 'a' again"),
        ("workers: []", "workers: must be at least one worker, got none"),
        ("workers: [train]", "workers[0].name: must be 1 to 64 of"),
        ("workers: [w=both]", "workers[0].queue: must be one of train, infer, got 'both'"),
        ("workers: ['w=train,threads=0']", "workers[0].threads: must be an integer from 1 to 1024"),
        ("workers: [{name: w, queue: train, threads: 1.5}]", "workers[0].threads: must be"),
        ("workers: [{name: w, queue: train, threads: true}]", "workers[0].threads: must be"),
        ("workers: ['w=infer,slots=2']", "workers[0].slots: must be 1 with isolation fork, got 2"),
        (
            "workers: ['w=train,isolation=resident,slots=2']",
            "workers[0].slots: must be 1 with queue train, got 2: none could resume exactly",
        ),
        ("workers: ['w=infer,slots=0']", "workers[0].slots: must be an integer from 1 to 1024"),
        ("workers: ['w=train,nice=-1']", "workers[0].nice: must be an integer from 0 to 19"),
        (
            "workers: ['w=train,device=cuda']",
            "workers[0].device: must be auto, cpu, cuda:N or the UUID of a GPU (GPU-…) or MIG "
            "instance, got 'cuda'",
        ),
        (
            "workers: ['w=train,gpu_memory=0%']",
            "workers[0].gpu_memory: must be a share of the GPU's memory from 1% to 100%, got '0%'",
        ),
        (
            "workers: ['w=train,copy_threads=65']",
            "workers[0].copy_threads: must be an integer from",
        ),
        (
            "workers: ['w=train,standby=yes']",
            "workers[0].standby: must be one of on, off, got 'yes",
        ),
        (
            "workers: [{name: w, queue: infer, isolation: resident, standby: on}]",
            "workers[0].standby: must be off with isolation resident, got on: its process stays",
        ),
        ("workers: ['w=train,device=GPU-']", "workers[0].device: must be auto, cpu, cuda:N"),
        ("workers: [{name: w, queue: train, isolation: }]", "workers[0].isolation: must be one of"),
        ("memory_budget: 8 apples", "memory_budget: must be a size like 8GB or 512MiB or a share"),
        ("memory_budget: 101%", "memory_budget: must be a size"),
        ("memory_budget: 0", "memory_budget: must be a size"),
        ("log_size: 60%", "log_size: must be a size like 8GB or 512MiB, got '60%'"),
        ("log_files: 0", "log_files: must be an integer from 1 to 1000, got 0"),
        ("stop_grace: -1", "stop_grace: must be a duration like 90s, 2m or 1h30m, got -1"),
        ("stop_grace: soon", "stop_grace: must be a duration"),
        ("stop_grace: .inf", "stop_grace: must be a duration"),
        ("stop_grace: yes", "stop_grace: must be a duration"),
        ("stop_grace: ", "stop_grace: must be a duration like 90s, 2m or 1h30m, got nothing"),
        ("redis_binary: [x]", "redis_binary: must be a program or auto, got ['x']"),
        ("home: 3", "home: must be a path, got 3"),
        ("defaults: [grpo]", "defaults: must be keys with values, got ['grpo']"),
        ("defaults: {grpo: {a: {b: 1}}}", "defaults.grpo.a: must be text, a number"),
        ("defaults: {grpo: {a: .nan}}", "defaults.grpo.a: must be a finite number"),
        ("defaults: {grpo: {a: 2026-11-21}}", "defaults.grpo.a: must be text, a number"),
    ],
)
def test_wrong_setting_is_refused_by_file_and_key(home, text, message):
    assert refusal(home, text).startswith(f"config.yaml: {message}")


def test_wrong_variable_is_named(home):
    message = refusal(home, environ={"WARMD_LOG_FILES": "many"})
    assert message == ("WARMD_LOG_FILES: log_files: must be an integer from 1 to 1000, got 'many'")


def test_misspelt_variable_is_refused_but_foreign_ones_are_not(home):
    message = refusal(home, environ={"WARMD_MODEL": "a=org/a"})
    assert message == "WARMD_MODEL: unknown variable; did you mean WARMD_MODELS?"
    foreign = {"WARMD_REDIS_SERVICE_HOST": "10.0.0.1", "WARMD_PORT": "x", "WARMD_DEBUG": "1"}
    assert load(home=home, environ=foreign) == DaemonConfig(home=home)


def test_unknown_option_is_refused(home):
    assert refusal(home, redis="x") == "redis: unknown key; did you mean redis_url?"


# Ten lists, each but the first with the one before ten times: nobody may print it.
BILLION_VALUES = "log_size: [&a0 [x, x], {}]".format(
    ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))
).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: [1", "config.yaml:2: is not right YAML: "),
        (
            b"log_files: 1\nlog_files: 2",
            "config.yaml:2: is not right YAML: 'log_files' stands twice",
        ),
        (b"a: 1\nb: \xff", "config.yaml:2: must be UTF-8 text"),
        (b"a: 1\nb: \x01", "config.yaml:2: is not right YAML: a control character"),
        (b"- a", "config.yaml: must hold `key: value` lines, got list"),
        (b"a: 2026-13-45", "config.yaml: holds a value that YAML cannot read: month"),
        (b"a: !!python/object:os.system x", "config.yaml:1: is not right YAML: could not"),
        (BILLION_VALUES, "config.yaml:1: is not right YAML: aliases make more than"),
        (b"log_size: &a [*a]", "config.yaml:1: is not right YAML: aliases make more than"),
        (b"[" * 100_000, "config.yaml: holds a value that YAML cannot read: "),
    ],
)
def test_broken_file_is_refused_by_its_line(home, data, message):
    (home / "config.yaml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(home=home, environ={})
    assert str(caught.value).startswith(f"{home}/{message}")


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300])
def test_home_that_cannot_be_a_folder_is_refused_by_its_name(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^home: must be a folder, got .*: \w+"):
        load(home=tmp_path / name, environ={})


def test_config_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: must be a YAML file .* No such file"):
        load(home=tmp_path, config_file=tmp_path / "gone.yaml", environ={})
    with pytest.raises(ConfigError, match=r"must be a YAML file .* Is a directory"):
        load(home=tmp_path, config_file=tmp_path, environ={})


@given(
    data=st.binary(max_size=60) | st.text(alphabet="abe1-:[]{}&*!?|>#'\",.%\n \t~=<", max_size=60)
)
@settings(max_examples=200)
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    with refused_in_one_line_if_at_all():
        load(home=file.parent, config_file=file, environ={})


_RAW = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(values=st.dictionaries(st.sampled_from([s.name for s in SETTINGS]), _RAW))
@settings(max_examples=300)
def test_any_option_gives_settings_that_json_can_hold_or_one_line(values):
    values.pop("home", None)
    with refused_in_one_line_if_at_all():
        config = load(home=Path("/home-of-tests"), environ={}, overrides=values)
        assert DaemonConfig.from_json(orjson.loads(orjson.dumps(config.to_json()))) == config


@given(text=st.text(max_size=40))
def test_any_model_line_is_read_or_refused_in_one_line(text):
    with refused_in_one_line_if_at_all():
        folder = Path("/nowhere")  # where no word is the name of a folder
        model = parse_model(text, folder)
        assert parse_model(f"{model.name}={model.path}", folder).path == model.path


# --- Numbers, sizes, durations


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-5", 1e-5), ("-2E3", -2000.0), ("1.5e+2", 150.0), ("'1e-5'", "1e-5"), ("e5", "e5")],
)
def test_exponent_without_a_dot_is_a_number_unless_quoted(home, text, expected):
    config = loaded(home, f"defaults: {{grpo: {{learning_rate: {text}}}}}")
    assert config.defaults["grpo"]["learning_rate"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8e9), ("1.5 gib", 1.5 * 2**30), ("512MiB", 2**29), ("10kB", 1e4), ("7", 7), (7, 7)],
)
def test_size_is_read_in_powers_of_1000_or_with_an_i_of_1024(text, expected):
    assert size_bytes("size", text) == expected


def test_a_memory_budget_in_percent_is_a_share_of_the_memory(home):
    assert loaded(home, "memory_budget: 50%").memory_budget_bytes == int(memory_bytes() * 0.5)


def test_memory_is_that_of_the_container_if_it_has_a_limit(tmp_path, monkeypatch):
    machine = memory_bytes()
    monkeypatch.setattr("warmd.configs.memory._CGROUPS", tmp_path)
    assert memory_bytes() == machine  # without the files, as outside of a container
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\nactive_file 40000\ninactive_file 60000\n")
    for limit, whole, available in (("1000000", 10**6, 400_000), ("500000", 500_000, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert (memory_bytes(), available_bytes()) == (whole, available)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes() == machine
    assert 10**6 < available_bytes() <= machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("2m", 120), ("1h30m", 5400), ("1.5h", 5400), ("1d", 86400), (3, 3), ("0", 0)],
)
def test_duration_is_read_in_seconds(text, expected):
    assert duration_s("grace", text) == expected


# --- Redis URLs


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://user:p%40ss@10.0.0.1:6380/3",
        "redis://[::1]:6379/0?socket_timeout=5",
        "rediss://:secret@cache.example.org:6380?ssl_cert_reqs=none",
        "unix:///run/user/1000/redis.sock?db=2",
    ],
)
def test_redis_urls_over_tcp_tls_and_unix_sockets_are_accepted(home, url):
    assert loaded(home, redis_url=url).redis_url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host",
        "user:hunter2@host:6379",
        "redis://:hunter2@host:notaport",
        "redis://:hunter2@host:99999",
        "redis://:hunter2@/0",
        "redis://:hunter2@host/db0",
        "redis://:hun#ter2@host",
        "redis://:hun/ter2@host",
        "unix://user:hunter2@run/redis.sock",
        "ftp://host?password=hunter2",
    ],
)
def test_wrong_redis_url_is_refused_without_its_password(home, url):
    message = refusal(home, redis_url=url)
    assert message.startswith(
        "redis_url: must be redis://HOST:PORT/DB, rediss://… (TLS) or unix://"
    )
    assert "hunter2" not in message
    assert "ter2" not in message


def test_settings_never_show_the_password_when_printed(home):
    assert "secret" not in repr(loaded(home, redis_url="redis://:secret@localhost"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://me:secret@host/0", "redis://***@host/0"),
        ("unix:///run/a@b.sock?password=secret&db=1", "unix:///run/a@b.sock?password=***&db=1"),
    ],
)
def test_shown_url_has_neither_user_nor_password(url, expected):
    assert redacted_url(url) == expected


# --- Cost


def test_settings_are_read_without_yaml_and_without_the_rest_of_warmd():
    code = (
        "import sys; from warmd.configs.config import load; load(environ={}); "
        "print(*(m for m in sys.modules if m == 'yaml' or m.startswith('warmd.')))"
    )
    environ = {**os.environ, "HOME": "/nonexistent"}
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, env=environ, capture_output=True, text=True, check=True).stdout
    assert out.split()
    assert all(module.startswith("warmd.configs") for module in out.split())
