"""What a report says of several machines: those that were lost, and clocks that are not known well."""

from __future__ import annotations

from loadgen.report import build, cluster, text
from loadgen.report.finding import Finding
from loadgen.rundir.cluster_facts import ClusterFacts
from loadgen.rundir.records import table
from tests.loadgen.cluster.facts import cluster as facts_of
from tests.loadgen.cluster.facts import node
from tests.loadgen.tables import facts, manifest, request


def found(of: ClusterFacts, ttft_ms: float | None = 100.0) -> dict[str, Finding]:
    return {finding.code: finding for finding in cluster.find(of, ttft_ms)}


def test_machines_that_live_and_agree_on_the_time_are_no_finding() -> None:
    assert found(facts_of(node(1), node(2))) == {}


def test_a_clock_is_told_beyond_a_millisecond_or_a_twentieth_of_ttft() -> None:
    for bound_ms, ttft_ms, told in (
        (1.1, 100.0, True), (0.9, 100.0, False), (0.9, 10.0, True), (0.4, 10.0, False), (1.1, None, True),
    ):  # fmt: skip
        finding = found(facts_of(node(1), node(2, clock_bound_ms=bound_ms)), ttft_ms).get("CLOCK")
        assert (finding is not None) == told
        if finding is not None:
            assert finding.severity == "warning" and "10.0.0.2 are known within" in finding.message


def test_a_clock_that_was_never_seen_is_told() -> None:
    finding = found(facts_of(node(1), node(2, clock_bound_ms=None)))["CLOCK"]
    assert "10.0.0.2 are not known" in finding.message


def test_a_lost_machine_makes_a_run_invalid_and_is_named_with_what_to_do() -> None:
    finding = found(facts_of(node(1), node(2, lost="its machine has left the cluster", left_there=True)))["NODE_LOST"]
    assert finding.severity == "invalid"
    assert "1 of 2 machines" in finding.message and "10.0.0.2: its machine has left" in finding.message
    assert "loadgen collect" in finding.advice and "10.0.0.2" in finding.advice
    home = found(facts_of(node(1), node(2, lost="its actor died")))["NODE_LOST"]
    assert "collect" not in home.advice


def test_the_processes_of_a_lost_machine_are_not_told_twice() -> None:
    lost = facts_of(node(1), node(2, lost="its actor died"))
    rows = table([request(at) for at in range(99)] + [request(99, outcome="node_lost", sent_ns=None)])
    report = build.build(manifest(cluster=lost, client_processes=2, requests_planned=100), rows, [facts()])
    codes = {finding.code for finding in report.verdict.findings}
    assert "NODE_LOST" in codes and "KILLED" not in codes and not report.verdict.valid
    assert report.requests.by_outcome == {"ok": 99, "node_lost": 1}


def test_the_text_has_a_line_a_machine_and_escapes_its_name() -> None:
    evil = node(2, name="\x1b[31mn2", lost="it \x1b[0m died")
    rows = table([request(at) for at in range(9)])
    report = build.build(manifest(cluster=facts_of(node(1), evil, start_spread_ms=0.3)), rows, [facts()])
    shown = text.render(report)
    assert "Machines: 2 (STRICT_SPREAD on Ray 10.0.0.1:6379)" in shown
    assert "clocks known within 0.040 ms; first requests left within 0.30 ms" in shown
    assert "\x1b" not in shown and "LOST: it" in shown
