"""Job kinds of other packages: found by their entry points, used like warmd's own, or left out."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import packages
import pytest
import tiny
import torch
from daemons import Daemon
from gateways import openai_client
from safetensors.torch import load_file
from shell import warmd
from waiting import wait_until

from warmd.cli.commands import doctor
from warmd.daemon.fork.before_run import run_of
from warmd.daemon.fork.libraries import import_kind
from warmd.jobs import KINDS, import_all, run_function, spec_class
from warmd.jobs.errors import SpecError
from warmd.jobs.registry import Kinds

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

SPEC = """
from dataclasses import dataclass
from typing import ClassVar
from warmd.jobs.spec import HttpMethod, Spec, option

@dataclass(frozen=True, kw_only=True)
class {name}(Spec):
    kind: ClassVar[str] = "odd"
    run_module: ClassVar[str | None] = "json"
    {body}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, on the path of this process and of its children."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    packages.look_again()
    yield folder
    packages.look_again()


@pytest.fixture
def lines(site: Path) -> Path:
    """The example of the manual, installed."""
    return packages.install_example(site)


def job(folder: Path, **options: Any) -> Any:
    path = folder / "lines.txt"
    path.write_text("\n".join(f"{n}+{n}={2 * n}" for n in range(11)))
    return spec_class("lines").parse({"dataset": str(path), "save_every": 3, **options})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


# Used as one of warmd's own.


def test_its_files_get_the_umask_of_the_user(lines, monkeypatch):
    seen = []
    monkeypatch.setattr("warmd_lines.kind.run", lambda spec, ctx: seen.append(os.umask(0o077)))
    monkeypatch.setenv("_WARMD_UMASK", "027")
    before = os.umask(0o077)
    try:
        run_of("lines")(None, None)
        assert seen == [0o027]
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert run_of("sft") is run_function("sft")


def test_the_example_of_the_manual_equals_its_files(lines):
    project = tomllib.loads((packages.EXAMPLE.parent / "pyproject.toml").read_text())["project"]
    (entry,) = Kinds({}).outside.values()
    assert project["entry-points"]["warmd.kinds"] == {"lines": f"{entry.options}:{entry.spec}"}
    manual = (Path(__file__).parents[2] / "docs" / "kinds.md").read_text()
    files = list(packages.EXAMPLE.glob("*.py"))
    assert all(path.read_text() in manual for path in files)
    code = [line for path in files for line in path.read_text().splitlines() if line.strip()]
    assert len(code) <= 60


def test_a_kind_from_outside_trains_and_resumes_bit_by_bit(lines, tmp_path):
    run, spec = run_function("lines"), job(tmp_path)
    run(spec, tiny.surroundings(tmp_path / "whole").ctx)
    first = tiny.surroundings(tmp_path / "died")
    first.raise_at_step[5] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(spec, first.ctx)
    second = tiny.surroundings(tmp_path / "died")
    assert run(spec, second.ctx)["steps"] == 10
    assert [event["step"] for event in second.of_type("step")] == [4, 5, 6, 7, 8, 9, 10]
    ours, theirs = weights(tmp_path / "died"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_its_options_are_those_of_the_command_line(lines, tmp_path):
    done = warmd("submit", "lines", "--help", home=tmp_path)
    assert done.code == 0, done.err
    assert "Train a decoder on the lines of a text file." in done.out
    assert "text file, one sample per line" in done.out
    assert "--init-from" in done.out
    refused = warmd("submit", "lines", "--steps", "0", home=tmp_path)
    assert refused.code == 2
    assert "steps: must be an integer of at least 1" in refused.err
    assert "lines" in warmd("submit", "--help", home=tmp_path).out


@pytest.mark.nightly(
    part="daemons", catches="a kind of another package that the daemon or its gateway cannot run"
)
def test_a_daemon_runs_it_and_http_takes_it_as_a_method(lines, tmp_path, make_daemon):
    daemon: Daemon = make_daemon(http_port=0)
    daemon.start()
    spec = job(tmp_path, model="tiny")
    done = daemon.wait(daemon.client.jobs.submit(spec))
    assert (done["status"], done["result"]["steps"]) == ("finished", 10)
    client = openai_client(wait_until(lambda: daemon.status()["http"]["url"]))
    file = client.files.create(file=Path(spec.dataset), purpose="fine-tune").id
    method: Any = {"type": "lines", "lines": {"hyperparameters": {"steps": 2}}}
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file, method=method)
    assert daemon.wait(made.id)["result"]["steps"] == 2
    view: Any = client.fine_tuning.jobs.retrieve(made.id)
    assert (view.status, view.method.type) == ("succeeded", "lines")
    method["lines"]["hyperparameters"] = {"dataset": "/etc/passwd"}
    with pytest.raises(openai.BadRequestError, match="not an option of lines over HTTP"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file, method=method)
    client.close()


