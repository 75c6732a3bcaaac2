"""`/v1/warmd/…`: jobs of all kinds over HTTP, live events, and the files of the page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from gateway_requests import OURS
from gateways import Gateway

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class
from warmd.jobs.grpo.completions import FILE, Completions


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Gateway(Path(folder, "home"), tiny_model)
        yield made
        made.close()


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as client:
        yield client


def submit(gateway: Gateway, kind: str = "grpo") -> str:
    options = {"model": "tiny", "num_generations": 2} if kind == "grpo" else {"prompt": "1"}
    return gateway.client.jobs.submit(spec_class(kind).parse({"model": "tiny", **options}))


def log_steps(gateway: Gateway, job_id: str, count: int) -> None:
    with EventLog(gateway.client.rundir(job_id).events, execution=1) as log:
        for step in range(1, count + 1):
            log.emit(
                "step", step=step, loss=float(step), tokens=10, samples=[{"prompt": str(step)}]
            )


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


# --- the list


def test_jobs_are_listed_newest_first_and_page_by_page(gateway, http):
    ids = [submit(gateway) for _ in range(5)][::-1]
    pages, after = [], None
    while True:
        params = {"kind": "grpo", "limit": 2} | ({"after": after} if after else {})
        page = http.get("/v1/warmd/jobs", params=params).json()
        pages += [job["id"] for job in page["data"]]
        if not page["has_more"]:
            break
        after = pages[-1]
    assert pages[: len(ids)] == ids
    assert len(pages) == len(set(pages))


def test_jobs_are_filtered_by_kind_status_and_part_of_the_id(gateway, http):
    infer, grpo = submit(gateway, "infer"), submit(gateway)
    gateway.client.jobs.cancel(grpo)

    def listed(**params: Any) -> list[str]:
        found = http.get("/v1/warmd/jobs", params={**params, "limit": 200}).json()["data"]
        return [job["id"] for job in found]

    assert infer in listed(kind="infer")
    assert grpo not in listed(kind="infer")
    assert grpo in listed(status="canceled")
    assert infer not in listed(status="canceled")
    assert listed(text=grpo[-4:]) == [grpo]
    gateway.drop_waiting()


def test_jobs_are_filtered_by_name_and_tag(gateway, http):
    spec = spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    named = gateway.client.jobs.submit(spec, Queueing(name="night-1", tags=("baseline",)))

    def listed(**params: str) -> list[str]:
        return [job["id"] for job in http.get("/v1/warmd/jobs", params=params).json()["data"]]

    assert listed(name="night-1") == listed(name="night-*") == listed(tag="baseline") == [named]
    assert listed(name="night-1", kind="infer") == listed(name="day") == []
    gateway.client.jobs.cancel(named)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kind": "dance"}, "kind: must be one of "),
        ({"status": "happy"}, "status: must be one of "),
        ({"text": "<b>"}, "text: must be a part of a job id, got '<b>'"),
        ({"after": "x"}, "after: must be a job id, got 'x'"),
        ({"limit": 201}, "limit: must be less than or equal to 200"),
        ({"colour": "red"}, "colour: unknown or not supported"),
    ],
)
def test_a_wrong_filter_is_named(http, params, message):
    status, said = refusal(http.get("/v1/warmd/jobs", params=params))
    assert status == 400
    assert said.startswith(message)


@pytest.mark.slow
def test_an_invalid_job_id_is_not_found(http):
    for name in ("x", "grpo-20260101-000000-aaaa", "..%2f..", "%00"):
        for route in ("", "/events", "/curves", "/completions", "/checkpoints", "/log"):
            assert http.get(f"/v1/warmd/jobs/{name}{route}").status_code == 404
        reply = http.post(f"/v1/warmd/jobs/{name}/cancel", json={}, headers=OURS)
        assert reply.status_code == 404


# --- actions


def test_waiting_jobs_are_moved_paused_and_canceled(gateway, http):
    first, second = submit(gateway), submit(gateway)
    place = gateway.client.jobs.get(second)["position"]

    def act(job_id: str, name: str, **body: Any) -> str:
        reply = http.post(f"/v1/warmd/jobs/{job_id}/{name}", json=body, headers=OURS)
        assert reply.status_code == 200, reply.text
        outcome: str = reply.json()["outcome"]
        return outcome

    assert act(second, "move", position=1) == "position 1"
    assert gateway.client.jobs.get(second)["position"] == 1
    assert gateway.client.jobs.get(first)["position"] == place
    assert act(second, "move", position=1000) == f"position {place}"
    assert act(first, "pause") == "paused"
    assert act(first, "unpause") == "queued"
    assert act(first, "cancel") == "canceled"
    assert act(second, "kill") == "canceled"
    assert act(first, "resume") == "queued"
    gateway.client.jobs.cancel(first)


def test_a_job_that_is_not_queued_cannot_be_moved(gateway, http):
    job_id = submit(gateway)
    gateway.client.jobs.cancel(job_id)
    reply = http.post(f"/v1/warmd/jobs/{job_id}/move", json={"position": 1}, headers=OURS)
    assert refusal(reply) == (409, f"job: {job_id} is canceled: it is in no queue")


def test_only_ended_jobs_are_removed(gateway, http):
    job_id = submit(gateway)
    remove = f"/v1/warmd/jobs/{job_id}/remove"
    reply = http.post(remove, json={}, headers=OURS)
    assert refusal(reply) == (409, f"job: {job_id} is queued: cancel it first")
    gateway.client.jobs.cancel(job_id)
    assert http.post(remove, json={}, headers=OURS).json()["bytes"] > 0
    assert not (gateway.home.runs / job_id).exists()
    assert http.get(f"/v1/warmd/jobs/{job_id}").status_code == 404


def test_a_change_needs_our_header_json_and_the_same_origin(gateway, http):
    job_id = submit(gateway)
    cancel = f"/v1/warmd/jobs/{job_id}/cancel"
    for headers, content, status in (
        ({}, b"{}", 403),
        ({**OURS, "sec-fetch-site": "cross-site"}, b"{}", 403),
        ({**OURS, "sec-fetch-site": "same-site"}, b"{}", 403),
        ({**OURS, "origin": "https://example.org"}, b"{}", 403),
        ({**OURS, "origin": gateway.url.replace("127.0.0.1", "localhost")}, b"{}", 403),
        ({**OURS, "host": "example.org"}, b"{}", 403),
        ({**OURS, "content-type": "text/plain"}, b"{}", 415),
        (OURS, b'{"force": true}', 400),
    ):
        sent = {"content-type": "application/json", **headers}
        assert http.post(cancel, content=content, headers=sent).status_code == status, headers
    assert gateway.status(job_id) == "queued"
    own = {**OURS, "sec-fetch-site": "same-origin", "origin": gateway.url}
    assert http.post(cancel, json={}, headers=own).json()["outcome"] == "canceled"


# --- events


def events_in(text: str) -> list[tuple[str | None, Any]]:
    """The id and the data of each server-sent event."""
    found = []
    for frame in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line)
        if "data" in fields:
            found.append((fields.get("id"), orjson.loads(fields["data"])))
    return found


def test_a_stream_continues_after_the_last_event_id(gateway, http):
    job_id = submit(gateway)
    log_steps(gateway, job_id, 5)
    gateway.client.jobs.cancel(job_id)
    url = f"/v1/warmd/jobs/{job_id}/events/stream"
    whole = [id for id, _ in events_in(http.get(url).text) if id]
    assert whole == ["1", "2", "3", "4", "5"]
    resumed = http.get(url, headers={"last-event-id": "3"}, params={"after": 1}).text
    assert [id for id, _ in events_in(resumed) if id] == ["4", "5"]
    assert "event: end" in resumed
    assert http.get(url, headers={"last-event-id": "soon"}).status_code == 400


def test_events_are_listed_without_those_of_some_types(gateway, http):
    job_id = submit(gateway)
    with EventLog(gateway.client.rundir(job_id).events, execution=1) as log:
        log.emit("begin", learning_rate=1e-5)
    log_steps(gateway, job_id, 30)
    url = f"/v1/warmd/jobs/{job_id}/events"
    newest = http.get(url, params={"limit": 2}).json()
    assert [event["step"] for event in newest["data"]] == [29, 30]
    others = http.get(url, params={"limit": 2, "without": ["step", "text"]}).json()
    assert [event["type"] for event in others["data"]] == ["begin"]
    assert newest["seq"] == others["seq"] == 31
    gateway.client.jobs.cancel(job_id)


def test_curves_of_many_steps_come_in_few_points(gateway, http):
    job_id = submit(gateway)
    log_steps(gateway, job_id, 1000)
    url = f"/v1/warmd/jobs/{job_id}/curves"
    found = http.get(url, params={"points": 100}).json()
    assert len(found["steps"]) == 100
    assert (found["total"], found["seq"], found["tokens"][-1]) == (1000, 1000, 10_000)
    loss = found["metrics"]["loss"]
    assert (loss["min"][0], loss["mean"][0], loss["max"][0]) == (1, 5.5, 10)
    zoomed = http.get(url, params={"points": 100, "first": 11, "last": 20}).json()
    assert zoomed["metrics"]["loss"]["mean"] == list(range(11, 21))
    gateway.client.jobs.cancel(job_id)


def test_completions_are_shown_by_step(gateway, http):
    job_id = submit(gateway)
    log_steps(gateway, job_id, 3)
    url = f"/v1/warmd/jobs/{job_id}/completions"
    assert [one["prompt"] for one in http.get(url).json()["samples"]] == ["3"]
    second = http.get(url, params={"step": 2}).json()
    assert (second["step"], second["previous_step"], second["next_step"]) == (2, 1, 3)
    assert http.get(url, params={"step": 9}).status_code == 404
    gateway.client.jobs.cancel(job_id)


def test_completions_are_found_by_row_and_by_text_in_all_steps(gateway, http):
    job_id = submit(gateway)
    url = f"/v1/warmd/jobs/{job_id}/completions"
    assert http.get(url, params={"text": "a"}).json()["steps"] == []
    file = Completions(gateway.client.rundir(job_id).path / FILE, every=1, step=0)
    for step in (1, 2, 3):
        file.add(step, [{"row": row, "completion": f"At {step}/{row}"} for row in (7, 8)])
    file.close()

    def found(**query: Any) -> tuple[Any, list[str]]:
        page = http.get(url, params=query).json()
        assert page["steps"] == [1, 2, 3]
        return page["step"], [one["completion"] for one in page["samples"]]

    assert found() == (3, ["At 3/7", "At 3/8"])
    assert found(row=8) == (None, ["At 1/8", "At 2/8", "At 3/8"])
    assert found(row=8, limit=2) == (None, ["At 2/8", "At 3/8"])
    assert found(text="aT 2") == (None, ["At 2/7", "At 2/8"])
    assert found(step=2, text="/7") == (2, ["At 2/7"])
    assert found(step=2, row=9) == (2, [])
    gateway.client.jobs.cancel(job_id)


def test_the_overview_sends_only_changes(gateway, http):
    with http.stream("GET", "/v1/warmd/overview/stream") as stream:
        lines = stream.iter_lines()
        first = next(orjson.loads(line[6:]) for line in lines if line.startswith("data: "))
        assert first["machine"]["cores"] > 0
        job_id = submit(gateway)
        for line in lines:
            part = orjson.loads(line[6:]) if line.startswith("data: ") else {}
            if job_id in [job["id"] for job in part.get("jobs", ())]:
                break
    gateway.client.jobs.cancel(job_id)


# --- forms


def test_a_check_queues_nothing_and_names_the_wrong_field(gateway, http):
    def check(**options: Any) -> Any:
        method = {"type": "reinforcement", "reinforcement": {"hyperparameters": options}}
        body = {"model": "tiny", "training_file": "arithmetic", "method": method}
        return http.post("/v1/warmd/check", json=body, headers=OURS).json()

    before = len(gateway.client.jobs.all())
    found = check(samples=12, max_completion_length=4, template="{question}=")
    assert (found["problem"], found["kind"], found["steps_total"]) == (None, "grpo", 12)
    assert found["options"]["samples"] == 12
    problem = check(samples=0)["problem"]
    assert problem["param"] == "method.reinforcement.hyperparameters.samples"
    assert "must be an integer of at least 1 and at most" in problem["message"]
    assert "not an option of grpo over HTTP" in check(report_to=["wandb"])["problem"]["message"]
    assert len(gateway.client.jobs.all()) == before


@pytest.mark.parametrize("sweep", [None, {"learning_rate": [1e-5, 1e-4]}])
def test_a_check_shows_no_path_of_the_home(gateway, http, sweep):
    content = b'{"prompt": "a", "completion": "b"}\n'
    file = http.post("/v1/files", files={"file": ("a.jsonl", content)}).json()["id"]
    path = "/v1/warmd/check" if sweep is None else "/v1/warmd/sweeps/check"
    body = {"model": "tiny", "training_file": file, **({} if sweep is None else {"sweep": sweep})}
    found = http.post(path, json=body, headers=OURS)
    assert found.json()["steps_total"] is not None
    assert found.json()["options"]["dataset"] == f"HOME/files/{file}/a.jsonl"
    (gateway.home.path / "files" / file / "a.jsonl").write_text("not JSON")
    refused = http.post(path, json=body, headers=OURS)
    assert f"HOME/files/{file}/a.jsonl" in refused.json()["problem"]["message"]
    assert str(gateway.home.path) not in found.text + refused.text
    http.delete(f"/v1/files/{file}")


def test_forms_offer_the_options_that_a_request_may_set(http):
    kinds = {kind["kind"]: kind for kind in http.get("/v1/warmd/kinds").json()["data"]}
    options = {option["name"]: option for option in kinds["grpo"]["options"]}
    assert {"samples", "reward", "num_generations"} <= options.keys()
    assert not {"model", "dataset", "report_to"} & options.keys()
    assert {"correctness", "custom"} <= set(options["reward"]["choices"])
    assert "grader" not in options["reward"]["choices"]  # it follows from a field of the request


@pytest.mark.parametrize("sweep", [None, {"learning_rate": [1e-5, 1e-4]}])
def test_a_check_shows_the_first_prompt_as_the_model_gets_it(http, sweep):
    rows = b'{"question": "1+1", "answer": "2"}\n' * 4
    file = http.post("/v1/files", files={"file": ("a.jsonl", rows)}).json()["id"]

    def first_prompt(**options: Any) -> Any:
        method = {"type": "reinforcement", "reinforcement": {"hyperparameters": options}}
        body = {"model": "tiny", "training_file": file, "method": method}
        more = {} if sweep is None else {"sweep": sweep}
        path = "/v1/warmd/check" if sweep is None else "/v1/warmd/sweeps/check"
        return http.post(path, json=body | more, headers=OURS).json()["first_prompt"]

    small = {"max_completion_length": 4, "template": "Q: {question}="}
    prompt = first_prompt(**small)
    assert prompt["text"] == "Q: 1+1="
    assert prompt["tokens"] > 0
    as_chat = first_prompt(chat_template=True, **small)
    assert "user" in as_chat["text"]
    assert as_chat["tokens"] > prompt["tokens"]
    http.delete(f"/v1/files/{file}")


def test_a_check_that_fails_shows_the_first_prompt_too(http):
    hyperparameters = {"samples": 4, "max_completion_length": 100_000, "template": "{question}="}
    method = {"type": "reinforcement", "reinforcement": {"hyperparameters": hyperparameters}}
    body = {"model": "tiny", "training_file": "arithmetic", "method": method}
    found = http.post("/v1/warmd/check", json=body, headers=OURS).json()
    assert found["problem"] is not None
    assert found["first_prompt"]["text"].endswith("=")


def test_a_training_has_a_name_and_tags(gateway, http):
    small = {"samples": 4, "max_completion_length": 4}
    method = {"type": "reinforcement", "reinforcement": {"hyperparameters": small}}
    body = {"model": "tiny", "training_file": "arithmetic", "method": method}
    body |= {"suffix": "sums", "tags": ["a", "b"]}
    job_id = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
    job = gateway.client.jobs.get(job_id)
    assert (job["name"], job["tags"]) == ("sums", ["a", "b"])
    gateway.client.jobs.cancel(job_id)
    for field, value in (("suffix", "no name"), ("suffix", job_id), ("tags", ["no tag"])):
        refused = http.post("/v1/fine_tuning/jobs", json=body | {field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_the_first_records_of_a_file_are_shown_with_their_number(gateway, http):
    def records(name: str, content: bytes) -> Any:
        file = http.post("/v1/files", files={"file": (name, content)}).json()["id"]
        found = http.get(f"/v1/warmd/files/{file}/records", params={"limit": 2})
        http.delete(f"/v1/files/{file}")
        return found

    csv = records("a.csv", b"question,answer\n1+1,2\n2+2,4\n3+3,6\n").json()
    first = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
    assert csv == {"rows": 3, "records": first, "faults": []}
    found = records("a.jsonl", b'{"a": [1, {"b": 2}], "c": "%s"}\nno JSON\n' % (b"x" * 5000))
    lines = found.json()
    assert lines["rows"] == 2
    assert lines["records"][0]["a"] == '[1,{"b":2}]'
    assert len(lines["records"][0]["c"]) == 1000
    assert len(lines["faults"]) == 1
    broken = records("a.parquet", b"no table")
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "file_id")
    assert str(gateway.home.path) not in found.text + broken.text
    assert http.get("/v1/warmd/files/file-x/records").status_code == 404


def test_a_model_shows_whether_it_takes_chats_and_how_many_tokens(http):
    found = http.get("/v1/warmd/models/tiny").json()
    assert (found["name"], found["has_chat_template"]) == ("tiny", True)
    assert found["context_length"] > 0
    assert http.get("/v1/warmd/models/none").status_code == 404


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/health", "/livez", "/readyz"])
def test_head_is_answered_as_get_without_a_body(http, path):
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


# --- the page


def test_the_page_allows_no_inline_script_and_no_frame(http):
    reply = http.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    again = http.get("/", headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304


def test_only_files_of_the_page_are_served(http):
    for name in ("routes.py", "../routes.py", "..%2froutes.py", "/etc/passwd", "vendor", ""):
        assert http.get(f"/page/{name}").status_code == 404


def test_a_sweep_over_http_is_shown_steered_and_removed(gateway, http):
    body = {
        "model": "tiny",
        "training_file": "arithmetic",
        "method": {
            "type": "reinforcement",
            "reinforcement": {"hyperparameters": {"samples": 9, "num_generations": 2}},
        },
        "sweep": {"learning_rate": [1e-6, 1e-5, 1e-4]},
        "seeds": 2,
        "halving": 3,
        "name": "rates",
    }
    url = "/v1/warmd/sweeps"
    made = http.post(url, json=body, headers=OURS)
    assert made.status_code == 200, made.text
    sweep = made.json()
    assert (sweep["jobs"], sweep["rungs"], sweep["metric"]) == (6, [3, 9], "reward")
    job_id = sweep["points"][0]["jobs"][0]["id"]
    # A request must not name code: the job imports from no folder.
    assert gateway.client.rundir(job_id).read_spec()["python_path"] == []
    listed = http.get("/v1/warmd/jobs", params={"tag": sweep["id"]}).json()["data"]
    assert {job["sweep"] for job in listed} == {sweep["id"]}
    assert [one["id"] for one in http.get(url).json()["data"]] == [sweep["id"]]
    act = f"{url}/{sweep['id']}"
    assert (
        http.post(f"{act}/pause", json={}, headers=OURS).json()["outcome"] == "paused 6 of 6 jobs"
    )
    for action, outcome in (("unpause", "queued 6"), ("cancel", "canceled 6")):
        done = http.post(f"{act}/{action}", json={}, headers=OURS).json()
        assert done["outcome"] == f"{outcome} of 6 jobs"
    assert http.post(f"{act}/remove", json={}, headers=OURS).json()["bytes"] > 0
    assert http.get(act).status_code == 404


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sweep": {"reward_log": ["/tmp/a", "/tmp/b"]}}, "sweep: must be of options of grpo"),
        ({"sweep": {"learning_rate": [7]}}, "learning_rate: must be a number above 0"),
        (
            {"sweep": {"reward": ["correctness", "os:system"]}},
            "hyperparameters.reward: must be one",
        ),
        ({"sweep": {}}, "sweep: must be given, or else seeds or array"),
        ({"model": "/etc", "seeds": 2}, "model: no model '/etc'"),
    ],
)
def test_a_wrong_sweep_over_http_is_refused(http, changes, problem):
    body = {"model": "tiny", "training_file": "arithmetic", **changes}
    found = http.post("/v1/warmd/sweeps", json=body, headers=OURS)
    assert found.status_code in (400, 404)
    assert problem in found.json()["error"]["message"]
    assert http.get("/v1/warmd/sweeps").json()["data"] == []


CURRICULUM = {
    "model": "tiny",
    "training_file": "arithmetic",
    "method": {
        "type": "reinforcement",
        "reinforcement": {"hyperparameters": {"samples": 9, "num_generations": 2}},
    },
    "stages": [
        {"name": "easy", "hyperparameters": {"n_epochs": 2, "learning_rate": 1e-5}},
        {"hyperparameters": {"samples": 4}, "gate": False},
    ],
    "gate": {"samples": 20, "max_tokens": 4},
    "name": "first",
}


@pytest.mark.slow
def test_a_curriculum_over_http_is_shown_steered_and_removed(gateway, http):
    url = "/v1/warmd/curricula"
    made = http.post(url, json=CURRICULUM, headers=OURS)
    assert made.status_code == 200, made.text
    found = made.json()
    assert (found["stages"], found["status"], found["kind"]) == (
        ["easy", "stage-2"],
        "started",
        "grpo",
    )
    [attempt] = found["attempts"]
    document = gateway.client.rundir(attempt["job"]).read_spec()
    # A request must not name code: the job imports from no folder.
    assert (document["python_path"], document["origin"]) == ([], "http")
    assert (document["spec"]["samples"], document["spec"]["epochs"]) == (9, 2)
    assert [one["id"] for one in http.get(url).json()["data"]] == [found["id"]]
    job = http.get(f"/v1/warmd/jobs/{attempt['job']}").json()["job"]
    assert (job["curriculum"], job["name"]) == (found["id"], "first/easy")
    [line] = http.get("/v1/warmd/overview").json()["groups"]
    assert (line["id"], line["name"], line["active"]) == (found["id"], "first", True)
    act = f"{url}/{found['id']}"
    for action, status in (("pause", "paused"), ("unpause", "started"), ("cancel", "canceled")):
        done = http.post(f"{act}/{action}", json={}, headers=OURS)
        assert done.status_code == 200, done.text
        assert http.get(act).json()["status"] == status
    assert http.post(f"{act}/remove", json={}, headers=OURS).json()["bytes"] > 0
    assert http.get(act).status_code == 404
    assert http.get("/v1/warmd/overview").json()["groups"] == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stages": []}, "stages: "),
        (
            {"stages": [{"hyperparameters": {"reward": ["os:system"]}}]},
            "stages.0.method.reinforcement.hyperparameters.reward: must be one of",
        ),
        (
            {"stages": [{"training_file": "/etc/passwd"}]},
            "stages.0.training_file: must be the id of an uploaded file",
        ),
        (
            {"stages": [{"hyperparameters": {"learning_rate": 7}}]},
            "stages: stage-1: learning_rate: must be a number above 0",
        ),
        ({"gate": {"reward": "os:system"}}, "gate.reward: must be one of"),
        ({"gate": {"dataset": "/etc/passwd"}}, "gate.dataset: must be the id of an uploaded file"),
        ({"gate": {"examples_dataset": "x"}}, "gate.examples_dataset: not an option of eval"),
        ({"gate": {"samples": 0}}, "gate: must have samples from 1 to"),
        ({"model": "/etc"}, "model: no model '/etc'"),
    ],
)
def test_a_wrong_curriculum_over_http_is_refused(http, changes, problem):
    found = http.post("/v1/warmd/curricula", json={**CURRICULUM, **changes}, headers=OURS)
    assert found.status_code in (400, 404, 422), found.text
    assert problem in found.json()["error"]["message"]
    assert http.get("/v1/warmd/curricula").json()["data"] == []


def test_a_stage_with_a_file_of_its_own_keeps_the_kind(gateway, http):
    line = b'{"question": "1 + 1 =", "answer": "2"}'
    uploaded = gateway.openai().files.create(file=("sums.jsonl", line), purpose="fine-tune")
    stages = [{"gate": False}, {"training_file": uploaded.id, "gate": False}]
    body = {"model": "tiny", "training_file": "arithmetic", "stages": stages}
    made = http.post("/v1/warmd/curricula", json=body, headers=OURS)
    assert made.status_code == 200, made.text
    assert made.json()["kind"] == "grpo"  # that of arithmetic, for all stages


def test_a_resume_over_http_cannot_report_to_a_tracker(gateway, http):
    job_id = gateway.client.jobs.submit(
        spec_class("grpo").parse({"model": "tiny", "num_generations": 2})
    )
    gateway.client.jobs.cancel(job_id)
    act = f"/v1/warmd/jobs/{job_id}/resume"
    found = http.post(act, json={"changes": {"report_to": "wandb"}}, headers=OURS)
    assert found.status_code == 400
    assert "report_to: not an option of grpo over HTTP" in found.json()["error"]["message"]
    assert gateway.status(job_id) == "canceled"
