"""The output law with the Triton kernels, by exact enumeration: of the op alone, and of `generate` around it."""

import kernel_kit
import law
import pytest
import test_verify_block_law as op_law
from kernel_kit import tiled

from hf_dflow.kernels import verify_block

pytestmark = kernel_kit.pytestmark_interpreter

EXACT = 1e-6  # what the kernels promise; enumerated in float64 they reach 1e-15
RULES = ("token", "block")
LAWS = ("dense", "sparse", "point_mass", "mixed")


@pytest.fixture
def in_triton(monkeypatch):
    """Both enumerations verify with the interpreted kernels."""
    calls = []

    def verify(**arguments):
        calls.append(arguments["rule"])
        with tiled(rows=32):
            return verify_block(**{**arguments, "backend": "triton"})

    monkeypatch.setattr(op_law, "verify_block", verify)
    monkeypatch.setattr(law, "verify_block", verify)
    return calls


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("rule", RULES)
def test_output_law_of_the_op(in_triton, rule, kind):
    """Bug: a wrong ratio, weight, residual or draw in a kernel: text that only looks plausible."""
    for num_drafts in (1, 3):
        assert op_law.law_error(op_law.make_instance(num_drafts, num_drafts, kind), rule) < EXACT
    assert in_triton


@pytest.mark.parametrize("rule", RULES)
def test_output_law_with_shorter_verification_or_a_broken_draft_law(in_triton, rule):
    """Bug: the last verified draft is judged as if another followed, or a slot without a law biases the text."""
    instance = op_law.make_instance(1, 3, "dense")
    for length in (0, 2):
        assert op_law.law_error(instance, rule, lengths=op_law.torch.full((27,), length)) < EXACT
    broken = {x: probs * (op_law.np.nan if len(x) == 1 else 1.0) for x, probs in instance.draft.items()}
    assert op_law.law_error(instance, rule, claimed=op_law.replace(instance, draft=broken)) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_control_a_wrong_draft_law_is_seen(in_triton, rule):
    """Control: verifying with another q than the one that drew the drafts must be seen."""
    instance, other = (op_law.make_instance(seed, 2, "dense") for seed in (3, 4))
    assert op_law.law_error(instance, rule, claimed=other) > op_law.BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_output_law_of_generate(monkeypatch, in_triton, rule):
    """Bug: logits, uniforms or drafts handed to the kernels in another order than the loop's."""
    target = law.three_token_target()
    loop = law.Loop(monkeypatch, target, law.three_token_drafter(target), verification=rule)
    assert law.law_error(loop, 1) < EXACT
    assert set(in_triton) == {rule}
