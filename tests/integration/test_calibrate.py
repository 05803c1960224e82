"""What `hf-dflow calibrate` fits: right on made-up records, recorded from real decoding, kept in the configuration."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from kit import assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, DFlowGenerationConfig, DrafterConfigError, UnsupportedGenerationError
from hf_dflow.bench import calibrate
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_PROMPTS, TINY_TARGET
from hf_dflow.bench.workloads import FITTING, HELD_OUT, Prompt, read_prompts
from hf_dflow.cli import app
from hf_dflow.errors import DFlowError
from hf_dflow.generation.configuration import resolve_options
from hf_dflow.generation.mixture import StaleMixture
from hf_dflow.generation.policy.costs import StepCosts
from hf_dflow.generation.policy.lengths import LengthPlanner
from hf_dflow.generation.policy.lengths import calibrated as calibrated_probability
from hf_dflow.model.configuration import NUM_TRAITS


def made_up_slots(generator, count=4000):
    """Slots whose token the row knows where the second trait is 1, and the drafter where it is 0."""
    knows = torch.rand(count, generator=generator) < 0.5
    traits = torch.zeros(count, NUM_TRAITS)
    traits[:, 0], traits[:, 1] = 1.0, knows
    right, wrong = 0.7, 0.05
    own = torch.where(knows, wrong, right)
    stale = torch.where(knows, right, wrong)
    return traits, torch.stack([own, stale, torch.ones(count)], dim=-1)


def test_the_weight_goes_where_the_row_is_right():
    """Bug: laws that change places in the likelihood, or a ridge that leaves nothing to learn."""
    traits, likelihoods = made_up_slots(torch.Generator().manual_seed(0))
    coefficients, found = calibrate.fit_mixture(traits, likelihoods)
    weights = (traits[:2] @ torch.tensor(coefficients)).sigmoid()
    knows = traits[:2, 1].bool()
    low, high = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]), torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])
    assert (low @ torch.tensor(coefficients)).sigmoid() < 0.05 < 0.7 < (high @ torch.tensor(coefficients)).sigmoid()
    assert found["mixture"] > found["drafter"] + 0.5
    assert len(weights) == len(knows)


def made_up_texts(shifts, eases, steps, generator):
    """Texts of `steps` steps; a draft's acceptance is its confidence, off by its slot's shift and its text's ease."""

    def step(ease):
        sure = (torch.rand(len(shifts), generator=generator) * 0.9 + 0.05).tolist()
        for slot, one in enumerate(sure):
            truth = torch.sigmoid(torch.logit(torch.tensor(one)) + shifts[slot] + ease)
            if torch.rand((), generator=generator) >= truth:
                return calibrate.JudgedStep(sure[: slot + 1], slot)
        return calibrate.JudgedStep(sure, len(sure))

    return [[step(ease) for _ in range(steps)] for ease in eases]


@pytest.mark.parametrize(("spread", "least", "most"), [(1.0, 0.5, 2.9), (0.25, 8.0, 46.0), (0.0, 64.0, 256.0)])
def test_texts_that_differ_more_are_learned_faster(spread, least, most):
    """Bug: a precision that is the same for all drafters, or texts that share what they learn."""
    generator = torch.Generator().manual_seed(0)
    eases = (torch.randn(200, generator=generator) * spread).tolist()
    texts = made_up_texts((0.0, 0.0), eases, 25, generator)
    precision, found = calibrate.fit_precision(texts, [[0.0, 1.0]] * 3)
    assert least <= precision <= most
    if spread:
        assert found["likelihood"] > found["likelihood_without"] + 0.005 * spread**2


def test_a_line_undoes_overconfidence():
    """Bug: slots that share one line, or a slope where an intercept is needed."""
    generator = torch.Generator().manual_seed(0)
    texts = made_up_texts((0.0, -1.0, -2.0, -2.0, -2.0, -2.0), [0.0] * 40, 300, generator)
    lines, found = calibrate.fit_calibration(texts)
    for (intercept, slope), shift in zip(lines, (0.0, -1.0, -2.0), strict=True):
        assert intercept == pytest.approx(shift, abs=0.15) and slope == pytest.approx(1.0, abs=0.15)
    assert abs(found["too_sure_after"]) < 0.01 < found["too_sure_before"]


