"""N24: tokens per step are emitted tokens over drafting steps, wherever a text ends, and the same on every surface."""

from types import SimpleNamespace

import kit
import pytest
import torch
from batches import following, generate, new_tokens_of, padded, plain_ids, prompt, target_of

from hf_dflow import AcceptanceMonitor, MonitorSettings, StepTimes
from hf_dflow.bench import figures
from hf_dflow.bench.answers import Answer
from hf_dflow.bench.pairs import load_pair
from hf_dflow.bench.strategies import PLAIN, Contestant, Mode, decode
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.bench.workloads import Prompt
from hf_dflow.training import evaluate

BLOCK, NEW_TOKENS = 8, 30
ENDS = range(1, 2 * BLOCK + 2)  # every place in two blocks, their bonus tokens included
ROWS = [0, 1, 3]


@pytest.fixture(scope="module")
def setting():
    """Target, prompt and greedy text, the first tokens of which differ, so that each can be made the EOS."""
    target = kit.shared_target("llama")
    ids = kit.varied_prompt(target, 13, first_seed=55)
    text = kit.plain_greedy(target, ids, NEW_TOKENS + BLOCK)[0, ids.shape[1] :].tolist()
    return SimpleNamespace(target=target, ids=ids, text=text)


def drafter_of(setting, drafter_class=kit.OracleDrafter, **attributes):
    drafter = kit.tiny_drafter(setting.target, BLOCK, drafter_class=drafter_class)
    for name, value in attributes.items():
        setattr(drafter, name, value)
    return drafter.follow(setting.ids[0].tolist() + setting.text, setting.ids.shape[1])


def assert_counts(statistics, new_tokens):
    """Every token of the text is the prefill's, a step's, or that of a forward without drafts; ratios follow."""
    steps = len(statistics.per_step_drafted)
    lists = (statistics.per_step_accepted, statistics.per_step_offered, statistics.per_step_drafted)
    assert statistics.num_output_tokens == new_tokens
    assert sum(statistics.per_step_emitted) + statistics.num_target_forwards - steps == new_tokens
    assert all(accepted <= offered <= drafted for accepted, offered, drafted in zip(*lists, strict=True))
    pairs = zip(statistics.per_step_emitted, statistics.per_step_accepted, strict=True)
    assert all(emitted - accepted in (0, 1) for emitted, accepted in pairs)
    if steps:
        assert statistics.tokens_per_step == sum(statistics.per_step_emitted) / steps
        assert statistics.mean_acceptance_length == sum(statistics.per_step_accepted) / steps + 1
        assert statistics.draft_acceptance_rate == sum(lists[0]) / max(1, sum(lists[1]))
    assert statistics.tokens_per_target_forward == new_tokens / statistics.num_target_forwards


def end_after(setting, how, count):
    """Options under which the text ends after `count` tokens."""
    if how == "eos":
        return {"eos_token_id": setting.text[count - 1]}
    if how == "limit":
        return {"max_new_tokens": count}
    tokenizer = kit.tiny_tokenizer()
    return {"stop_strings": [tokenizer.decode(setting.text[count - 2 : count])], "tokenizer": tokenizer}


@pytest.mark.parametrize("how", ["eos", "limit", "stop string"])
def test_an_oracle_gets_one_wherever_the_text_ends(setting, how):
    """N24: a cut step counted whole, so that 3 tokens say 4.0; positions behind the end as offered and rejected."""
    cut = 0
    for count in ENDS if how == "limit" else range(2, 13):
        options = {"max_new_tokens": NEW_TOKENS, **end_after(setting, how, count)}
        output = kit.dflow_greedy(setting.target, drafter_of(setting), setting.ids, **options)
        statistics = output.statistics
        assert output.sequences[0, setting.ids.shape[1] :].tolist() == setting.text[:count]
        assert_counts(statistics, count)
        assert set(statistics.acceptance_rate_per_position) <= {1.0}
        assert set(statistics.conditional_acceptance_rate_per_position) <= {1.0}
        if statistics.num_spec_steps:
            assert statistics.draft_acceptance_rate == 1.0
        cut += statistics.tokens_per_step < statistics.mean_acceptance_length
    assert cut == (0 if how == "limit" else 10)  # all but the end at the bonus of the first block


