"""The probe counts what decoding does: its steps, its rejected rows, and what they said."""

import json
from itertools import pairwise

import pytest
import torch
from restless import restless_pair
from typer.testing import CliRunner

from hf_dflow import DFlowGenerationConfig
from hf_dflow.bench import pairs
from hf_dflow.bench.probe import TOP, ProbeCounts, _walk, figures, probe_text, summarise
from hf_dflow.cli import app
from hf_dflow.generation.verification import Verifier

NEW_TOKENS = 80
PROMPT = [1, 5, 2]


CORRECTION = {"correction_intermediate_size": 16, "correction_top_k": 4}


@pytest.fixture(scope="module", params=[{}, CORRECTION], ids=["independent", "corrected"])
def decoded(request):
    """A real decoding with the relay off: final text, and each step's drafts, accepted length and target logits."""
    target, drafter = restless_pair(**request.param)
    if drafter.causal_correction is not None:
        drafter.load_state_dict(restless_pair()[1].state_dict(), strict=False)  # its seed gives partial rejections
        torch.manual_seed(0)
        torch.nn.init.normal_(drafter.causal_correction.down_proj.weight, std=0.03)
    steps = []
    original = Verifier.__call__

    def spy(self, rows, forward, uniforms):
        anchor, draft = rows[0].length - 1, forward.chain
        verification = original(self, rows, forward, uniforms)
        if draft.num_drafts:
            steps.append((anchor, draft.token_ids[0], int(verification.accepted_length), forward.logits[0]))
        return verification

    Verifier.__call__ = spy
    try:
        config = DFlowGenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, use_relay=False
        )
        output = target.generate(torch.tensor([PROMPT]), generation_config=config, assistant_model=drafter)
    finally:
        Verifier.__call__ = original
    accepted = output.statistics.per_step_accepted
    assert max(accepted) >= 2 and 0 in accepted
    return target, drafter, output.sequences[0].tolist(), steps


def test_counts_are_those_of_a_real_decoding(decoded):
    """Catches: a walk by other steps than decoding's, a rejected row compared to the wrong place of the final text."""
    target, drafter, text, steps = decoded
    counts = probe_text(drafter, target, text, len(PROMPT))
    num_drafts = drafter.config.block_size - 1
    hinted_slots = reconverged = redrafted = hinted_failures = rescued = rescued_top5 = 0
    for (anchor, _, accepted, logits), (_, next_drafts, _, _) in pairwise(steps):
        if accepted == num_drafts:
            continue
        new_anchor, failed = anchor + accepted + 1, False
        for slot, row in enumerate(range(accepted + 1, num_drafts + 1), 1):  # slot j - a is fed by row j
            if new_anchor + slot >= len(text):
                break
            final = text[new_anchor + slot]
            top = logits[row].topk(TOP).indices.tolist()
            hinted_slots += 1
            reconverged += top[0] == final
            redrafted += int(next_drafts[slot - 1]) == final if slot <= len(next_drafts) else 0
            if slot <= len(next_drafts) and int(next_drafts[slot - 1]) != final and not failed:
                failed = True
                hinted_failures += 1
                rescued += top[0] == final
                rescued_top5 += final in top
    assert counts.steps in (len(steps), len(steps) + 1)  # decoding stops at its budget, the walk at the text's end
    assert abs(counts.hinted_slots - hinted_slots) <= num_drafts
    for name, expected in {
        "reconverged": reconverged,
        "redrafted": redrafted,
        "hinted_failures": hinted_failures,
        "rescued": rescued,
        "rescued_top5": rescued_top5,
    }.items():
        assert expected and abs(getattr(counts, name) - expected) <= 1, name


def test_hand_made_steps_are_counted():
    """Catches: a rescue counted behind the first failure, a mended walk that mends what the verifier got wrong."""
    # One text of tokens 0, 1, 2 …; three drafts a block. Anchor 0 drafts its second token wrong, so that rows 2 and 3
    # are rejected and feed slots 1 and 2 of the block at anchor 2.
    labels = torch.tensor([[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, -100], [5, -100, -100]])
    drafts = labels.clone()
    drafts[0, 1] = 9
    drafts[2, 0] = 9  # the second step fails at slot 1, which row 2 of the first block feeds
    drafts[3, 1] = 9
    top = torch.full((5, 4, TOP), 7)
    top[0, 2, 0] = 3  # and row 2 says the final token
    top[0, 3, 1] = 4  # row 3 has it in the top five only
    counts = _walk(drafts, labels, top)
    assert counts == ProbeCounts(
        tokens=5,
        steps=3,  # anchors 0, 2, 3
        hinted_slots=2 + 2,  # slots 1, 2 at anchor 2; slots 1, 2 at anchor 3
        reconverged=1,
        redrafted=2,  # slot 2 at anchor 2, slot 1 at anchor 3
        only_verifier=1,
        hinted_failures=2,
        rescued=1,
        rescued_top5=1,
        steps_if_rescued=2,
    )
    assert figures(counts)["rescue_rate"] == 0.5 and figures(counts)["largest_gain"] == 0.5


def test_figures_of_nothing_are_zero():
    """Catches: a division by zero for a text without a rejection."""
    assert set(figures(ProbeCounts(tokens=8, steps=1, steps_if_rescued=1)).values()) == {8.0, 0.0}
    assert summarise([ProbeCounts(tokens=8, steps=2, steps_if_rescued=2)])["tokens_per_step"]["value"] == 4.0


def test_command_prints_tasks_and_writes_the_same(decoded, monkeypatch, tmp_path):
    """Catches: a task left out, a text that is not the pair's own answer, figures without their conditions."""
    target, drafter, text, _ = decoded

    class Tokenizer:
        def apply_chat_template(self, *arguments, **options):
            return {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)}

    monkeypatch.setattr(pairs, "load_pair", lambda *_, **__: pairs.Pair(target, drafter, Tokenizer(), "tiny"))
    (tmp_path / "prompts.json").write_text('{"chat": ["one"], "code": ["two", "three"]}')
    arguments = [
        "--prompts",
        tmp_path / "prompts.json",
        "--max-new-tokens",
        NEW_TOKENS,
        "--json",
        tmp_path / "out.json",
    ]
    result = CliRunner().invoke(app, ["probe", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert all(task in result.output for task in ("chat", "code", "all"))
    record = json.loads((tmp_path / "out.json").read_text())
    expected = figures(probe_text(drafter, target, text, len(PROMPT)))
    for task in ("chat", "code", "all"):
        assert {name: one["value"] for name, one in record["by_task"][task].items()} == pytest.approx(expected)
    assert record["conditions"]["max_new_tokens"] == NEW_TOKENS and record["conditions"]["target"] == "tiny"
