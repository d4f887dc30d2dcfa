"""The number of requests under way, on a simulated clock: its bounds, its falls, and how soon it finds what a server bears."""
import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpaca_farm.core.ask.throttle import Throttle


class Simulation:
    "A client with a throttle and a server of `slots` that queues or refuses what is more, or takes at most `rate` a second."
    def __init__(self, throttle, kind='queues', slots=64, rate=400, latency=.05, spread=.1, retry=.2, outage=(0, 0), seed=0):
        self.throttle, self.kind, self.slots, self.rate, self.latency, self.spread = throttle, kind, slots, rate, latency, spread
        self.retry, self.outage, self.rng = retry, outage, random.Random(seed)
        self.events, self.queue, self.count = [], [], 0
        self.busy = self.underway = 0
        self.tokens = self.refilled = self.paused = 0.
        self.answers, self.refusals, self.levels = [], [], []

    def at(self, time, what, sent=0.):
        self.count += 1
        heapq.heappush(self.events, (time, self.count, what, sent))

    def refuses(self, now):
        self.tokens, self.refilled = min(.1*self.rate, self.tokens + (now - self.refilled)*self.rate), now
        if self.outage[0] <= now < self.outage[1] or self.kind == 'refuses' and self.busy >= self.slots: return True
        if self.kind != 'limits': return False
        self.tokens -= (enough := self.tokens >= 1)
        return not enough

    def work(self, now, sent):
        self.busy += 1
        self.at(now + self.latency*math.exp(self.spread*self.rng.gauss(0, 1) - self.spread**2/2), 'answer', sent)

    def send(self, now):
        self.underway += 1
        if self.refuses(now): self.at(now + .005, 'refusal', now)
        elif self.kind == 'queues' and self.busy >= self.slots: self.queue.append(now)
        else: self.work(now, now)

    def run(self, seconds):
        self.at(0., 'start')
        while self.events[0][0] < seconds:
            now, _, what, sent = heapq.heappop(self.events)
            if what == 'answer':
                self.busy, self.underway = self.busy - 1, self.underway - 1
                self.answers.append(now)
                self.throttle.answered(sent, now)
                if self.queue: self.work(now, self.queue.pop(0))
            if what == 'refusal':    # its worker waits, and so do all others, as long as the server demands
                self.refusals.append(now)
                self.throttle.refused(sent, now, self.retry)
                self.paused = max(self.paused, now + self.retry)
                self.at(self.paused + .3*self.rng.random(), 'wake')
            if what == 'wake': self.underway -= 1
            self.levels.append((now, self.throttle.level))
            if now < self.paused: self.at(self.paused, 'start')
            else:
                while self.underway < self.throttle.level: self.send(now)
        return self

    def share(self, start, end, of): return sum(start <= t < end for t in self.answers)/(end - start)/of


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.floats(0, 2), st.floats(0, 3)), max_size=300))
def test_it_stays_between_one_and_the_bound(bound, events):
    "Whatever happens; and of the refusals of one round trip only the first is a fall."
    throttle, now, fallen = Throttle(bound), 0., -math.inf
    for answered, step, latency in events:
        now, before, sent = now + step, throttle.level, now + step - latency
        if answered: throttle.answered(sent, now)
        else: throttle.refused(sent, now, .1)
        assert 1 <= throttle.level <= bound
        if not answered: assert throttle.level <= before and (throttle.level == before or sent >= fallen)
        if throttle.level < before: fallen = now


@pytest.mark.parametrize('spread', [.05, .3, .7])
@pytest.mark.parametrize('kind, slots, of', [('queues', 64, 1280), ('refuses', 64, 1280), ('limits', 0, 400), ('queues', 8, 160), ('refuses', 8, 160)])
def test_it_finds_what_a_server_bears(kind, slots, of, spread):
    "Nine tenths of it from the tenth second on, at 50 ms; 95 % where requests only wait."
    seen = Simulation(Throttle(256), kind, slots, spread=spread).run(40)
    assert seen.share(10, 40, of) > (.95 if kind == 'queues' else .85 if slots == 8 else .9)
    assert max(level for _, level in seen.levels) <= 256
    if kind == 'queues': assert seen.share(1, 40, of) > .93 and sum(l for t, l in seen.levels if t > 10)/sum(t > 10 for t, _ in seen.levels) < 3*max(slots, 20)
    else: assert len(seen.refusals) < .02*len(seen.answers)


def test_it_rises_again_after_an_outage():
    "All requests of one second are refused: it falls to a few, and soon bears what it bore."
    seen = Simulation(Throttle(256), outage=(5, 6)).run(20)
    assert min(level for t, level in seen.levels if 5 < t < 6.5) < 40 and seen.share(10, 20, 1280) > .95


@pytest.mark.parametrize('before, after', [(64, 16), (16, 64)])
def test_it_follows_a_capacity_that_changes(before, after):
    seen = Simulation(Throttle(256), 'refuses', before)
    seen.at(10., 'change')
    of, work = 20*after, seen.work
    def changed(now, sent):
        if now > 10: seen.slots = after
        work(now, sent)
    seen.work = changed
    assert seen.run(60).share(30, 60, of) > .85


def test_a_bound_below_the_capacity_is_used_up():
    seen = Simulation(Throttle(30)).run(5)
    assert {level for t, level in seen.levels if t > 1} <= set(range(26, 31)) and seen.share(1, 5, 600) > .95


def test_a_long_latency_takes_no_longer_in_round_trips():
    "Answers of 5 s: in a minute, all of 200 slots are in use."
    seen = Simulation(Throttle(256), slots=200, latency=5., spread=.7).run(300)
    assert seen.share(60, 300, 40) > .93