def test_the_planner_begins_with_the_line():
    """Bug: a calibration that is read for another slot, or that what a row learns cannot correct."""
    lines = [[0.0, 1.0], [-1.0, 1.0], [-2.0, 0.5]]
    planner = LengthPlanner(StepCosts(0.0, (1.0, 1.1, 1.2, 1.3)), lines)
    assert planner.acceptance(0, 0.8) == pytest.approx(0.8)
    assert planner.acceptance(1, 0.5) == pytest.approx(1 / (1 + 2.718281828), abs=1e-6)
    assert planner.acceptance(7, 0.5) == planner.acceptance(2, 0.5) == pytest.approx(0.1192, abs=1e-3)


def test_a_row_learns_how_hard_its_text_is():
    """Bug: what one slot shows that no other hears of, a step in the wrong direction, or drafts behind a failure."""
    generator = torch.Generator().manual_seed(0)
    planner = LengthPlanner(StepCosts(0.0, (1.0, 1.1, 1.2)), [[0.0, 1.0]] * 3)
    for _ in range(300):  # all slots are one logit harder than calibrated
        sure = float(torch.rand((), generator=generator) * 0.8 + 0.1)
        is_right = torch.rand(2, generator=generator) < torch.sigmoid(torch.logit(torch.tensor(sure)) - 1.0)
        planner.choose([sure, sure])
        planner.learn(2, int(is_right.long().cumprod(0).sum()))
    assert planner.ease == pytest.approx(-1.0, abs=0.3)
    assert planner.acceptance(2, 0.5) == pytest.approx(1 / (1 + 2.718281828), abs=0.06), "a slot that was never judged"
    alone = LengthPlanner(StepCosts(0.0, (1.0, 1.1, 1.2)), [[0.0, 1.0]] * 3)
    alone.choose([0.9, 0.2])
    alone.learn(2, 0)
    assert alone.ease == pytest.approx(-0.9 / (4 + 0.09)), "the second draft was not judged"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The tiny pair's drafter with what was fitted on a few prompts, and what the command said."""
    folder = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(TINY_DRAFTER, folder / "drafter")
    prompts = json.loads(TINY_PROMPTS.read_text())
    few = {task: texts[:4] for task, texts in prompts.items()}
    (folder / "few.json").write_text(json.dumps(few))
    options = ["--target", str(TINY_TARGET), "--prompts", str(folder / "few.json"), "--max-new-tokens", "64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "FEWEST", 20)
        done = CliRunner().invoke(app, ["calibrate", str(folder / "drafter"), *options, "--skip", "2"])
    assert done.exit_code == 0, done.output
    return folder / "drafter"


def test_what_is_kept_is_read_and_used(calibrated, monkeypatch):
    """Bug: fitted numbers that no call reads, or that change a text."""
    drafter = DFlowDrafter.from_pretrained(calibrated).double().eval()
    fitted = drafter.config.fitted_decisions
    assert fitted["calibration"].keys() == fitted["row_precision"].keys() == {"greedy", "sampled"}
    assert all(value in calibrate.PRECISIONS for value in fitted["row_precision"].values())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET).double().eval()
    text = next(iter(json.loads(TINY_PROMPTS.read_text()).values()))[-1]
    encoded = AutoTokenizer.from_pretrained(TINY_TARGET).apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    used, honest = [], StaleMixture._weights

    def weights(self, mixed):
        used.append(self.coefficients)
        return honest(self, mixed)

    monkeypatch.setattr(StaleMixture, "_weights", weights)
    plain = plain_greedy(target, encoded["input_ids"], 40)
    costs = {"draft": 0.0, "verify": [1.0] * 8}
    config = DFlowGenerationConfig(
        do_sample=False, max_new_tokens=40, stale_mixture="learned", adaptive_length=True, step_costs=costs,
        return_dict_in_generate=True,
    )  # fmt: skip
    output = target.generate(encoded["input_ids"], generation_config=config, assistant_model=drafter)
    assert torch.equal(output.sequences, plain)
    assert_not_vacuous(output.statistics)
    assert used and all(torch.allclose(one, torch.tensor(fitted["mixture"])) for one in used)
    first, expected = output.statistics.predictions[0][0], fitted["calibration"]["greedy"][0]
    assert 0 < first < 1 and expected != [0.0, 1.0]


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_fitting_foretells_what_serving_predicts(rule):
    """Bug: a precision fitted for predictions that no call makes, or that no call reads."""
    target = tiny_target()
    lines, costs = [[0.3, 0.8], [-0.5, 1.2], [-1.0, 1.0]], {"draft": 0.0, "verify": [1.0] * 8}
    told = {}
    for precision in (0.5, 50.0):
        other = "sampled" if rule == "greedy" else "greedy"
        fitted = {"calibration": {rule: lines}, "row_precision": {rule: precision, other: 7.0}}
        drafter = tiny_drafter(target, 6, fitted_decisions=fitted)
        log = calibrate.Log()
        options = {"do_sample": rule == "sampled", "max_new_tokens": 30, "return_dict_in_generate": True}
        recorder = calibrate.Recorder(log, is_sampled=rule == "sampled")
        recorded = DFlowGenerationConfig(**options, acceptance_processors=[recorder])
        served = DFlowGenerationConfig(**options, adaptive_length=True, step_costs=costs)
        for config in (recorded, served):
            torch.manual_seed(1)
            output = target.generate(prompt_of(5), generation_config=config, assistant_model=drafter)
        told[precision] = output.statistics.predictions
        assert torch.allclose(
            *map(torch.tensor, (calibrate.predictions_of(log.texts[0], lines, precision), told[precision]))
        )
    assert len(told[0.5]) > 10 and told[0.5] != told[50.0]


