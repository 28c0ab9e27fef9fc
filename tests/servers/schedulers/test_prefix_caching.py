"""The schedulers with a prefix cache: what must hold for any load, hits that block arithmetic gives, known answers."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.schedulers import Sequence, Step
from servers.schedulers.blocks import BlockCache
from servers.schedulers.lightllm import CachingLightLLMNow, LightLLMNow
from servers.schedulers.prefixes import Position, chains
from servers.schedulers.radix import BlockTree, RadixNode, RadixTree, Stretch, cut, length, shared, stretch
from servers.schedulers.tgi import CachingTgi3, Tgi3
from servers.schedulers.vllm import CachingVllmV1, VllmV1
from tests.servers.schedulers.test_schedulers import Make, Request, Run, made

# with and without, limits so small that small loads meet them
PAIRS: dict[str, tuple[Make, Make]] = {
    "vllm@v1": (
        lambda kv: made(CachingVllmV1, kv, max_running=6, budget_tokens=48),
        lambda kv: made(VllmV1, kv, max_running=6, budget_tokens=48),
    ),
    "vllm@v1, one step at a time": (
        lambda kv: made(CachingVllmV1, kv, max_running=6, budget_tokens=48, async_scheduling=False),
        lambda kv: made(VllmV1, kv, max_running=6, budget_tokens=48, async_scheduling=False),
    ),
    "tgi@3": (
        lambda kv: made(CachingTgi3, kv, max_batch_prefill_tokens=40, max_concurrent_requests=12),
        lambda kv: made(Tgi3, kv, max_batch_prefill_tokens=40, max_concurrent_requests=12),
    ),
    "tgi@3, paged": (
        lambda kv: made(CachingTgi3, kv, max_batch_prefill_tokens=96, chunking=False, block_tokens=16),
        lambda kv: made(Tgi3, kv, max_batch_prefill_tokens=96, chunking=False, block_tokens=16),
    ),
    "lightllm@now": (
        lambda kv: made(CachingLightLLMNow, kv, batch_max_tokens=64, running_max_req_size=6),
        lambda kv: made(LightLLMNow, kv, batch_max_tokens=64, running_max_req_size=6),
    ),
    "lightllm@now, outputs unknown": (
        lambda kv: made(CachingLightLLMNow, kv, batch_max_tokens=64, ignores_eos=False, router_token_ratio=2.0),
        lambda kv: made(LightLLMNow, kv, batch_max_tokens=64, ignores_eos=False, router_token_ratio=2.0),
    ),
}

keys = st.integers(0, 3)
pieces = st.lists(st.tuples(keys, st.integers(0, 40)), max_size=3).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prompts of at most 160 tokens, of pieces that others may have too, and often a rest of their own, or a reply of
    such pieces."""
    segments = draw(pieces)
    shared = sum(tokens for _, tokens in segments)
    prompt = max(1, shared + draw(st.sampled_from([0, 0, 1, 17, 40, -1, -30])))
    output = max(draw(st.integers(1, 60)), shared - prompt)
    if shared and prompt == shared and (reply := draw(st.none() | keys)) is not None:
        segments = (*segments, (reply, draw(st.integers(1, output))))
    leaves = draw(st.none() | st.none() | st.integers(0, 80))
    return Request(prompt, output, draw(st.integers(0, 40)), leaves, segments)


loads = st.lists(requests(), max_size=25)


