"""The dashboard and the alert rules: every metric in them exists, and Prometheus reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from desks import Desk
from needs import needs
from prometheus_client.parser import text_string_to_metric_families as parse

from warmd.daemon.gateway.core.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
OPERATIONS = DEPLOY.parent / "docs" / "operations.md"


def alerts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "warmd.json").read_text())
    return found


def queries() -> list[str]:
    """The queries of the dashboard, with values for Grafana's variables."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in found]


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """The names of all samples of a gateway that has seen everything, and of their labels."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        desk = Desk(Path(folder))
        desk.submit()
        desk.begin().fail("no reason")
        desk.submit()
        run = desk.begin()
        run.step(1)
        time.sleep(0.01)  # times of events are in milliseconds, and no time is no pace
        run.step(2)
        metrics = Metrics(desk.client)
        metrics.count_request("/health", 200, 0.1)
        metrics.count_tokens({"prompt_tokens": 1})
        text = metrics.text().decode()
        desk.close()
    samples = [sample for family in parse(text) for sample in family.samples]
    found: dict[str, set[str]] = {sample.name: set() for sample in samples}
    for sample in samples:
        found[sample.name] |= sample.labels.keys()
    return found


def test_every_metric_and_label_of_the_rules_and_the_dashboard_exists(scraped):
    for query in [*queries(), *(rule["expr"] for rule in alerts())]:
        names = re.findall(r"\bwarmd_\w+", query)
        assert names
        for name in names:
            assert name in scraped, query
        labels = set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", query))
        for words in re.findall(r"\b(?:by|on) \(([\w, ]*)\)", query):
            labels |= set(words.split(", "))
        known = set.union(*(scraped[name] for name in names))
        assert labels <= known | {"instance"}, query
    for rule in alerts():
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            assert any(label in scraped[name] for name in re.findall(r"warmd_\w+", rule["expr"]))


def test_the_table_of_the_manual_has_every_metric(scraped):
    suffixes = re.compile(r"_(bucket|sum|count)$")
    wanted = {suffixes.sub("", name) for name in scraped if not name.endswith("_created")}
    section = OPERATIONS.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(warmd_\w+)", section, re.MULTILINE)) == wanted


def promtool(*arguments: str | Path) -> None:
    needs(shutil.which("promtool"), "promtool (prometheus)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_rules_and_the_queries_of_the_dashboard(tmp_path):
    promtool("check", "rules", RULES)
    rules = [{"record": f"panel:query{n}", "expr": query} for n, query in enumerate(queries())]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


# Alert -> series with their values minute by minute, for which it must be firing after 30 minutes.
FIRING = {
    "WarmdIsDown": {"up": "0x40"},
    "WarmdJobsWaitForAWorker": {
        'warmd_queue_oldest_waiting_seconds{queue="train"}': "0+60x40",
        'warmd_workers{queue="train"}': "0x40",
    },
    "WarmdRequestsWait": {'warmd_queue_oldest_waiting_seconds{queue="infer"}': "0+60x40"},
    "WarmdSavesFail": {'warmd_job_alerts_total{kind="sft",type="save_failed"}': "0x20 1x20"},
    "WarmdTrainingIsInTrouble": {'warmd_job_alerts_total{kind="grpo",type="stall"}': "0x20 1x20"},
    "WarmdProcessesDie": {'warmd_process_restarts_total{process="zygote"}': "0+1x40"},
    "WarmdJobsAreInterrupted": {
        'warmd_job_requeues_total{kind="grpo",reason="horse_died"}': "0+1x40"
    },
    "WarmdJobsFail": {
        'warmd_job_duration_seconds_count{kind="grpo",status="failed"}': "0+1x40",
    },
    "WarmdNodeIsSilent": {'warmd_nodes{state="silent"}': "1x40"},
    "WarmdDiskIsNearlyFull": {
        'warmd_disk_free_bytes{folder="runs"}': "5x40",
        'warmd_disk_used_bytes{folder="runs"}': "95x40",
    },
    "WarmdMemoryIsNearlyFull": {
        "warmd_memory_available_bytes": "4x40",
        "warmd_memory_size_bytes": "100x40",
    },
    "WarmdRedisIsNearlyFull": {
        "warmd_redis_memory_used_bytes": "95x40",
        "warmd_redis_memory_limit_bytes": "100x40",
    },
}
CALM = {
    'warmd_jobs{queue="train",status="queued"}': "3x40",
    'warmd_queue_oldest_waiting_seconds{queue="train"}': "0+60x40",
    'warmd_queue_oldest_waiting_seconds{queue="infer"}': "1x40",
    'warmd_workers{queue="train"}': "1x40",
    'warmd_job_alerts_total{kind="sft",type="save_failed"}': "3x40",
    'warmd_job_requeues_total{kind="grpo",reason="requested"}': "0+1x40",
    'warmd_process_restarts_total{process="zygote"}': "2x40",
    'warmd_job_duration_seconds_count{kind="grpo",status="finished"}': "0+1x40",
    'warmd_nodes{state="silent"}': "0x40",
    'warmd_disk_free_bytes{folder="runs"}': "50x40",
    'warmd_disk_used_bytes{folder="runs"}': "50x40",
    "warmd_memory_available_bytes": "50x40",
    "warmd_memory_size_bytes": "100x40",
    "warmd_redis_memory_used_bytes": "95x40",
    "warmd_redis_memory_limit_bytes": "0x40",  # no limit
}


def case(series: dict[str, str], fires: str | None) -> dict[str, Any]:
    """A case of `promtool test rules`: the one alert that fires, or none of all."""
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    if fires is None:
        wanted = []
    else:
        query = f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{fires}"}})'
        wanted = [{"labels": f'{{alertname="{fires}"}}', "value": 1}]
    return {
        "name": fires or "calm",
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "30m", "exp_samples": wanted}],
    }


def test_each_alert_fires_in_its_case_and_none_in_normal_operation(tmp_path):
    assert FIRING.keys() == {rule["alert"] for rule in alerts()}
    cases = [case(series, name) for name, series in FIRING.items()]
    document = {"rule_files": [str(RULES)], "tests": [*cases, case(CALM, None)]}
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump(document))
    promtool("test", "rules", path)