# Left out.

BROKEN: dict[str, tuple[str, str, str]] = {
    # fault: (name of the kind, source of its module, expected message)
    "its module is not there": ("odd", "", "ModuleNotFoundError: No module named 'odd_kind'"),
    "its module raises": ("odd", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "its module exits": ("odd", "raise SystemExit(3)", "SystemExit: 3"),
    "it is no class": ("odd", "Odd = 3", "odd_kind:Odd must be a class derived from"),
    "it is no dataclass": (
        "odd",
        SPEC.format(name="Odd", body="").replace("@dataclass(frozen=True, kw_only=True)\n", ""),
        "odd_kind:Odd must be a dataclass",
    ),
    "it has another name": (
        "even",
        SPEC.format(name="Odd", body=""),
        "kind of Odd must be even, got 'odd'",
    ),
    "its name is no beginning of an id": (
        "odd-kind",
        SPEC.format(name="Odd", body=""),
        "its name must be a letter and up to 15 letters or digits, all lowercase",
    ),
    "its name is taken": ("sft", SPEC.format(name="Odd", body=""), "there is another kind of this"),
    "its queue is unknown": (
        "odd",
        SPEC.format(name="Odd", body="queue: ClassVar[str] = 'fast'"),
        "queue of Odd must be train or infer, got 'fast'",
    ),
    "it does not say what runs": (
        "odd",
        SPEC.format(name="Odd", body="").replace('"json"', "None"),
        "run_module of Odd must be a module that is installed, got None",
    ),
    "an option has no plain type": (
        "odd",
        SPEC.format(name="Odd", body="when: dict = option(None, 'when', group='data')"),
        "when: a spec field needs a default and a plain type",
    ),
    "it takes no file over HTTP": (
        "odd",
        SPEC.format(
            name="Odd",
            body="http: ClassVar[HttpMethod] = HttpMethod(type='odd', training_file='data')",
        ),
        "http of Odd needs the options data, model, seed",
    ),
}


@pytest.mark.parametrize(("name", "module", "message"), BROKEN.values(), ids=BROKEN)
def test_a_kind_that_cannot_be_used_is_left_out_with_a_one_line_reason(site, name, module, message):
    if module:
        (site / "odd_kind.py").write_text(module)
    packages.install(site, "odd-package", {name: "odd_kind:Odd"})
    kinds = Kinds(KINDS.own)
    assert list(kinds) == list(KINDS.own)
    (fault,) = kinds.faults
    assert fault.startswith(f"{name} of odd-package: {message}")
    assert "\n" not in fault


def test_the_command_line_works_and_the_doctor_names_the_kind_that_is_left_out(site, tmp_path):
    (site / "odd_kind.py").write_text("raise RuntimeError('too old')")
    packages.install(site, "odd-package", {"odd": "odd_kind:Odd"})
    assert "odd" not in warmd("submit", "--help", home=tmp_path).out
    refused = warmd("submit", "odd", home=tmp_path)
    assert refused.code == 2
    assert "kind: must be one of grpo, sft, dpo, mlm, encode, eval, infer, got 'odd'" in refused.err
    check = doctor.check_kinds()
    assert (check.result, check.found) == (
        "warn",
        "7 of warmd; not usable: odd of odd-package: RuntimeError: too old",
    )


@pytest.mark.nightly(
    part="oracles", catches="a doctor that passes a kind whose module cannot be imported"
)
def test_the_doctor_names_a_kind_whose_jobs_would_fail(lines):
    assert doctor.check_kinds().found == "7 of warmd, from outside: lines"
    (lines / "warmd_lines" / "kind.py").write_text("import not_there")
    check = doctor.check_kinds()
    assert check.result == "warn"
    assert check.found.endswith(
        "lines: its jobs will fail: ModuleNotFoundError: No module named 'not_there'"
    )


def test_a_run_module_that_fails_leaves_the_zygote_alive(lines, caplog):
    (lines / "warmd_lines" / "kind.py").write_text("import not_there")
    import_kind("lines")
    assert "kind lines: its jobs will fail: ModuleNotFoundError" in caplog.text
    with pytest.raises(ModuleNotFoundError):
        import_all("lines")


def test_a_kind_of_an_earlier_version_is_told_the_contract_of_this_one(lines):
    module = "from warmd.jobs.training.trainer import JobTrainer"
    (lines / "warmd_lines" / "kind.py").write_text(module)
    with pytest.raises(ModuleNotFoundError, match=r"a task of warmd\.jobs\.training\.loop"):
        import_all("lines")


def test_without_outside_kinds_an_unknown_kind_is_refused_by_name():
    with pytest.raises(SpecError, match=r"^kind: must be one of grpo, .*, got 'lines'"):
        spec_class("lines")
