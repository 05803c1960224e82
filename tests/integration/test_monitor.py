"""A drafter that turns bad and good again, watched: the same text, a bounded price, and drafting is back in time."""

import copy
import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest
from batches import following, generate, new_tokens_of, plain_ids, target_of
from internals import MONITOR_LOGGER
from kit import ROOT, ScriptedDrafter, assert_not_vacuous

from hf_dflow import AcceptanceMonitor, DFlowGenerationConfig, MonitorSettings, StepTimes
from hf_dflow.errors import DFlowError, UnsupportedGenerationError

LONG = 140
BLOCK = 4
SMALL = MonitorSettings(window=8, fewest_steps=4, probe_steps=2, first_pause=4, longest_pause=16)
TIMES = StepTimes(draft=1.0, verify=1.5, plain=1.0)  # pays from 2.5 tokens per step


class Weather(ScriptedDrafter):
    """Right; between two positions only in the first slot, which is more than nothing, and less than pays."""

    bad = range(0)

    def draft_hidden(self, block_embeds, position_ids, extend, mask_for):
        self.is_bad = int(position_ids[0, 0]) in self.bad
        return super().draft_hidden(block_embeds, position_ids, extend, mask_for)

    def scripted_logits(self, logits, right, *, slot, step):
        return self._say(logits, self._wrong(right) if self.is_bad and slot > 1 else right)


def config_of(monitor, route="code", **options):
    return DFlowGenerationConfig(
        max_new_tokens=LONG, do_sample=False, return_dict_in_generate=True, monitor=monitor.route(route), **options
    )


def decode(monitor, drafter, rows=(1,)):
    rows = list(rows)
    output = generate(rows, drafter, LONG, generation_config=config_of(monitor))
    for i, row in enumerate(rows):
        assert new_tokens_of(output, i, rows) == plain_ids(row, LONG)
    return output.statistics


def test_bad_and_good_again():
    """Bug: text that depends on the switch, drafts in vain without a bound, or a drafter that is never found again."""
    events = []
    monitor = AcceptanceMonitor(SMALL, times=TIMES, on_event=[events.append])
    drafter = following(Weather, [1], LONG, block_size=BLOCK, bad=range(40, 80))
    statistics = decode(monitor, drafter)
    bad_drafts = [anchor for anchor in drafter.anchor_positions if anchor in drafter.bad]
    assert 0 < len(bad_drafts) <= SMALL.window + SMALL.largest_waste(40) - SMALL.fewest_steps < 25
    assert [event.kind for event in events][:2] == ["plain", "probing"] and events[-1].kind == "drafting"
    back = next(anchor for anchor in drafter.anchor_positions if anchor >= 80)
    assert back <= 80 + SMALL.steps_until_back
    later = [anchor for anchor in drafter.anchor_positions if anchor >= back]
    assert all(b - a == BLOCK for a, b in pairwise(later[:-1]))  # drafting for good, not trying
    assert statistics.per_step_accepted[:5] == [BLOCK - 1] * 5
    assert statistics.num_draft_forwards == len(drafter.anchor_positions)
    assert_not_vacuous(statistics)