def check(scheduler: Any) -> None:
    """Nothing is lost and nothing is there twice."""
    if isinstance(scheduler, CachingVllmV1):
        cache = scheduler.cache
        held_runs = {held: [run.up_to(end) for run, end in held.runs] for held in cache._held.values()}
        holders = Counter(run for runs in held_runs.values() for run in itertools.chain.from_iterable(runs))
        runs = list(itertools.chain.from_iterable(cache._runs.values()))
        assert all(run.low < run.high and run.holders == holders[run] for run in runs)
        assert holders.keys() <= set(runs)
        idle = [run for run in runs if not run.holders]
        waits = [(run.freed, -run.low, run) for parts in cache._idle.values() for run in reversed(parts)]
        assert [each[:2] for each in waits] == sorted(each[:2] for each in waits)
        assert list(cache._idle) == sorted({run.freed for run in idle})
        assert sorted(id(run) for *_, run in waits) == sorted(map(id, idle))
        free = cache.blank + sum(run.high - run.low for run in idle)
        own = sum(sequence.blocks - held.published for sequence, held in cache._held.items())
        assert free + sum(run.high - run.low for run in holders) + own == scheduler._total
        assert scheduler._free == free
        for sequence, held in cache._held.items():
            blocks = [range(run.low, run.high) for run in itertools.chain.from_iterable(held_runs[held])]
            assert list(itertools.chain.from_iterable(blocks)) == list(range(held.published))
            assert held.published <= sequence.blocks
    else:
        check_tree(scheduler.tree)
        if isinstance(scheduler, CachingTgi3):
            own = sum(s.blocks - scheduler._taken_over[s][1] // scheduler._block_tokens for s in scheduler._running)
            assert scheduler._blank + own + scheduler.tree.total_tokens // scheduler._block_tokens == scheduler._total
        else:
            own = scheduler.used_tokens - scheduler.tree.held_tokens
            assert own + scheduler.tree.total_tokens <= scheduler.kv_tokens


def check_tree(tree: RadixTree) -> None:
    nodes = [tree._root]
    for node in nodes:
        nodes += node.children.values()
        for first, child in node.children.items():
            assert child.parent is node
            assert tree._first(child.tokens) == first
            assert length(child.tokens) and not length(child.tokens) % tree._unit
        assert node is tree._root or node.holders >= max((child.holders for child in node.children.values()), default=0)
    assert sum(length(node.tokens) for node in nodes) == tree.total_tokens
    assert sum(length(node.tokens) for node in nodes[1:] if node.holders) == tree.held_tokens


class CheckedRun(Run):
    def _check(self) -> None:
        super()._check()
        check(self.scheduler)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60, deadline=None)
@given(load=loads, kv_tokens=st.integers(260, 900))
def test_all_get_their_tokens_and_nothing_is_lost(name: str, load: list[Request], kv_tokens: int) -> None:
    run = CheckedRun(PAIRS[name][0](kv_tokens), load)
    for sequence in run.admitted:
        assert run.tokens[sequence] == sequence.output or sequence in run.cancelled
        assert sequence.done
        assert 0 <= sequence.cached < sequence.prompt
    scheduler = run.scheduler
    assert (scheduler.used_tokens, scheduler.waiting, scheduler.running) == (0, 0, 0)
    assert scheduler.cached_tokens == sum(sequence.cached for sequence in run.admitted)
    assert scheduler.cached_tokens <= scheduler.queried_tokens
    assert Run(PAIRS[name][0](kv_tokens), load).trace == run.trace


@pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("tgi")])
@settings(max_examples=30, deadline=None)
@given(load=loads)
def test_where_nothing_is_shared_and_nobody_is_preempted_the_cache_changes_no_step(
    name: str, load: list[Request]
) -> None:
    load = [request._replace(segments=()) for request in load]
    with_cache, without = (Run(make(40_000), load) for make in PAIRS[name])
    assert with_cache.trace == without.trace
    assert with_cache.scheduler.cached_tokens == 0