def test_recording_changes_no_draft():
    """Bug: a record of what other drafts would have done."""
    target = tiny_target()
    drafter = tiny_drafter(target, 6)
    torch.manual_seed(0)
    torch.nn.init.normal_(drafter.relay.down_proj.weight, std=0.3)
    log = calibrate.Log()
    config = DFlowGenerationConfig(
        do_sample=False, max_new_tokens=30, return_dict_in_generate=True,
        acceptance_processors=[calibrate.Recorder(log, is_sampled=False)],
    )  # fmt: skip
    watched = target.generate(prompt_of(5), generation_config=config, assistant_model=drafter).statistics
    alone = dflow_greedy(target, drafter, prompt_of(5), max_new_tokens=30).statistics
    assert watched.per_step_accepted == alone.per_step_accepted
    steps = zip(watched.per_step_drafted, watched.per_step_accepted, strict=True)
    assert [(len(seen), accepted) for seen, accepted in log.texts[0]] == [(min(n, a + 1), a) for n, a in steps]
    assert sum(len(one) for one in log.traits) > 10


def test_what_cannot_be_is_refused(calibrated, tmp_path):
    """Bug: minutes of decoding before a wrong folder is noticed, or damaged numbers that are read as none."""
    target = tiny_target()
    for wrong in (
        {"mixture": [1.0]},
        {"calibration": {"greedy": [[0.0, 1.0]]}},
        {"row_precision": {"greedy": 0.0}},
        {"row_precision": {"greedy": True}},
        {"row_precision": {"greedy": 10**400}},
        {"row_precision": {"lossy": 4.0}},
        {"row_precision": 4.0},
        {"mixture": [float("nan")] * 8},
        3,
        {"a": 1},
    ):
        with pytest.raises(DrafterConfigError, match="fitted_decisions"):
            tiny_drafter(target, 6, fitted_decisions=wrong)
    with pytest.raises(UnsupportedGenerationError, match="hf-dflow calibrate"):
        target.generate(
            prompt_of(3),
            generation_config=DFlowGenerationConfig(max_new_tokens=4, stale_mixture="learned"),
            assistant_model=tiny_drafter(target, 6),
        )
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for folder in (tmp_path, tmp_path / "nothing"):
        done = CliRunner().invoke(app, ["calibrate", str(folder)])
        assert done.exit_code != 0 and "config.json" in done.output
    few = tmp_path / "few.json"
    few.write_text('{"task": ["one prompt"]}')
    options = ["--target", str(TINY_TARGET), "--prompts", str(few)]
    before = (calibrated / "config.json").read_text()
    done = CliRunner().invoke(app, ["calibrate", str(calibrated), *options, "--skip", "1"])
    assert done.exit_code != 0 and "--skip" in done.output
    done = CliRunner().invoke(app, ["calibrate", str(calibrated), *options, "--max-new-tokens", "4"])
    assert done.exit_code != 0 and "give more prompts" in done.output
    assert (calibrated / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["bundled"]),
        (("--bundled",), ["bundled"]),
        (("--prompts", "FILE", "--skip", "1"), ["b"]),
        (("--prompts", "FILE", "--skip", "1", "--bundled"), ["b", "bundled"]),
    ],
)
def test_nothing_is_fitted_on_prompts_for_figures(calibrated, monkeypatch, tmp_path, options, expected):
    """Bug: coefficients fitted on the very prompts that bench and decisions measure, or bundled prompts skipped."""
    (tmp_path / "own.json").write_text('{"own": ["a", "b"]}')
    seen = []

    def fit(pair, prompts, *others):
        seen.extend(prompts)
        raise DFlowError("seen")

    monkeypatch.setattr(calibrate, "fit", fit)
    options = [str(tmp_path / "own.json") if one == "FILE" else one for one in options]
    given = ["calibrate", str(calibrated), "--target", str(TINY_TARGET)]
    CliRunner().invoke(app, [*given, *options])
    fitting, figures = (set(read_prompts(path)) for path in (FITTING, HELD_OUT))
    assert seen and not figures & set(seen)
    own = [prompt.text for prompt in seen if prompt.task == "own"]
    assert own + (["bundled"] if fitting <= set(seen) else []) == expected
    assert len(seen) == len(own) + (len(fitting) if "bundled" in expected else 0)
    refused = CliRunner().invoke(app, [*given, "--skip", "3"])
    assert refused.exit_code != 0 and "--skip 3 is of --prompts" in " ".join(refused.output.split())


