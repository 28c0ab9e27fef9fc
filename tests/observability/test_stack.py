"""compose/docker-compose.yml: pinned images, everything on 127.0.0.1, nobody's password, and files that are there."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.loadgen.server.test_compose import compose_program
from tests.observability import names

FILE = names.COMPOSE / "docker-compose.yml"


def services() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text())["services"])


def config() -> Any:
    return yaml.safe_load((names.COMPOSE / "prometheus" / "prometheus.yml").read_text())


def targets() -> dict[str, str]:
    return {job["job_name"]: job["static_configs"][0]["targets"][0] for job in config()["scrape_configs"]}


def test_images_are_pinned_by_version() -> None:
    for service in services().values():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), service["image"]


def test_nothing_listens_beyond_this_machine() -> None:
    parts = services()
    assert all(service["network_mode"] == "host" and "ports" not in service for service in parts.values())
    assert "--web.listen-address=127.0.0.1:9090" in parts["prometheus"]["command"]
    assert parts["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert parts["dcgm-exporter"]["environment"]["DCGM_EXPORTER_LISTEN"] == targets()["dcgm"] == "127.0.0.1:9400"
    assert parts["dcgm-exporter"]["profiles"] == ["gpu"]


def test_nobody_can_log_in() -> None:
    settings = services()["grafana"]["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == settings["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not [name for name in settings if "PASSWORD" in name]


def test_what_is_mounted_is_there_and_read_only() -> None:
    volumes = yaml.safe_load(FILE.read_text())["volumes"]
    for service in services().values():
        for volume in service.get("volumes", []):
            source, _, how = volume.partition(":")
            if source.startswith("."):
                assert (names.COMPOSE / source).is_dir() and how.endswith(":ro"), volume
            else:
                assert source in volumes


def test_servers_are_scraped_where_their_compose_files_publish_them() -> None:
    published = set()
    for name in ("vllm", "lightllm", "tgi"):
        (service,) = yaml.safe_load((names.COMPOSE / f"{name}.yaml").read_text())["services"].values()
        published |= {port.rpartition(":")[0] for port in service["ports"]}
    assert published == {targets()["server"]}


@pytest.mark.parametrize(
    ("metric", "server"),
    [("vllm:num_requests_running", "vllm"), ("tgi_queue_size", "tgi"), ("lightllm_batch_current_size", "lightllm")],
)
def test_a_metric_tells_its_server(metric: str, server: str) -> None:
    (job,) = (job for job in config()["scrape_configs"] if job["job_name"] == "server")
    (relabel,) = job["metric_relabel_configs"]
    assert re.fullmatch(relabel["regex"], metric)[1] == server  # type: ignore[index]


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    provisioning = names.COMPOSE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (bench,) = (job for job in config()["scrape_configs"] if job["job_name"] == "bench")
    assert (source["uid"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    assert source["jsonData"]["timeInterval"] == bench["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "llm-dissect.yaml").read_text())["providers"]
    grafana = services()["grafana"]
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"]) and (names.DASHBOARDS / home.rpartition("/")[2]).is_file()


def test_docker_compose_takes_it() -> None:
    program = compose_program()
    if program is None:
        pytest.skip("Docker Compose 2 is not installed")
    words = [*program, "-f", str(FILE), "--profile", "gpu", "config"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(services())