def test_price_of_a_drafter_that_does_not_pay():
    """Bug: accepted drafts now and then, which end the loop's own back-off, keep a losing drafter at work."""
    monitor = AcceptanceMonitor(SMALL, times=TIMES)
    drafter = following(Weather, [1], LONG, block_size=BLOCK, bad=range(1000))
    statistics = decode(monitor, drafter)
    figures = monitor.route("code").figures()
    assert statistics.num_spec_steps == figures.num_spec_steps <= SMALL.largest_waste(LONG) < LONG / 4
    assert figures.num_accepted_draft_tokens == statistics.num_accepted_draft_tokens == figures.num_spec_steps
    # It goes on where it stopped in the next call: no call pays for finding out again.
    again = decode(monitor, drafter)
    assert again.num_spec_steps <= SMALL.probe_steps * (1 + LONG // (SMALL.longest_pause + SMALL.probe_steps))


def test_a_drafter_that_pays_is_left_alone():
    """Bug: a good route that is switched off, or one that pays for measuring although its times were given."""
    monitor = AcceptanceMonitor(SMALL, times=TIMES)
    statistics = decode(monitor, following(Weather, [1], LONG, block_size=BLOCK))
    figures = monitor.route("code").figures()
    assert figures.state == "drafting" and figures.num_switches == 0
    assert BLOCK >= figures.tokens_per_step > BLOCK - 0.2 and figures.draft_acceptance_rate == 1.0
    assert figures.num_plain_steps <= 1  # at the end there may be room for one token
    assert statistics.num_target_forwards <= 2 + LONG / BLOCK


def test_break_even_is_measured(monkeypatch):
    """Bug: a streamer's or the prompt's time counted, the two kinds of steps mixed up, or no step measured plainly."""
    now = [0.0]
    monitor = AcceptanceMonitor(SMALL, clock=lambda: now[0])
    drafter = following(Weather, [1], LONG, block_size=BLOCK)
    honest = type(drafter).draft_hidden

    def slow(self, *args):
        now[0] += 2.0
        return honest(self, *args)

    monkeypatch.setattr(Weather, "draft_hidden", slow)
    calls = []

    def forward(*_):
        calls.append(1)
        now[0] += 1000.0 if len(calls) == 1 else 1.0

    handle = target_of().register_forward_hook(forward)
    puts = SimpleNamespace(put=lambda value: now.__setitem__(0, now[0] + 50.0), end=lambda: None)
    try:
        output = generate([1], drafter, LONG, generation_config=config_of(monitor), streamer=puts)
    finally:
        handle.remove()
    assert new_tokens_of(output, 0, [1]) == plain_ids(1, LONG)
    figures = monitor.route("code").figures()
    assert figures.break_even == 3.0  # 2 for the draft and 1 for the block, over 1
    assert figures.state == "drafting"  # 4 tokens a step
    assert 4 <= figures.num_plain_steps <= 6


def test_a_batch_of_one_route():
    """Bug: rows of a call that switch by themselves, or a batch's text that depends on it."""
    monitor = AcceptanceMonitor(SMALL, times=TIMES)
    drafter = following(Weather, [1, 0, 3], LONG, block_size=BLOCK, bad=range(40, 60))
    statistics = decode(monitor, drafter, [1, 0, 3])
    assert monitor.route("code").figures().num_switches >= 1
    assert_not_vacuous(statistics)
    assert len({row.num_spec_steps for row in statistics.per_row}) <= 3


def test_thresholds_callbacks_and_log(caplog):
    """Bug: an alarm at every step, none when it is over, or a broken callback that ends decoding."""
    events = []

    def broken(event):
        raise RuntimeError("pager is down")

    monitor = AcceptanceMonitor(SMALL, times=TIMES, low_acceptance={"code": 0.5}, on_event=[broken, events.append])
    with caplog.at_level(logging.INFO, logger=MONITOR_LOGGER):
        decode(monitor, following(Weather, [1], LONG, block_size=BLOCK, bad=range(60, 100)))
    kinds = [event.kind for event in events]
    assert kinds.count("low_acceptance") == kinds.count("acceptance_recovered") == 1
    assert kinds.index("low_acceptance") < kinds.index("acceptance_recovered")
    logged = [record for record in caplog.records if record.name == MONITOR_LOGGER]
    assert sum("A callback failed" in record.getMessage() for record in logged) == len(events)
    (switch,) = [r for r in logged if "decodes plainly" in r.getMessage()][:1]
    assert switch.levelno == logging.WARNING and "pays from 2.50 tokens per step" in switch.getMessage()
    other = monitor.route("chat")
    other.end_step([3] * 8, [0] * 8)
    assert [event.kind for event in events].count("low_acceptance") == 1  # no threshold for this route


def test_prometheus_reads_it():
    """Bug: text that Prometheus refuses, labels that break out of their quotes, or None for a number."""
    parser = pytest.importorskip("prometheus_client.parser")
    monitor = AcceptanceMonitor(SMALL, times=TIMES)
    hostile = 'a "b" \\ c\nd'
    monitor.route(hostile).end_step([3, 3], [2, 1])
    monitor.route("new")
    families = {one.name: one for one in parser.text_string_to_metric_families(monitor.prometheus_text())}
    drafts = {s.labels["route"]: s.value for s in families["hf_dflow_draft_tokens"].samples}
    assert drafts == {hostile: 6.0, "new": 0.0}
    assert families["hf_dflow_draft_tokens"].type == "counter"
    rates = {s.labels["route"]: s.value for s in families["hf_dflow_draft_acceptance_rate"].samples}
    assert rates == {hostile: 0.5}
    assert {s.value for s in families["hf_dflow_drafting"].samples} == {1.0}
    assert {s.value for s in families["hf_dflow_break_even_tokens_per_step"].samples} == {2.5}


def test_window_forgets():
    """Bug: figures of all time under the name of the window's."""
    route = AcceptanceMonitor(SMALL, times=StepTimes(0, 1, 1)).route("code")
    for accepted in [0] * 8 + [2] * 8:
        route.end_step([4], [accepted])
    figures = route.figures()
    assert figures.draft_acceptance_rate == 0.5 and figures.tokens_per_step == 3.0
    assert figures.num_draft_tokens == 64 and figures.num_accepted_draft_tokens == 16


def test_pauses_by_hand():
    """Bug: pauses that do not grow, that grow for ever, or that a lucky trial resets."""
    route = AcceptanceMonitor(SMALL, times=TIMES).route("code")

    def next_pause(accepted_in_trial=0):
        while route.drafts_now:
            route.end_step([3], [accepted_in_trial])
        steps = 0
        while not route.drafts_now:
            route.end_step([0], [0])
            steps += 1
        return steps

    assert [next_pause() for _ in range(5)] == [4, 8, 16, 16, 16]
    for _ in range(SMALL.probe_steps):
        route.end_step([3], [3])
    assert route.figures().state == "drafting"
    assert next_pause() == 16  # two good steps, and bad ones behind them
    for _ in range(SMALL.probe_steps + SMALL.window):
        route.end_step([3], [3])
    assert next_pause() == 4


def test_the_document_states_the_defaults():
    """Bug: a promise of so many steps that the settings no longer keep."""
    usual = MonitorSettings()
    document = " ".join((ROOT / "docs" / "monitor.md").read_text(encoding="utf-8").split())
    pauses = [usual.first_pause * 2**trial for trial in range(4)]
    assert pauses[-1] == usual.longest_pause
    assert f"over its last {usual.window} steps" in document
    assert f"After {pauses[0]} steps, then {', '.join(map(str, pauses[1:]))}, it tries {usual.probe_steps}" in document
    assert f"resumes drafting {usual.steps_until_back} steps at most after" in document


def test_routes_and_copies():
    """Bug: `generate` copies its configuration, and the copy is watched; or one route's window serves another."""
    monitor = AcceptanceMonitor()
    config = DFlowGenerationConfig(monitor=monitor.route("code"))
    assert copy.deepcopy(config).monitor is monitor.route("code") is not monitor.route("chat")
    assert "monitor" not in config.to_dict() and "monitor" not in config.to_json_string()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StepTimes(draft=1, verify=1, plain=0),
        lambda: MonitorSettings(window=8, fewest_steps=9),
        lambda: MonitorSettings(first_pause=9, longest_pause=8),
        lambda: MonitorSettings(probe_steps=0),
        lambda: AcceptanceMonitor(low_acceptance=40),
        lambda: AcceptanceMonitor(low_acceptance={"code": -1}),
        lambda: AcceptanceMonitor(low_acceptance={"code": "0.5"}),
        lambda: AcceptanceMonitor(low_acceptance=[0.5]),
        lambda: AcceptanceMonitor().route("code").end_step([3], [1]),
    ],
)
def test_settings_that_make_no_sense(wrong):
    """Bug: a threshold of 40 for 40%, which no route ever reaches, or a route that can never be judged."""
    with pytest.raises(DFlowError, match=r"give|may not"):
        wrong()


