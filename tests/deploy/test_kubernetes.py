"""The manifests for Kubernetes: valid by its published schemas, and true to warmd's own options."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import redis
import yaml
from breadth import mostly_slow
from ports import free_port
from waiting import wait_until

from warmd.cli.main import warmd
from warmd.configs.config import DaemonConfig
from warmd.configs.settings import SETTINGS
from warmd.daemon.gateway.app import create_app
from warmd.daemon.queue.rq_format import queue_key
from warmd.daemon.supervise.redis_server import find_binary

DEPLOY = Path(__file__).parents[2] / "deploy"
VERSIONS = ("1.30", "1.35")
OWN_KINDS = ("ScaledJob", "TriggerAuthentication")  # of KEDA, whose schemas are in no registry


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def as_kubernetes(document: dict[str, Any]) -> dict[str, Any] | None:
    """The document, or the Job in one of KEDA's; None if there is none."""
    if document["kind"] == "ScaledJob":
        job = document["spec"]["jobTargetRef"]
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    return None if document["kind"] in OWN_KINDS else document


def pods() -> dict[str, dict[str, Any]]:
    """The specs of all pods, by kind and name of what starts them."""
    found = {}
    for document in documents():
        kubernetes = as_kubernetes(document)
        if kubernetes is not None and "template" in kubernetes["spec"]:
            name = f"{document['kind']} {document['metadata']['name']}"
            found[name] = kubernetes["spec"]["template"]["spec"]
    return found


def containers() -> dict[str, dict[str, Any]]:
    """warmd's own containers."""
    every = {name: pod["containers"][0] for name, pod in pods().items()}
    return {name: one for name, one in every.items() if one["image"] == "warmd"}


def commands() -> Iterator[list[str]]:
    """All commands of warmd in the manifests, without `warmd`."""
    for container in containers().values():
        yield container["args"]
        hooks = [container.get("lifecycle", {}).get("preStop", {})]
        probes = [container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
        for words in (one["exec"]["command"] for one in (*hooks, *probes) if "exec" in one):
            if words[0] == "sh":
                words = shlex.split(words[-1])
                words = words[words.index("warmd") : words.index("||")]
            if words[0] == "warmd":
                yield words[1:]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    yield compose["node"]["command"]
    yield compose["gateway"]["command"]


@pytest.mark.parametrize("version", mostly_slow(VERSIONS, but=("1.35",)))
def test_every_manifest_is_valid_and_has_no_unknown_field(version):
    checked = [found for found in map(as_kubernetes, documents()) if found is not None]
    assert len(checked) == 10
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelled_field_would_be_found():
    document = next(one for one in documents() if one["kind"] == "Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_every_command_exists_with_these_options():
    found = list(commands())
    assert ["probe", "live"] in found
    assert ["nodes", "--drain", "$HOSTNAME", "--wait"] in found
    with click.Context(warmd) as context:
        for name, *arguments in found:
            command = warmd.get_command(context, name)
            assert command is not None, name
            command.make_context(name, arguments)


def test_every_variable_is_a_setting():
    names = {entry["name"] for one in containers().values() for entry in one["env"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    names |= compose["node"]["environment"].keys() | compose["gateway"]["environment"].keys()
    settings = {f"WARMD_{setting.name.upper()}" for setting in SETTINGS}
    assert {name for name in names if name.startswith("WARMD_")} <= settings


@pytest.mark.slow
def test_probes_request_routes_of_the_gateway(tmp_path):
    app = create_app(DaemonConfig(home=tmp_path), "unix:///nowhere")
    routes = set(app.openapi()["paths"])
    gateway = containers()["Deployment warmd-gateway"]
    for name in ("startup", "liveness", "readiness"):
        assert gateway[f"{name}Probe"]["httpGet"]["path"] in routes


def test_jobs_have_time_to_save_before_their_node_is_killed(tmp_path):
    grace_s = DaemonConfig(home=tmp_path).stop_grace_s
    for name, pod in pods().items():
        if "warmd-node" in name:
            before = pod["containers"][0].get("lifecycle", {}).get("preStop")
            drain_s = int(before["exec"]["command"][-1].split()[1]) if before else 0
            assert pod["terminationGracePeriodSeconds"] > drain_s + grace_s, name


def test_no_container_is_root_or_writes_to_its_image():
    for name, pod in pods().items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            volumes = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_passwords_are_in_secrets_only():
    for name, pod in pods().items():
        for entry in pod["containers"][0]["env"]:
            if "PASSWORD" in entry["name"] or "TOKEN" in entry["name"] or "AUTH" in entry["name"]:
                assert entry["valueFrom"]["secretKeyRef"]["name"] == "warmd", name


def test_policies_and_services_select_pods_that_exist():
    labels = {}
    for document in documents():
        kubernetes = as_kubernetes(document)
        if kubernetes is not None and "template" in kubernetes["spec"]:
            found = kubernetes["spec"]["template"]["metadata"]["labels"]
            assert found["app.kubernetes.io/part-of"] == "warmd"
            labels[found["app"]] = found
    for document in documents():
        if document["kind"] == "Service":
            assert document["spec"]["selector"]["app"] in labels
        if document["kind"] == "NetworkPolicy":
            assert document["spec"]["podSelector"]["matchLabels"]["app"] in labels


def valkey_arguments() -> dict[str, list[str]]:
    """Redis' arguments in the manifest and in the file of Compose."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["redis"]["command"]
    manifest = pods()["StatefulSet warmd-redis"]["containers"][0]["args"]
    return {"kubernetes": manifest, "compose": compose[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["kubernetes", "compose"])
def test_redis_takes_the_arguments_and_loses_nothing(where, tmp_path):
    arguments = [
        str(tmp_path) if word == "/data" else "secret" if "$" in word else word
        for word in valkey_arguments()[where]
    ]
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen(
        [find_binary(None), *arguments, *here], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        connection = redis.Redis(port=port, password="secret")

        def found() -> Any:
            try:
                return connection.config_get("appendonly", "appendfsync", "maxmemory-policy")
            except redis.ConnectionError:
                return None

        assert wait_until(found) == {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
    finally:
        process.kill()
        process.wait()


def test_keda_reads_the_list_of_the_queue():
    scaled = next(one for one in documents() if one["kind"] == "ScaledJob")
    names = [trigger["metadata"]["listName"] for trigger in scaled["spec"]["triggers"]]
    assert names == [queue_key("train")]