@pytest.mark.parametrize("how", ["eos", "limit", "stop string"])
def test_a_wrong_draft_at_the_end_is_judged_and_those_behind_it_are_not(setting, how):
    """N24: drafts behind an EOS that the target gave in place of a draft, counted as rejected."""
    for count in range(2, 13):
        options = {"max_new_tokens": NEW_TOKENS, **end_after(setting, how, count)}
        drafter = drafter_of(setting, kit.PatternDrafter, pattern=[2, 7, 0])
        statistics = kit.dflow_greedy(setting.target, drafter, setting.ids, **options).statistics
        assert_counts(statistics, count)
        if how == "eos" and count == 4:  # the prefill's token, two drafts, and the target's own token in the third slot
            assert (statistics.per_step_drafted, statistics.per_step_offered) == ([7], [3])
            assert statistics.acceptance_rate_per_position == [1.0, 1.0, 0.0]
            assert statistics.draft_acceptance_rate == 2 / 3 and statistics.wasted_ratio == 5 / 7


@pytest.mark.parametrize("way", ["chain", "tree", "mixture", "adaptive", "sampled", "block", "pausing", "off"])
@pytest.mark.parametrize("how", ["eos", "limit"])
def test_every_token_of_a_text_is_counted_once(setting, way, how):
    """N24: a way of drafting whose cut steps, or whose forwards without drafts, are counted otherwise."""
    costs = {"draft": 0.1, "verify": [1.0 + 0.1 * n for n in range(8)]}
    options = {
        "tree": {"tree_budget": 12},
        "mixture": {"stale_mixture": True},
        "adaptive": {"adaptive_length": True, "step_costs": costs},
        "sampled": {**kit.SAMPLED, "verification": "token"},
        "block": {**kit.SAMPLED, "verification": "block"},
    }.get(way, {})
    drafter_class = {"pausing": kit.HostileDrafter, "off": kit.HostileDrafter}.get(way, kit.PatternDrafter)
    for count in (2, 4, 6, 9, 12):
        drafter = drafter_of(setting, drafter_class)
        if drafter_class is kit.PatternDrafter:
            drafter.pattern = [2, 7, 0, 5]
        if way == "off":  # a monitor of which no step drafts pays
            monitor = AcceptanceMonitor(MonitorSettings(4, 2, 2, 2, 4), times=StepTimes(1.0, 1.0, 1.0))
            options = {"monitor": monitor.route("code")}
        length = {"eos": NEW_TOKENS, "limit": count}[how] if way != "pausing" else 60
        torch.manual_seed(count)
        eos = {"eos_token_id": setting.text[count - 1]} if how == "eos" and way != "pausing" else {}
        output = kit.decode(setting.target, drafter, setting.ids, length, **options, **eos)
        new_tokens = output.sequences.shape[1] - setting.ids.shape[1]
        assert_counts(output.statistics, new_tokens)
        if way == "tree":
            assert len(output.statistics.acceptance_rate_per_position) < BLOCK, "positions, not nodes"
        if way == "pausing" or (way == "off" and new_tokens == 12):
            assert output.statistics.num_target_forwards > output.statistics.num_spec_steps + 1, "some did not draft"
            assert output.statistics.tokens_per_step == output.statistics.tokens_per_target_forward == 1.0


