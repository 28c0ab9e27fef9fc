"""`loadgen.report/1`: what report.json holds, field for field and in this order. Latencies are in milliseconds; None is
what the records, or the server, do not define.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.monitor.server_view import GpuStats, ServerStats
from loadgen.report.finding import Finding
from loadgen.report.metrics import Summary
from loadgen.rundir import Ceiling, WireFacts
from loadgen.rundir.cluster_facts import ClusterFacts
from loadgen.rundir.emulation import Emulation, Timetable
from loadgen.rundir.launch_facts import LaunchFacts
from loadgen.steady.changes import Change
from loadgen.steady.keeping_up import KeepingUp
from loadgen.steady.window import Estimate

SCHEMA = "loadgen.report/1"


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Measured requests. planned: None where as many were sent as the duration held. by_outcome: counts by the names of
    OUTCOMES."""

    planned: int | None
    ok: int
    failed: int
    by_outcome: dict[str, int]


class TokenCounts(msgspec.Struct, frozen=True):
    """Of the requests that ended ok, by the server's own count."""

    prompt: int | None
    output: int | None


class Throughput(msgspec.Struct, frozen=True, omit_defaults=True):
    """items_per_s: of replies that are no texts, which have no output tokens."""

    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    items_per_s: float | None = None


class ItemStats(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of the requests that ended ok, each answered with a vector or a score. batch: how many a request had.
    tokens_mean: of one, by the server's count; None where it does not count."""

    items: int
    batch_mean: float
    batch_max: int
    tokens_mean: float | None


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """Images beside the prompts, so many of each request. tokens_mean: of one, as the server counts prompts beyond
    their text; None where it does not count."""

    count: int
    size: str
    tokens_mean: float | None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every limit, and how many of them a second (`request_goodput` of `vllm bench serve`); None
    where a limited latency cannot be known."""

    slos_ms: dict[str, float]
    good: int | None
    request_goodput: float | None


class Economics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user sees, what a GPU gives, what tokens cost. interactivity: tokens/s of one user, 1 / tpot p50.
    tps_per_user: MLPerf's, 1 / tpot p90. gpus: how many share the model, None where nothing says. Prices are in
    `currency`, of all GPUs over the time that the throughput is of; None without a price or a number of GPUs."""

    interactivity_tokens_per_s: float | None
    tps_per_user: float | None
    gpus: int | None = None
    output_tokens_per_s_per_gpu: float | None = None
    total_tokens_per_s_per_gpu: float | None = None
    currency: str | None = None
    gpu_hour_price: float | None = None
    price_per_million_output_tokens: float | None = None
    price_per_million_tokens: float | None = None
    goodput_requests_per_price: float | None = None


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """A load whose prompts begin alike; tokens of the requests that ended ok. shareable_tokens: what an earlier request
    of the load has sent. cached_tokens: what the server took from its prefix cache, by its replies or, where those do
    not tell, by its own counters; None where neither does. Warm is a request with some of that, by its reply or, where
    replies do not tell, with something to share; cold is every other."""

    prompt_tokens: int | None
    shareable_tokens: int
    cached_tokens: int | None
    cached_by: Literal["replies", "server"] | None
    cached_of_prompt_ratio: float | None
    cached_of_shareable_ratio: float | None
    warm_by: Literal["cached_tokens", "shared_tokens"]
    ttft_cold_ms: Summary
    ttft_warm_ms: Summary


class ServerRequests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests that ended ok and of which the server gave an account in its replies. metrics: by its own clock, as
    far as it tells: queue_ms, prefill_ms, ttft_ms, tpot_ms, e2el_ms, load_ms. client: what the client measured of the
    same requests."""

    requests: int
    metrics: dict[str, Summary]
    client: dict[str, Summary]
    retractions: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


class RequestStage(msgspec.Struct, frozen=True):
    """One part of a request in the mean, by the server's own clock and, where the client has it too, by the client's.
    n: requests that the server counted, 0 where it does not say, and client_n: that ended meanwhile by the client; by:
    where the server says so."""

    name: str
    server_ms: float
    client_ms: float | None
    n: int
    by: str
    client_n: int = 0

    @property
    def between_ms(self) -> float | None:
        """What the client's time has beyond the server's."""
        return None if self.client_ms is None else self.client_ms - self.server_ms


class Burst(msgspec.Struct, frozen=True):
    """How synchronous the requests due at t = 0 were."""

    requests: int
    send_spread_ms: float


class Connecting(msgspec.Struct, frozen=True):
    """Milliseconds that n connections took to open; of several client processes, those of the slowest."""

    n: int
    p50: float | None
    max: float | None


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the client processes used and how late they were: the worst of them, but for the CPU and memory of all."""

    processes: int
    cpu_us_per_event: float | None
    cpu_peak_ratio: float | None
    peak_rss_mb: float
    loop_lag_p50_ms: float | None
    loop_lag_p99_ms: float | None
    loop_lag_max_ms: float | None
    receive_lag_p50_ms: float | None
    receive_lag_p99_ms: float | None
    receive_lag_max_ms: float | None


class CeilingUse(Ceiling, kw_only=True):
    """What the client can take, beside the busiest second of the run. headroom_ratio: how many times as much."""

    peak_events_per_s: float | None
    headroom_ratio: float | None


class GpuUse(GpuStats, kw_only=True):
    """What the GPUs needed, and the energy of a token of the requests that ended ok."""

    j_per_output_token: float | None


class AskedStats(msgspec.Struct, frozen=True, kw_only=True):
    """The requests for one LoRA adapter, or of one priority; of those that ended ok their ttft, tpot and e2el. name: of
    the adapter, empty for the model itself; or the priority."""

    name: str
    requests: int
    ok: int
    metrics: dict[str, Summary]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Replies that ended ok and thought before they answered. thinking_ratio: of their output tokens. Of those that
    told it apart: thinking: from the first token to the answer's first; answer_tpot: between the tokens of the
    answer."""

    replies: int
    thinking_tokens_mean: float
    thinking_ratio: float
    thinking_ms: Summary
    answer_tpot_ms: Summary


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the client gave up, and whether the server stopped its work for them: told by others that waited.
    events: that had come of their replies. refilled_ms: of those that were given up, and of replies that ended, while
    others waited: from then until as many replies were under way as before. held_ms: how long the former's replies
    would have gone on."""

    requests: int
    events: int
    slots: Literal["freed", "held", "unknown"]
    refilled_abandoned_ms: Summary
    refilled_ended_ms: Summary
    held_ms: Summary


class Resent(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were sent again after a server had no room (--retries). sent: how many times in all. waited_ms: of
    each, from the first time it was sent to the last."""

    requests: int
    ok: int
    sent: int
    waited_ms: Summary


class Stall(msgspec.Struct, frozen=True):
    """When no event of any reply arrived, though replies were under way, for far longer than a step; seconds of the
    run."""

    start_s: float
    end_s: float


class ClientStall(msgspec.Struct, frozen=True):
    """When the client stood still; seconds of the run. requests: whose stamps fell into it, or were due in it."""

    start_s: float
    end_s: float
    requests: int


class SteadyWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The steady state of a run: from when to when, seconds of the run. requests: those that were sent in it, whose
    latencies these are: by name, then mean, p50, p90, p95 and p99; too few for a percentile's interval have none.
    replies_to_s: until when those were sent whose replies end in it, of which tpot and e2el are."""

    from_s: float
    to_s: float
    replies_to_s: float = 0.0
    requests: int
    throughput: dict[str, Estimate]
    metrics: dict[str, dict[str, Estimate]]


class Steady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the numbers describe a steady state. keeping_up: whether the server kept up with the requests or sessions
    that arrived; None where none arrives by itself, as in a closed loop. window: its steady state; why: where it has
    none, one clause. peak: of a closed loop, the most that were in flight. change: of the server's pace."""

    unit: Literal["requests", "sessions"] = "requests"
    keeping_up: KeepingUp | None = None
    window: SteadyWindow | None = None
    why: str = ""
    peak: int | None = None
    change: Change | None = None


class PhaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the load, from `start_s` to before `end_s` seconds of the run. requests: those due in it; metrics:
    their ttft, tpot and e2el, of those that ended ok, by the names of METRICS. offered: requests due a second;
    finished: requests that ended ok a second, whenever they were due."""

    name: str
    start_s: float
    end_s: float
    requests: int
    offered_requests_per_s: float
    finished_requests_per_s: float
    metrics: dict[str, Summary]


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations. ended: those whose turns all ended ok; None where turns that were planned have no record. failed:
    those with a turn that did not end ok. open: from the first turn due to the last ended or failed; thinking: from the
    end of a reply to the next turn due. think_time: how long that was, of the turns that were sent; turn_lag: how long
    after that they left (sent - due). Of sessions whose turns all ended ok: task: from their first turn due to their
    last reply's end; tokens_wait: of that, how long a turn was due and not yet answered; tools: the rest, in which
    tools ran or people thought."""

    begun: int
    ended: int | None
    failed: int
    turns: int
    open_max: int
    thinking_max: int
    offered_sessions_per_s: float | None
    think_time_ms: Summary
    turn_lag_ms: Summary
    task_ms: Summary | None = None
    tokens_wait_ms: Summary | None = None
    tools_ms: Summary | None = None


class TurnStats(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one number, or of a few neighbouring ones, of all sessions. Tokens (means, by the server's own
    count; cached None where no reply of the run tells) and metrics: of those that ended ok."""

    from_turn: int
    to_turn: int
    requests: int
    ok: int
    prompt_tokens_mean: float | None
    cached_tokens_mean: float | None
    metrics: dict[str, Summary]


class LengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the measured requests; of sessions, what each turn adds, as far as that is known. law: what they
    were drawn from; empty where that is no law."""

    law: str = ""
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: int


class PromptQuartile(msgspec.Struct, frozen=True, kw_only=True):
    """A quarter of the requests that ended ok, by prompt length: from and to how many tokens."""

    from_tokens: int
    to_tokens: int
    ttft_ms: Summary


class ErrorCount(msgspec.Struct, frozen=True):
    """How many requests ended with one outcome and message."""

    count: int
    outcome: str
    message: str


class Verdict(msgspec.Struct, frozen=True):
    """valid: no finding is `invalid`. findings: the worst first."""

    valid: bool
    findings: list[Finding]


class Numbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report before its verdict. convention_differs: what to expect of that tool's definitions. metrics: by the names
    of METRICS. offered_requests_per_s: the mean rate at which requests were due, as it was drawn; None without a rate,
    and for sessions, which have their own. retried_connections: requests that were sent again because the server had
    closed the connection that they reused.
    ttft_answer_ms: from the request to the first event of the answer, of replies whose reasoning was told apart.
    reply_models: models that replies named in place of the one that was asked for, and how many did.
    stamps: the server's own times beside the client's.
    imported: the load generator whose results these are, where it was not this one.
    quick_acks: whether each read was acknowledged at once, as ordinary clients do not.
    ttft_of_delivery: replies came in pieces, and ttft is when the first of them was delivered.
    Left out where they say nothing: asked lengths that are all one, ttft by prompt length where the prompts' lengths
    are about one, phases of a load that has none, stalls of a run without any, sharing where nothing is shared,
    sessions and turns where there are none, cluster where one machine sent it all, server_requests where replies tell
    nothing of the server's own times, stalls of the client that move no statistic, steady of a burst.
    late_statistics: by metric, those that such stalls move."""

    schema: str
    version: str
    run_id: str
    backend: str
    model: str
    server_version: str | None
    arrival: str
    emulated: bool
    convention: str
    convention_differs: str
    offered_requests_per_s: float | None
    requests: Requests
    tokens: TokenCounts
    duration_s: float | None
    throughput: Throughput
    metrics: dict[str, Summary]
    goodput: Goodput | None
    burst: Burst | None
    connect_ms: Connecting | None
    retried_connections: int
    client: ClientUse | None
    ceiling: CeilingUse | None
    wire: WireFacts | None = None
    quick_acks: bool = False
    imported: str = ""
    emulation: Emulation | None
    launch: LaunchFacts | None
    server: ServerStats | None
    gpus: GpuUse | None
    errors: list[ErrorCount]
    asked_prompt_tokens: LengthStats | None = None
    asked_output_tokens: LengthStats | None = None
    ttft_answer_ms: Summary | None = None
    ttft_of_delivery: bool = False
    ttft_by_prompt: list[PromptQuartile] = []
    sharing: Sharing | None = None
    phases: list[PhaseStats] = []
    stalls: list[Stall] = []
    sessions: SessionStats | None = None
    turns: list[TurnStats] = []
    cluster: ClusterFacts | None = None
    server_requests: ServerRequests | None = None
    client_stalls: list[ClientStall] = []
    late_statistics: dict[str, list[str]] = {}
    steady: Steady | None = None
    timetable: Timetable | None = None
    full_slots_s: float | None = None  # of a run whose warm-up handed its slots over: what throughput divides by
    reply_models: dict[str, int] = {}
    stamps: list[RequestStage] = []
    economics: Economics | None = None
    abandoned: Abandoned | None = None
    resent: Resent | None = None
    by_adapter: list[AskedStats] = []
    by_priority: list[AskedStats] = []
    reasoning: Reasoning | None = None
    items: ItemStats | None = None
    images: ImageStats | None = None


class Report(Numbers, frozen=True, kw_only=True):
    verdict: Verdict
