"""Kernels without a GPU: Triton interprets them on the CPU. Import it before anything that imports a kernel."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton: pip install 'hf-dflow[triton]'")

import triton.runtime.interpreter as interpreter

from experiments.kernel_agreement import compare_decisions
from hf_dflow.kernels import BlockDecision, SparseLogits, tiles, verification, verify_block

pytestmark_interpreter = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of 1/0 in lanes nobody reads


def _patch_once_per_launch() -> None:
    """Half of the interpreter's time goes into patching Triton's language anew for each device function called."""
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


if hasattr(interpreter, "_patch_lang"):
    _patch_once_per_launch()


@contextmanager
def tiled(block: int = 64, rows: int = 1, programs: int = 512) -> Iterator[None]:
    """Other tile sizes than a GPU's: small ones, so that a small vocabulary has several; many rows in one program."""
    saved = tiles.BLOCK, tiles.ROWS, tiles.PROGRAMS
    tiles.BLOCK, tiles.ROWS, tiles.PROGRAMS = block, rows, programs
    try:
        yield
    finally:
        tiles.BLOCK, tiles.ROWS, tiles.PROGRAMS = saved


def in_small_tiles(**arguments) -> BlockDecision:
    """`verify_block` in Triton, with tiles of 16 entries and four rows to a program."""
    with tiled(block=16, rows=4):
        return verify_block(**arguments, backend="triton")


def assert_agrees(**arguments) -> BlockDecision:
    """The same; fails unless every row is decided as by the reference."""
    decision = in_small_tiles(**arguments)
    found = compare_decisions(decision, arguments)
    assert found.wrong_rows == [] and found.num_excluded == 0
    return decision


def poisoned(*shape, dtype: torch.dtype, device=None) -> torch.Tensor:
    """What `torch.empty` may return at worst: NaN, or an index far out of range."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    return tensor.fill_(math.nan if dtype.is_floating_point else 10**9)


@pytest.fixture
def poison(monkeypatch):
    """Outputs and scratch of the kernels start as NaN."""
    plan = verification.plan_verification
    monkeypatch.setattr(verification, "plan_verification", lambda **arguments: plan(**arguments, empty=poisoned))


def random_arguments(
    seed: int,
    *,
    batch: int,
    num_drafts: int,
    vocab: int,
    rule: str,
    law: str = "dense",
    dtype: torch.dtype = torch.float32,
    spread: float = 2.0,
) -> dict:
    """Keyword arguments for `verify_block`: ragged rows, some tokens banned, drafts mostly from their law."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    target = spread * normal(batch, num_drafts + 1, vocab)
    # Rows differ in how far the drafter is off: not at all, a little, much.
    noise = torch.tensor([0.0, 0.5, 2.0])[torch.randint(3, (batch, 1, 1), generator=generator)]
    draft = target[:, :-1] + noise * normal(batch, num_drafts, vocab)
    banned = uniform(batch, num_drafts + 1, vocab) < 0.1
    banned[..., 0] = False
    target = target.masked_fill(banned, -math.inf).to(dtype)
    draft = draft.to(dtype)
    draft_law: torch.Tensor | SparseLogits | None = draft
    probs = draft.float().softmax(-1)
    if law == "sparse":
        top = draft.float().topk(min(vocab, 5), dim=-1)
        draft_law = SparseLogits(top.indices, top.values.to(dtype))
        probs = torch.zeros_like(probs).scatter(-1, top.indices, top.values.to(dtype).float().softmax(-1))
    elif law == "point mass":
        draft_law = None
    draft_ids = torch.zeros(batch, num_drafts, dtype=torch.long)
    if num_drafts:
        draft_ids = probs.flatten(0, 1).multinomial(1, generator=generator).view(batch, num_drafts)
    return {
        "draft_ids": draft_ids,
        "draft_logits": draft_law,
        "target_logits": target,
        "uniforms": uniform(batch, num_drafts + 1, dtype=torch.float64),
        "rule": rule,
        "lengths": torch.randint(0, num_drafts + 1, (batch,), generator=generator),
        "point_mass": uniform(batch, num_drafts) < 0.3 if law == "mixed" else None,
    }