def test_a_monitor_in_place_of_a_route_is_refused():
    """Bug: an attribute error in the middle of the first step."""
    with pytest.raises(UnsupportedGenerationError, match=r"monitor\.route"):
        config = DFlowGenerationConfig(max_new_tokens=4, do_sample=False, monitor=AcceptanceMonitor())
        generate([1], following(Weather, [1], 8, block_size=BLOCK), 4, generation_config=config)


@pytest.mark.parametrize("name", [7, None, "", b"chat", "\ud800", MonitorSettings()])
def test_a_route_needs_a_name_that_can_be_exported(name):
    """N15: a route whose name is no text is accepted, and breaks the figures of all routes."""
    monitor = AcceptanceMonitor()
    monitor.route("chat")
    with pytest.raises(DFlowError, match="use a str that UTF-8 can encode"):
        monitor.route(name)
    assert [figures.route for figures in monitor.figures()] == ["chat"] and 'route="chat"' in monitor.prometheus_text()


def test_a_trial_in_vain_is_no_warning(caplog):
    """N16: a warning in the log at every failed trial, for ever."""
    times, settings = StepTimes(1.0, 1.0, 1.0), MonitorSettings(8, 4, 2, 2, 4)
    route = AcceptanceMonitor(settings, times=times).route("chat")
    caplog.set_level(logging.INFO, logger=MONITOR_LOGGER)
    for _ in range(60):
        route.end_step([3] if route.drafts_now else [0], [0])
    levels = [record.levelno for record in caplog.records if "decodes plainly" in record.getMessage()]
    assert len(levels) > 3 and levels[0] == logging.WARNING and set(levels[1:]) == {logging.INFO}
