"""Tiny checkpoints in vLLM's speculators layout, written by the `speculators` package itself, and what it computes.

Importing speculators 0.9.0 also imports its trainer's data collection, which needs packages that nothing here uses
(and its metadata asks for an older transformers, so it is installed without dependencies): those that are missing are
stood in for by empty modules while it is imported.
"""

import importlib.abc
import importlib.machinery
import sys
from unittest.mock import MagicMock

import pytest
import torch
from dflash_oracle import (
    BLOCK_SIZE,
    DFLASH2,
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    SIZES,
    TARGET_LAYER_IDS,
    VOCAB_SIZE,
    WINDOW,
    randomize,
)
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: F401 - before the stand-ins are in place

UNUSED = {"openai", "aiohttp", "datasets", "hs_connectors", "pydantic_settings", "mooncake"}
DRAFT_VOCAB = [1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 61, 62]
SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": WINDOW, "use_sliding_window": True}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
VARIANTS = {
    "full": {},
    "mixed": {"layers": MIXED},
    "sliding": {"layers": SLIDING},
    "sliding, not causal": {"layers": SLIDING, "sliding_window_non_causal": True},
    "own embedding": {"own_embedding": True},
    "reduced vocabulary": {"draft_vocab_size": len(DRAFT_VOCAB)},
    "from the anchor": {"sample_from_anchor": True, "layers": MIXED},
    "from the anchor, reduced": {"sample_from_anchor": True, "draft_vocab_size": len(DRAFT_VOCAB)},
    "dflash2": {"kind": "dflash2"},
    "dflash2, mixed": {"kind": "dflash2", "layers": MIXED},
    "dflash2, causal": {"kind": "dflash2", "layers": SLIDING, "sliding_window_non_causal": False},
    "dflash2, from the anchor": {"kind": "dflash2", "sample_from_anchor": True, "own_embedding": True},
}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


def load_speculators(kind: str = "dflash"):
    """`speculators.models.dflash` or another module beside it, or a skip."""
    pytest.importorskip("pydantic")
    finder, before = _StandIns(), set(sys.modules)
    sys.meta_path.append(finder)
    try:
        module = pytest.importorskip(f"speculators.models.{kind}")
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:  # nobody else shall find the stand-ins
            if name.split(".")[0] in UNUSED and isinstance(sys.modules[name], MagicMock):
                del sys.modules[name]
    return module


def make_folder(
    path, target, *, kind: str = "dflash", layers: dict | None = None, own_embedding: bool = False, **config
):
    """Write a random checkpoint to `path`, and return the model behind it with `target`'s weights in it.

    Args:
        target: A tiny Qwen3 target, whose embedding and head the drafter shares.
        kind (`str`): "dflash" or "dflash2".
        layers (`dict`, *optional*): More fields of the draft layers' configuration.
        own_embedding (`bool`): Keep the embedding in the file, as older releases of speculators did.
        config: Fields of `DFlashSpeculatorConfig`.
    """
    module = load_speculators(kind)
    prefix = {"dflash": "DFlash", "dflash2": "DFlash2"}[kind]
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config = Qwen3Config(**{**SIZES, "num_hidden_layers": 3, **(layers or {})})
    layer_config._attn_implementation = "eager"
    fields = {"draft_vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN_ID, **config}
    fields |= DFLASH2 if kind == "dflash2" else {}
    drafts = BLOCK_SIZE if config.get("sample_from_anchor") else BLOCK_SIZE - 1
    model = getattr(module, f"{prefix}DraftModel")(
        getattr(module, f"{prefix}SpeculatorConfig")(
            transformer_layer_config=layer_config,
            aux_hidden_state_layer_ids=[i + 1 for i in TARGET_LAYER_IDS],
            speculators_config=SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
            **fields,
        )
    ).eval()
    randomize(model, 1)
    head = target.lm_head.weight
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        if model.use_draft_vocab:
            ids = torch.tensor(DRAFT_VOCAB)
            model.load_vocab_mappings(
                torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(len(ids))
            )
        else:
            model.lm_head.weight.copy_(head)
    if own_embedding:
        model.embed_tokens.weight.data += 0.1
        model.__dict__["_keys_to_ignore_on_save"] = ["verifier_lm_head.weight", "verifier_norm.weight"]
    model.save_pretrained(path)
    return model


def eager_mask():
    """Their function for masks of eager attention; a model that was loaded has chosen compiled ones."""
    from speculators.models.attention import create_float_mask

    return create_float_mask


@torch.no_grad()
def oracle_block(model, token_ids: torch.Tensor, features: torch.Tensor, anchor: int):
    """Final states `[L, H]` and logits `[L, vocab]` of the block at position `anchor` of `token_ids` `[1, T]`.

    From its training path. `features` `[1, T, taps * H]` are the tapped states; those from `anchor` on must not matter.
    Tokens outside a reduced vocabulary have logits of -inf.
    """
    length = token_ids.shape[1]
    loss_mask = torch.zeros(1, length)
    loss_mask[0, anchor] = 1  # the only anchor that can be chosen
    hidden, logits, *_ = model._backbone_forward(
        features,
        token_ids,
        loss_mask,
        torch.zeros(1, length, HIDDEN_SIZE, dtype=features.dtype),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    hidden, logits = hidden[0], logits[0]
    if model.use_draft_vocab:
        logits = logits.new_full((len(logits), VOCAB_SIZE), -torch.inf).index_copy(1, torch.tensor(DRAFT_VOCAB), logits)
    return hidden, logits