def test_rows_of_a_batch_add_up():
    """N24: rows that end at different places, inside a block or not, in a total that is not theirs."""
    eos = {plain_ids(0, NEW_TOKENS)[4], plain_ids(3, NEW_TOKENS)[9]}
    drafter = following(kit.PatternDrafter, ROWS, NEW_TOKENS, pattern=[7, 3, 0])
    output = generate(ROWS, drafter, NEW_TOKENS, eos_token_id=list(eos), pad_token_id=0)
    total = output.statistics
    lengths = [len(plain_ids(row, NEW_TOKENS, eos)) for row in ROWS]
    assert len(set(lengths)) > 1 and min(lengths) < NEW_TOKENS
    for place, (row, length) in enumerate(zip(ROWS, lengths, strict=True)):
        assert new_tokens_of(output, place, ROWS)[:length] == plain_ids(row, NEW_TOKENS, eos)
        assert_counts(total.per_row[place], length)
    for name in ("accepted", "drafted", "emitted", "offered", "positions"):
        joined = [count for row in total.per_row for count in getattr(row, f"per_step_{name}")]
        assert getattr(total, f"per_step_{name}") == joined
    emitted, steps = (
        sum(getattr(row, name) for row in total.per_row) for name in ("num_step_tokens", "num_spec_steps")
    )
    assert total.tokens_per_step == emitted / steps < total.mean_acceptance_length


def test_every_surface_says_the_same(setting):
    """N24: statistics, bench record, metrics, training's evaluation and monitor, each with a formula of its own."""
    # Not by `evaluate.load`, which would leave a folder on the path of this process; `test_metrics` does that.
    pytest.importorskip("evaluate")
    from hf_dflow.metrics.acceptance.acceptance import Acceptance
    from hf_dflow.metrics.acceptance_per_position.acceptance_per_position import AcceptancePerPosition

    eos = setting.text[5]
    monitor = AcceptanceMonitor(times=StepTimes(0.5, 1.0, 1.0))
    drafter = drafter_of(setting, kit.PatternDrafter, pattern=[1, 7])
    statistics = kit.decode(
        setting.target, drafter, setting.ids, NEW_TOKENS, eos_token_id=eos, monitor=monitor.route("chat")
    ).statistics
    assert statistics.per_step_emitted == [2, 3] and statistics.per_step_accepted == [1, 3]
    assert statistics.per_step_drafted == [7, 7] and statistics.per_step_offered == [7, 3]
    rates = {"tokens_per_step": 2.5, "draft_acceptance_rate": 0.4, "mean_acceptance_length": 3.0}
    assert {name: getattr(statistics, name) for name in rates} == rates

    route = monitor.route("chat").figures()
    assert {name: getattr(route, name) for name in ("tokens_per_step", "draft_acceptance_rate")} == {
        "tokens_per_step": 2.5,
        "draft_acceptance_rate": 0.4,
    }
    assert (route.num_output_tokens, route.num_target_forwards) == (5, 2)  # without the prefill
    assert 'hf_dflow_tokens_per_step{route="chat"} 2.5' in monitor.prometheus_text()

    lists = {name: getattr(statistics, f"per_step_{name}") for name in ("accepted", "drafted", "emitted", "offered")}
    counted = Acceptance._compute(
        None, **lists, output_tokens=statistics.num_output_tokens, target_forwards=statistics.num_target_forwards
    )
    by_position = AcceptancePerPosition._compute(
        None, accepted=lists["accepted"], drafted=lists["drafted"], positions=statistics.per_step_positions
    )
    assert counted["tokens_per_step"] == 2.5 and counted["accept_rate"] == 0.4
    assert counted["mean_acceptance_length"] == 3.0 and counted["wasted_ratio"] == statistics.wasted_ratio
    assert counted["tokens_per_target_forward"] == statistics.tokens_per_target_forward == 2.0
    assert by_position["acceptance_rate_per_position"] == statistics.acceptance_rate_per_position

    target = setting.target
    settings = target.generation_config.eos_token_id
    try:
        target.generation_config.eos_token_id = eos
        counts = evaluate.decode(
            drafter_of(setting, kit.PatternDrafter, pattern=[1, 7]), target, setting.ids.tolist(), NEW_TOKENS
        )
        inputs = {"input_ids": setting.ids, "attention_mask": torch.ones_like(setting.ids)}
        ways = {
            "dflow": Contestant("dflow", drafter_of(setting, kit.PatternDrafter, pattern=[1, 7])),
            "lookup": Contestant("lookup", lookup_tokens=BLOCK - 1),
            "theirs": Contestant("theirs", kit.tiny_target("llama"), is_their_loop=False),
            PLAIN: Contestant(PLAIN),
        }
        runs = {name: decode(target, inputs, way, Mode(), NEW_TOKENS) for name, way in ways.items()}
    finally:
        target.generation_config.eos_token_id = settings
    assert counts.tokens_per_step == counts.as_record()["tokens_per_step"] == 2.5
    assert counts.as_record()["tokens_per_target_forward"] == 2.0
    record = figures.as_record([Answer(Prompt("chat", "text"), Mode(), 0, runs)], "dflow")
    measured = record["modes"]["T=0"]["all"]["contestants"]
    assert measured["dflow"]["tokens_per_step"]["value"] == 2.5
    assert {name: measured["dflow"][name] for name in ("draft_acceptance_rate", "mean_acceptance_length")} == {
        "draft_acceptance_rate": 0.4,
        "mean_acceptance_length": 3.0,
    }
    (row,) = record["rows"]
    for name, run in row["runs"].items():
        # What older records, which lack it, are counted from.
        assert run["emitted"] == run["new_tokens"] - (run["target_forwards"] - run["steps"]), name
        assert run["new_tokens"] == 6 and runs[name].new_tokens == setting.text[:6]
    theirs = runs["theirs"].statistics
    assert theirs.draft_acceptance_rate == 1.0 and theirs.num_step_tokens == 6, "another model with the same weights"


