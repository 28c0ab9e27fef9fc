"""The rules, by Prometheus' own tool: they are well formed, and rules_test.yml holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from loadgen.monitor.exporter import Exporter
from loadgen.rundir import Histogram, MetricFamily, MetricSample
from tests.loadgen.monitor.test_exporter import HOSTILE_FAMILIES, put
from tests.observability import names
from tests.observability.programs import program

RULES = names.COMPOSE / "prometheus"


def promtool(*words: str) -> None:
    done = subprocess.run([program("promtool"), *words], cwd=RULES, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_the_configuration_and_the_rules_are_well_formed() -> None:
    promtool("check", "config", "prometheus.yml")


@pytest.mark.prometheus
def test_known_answers() -> None:
    promtool("test", "rules", "rules_test.yml")


@pytest.mark.prometheus
def test_the_exporter_of_hostile_directories_is_well_formed(tmp_path: Path) -> None:
    put(tmp_path, "good")
    for number, family in enumerate(HOSTILE_FAMILIES.values()):
        put(tmp_path, f"bad{number}", families=[family])
    page = Exporter(tmp_path).page()[0]
    words = [program("promtool"), "check", "metrics"]
    done = subprocess.run(words, input=page, capture_output=True, timeout=180)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: it is read, and a name could be better


@pytest.mark.prometheus
def test_the_exporter_of_all_that_there_is_is_clean(tmp_path: Path) -> None:
    of_runs = [name for name in names.GAUGES if "_run_" not in name and "_exporter_" not in name]
    put(
        tmp_path,
        "all",
        families=[
            *(MetricFamily(name, "gauge", "X.", [MetricSample(1)]) for name in of_runs),
            *(MetricFamily(name.removesuffix("_total"), "counter", "X.", [MetricSample(1)]) for name in names.COUNTERS),
            *(
                MetricFamily(name, "histogram", "X.", histograms=[Histogram([1], [1, 0], 0.5)])
                for name in names.HISTOGRAMS
            ),
        ],
    )
    words, page = [program("promtool"), "check", "metrics"], Exporter(tmp_path).page()[0]
    done = subprocess.run(words, input=page, capture_output=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, b"") and b"llm_dissect_training_steps_total" in page


def test_every_alert_has_a_known_answer_for_and_against() -> None:
    cases = yaml.safe_load((RULES / "rules_test.yml").read_text())["tests"]
    cases_of_alerts = [alert for case in cases for alert in case.get("alert_rule_test", [])]
    fires = {alert["alertname"] for alert in cases_of_alerts if alert.get("exp_alerts")}
    silent = {alert["alertname"] for alert in cases_of_alerts if not alert.get("exp_alerts")}
    assert fires == silent == {rule["alert"] for rule in names.rules() if "alert" in rule}


def test_alerts_say_what_is_wrong() -> None:
    for rule in names.rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"].endswith((".", "?"))
