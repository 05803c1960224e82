"""Low precision, broken logits, vocabularies of two sizes, and life without Triton."""

import kit
import pytest
import torch
from law import PLAIN, Loop, law_error, three_token_drafter
from torch import nn

from hf_dflow import DFlowDrafter

EXACT = 1e-9
RULES = ("token", "block")


def sample(target, drafter, prompt, new_tokens=12, **options):
    return kit.decode(target, drafter, prompt, new_tokens, **{**PLAIN, **options})


# -- low precision


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_low_precision_sampling(dtype, rule, temperature):
    """Bug (E2): a residual that rounds to nothing or a probability that underflows: NaN, an exception, or junk ids."""
    target = kit.shared_target(dtype=dtype)
    torch.manual_seed(0)
    options = {"temperature": temperature, "verification": rule, "output_scores": True}
    output = sample(target, kit.tiny_drafter(target, 8), kit.prompt_of(5), 80, **options)
    new = output.sequences[0, 5:]
    assert len(new) == 80
    assert bool(((new >= 0) & (new < kit.VOCAB_SIZE)).all())
    assert not any(score.isnan().any() for score in output.scores)
    assert output.statistics.num_draft_tokens > 100  # the drafter did not fall out on the way


# -- NaN and inf


class BreaksLater(nn.Module):
    """A head whose logits of token 3 are `value` after `calls` sound forwards."""

    def __init__(self, head: nn.Module, value: float, calls: int):
        super().__init__()
        self.head, self.value, self.calls = head, value, calls

    @property
    def weight(self):
        return self.head.weight

    def forward(self, hidden):
        logits = self.head(hidden).clone()
        self.calls -= 1
        if self.calls < 0:
            logits[..., 3] = self.value
        return logits


def broken_target(value: float, calls: int):
    """A target that breaks after `calls` forwards, and a drafter whose own head does not."""
    target = kit.tiny_target("llama")
    drafter = kit.tiny_drafter(target, 4, output_head="own")
    target.lm_head = BreaksLater(target.lm_head, value, calls)
    return target, drafter


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_sampling_from_broken_logits_raises_as_plain(value, calls, rule):
    """Bug (E2): junk is sampled where plain sampling raises, or a device assert comes instead of an exception."""
    prompt = kit.prompt_of(5)
    target, drafter = broken_target(value, calls)
    with pytest.raises(RuntimeError, match="remove_invalid_values"):
        sample(target, drafter, prompt, verification=rule)
    target, _ = broken_target(value, calls)
    with pytest.raises(RuntimeError):
        target.generate(prompt, **PLAIN, max_new_tokens=12)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", RULES)
def test_remove_invalid_values_works(value, rule):
    """Bug (E2): `remove_invalid_values` reaches the drafts only, or not at all."""
    prompt = kit.prompt_of(5)
    target, drafter = broken_target(value, 0)
    output = sample(target, drafter, prompt, verification=rule, remove_invalid_values=True, output_scores=True)
    assert output.sequences.shape == (1, 17)
    assert all(score.isfinite().all() for score in output.scores)
    if value == torch.inf:  # becomes the largest float: nothing else can be sampled
        assert set(output.sequences[0, 5:].tolist()) == {3}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"remove_invalid_values": True}])
def test_greedy_with_broken_logits_is_as_plain(value, options):
    """Bug (E2): NaN that changes an argmax, or an error that plain greedy decoding does not raise."""
    prompt = kit.prompt_of(5)
    target, drafter = broken_target(value, 0)
    plain = kit.plain_greedy(target, prompt, 8, **options)
    assert torch.equal(kit.dflow_greedy(target, drafter, prompt, max_new_tokens=8, **options).sequences, plain)


# -- vocabularies of two sizes


@pytest.mark.parametrize("rule", RULES)
def test_target_tokens_outside_the_drafters_vocabulary(monkeypatch, rule, three_tokens):
    """Bug (F6): tokens that the drafter cannot propose are never output, or only at the wrong rate."""
    target = three_tokens
    drafter = three_token_drafter(target, vocab_size=2, mask_token_id=1)  # proposes token 0 and nothing else
    loop = Loop(monkeypatch, target, drafter, verification=rule)
    assert law_error(loop, 2 if rule == "token" else 1) < EXACT
    assert loop.steps[-1].draft_law.tolist() == [[1.0, 0.0, 0.0]] * 2
    drafter = three_token_drafter(target, vocab_size=2, mask_token_id=1, input_embedding="raw", output_head="target")
    assert law_error(Loop(monkeypatch, target, drafter, verification=rule), 1) < EXACT


@pytest.mark.parametrize(("target_vocab", "drafter_vocab"), [(128, 120), (128, 136), (136, 128)])
def test_two_vocabulary_sizes(tmp_path, target_vocab, drafter_vocab):
    """Bug (F6): the same tokenizer padded differently is refused, crashes, or proposes ids that nobody has."""
    target = kit.tiny_target("llama", vocab_size=target_vocab)
    mask = {"mask_token_id": drafter_vocab - 1, "input_embedding": "own", "output_head": "own"}
    kit.tiny_drafter(target, 6, vocab_size=drafter_vocab, **mask).save_pretrained(tmp_path)
    drafter = DFlowDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    last = min(target_vocab, drafter_vocab)
    prompt = torch.cat([kit.prompt_of(5), torch.tensor([[125]])], dim=1)  # 125: unknown to the smallest drafter
    if drafter_vocab > target_vocab:  # the padded ids are what the drafter likes best
        with torch.no_grad():
            drafter.lm_head.weight[128:] *= 50
    greedy = kit.plain_greedy(target, prompt, 40)
    output = kit.dflow_greedy(target, drafter, prompt, max_new_tokens=40)
    assert torch.equal(output.sequences, greedy)
    assert output.statistics.num_draft_tokens > 0
    torch.manual_seed(0)
    sampled = sample(target, drafter, prompt, 100, temperature=2.0)
    assert int(sampled.sequences.max()) < target_vocab
    if drafter_vocab < target_vocab:  # ids that the drafter lacks are reached all the same
        assert int(sampled.sequences[0, 6:].max()) >= last