def test_a_route_is_judged_by_what_was_emitted():
    """N24: break-even compared with tokens of which a text's end cut some off."""
    monitor = AcceptanceMonitor(MonitorSettings(4, 4, 2, 2, 4), times=StepTimes(1.0, 1.5, 1.0))  # pays from 2.5
    for emitted, state in (([3], "drafting"), ([2], "plain")):
        route = monitor.route(state)
        for _ in range(4):
            route.end_step([2], [2], emitted=emitted)
        assert route.figures().state == state


def test_a_batch_of_one_prompt_repeated(setting):
    """N24: a batch of equal prompts whose rates are not those of one of them."""
    ids, mask = padded([prompt(1)] * 2)
    drafter = following(kit.OracleDrafter, [1, 1], NEW_TOKENS)
    eos = plain_ids(1, NEW_TOKENS)[4]
    output = kit.decode(target_of(), drafter, ids, NEW_TOKENS, attention_mask=mask, eos_token_id=eos)
    one, two = output.statistics.per_row
    assert one == two and output.statistics.tokens_per_step == one.tokens_per_step
    assert output.statistics.draft_acceptance_rate == 1.0


def test_transformers_own_loop_is_counted_as_ours():
    """N24: a loop of transformers', of which only the stream is seen, gets another count where a text ends."""
    pair = load_pair(TINY_TARGET, TINY_DRAFTER)
    inputs = pair.encode("airports ZRE MSL RKD ZAD MLB DEM :")
    text = decode(pair.target, inputs, Contestant(PLAIN), Mode(), 40).new_tokens
    ours = Contestant("ours", pair.drafter, use_relay=False)
    theirs = Contestant("theirs", pair.drafter, is_their_loop=True)
    for last in (5, 9, 20):  # inside the drafts of a step, as its bonus, and inside a long step
        pair.target.generation_config.eos_token_id = text[last]
        first, second = (decode(pair.target, inputs, way, Mode(), 40).statistics for way in (ours, theirs))
        for name in ("accepted", "drafted", "emitted", "offered", "positions"):
            assert getattr(first, f"per_step_{name}") == getattr(second, f"per_step_{name}"), name
        assert_counts(second, last + 1)