def together(request: Request, other: Request) -> int:
    """How many tokens the prompt of a request shares with what the other has when it has ended, by the tokens."""
    one = [(key, offset) for key, tokens in request.segments for offset in range(tokens)][: request.prompt]
    two = [(key, offset) for key, tokens in other.segments for offset in range(tokens)]
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.parametrize("name", ["vllm@v1", "vllm@v1, one step at a time", "lightllm@now"])
@settings(max_examples=60, deadline=None)
@given(load=loads)
def test_with_ample_memory_one_after_the_other_hits_what_arithmetic_allows(name: str, load: list[Request]) -> None:
    load = [request._replace(gap=400, leaves=None) for request in load]
    run = Run(PAIRS[name][0](40_000), load)
    for index, sequence in enumerate(run.admitted):
        request = load[index]
        allowed = 0
        for other in load[:index]:
            # vLLM does not compute a reply's last token, LightLLM does for nothing
            computed = other.prompt + other.output - (1 if name.startswith("vllm") else 0)
            common = min(together(request, other), computed, request.prompt - 1)
            allowed = max(allowed, common // 16 * 16 if name.startswith("vllm") else common)
        assert sequence.cached == allowed


@settings(max_examples=60, deadline=None)
@given(load=loads, block_tokens=st.sampled_from([1, 16]))
def test_tgi_one_after_the_other_hits_the_prompts_that_came_before(load: list[Request], block_tokens: int) -> None:
    load = [request._replace(gap=400, leaves=None) for request in load]
    run = Run(made(CachingTgi3, 40_000, block_tokens=block_tokens), load)
    for index, sequence in enumerate(run.admitted):
        prompts = [min(together(load[index], other), other.prompt) for other in load[:index]]
        most = max(prompts, default=0) // block_tokens * block_tokens
        assert sequence.cached == min(most, sequence.prompt - 1)


# what requests have in common


def named(*segments: tuple[int, int], output: int = 1, own: int = 0, reply_key: int | None = None) -> Sequence:
    prompt = sum(tokens for _, tokens in segments) + own
    return Sequence(0, prompt, output, segments if reply_key is None else (*segments, (reply_key, output)))


def found(one: Sequence, other: Sequence) -> int:
    """Of a pool in which the blocks of one request can be found: how many of them the other finds."""
    cache = BlockCache(1000, 16)
    cache.find(one, 0)
    cache.publish(one, one.prompt + one.output)
    return cache.find(other, 1000)[0]


def test_pieces_of_one_key_begin_alike_and_what_follows_does_not_have_to() -> None:
    longer, shorter = named((1, 40)), named((1, 20), (2, 20))
    assert shared(stretch(longer), stretch(shorter)) == 20
    assert found(longer, shorter) == 1


def test_a_piece_is_the_same_only_after_the_same() -> None:
    assert shared(stretch(named((1, 16), (3, 16))), stretch(named((2, 16), (3, 16)))) == 0
    assert shared(stretch(named((1, 16), (3, 16))), stretch(named((1, 17), (3, 16)))) == 16
    assert shared(stretch(named((1, 10), (1, 10))), stretch(named((1, 20)))) == 10


def test_what_has_no_key_is_shared_with_nobody() -> None:
    assert shared(stretch(named((1, 16), own=16)), stretch(named((1, 16), own=16))) == 16
    assert shared(stretch(named(own=16)), stretch(named(own=16))) == 0
    assert shared(stretch(named((1, 9), output=9)), stretch(named((1, 9), output=9))) == 9


def test_a_reply_is_found_in_the_prompt_of_the_next_turn() -> None:
    turn = named((1, 20), output=30, reply_key=2)
    following = named((1, 20), (2, 30), (3, 10))
    assert shared(stretch(turn), stretch(following)) == 50
    assert found(turn, following) == 3


@settings(max_examples=300, deadline=None)
@given(one=pieces, other=pieces)
def test_common_tokens_are_those_of_made_up_text(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    def text(segments: tuple[Any, ...]) -> list[tuple[int, int]]:
        return [(key, offset) for key, tokens in segments for offset in range(tokens)]

    pairs = zip(text(one), text(other), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert shared(stretch(named(*one)), stretch(named(*other))) == common
    assert found(named(*one), named(*other)) == common // 16


class Block:
    """One block of a pool that knows each by itself."""

    def __init__(self, content: Position) -> None:
        self.content = content
        self.holders = 1
        self.freed = 0


class BlockByBlock:
    """`known`: of the same content that first which was there first."""

    def __init__(self, blocks: int) -> None:
        self.blank, self.known, self._freed = blocks, list[Block](), 0

    def find(self, contents: list[Position]) -> list[Block]:
        firsts = [next((block for block in self.known if block.content == content), None) for content in contents]
        return [block for block in itertools.takewhile(bool, firsts) if block]

    def take(self) -> None:
        if self.blank:
            self.blank -= 1
        else:
            self.known.remove(min((block for block in self.known if not block.holders), key=lambda each: each.freed))

    def release(self, held: list[Block]) -> None:
        for block in reversed(held):
            self._freed += 1
            block.holders -= 1
            block.freed = self._freed


@pytest.mark.parametrize("seed", range(60))
def test_runs_of_blocks_are_found_and_lost_as_blocks_are_one_by_one(seed: int) -> None:
    """Requests that take over what there is, fill blocks a few at a time, let go, and sometimes come back."""
    rng = random.Random(seed)
    total = rng.choice([20, 60])
    cache, other = BlockCache(total, 4), BlockByBlock(total)
    running: dict[Sequence, list[Block]] = {}
    waiting = [
        named(
            *[(rng.randint(0, 1), rng.choice([5, 8, 16, 40])) for _ in range(rng.randint(1, 3))], own=rng.choice([0, 9])
        )
        for _ in range(100)
    ]
    contents = {
        each: [(chain, offset) for chain, tokens in chains(each) for offset in range(tokens)][3::4] for each in waiting
    }
    for _ in range(600):
        if waiting and rng.random() < 0.4:
            sequence = waiting[-1]
            most = rng.choice([rng.randint(0, sequence.prompt // 4), sequence.prompt // 4])
            same = other.find(contents[sequence][:most])
            found, idle = cache.find(sequence, most)
            assert (found, idle) == (len(same), sum(not block.holders for block in same))
            sequence.blocks = -(-sequence.prompt // 4)
            free = other.blank + sum(not block.holders for block in other.known)
            if sequence.blocks - found + idle <= free:
                waiting.pop()
                running[sequence] = same
                cache.hold(sequence, found)
                for block in same:
                    block.holders += 1
                cache.take(sequence.blocks - found)
                for _ in range(sequence.blocks - found):
                    other.take()
        elif running:
            sequence = rng.choice(list(running))
            held = running[sequence]
            if len(held) < sequence.prompt // 4 and rng.random() < 0.8:
                whole = rng.randint(len(held), sequence.prompt // 4)
                cache.publish(sequence, 4 * whole + rng.randint(0, 3))
                new = [Block(content) for content in contents[sequence][len(held) : whole]]
                other.known += new
                held += new
            else:
                blank = sequence.blocks - len(held)
                other.blank += blank
                other.release(running.pop(sequence))
                assert cache.release(sequence) == blank + sum(not block.holders for block in held)
                sequence.blocks = 0
                if rng.random() < 0.5:
                    waiting.append(sequence)
                else:
                    cache.forget(sequence)
        assert (cache.blank, cache.findable) == (other.blank, len({block.content for block in other.known}))


def test_pieces_that_differ_have_chains_that_differ() -> None:
    draw = random.Random(1)
    firsts = {(draw.randrange(1000), draw.randrange(1, 1000), draw.randrange(1000)) for _ in range(200_000)}
    seen = {tuple(chains(named((a, tokens), (b, 5))))[1][0] for a, tokens, b in firsts}
    assert len(seen) == len(firsts)
    keys = [0, -1, -2, -3, 1, 2**61 - 1, 2**61, 2**32, -(2**32), 2**63 - 1, -(2**63)]
    assert len({next(chains(named((key, 5))))[0] for key in keys}) == len(keys)


# vLLM V1


def serve(scheduler: Any, *sequences: Sequence) -> list[Step]:
    """All of them together, to the end."""
    for sequence in sequences:
        scheduler.admit(sequence)
        scheduler.add(sequence)
    under_way: deque[Step] = deque()
    done: list[Step] = []
    while True:
        while len(under_way) < scheduler.depth and (step := scheduler.schedule()) is not None:
            under_way.append(step)
        if not under_way:
            return done
        done.append(under_way.popleft())
        scheduler.finish(done[-1])


def test_vllm_a_prompt_that_is_known_whole_computes_its_last_block() -> None:
    scheduler = made(CachingVllmV1, 16 * 100)
    serve(scheduler, named((1, 64)))
    first = named((1, 64))
    (step,) = serve(scheduler, first)
    assert (first.cached, step.prefill_tokens, step.prefill_work) == (48, 16, 16 * (48 + 8))
    longer = named((1, 65))
    (step,) = serve(scheduler, longer)
    assert (longer.cached, step.prefill_tokens) == (64, 1)
    assert (scheduler.queried_tokens, scheduler.cached_tokens) == (64 + 64 + 65, 48 + 64)


def test_vllm_of_one_burst_all_but_the_first_find_the_prefix_in_the_same_step() -> None:
    scheduler = made(CachingVllmV1, 16 * 1000)
    burst = [named((1, 160), own=30) for _ in range(5)]
    step = serve(scheduler, *burst)[0]
    assert [sequence.cached for sequence in burst] == [0, 160, 160, 160, 160]
    assert step.prefill_tokens == 190 + 4 * 30
    assert scheduler._total - scheduler._free == 0


def test_vllm_counts_shared_blocks_once() -> None:
    scheduler = made(CachingVllmV1, 16 * 101, async_scheduling=False)
    for sequence in (named((1, 160), own=8, output=2), named((1, 160), own=8, output=2)):
        scheduler.add(sequence)
    assert scheduler.schedule() is not None
    assert scheduler.used_tokens == 16 * (10 + 1 + 1)


def test_vllm_finds_a_reply_up_to_the_last_block_that_was_computed_whole() -> None:
    for output, known in ((32, 16), (33, 32)):  # a reply's last token is not computed
        scheduler = made(CachingVllmV1, 16 * 100)
        serve(scheduler, named((1, 16), output=output, reply_key=2))
        turn = named((1, 16), (2, output), (3, 40))
        serve(scheduler, turn)
        assert turn.cached == 16 + known


def test_vllm_gives_up_the_end_of_what_was_let_go_first() -> None:
    scheduler = made(CachingVllmV1, 16 * 11, async_scheduling=False)  # ten blocks
    serve(scheduler, named((1, 64)))
    serve(scheduler, named((2, 64)))
    serve(scheduler, named((3, 32 + 16), own=1))  # two blank ones, and the last two of key 1
    kept = [named((key, 64), own=1) for key in (2, 1)]
    serve(scheduler, kept[0])
    assert kept[0].cached == 64
    serve(scheduler, kept[1])
    assert kept[1].cached < 64


def test_vllm_a_preempted_request_finds_its_own_blocks_and_that_is_not_counted() -> None:
    prefilled = []
    for kind in (VllmV1, CachingVllmV1):
        scheduler = made(kind, 16 * 9, async_scheduling=False)  # eight blocks
        first, second = named(own=48, output=30), named(own=48, output=30)
        steps = serve(scheduler, first, second)
        assert (first.preemptions, second.preemptions) == (0, 1)
        prefilled.append([step.prefill_tokens for step in steps if step.prefill_rows])
        assert second.cached == scheduler.cached_tokens == 0
    # after 17 steps each has four blocks; the first takes the last one of the second, which keeps three
    assert prefilled == [[96, 48 + 17], [96, 17]]
    assert scheduler.queried_tokens == 96


# LightLLM and TGI


def test_lightllm_takes_over_to_the_token_and_the_reply_too() -> None:
    scheduler = made(CachingLightLLMNow, 10_000)
    serve(scheduler, named((1, 50), output=7, reply_key=2))
    turn, again = named((1, 50), (2, 7), (3, 5)), named((1, 50), (2, 7), (3, 5))
    steps = serve(scheduler, turn)
    assert turn.cached == 57
    assert (steps[0].prefill_tokens, steps[0].prefill_work) == (5, 5 * (57 + 2.5))
    steps = serve(scheduler, again)
    assert again.cached == 61
    assert (steps[0].decode_rows, steps[0].decode_context) == (1, 62)  # one token is left: it is decoded
    assert scheduler.tree.total_tokens == 62 + 1 + 1  # the prompt once, and the reply of each


def test_lightllm_gives_up_whole_nodes_the_longest_unused_first() -> None:
    tree = RadixTree()
    for key in (1, 2, 3):
        tree.insert(stretch(named((key, 10)))[:1])
    tree.match(stretch(named((1, 10)))[:1])
    assert tree.evict(3) == 10
    found = {key: tree.match(stretch(named((key, 10)))[:1])[1] for key in (1, 2, 3)}
    assert found == {1: 10, 2: 0, 3: 10}


def test_tgi_keeps_prompts_and_not_replies() -> None:
    scheduler = made(CachingTgi3, 10_000)
    serve(scheduler, named((1, 50), output=7, reply_key=2))
    turn = named((1, 50), (2, 7), (3, 5))
    steps = serve(scheduler, turn)
    assert (turn.cached, steps[0].prefill_tokens) == (50, 12)
    again = named((1, 50), (2, 7), (3, 5))
    steps = serve(scheduler, again)
    assert (again.cached, steps[0].prefill_tokens) == (61, 1)


def test_tgi_the_ninth_of_a_burst_that_fills_the_prefill_is_taken_for_known() -> None:
    scheduler = made(CachingTgi3, 100_000)
    burst = [named(own=512, output=3) for _ in range(9)]
    steps = serve(scheduler, *burst)
    assert [sequence.cached for sequence in burst] == [0] * 8 + [511]
    assert [step.prefill_tokens for step in steps[:2]] == [4096, 1]


def test_tgi_gives_up_no_more_blocks_than_are_needed() -> None:
    tree = BlockTree(16)
    tree.insert(stretch(named((1, 160)))[:1])
    assert tree.evict(32) == 32
    assert tree.match(stretch(named((1, 160)))[:1])[1] == 128


# the trees beside a plain list of what was inserted


@settings(max_examples=200, deadline=None)
@given(inserted=st.lists(pieces, max_size=12), wanted=pieces, unit=st.sampled_from([1, 4, 16]))
def test_a_tree_finds_the_longest_beginning_of_all_that_it_was_given(
    inserted: list[tuple[Any, ...]], wanted: tuple[Any, ...], unit: int
) -> None:
    def whole(segments: tuple[Any, ...]) -> Stretch:
        tokens = stretch(named(*segments))[:-1]  # without the reply
        return cut(tokens, length(tokens) // unit * unit)[0]

    trees: list[RadixTree] = [BlockTree(unit), RadixTree(unit)]
    for tree in trees:
        held: list[RadixNode] = []
        for segments in inserted:
            node, _ = tree.match(whole(segments))
            tree.hold(node)
            held.append(node)
            tree.insert(whole(segments))
            check_tree(tree)
        common = max((shared(whole(wanted), whole(segments)) for segments in inserted), default=0)
        assert tree.match(whole(wanted))[1] == common // unit * unit
        for node in held:
            tree.release(node)
        check_tree(tree)
        assert tree.held_tokens == 0
        kept = tree.total_tokens
        assert tree.evict(10_000) == kept
        assert tree.total_tokens == 0
