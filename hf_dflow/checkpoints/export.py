"""Our drafters in the layouts of other servers, and back without a bit lost.

What a layout cannot say is kept beside it: relay and causal correction in `hf_dflow/parts.safetensors` (a folder below,
where no server looks for weights), the fields that reading the layout would not give back under `"hf_dflow"` in
config.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from hf_dflow._version import __version__
from hf_dflow.checkpoints import dflash, dflash2, speculators
from hf_dflow.checkpoints.files import OWN_PARTS_FILE, StoredTensor
from hf_dflow.errors import DrafterConfigError
from hf_dflow.model.configuration import DFlowDrafterConfig

OWN_PARTS = ("relay.", "causal_correction.")
QWEN3_FIELDS = (
    *dflash.SIZES,
    *dflash.OPTIONAL,
    *dflash.TOKEN_IDS,
    *("rope_parameters", "layer_types"),
)


def export_drafter(drafter: Any, folder: str | Path, to: str, num_target_layers: int | None = None) -> list[str]:
    """Write `drafter` into `folder`.

    Args:
        drafter (`DFlowDrafter`): In the dtype that it should have there.
        folder (`str` or `Path`): Empty, or not there yet.
        to (`str`): "dflash" (z-lab's) or "speculators" (vLLM's); DFlash 2 of either where the drafter has its parts.
        num_target_layers (`int`, *optional*): Where the drafter does not record it; z-lab's layout needs it.

    Returns:
        `list[str]`: What to pass to the servers that read this layout.

    Raises:
        [`DrafterConfigError`]: The layout cannot express this drafter; the message says what stands in the way.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DrafterConfigError(f"{folder} is not empty; export into a new folder.")
    if to not in WRITERS:
        raise DrafterConfigError(f"--to {to} is unknown; use one of {', '.join(WRITERS)}.")
    config = drafter.config
    names = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    parts = {name: names.pop(name) for name in list(names) if name.startswith(OWN_PARTS)}
    module, raw, weights = WRITERS[to](config, names, num_target_layers)
    raw = {**raw, "dtype": str(drafter.dtype).removeprefix("torch.")}
    stored = {name: StoredTensor("", tuple(one.shape), one.dtype) for name, one in weights.items()}
    read_back = module.convert_config(raw, str(folder), stored)
    lost = {
        key: getattr(config, key)
        for key in DFlowDrafterConfig.__annotations__
        if getattr(config, key) != getattr(read_back, key)
    }
    raw["hf_dflow"] = {
        "version": __version__,
        "note": "Exported from a DFlow drafter. Servers of this format ignore this key and the folder hf_dflow.",
        "config": lost,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if parts:
        (folder / OWN_PARTS_FILE).parent.mkdir()
        save_file(parts, folder / OWN_PARTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return server_lines(str(folder), config, to)


def server_lines(path: str, config: DFlowDrafterConfig, to: str) -> list[str]:
    """How vLLM and SGLang are told to draft with the folder or repository `path` (z-lab/dflash, README.md)."""
    settings = {"method": "dflash", "model": path, "num_speculative_tokens": config.drafts_per_block}
    lines = [f"vLLM:   --speculative-config '{json.dumps(settings)}'"]
    if to == "dflash":
        lines.append(
            f"SGLang: --speculative-algorithm DFLASH --speculative-draft-model-path {path} "
            f"--speculative-num-draft-tokens {config.block_size}"
        )
    return lines


def _refuse_where(to: str, reasons: Mapping[str, bool]) -> None:
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        _refuse(f"the {to} layout cannot express this drafter: {'; '.join(found)}")


def _refuse(what: str) -> NoReturn:
    raise DrafterConfigError(f"{what}.")


def _dflash(config: Any, weights: dict[str, torch.Tensor], num_target_layers: int | None):
    slides = "sliding_attention" in config.layer_types
    parts = [config.conv_kernel_size is not None, config.selector_rank is not None]
    causal = {config.sliding_is_causal if kind == "sliding_attention" else config.full_is_causal
              for kind in config.layer_types}  # fmt: skip
    by_kind = config.sliding_is_causal and not config.full_is_causal  # what the layout does unless told otherwise
    layers = config.num_target_layers or num_target_layers
    _refuse_where(
        "dflash",
        {
            "it has an embedding of its own": config.input_embedding == "own",
            "it reads what the target's embedding module returns (load it with input_embedding='raw' if that is the "
            "embedding's rows)": config.input_embedding == "target",
            "it has a head of its own": config.output_head != "target",
            "its anchor's row drafts too (sample_from_anchor)": config.sample_from_anchor,
            "its window is measured from the anchor": slides and config.window_from_anchor,
            "its full layers are causal and its sliding ones not": len(causal) == 2 and not by_kind,
            "it has convolutions or a selector, but not both": parts[0] != parts[1],
            "its vocab_size is not known; load it with vocab_size=": config.vocab_size is None,
            "its num_target_layers is not recorded; give it": layers is None,
        },
    )
    module = dflash2 if parts[0] else dflash
    draft = {key: getattr(config, key) for key in dflash.DRAFT_REQUIRED}
    if module is dflash2:
        draft |= {key: getattr(config, key) for key in dflash2.DRAFT_KEYS}
    defaults = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    draft |= {key: getattr(config, key) for key, default in defaults.items() if getattr(config, key) != default}
    is_causal = None if len(causal) == 2 else causal.pop()
    raw = {
        **{key: getattr(config, key) for key in QWEN3_FIELDS},
        "architectures": [module.ARCHITECTURE],
        "model_type": "qwen3",
        "num_target_layers": layers,
        "dflash_config": draft,
        "use_sliding_window": slides,
        "sliding_window": config.window_reach + 1 if slides else None,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        **({} if is_causal is None else {"is_causal": is_causal}),
    }
    return module, raw, _published_names(weights)


def _published_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the names of the selector's codebooks that DFlash 2's files have."""
    stored = {ours: theirs for theirs, ours in dflash2.NAMES.items()}
    return {stored.get(name, name): tensor for name, tensor in weights.items()}


def _speculators(config: Any, weights: dict[str, torch.Tensor], num_target_layers: int | None):
    slides = "sliding_attention" in config.layer_types
    is_reduced = config.draft_vocab_size is not None
    parts = [config.conv_kernel_size is not None, config.selector_rank is not None]
    _refuse_where(
        "speculators",
        {
            "it does not read the raw rows of the target's embedding": config.input_embedding != "raw",
            "it scales its embeddings": config.input_embedding_scale != 1.0,
            "it shapes its logits": config.output_multiplier != 1.0 or bool(config.final_logit_softcapping),
            "it has a whole head of its own": config.output_head == "own" and not is_reduced,
            "the window of its sliding layers is measured from each row": slides and not config.window_from_anchor,
            "its full layers are causal": config.full_is_causal and "full_attention" in config.layer_types,
            "it has convolutions or a selector, but not both": parts[0] != parts[1],
            "its vocab_size is not known; load it with vocab_size=": config.vocab_size is None,
        },
    )
    layers = Qwen3Config(
        **{key: getattr(config, key) for key in QWEN3_FIELDS},
        use_sliding_window=slides,
        sliding_window=config.window_reach if slides else None,
    ).to_dict()
    for key in ("dtype", "architectures", "transformers_version"):
        layers.pop(key, None)
    weights = dict(weights)
    ids = weights.pop("draft_token_ids", None)
    if ids is not None:
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    kind, architecture, second = speculators.MODEL_TYPE, dflash.ARCHITECTURE, {}
    if parts[0]:
        kind, architecture = speculators.MODEL_TYPE_2, dflash2.ARCHITECTURE
        second = {key: getattr(config, key) for key in dflash2.DRAFT_KEYS}
        weights = _published_names(weights)
    wanted = (config.generation_defaults or {}).get("num_draft_tokens")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": wanted or config.drafts_per_block,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "target_hidden_size": None,
        "sliding_window_non_causal": not config.sliding_is_causal,
        "sample_from_anchor": config.sample_from_anchor,
        "tie_word_embeddings": False,
        **second,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
    }
    return speculators, raw, weights


WRITERS = {"dflash": _dflash, "speculators": _speculators}
