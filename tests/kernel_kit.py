"""Verification on both backends: random inputs, and Triton's kernels interpreted on the CPU (no GPU needed)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch

from hf_dflow.kernels import BlockDecision, VerifyInputs, verify_block
from hf_dflow.kernels.backends import HAS_TRITON

BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
NAN = float("nan")
ignore_numpy_warnings = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of 1/0 in lanes nobody reads


def _patch_once_per_launch() -> None:
    """Half of the interpreter's time goes into patching Triton's language anew for each device function called."""
    import triton.runtime.interpreter as interpreter

    if not hasattr(interpreter, "_patch_lang"):
        return
    original = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()

    class Scope:
        def __init__(self, scope):
            self.scope = scope

        def restore(self):
            patched.clear()
            self.scope.restore()

    def patch(function):
        modules = [value for value in function.__globals__.values() if value in (interpreter.tl, interpreter.tl.core)]
        key = (interpreter.tl in modules, interpreter.tl.core in modules)
        if key in patched:
            return None
        is_launch = not patched
        patched.add(key)
        scope = original(function)
        return Scope(scope) if is_launch else scope

    interpreter._patch_lang = patch


if HAS_TRITON:
    _patch_once_per_launch()
    from hf_dflow.kernels import triton_tiles, triton_verify


@contextmanager
def tiled(block: int = 64, rows: int = 1, programs: int = 512) -> Iterator[None]:
    """Other tile sizes than a GPU's: small ones, so that a small vocabulary has several; many rows in one program."""
    saved = triton_tiles.BLOCK, triton_tiles.ROWS, triton_tiles.PROGRAMS
    triton_tiles.BLOCK, triton_tiles.ROWS, triton_tiles.PROGRAMS = block, rows, programs
    try:
        yield
    finally:
        triton_tiles.BLOCK, triton_tiles.ROWS, triton_tiles.PROGRAMS = saved


def poisoned(*shape, dtype: torch.dtype, device=None) -> torch.Tensor:
    """What `torch.empty` may return at worst: NaN, or an index far out of range."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    return tensor.fill_(math.nan if dtype.is_floating_point else 10**9)


def verify(
    inputs: VerifyInputs, backend: str, *, block: int = 16, rows: int = 32, programs: int = 512
) -> BlockDecision:
    """`verify_block`; for Triton in small tiles, with outputs and scratch that start as NaN."""
    if backend != "triton":
        return verify_block(inputs, backend)
    plan = triton_verify.plan_verification
    with pytest.MonkeyPatch.context() as patch, tiled(block, rows, programs):
        patch.setattr(triton_verify, "plan_verification", lambda inputs: plan(inputs, empty=poisoned))
        return verify_block(inputs, backend)


def assert_same(left: BlockDecision, right: BlockDecision, tolerance: float = 0.0) -> None:
    assert torch.equal(left.accepted_length, right.accepted_length)
    assert torch.equal(left.bonus_ids, right.bonus_ids)
    torch.testing.assert_close(left.acceptance_probs, right.acceptance_probs, rtol=0, atol=tolerance)


def assert_agrees(inputs: VerifyInputs, **tiles) -> BlockDecision:
    """Triton's decision; fails unless every row is decided as by torch."""
    decision = verify(inputs, "triton", **tiles)
    assert_same(decision, verify(inputs, "torch"), tolerance=5e-6)  # of a float32 ratio of two softmax probabilities
    return decision


def each_tensor(inputs: VerifyInputs, change) -> VerifyInputs:
    """`inputs` with `change(tensor)` for each of its tensors."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{k: change(v) for k, v in values.items() if isinstance(v, torch.Tensor)})


def one_row(
    target_probs: list[float], draft_probs: list[float], draft_id: int, uniforms: list[float], rule: str, **options
) -> VerifyInputs:
    """One row, one draft: probabilities are given over the vocabulary, the target's for both of its rows."""
    target, draft = (torch.tensor(probs, dtype=torch.float64).log() for probs in (target_probs, draft_probs))
    return VerifyInputs(
        rule=rule,
        draft_ids=torch.tensor([[draft_id]]),
        draft_logits=draft[None, None],
        target_logits=torch.stack([target, target])[None],
        uniforms=torch.tensor([uniforms], dtype=torch.float64),
        **options,
    )


def no_drafts(target_logits: torch.Tensor, uniforms: torch.Tensor | None, rule: str = "token") -> VerifyInputs:
    """A verification of the anchor alone: `target_logits` `[B, 1, V]`, `uniforms` `[B, 1]`."""
    draft_ids = torch.zeros(len(target_logits), 0, dtype=torch.long)
    return VerifyInputs(
        rule=rule, draft_ids=draft_ids, draft_logits=None, target_logits=target_logits, uniforms=uniforms
    )


def random_inputs(
    seed: int,
    *,
    batch: int,
    num_drafts: int,
    vocab: int,
    rule: str,
    law: str = "dense",
    dtype: torch.dtype = torch.float32,
    spread: float = 2.0,
) -> VerifyInputs:
    """Ragged rows, some tokens banned, drafts mostly from their law, which is "dense", "point mass" or "mixed"."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    target = spread * normal(batch, num_drafts + 1, vocab)
    # Rows differ in how far the drafter is off: not at all, a little, much.
    noise = torch.tensor([0.0, 0.5, 2.0])[torch.randint(3, (batch, 1, 1), generator=generator)]
    draft = (target[:, :-1] + noise * normal(batch, num_drafts, vocab)).to(dtype)
    banned = uniform(batch, num_drafts + 1, vocab) < 0.1  # -inf as left by top-k or a grammar
    banned[..., 0] = False
    draft_ids = torch.zeros(batch, num_drafts, dtype=torch.long)
    if num_drafts:
        draft_ids = draft.float().softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(batch, num_drafts)
        draft_ids = torch.where(uniform(batch, num_drafts) < 0.05, 0, draft_ids)
    return VerifyInputs(
        rule=rule,
        draft_ids=draft_ids,
        draft_logits=None if law == "point mass" else draft,
        target_logits=target.masked_fill(banned, -math.inf).to(dtype),
        uniforms=uniform(batch, num_drafts + 1, dtype=torch.float64),
        lengths=torch.randint(0, num_drafts + 1, (batch,), generator=generator),
        point_mass=uniform(batch, num_drafts) < 0.3 if law == "mixed" else None,
    )