def test_the_drafters_defaults_are_not_in_use_while_it_is_watched(monkeypatch):
    """Bug: a mixture fitted on what the mixture drafts, or acceptance learned from a rule that accepts too much."""
    drafter = tiny_drafter(tiny_target(), 6)
    drafter.config.generation_defaults = {
        "stale_mixture": True, "adaptive_length": True, "tree_budget": 8, "acceptance_threshold": 0.1,
    }  # fmt: skip
    seen = []

    def decode(target, inputs, contestant, *others):
        seen.append(resolve_options(contestant.model, DFlowGenerationConfig(**contestant.options)))
        raise DFlowError("seen")

    monkeypatch.setattr(calibrate, "decode", decode)
    pair = SimpleNamespace(target=None, drafter=drafter, encode=lambda text: {})
    with pytest.raises(DFlowError, match="seen"):
        calibrate.fit(pair, [Prompt("task", "text")], 4)
    (options,) = seen
    assert not (options.stale_mixture or options.adaptive_length or options.tree_budget or options.acceptance_threshold)
    assert [type(one) for one in options.all_processors] == [calibrate.Recorder]


@pytest.mark.parametrize(("line", "expected"), [((0.0, 1e6), 1.0), ((-1e6, 1.0), 0.0), ((1e6, 1.0), 1.0)])
def test_a_steep_line_overflows_nothing(line, expected):
    """Bug: an exponential of what a folder says, which ends a call in the middle of its text."""
    assert calibrated_probability(0.7, *line) == pytest.approx(expected)
