"""`python tests/families.py docs/results`: every causal language model of the installed transformers, tiny and random.

For each class: what its self-check measures, and whether text with a drafter equals plain decoding where it passes. The
record is `families-VERSION.json`; `python -m experiments.tables` makes the document's table of it.
"""

import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kit
import torch
import transformers
from batches import padded
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_dflow import DFlowDrafter, UnsupportedGenerationError
from hf_dflow.errors import DFlowError
from hf_dflow.generation.checks import can_hold_holes, can_hold_trees
from hf_dflow.generation.selfcheck import PARTS, check_of

WINDOW = 8
NEW_TOKENS = 24
MOST_NUMBERS = 10_000_000
PROMPTS = [kit.prompt_of(length, seed=length) for length in (14, 5, 9)]  # two are past the window from the start
EXACT, REFUSED, DIFFERS, FAILS, NOT_BUILT = "exact", "refused", "DIFFERS", "FAILS", "not built"

# Fields of configurations, by what they are.
TINY = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "pad_token_id": 0, "is_decoder": True, "use_cache": True,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "emb_dim": 32,
    "word_embed_proj_dim": 32,
    "input_embedding_size": 32, "output_embedding_size": 32, "hidden_size_per_layer_input": 8,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "d_inner": 48,
    "dim_ff": 48, "dff": 48, "ffn_hidden_size": 48, "shared_expert_intermediate_size": 24, "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "shared_intermediate_size": 24, "intermediate_size_mlp": 48, "block_ff_dim": 48,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4, "encoder_layers": 1,
    "num_decoder_layers": 4, "num_encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "attention_head_dim": 8, "dim_head": 8,
    "kv_channels": 8, "d_kv": 8,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "max_sequence_length": 256,
    "max_target_positions": 256, "max_source_positions": 256,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "zero_expert_num": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "mamba_d_ssm": 64,
    "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 16, "mamba_dt_rank": 4, "lru_width": 32, "time_step_rank": 4,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "layernorm_embedding": False,
    "sliding_window": WINDOW, "window_size": WINDOW, "keep_window_size": WINDOW, "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW, "local_attention": WINDOW, "sliding_window_size": WINDOW,
    "initializer_range": 0.3, "init_std": 0.3,
}  # fmt: skip


@dataclass
class Family:
    """What became of one class."""

    name: str
    model_class: str
    verdict: str = NOT_BUILT
    reason: str = ""
    window: int = 0
    measured: dict[str, Any] | None = None  # of each part: error, control, limit and whether it passes
    together: bool | None = None  # whether rows of a batch keep their own pace
    tree: str = ""
    decoded: dict[str, str] | None = None  # of each way of decoding


def tiny_config(config_class) -> Any:
    """A configuration of `config_class` with tiny numbers wherever it has a field of a known name."""
    known = AutoConfig.for_model(config_class.model_type) if config_class.model_type else config_class()
    fields = vars(known)
    names = {*fields, *config_class.attribute_map}
    values = {name: value for name, value in TINY.items() if name in names}
    values = {name: value for name, value in values.items() if name != "sliding_window" or fields.get(name) is not None}
    for name, value in fields.items():
        if name.endswith(("_token_id", "_token_index")) and name not in values:
            values[name] = None if name in ("bos_token_id", "eos_token_id") else 0
        if "drop" in name and isinstance(value, float):
            values[name] = 0.0
    values |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    if "kv_lora_rank" in names:  # latent attention: keys of all heads, of two parts
        values["num_key_value_heads"] = 4
        values.pop("head_dim", None)
    if "rotary_dim" in names:
        values["rotary_dim"] = 4
    values |= SPECIAL.get(config_class.model_type, {})
    return config_class(**values)


LAYERS = {"linear": ["linear_attention", "full_attention"] * 2, "mamba": ["mamba", "hybrid"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {  # what a class needs beside the above
    "cwm": {"bos_token_id": 0, "eos_token_id": 0},
    "modernbert-decoder": {"bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "intermediate_size": [48] * 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2, "laurel_rank": 4, "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bailing_hybrid": {"layer_types": LAYERS["linear"]},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "kimi_linear": {
        "layer_types": LAYERS["linear"], "linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "chunk_size": 16},
    "zamba2": {"layers_block_type": LAYERS["mamba"], "num_mem_blocks": 1, "adapter_rank": 4, "mamba_expand": 2},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "roc_bert": {
        "pronunciation_vocab_size": 64, "shape_vocab_size": 64, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"] * 2},
}  # fmt: skip


def build(config_class, model_class) -> PreTrainedModel:
    """A random model with weights that are large enough for tokens to depend on each other."""
    config = tiny_config(config_class)
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in model_class(config).parameters())
    if numbers > MOST_NUMBERS:
        raise ValueError(f"{numbers:,} numbers with tiny sizes")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


def examine(config_class, model_class) -> Family:
    """Measure and decode one class."""
    family = Family(config_class.model_type, model_class.__name__)
    if set(config_class.sub_configs) & {"vision_config", "audio_config", "text_config", "decoder"}:
        family.reason = "of several models"
        return family
    try:
        model = build(config_class, model_class)
        head = model.get_output_embeddings()
        head.weight[kit.MASK_TOKEN_ID] *= 0.01  # no drafter may propose it, so the target should not say it
    except Exception as error:
        family.reason = in_words(error)
        return family
    try:
        texts = [(kit.plain_greedy(model, prompt, NEW_TOKENS + 8), prompt.shape[1]) for prompt in PROMPTS]
        drafter = kit.tiny_drafter(model, 8, drafter_class=kit.PatternDrafter).follow_rows(texts)
        drafter.pattern, drafter.offset = [3, 0, 7, 1, 5], 2
    except Exception as error:
        family.verdict, family.reason = FAILS, f"plain generate: {in_words(error)}"
        return family
    family.decoded = {}
    for way in ("block", "batch of three", "tree"):
        family.decoded[way], reason = decode(model, drafter, texts, way)
        family.reason = family.reason or (reason if way == "block" else "")
        if way == "tree":
            family.tree = reason
        if way == "block" and family.decoded[way] == REFUSED:
            break
    family.verdict = worst(family.decoded.values()) if family.decoded["block"] != REFUSED else REFUSED
    if family.decoded["block"] != REFUSED or "random tokens" in family.reason:
        measure(model, family)
    if family.decoded["block"] == REFUSED and "random tokens" in family.reason:
        family.decoded["block, were it not refused"] = decode_unchecked(model, drafter, texts)
    return family


def measure(model: PreTrainedModel, family: Family) -> None:
    """Note what the self-check finds."""
    has_full_attention = can_hold_holes(model)
    check = check_of(model, holes=has_full_attention, tree=can_hold_trees(model))
    family.window, family.measured = check.window, {}
    for part in PARTS:
        comparison = getattr(check, part)
        if part in check.failures:
            family.measured[part] = {"passes": False, "failure": check.failures[part]}
        elif comparison is not None:
            family.measured[part] = {**asdict(comparison), "passes": comparison.passes}
    family.together = has_full_attention and check.lacks("holes") is None


def decode(model, drafter: DFlowDrafter, texts, way: str) -> tuple[str, str]:
    """Whether text with the drafter is plain decoding's, and why not."""
    try:
        if way == "batch of three":
            ids, mask = padded(PROMPTS)
            plain = kit.plain_greedy(model, ids, NEW_TOKENS, attention_mask=mask)[:, ids.shape[1] :].tolist()
            output = kit.dflow_greedy(model, drafter, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
            rows = output.sequences[:, ids.shape[1] :].tolist()
        else:
            options = {"tree_budget": 12} if way == "tree" else {}
            output = kit.decode(model, drafter, PROMPTS[0], NEW_TOKENS, **options)
            rows = output.sequences[:, PROMPTS[0].shape[1] :].tolist()
    except UnsupportedGenerationError as error:
        return REFUSED, str(error)
    except DFlowError as error:
        return REFUSED, str(error)
    except Exception as error:
        return FAILS, in_words(error)
    for index, (row, (text, length)) in enumerate(zip(rows, texts, strict=False)):
        expected = text[0, length : length + NEW_TOKENS].tolist()
        if way == "batch of three" and row == plain[index]:  # some targets tell a padded row from the row alone
            continue
        if row != expected:
            at = next(i for i, (ours, theirs) in enumerate(zip(row, expected, strict=True)) if ours != theirs)
            return DIFFERS, f"from new token {at}"
    return EXACT, ""


def decode_unchecked(model, drafter: DFlowDrafter, texts) -> str:
    """What a block would give without the self-check."""
    from hf_dflow.generation import checks

    check_measured, checks.check_measured = checks.check_measured, lambda *args, **kwargs: None
    try:
        return decode(model, drafter, texts, "block")[0]
    finally:
        checks.check_measured = check_measured


def worst(results) -> str:
    """FAILS or DIFFERS, if a result is."""
    return next((result for result in (FAILS, DIFFERS) if result in results), EXACT)


def in_words(error: Exception) -> str:
    """The class and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def sweep(names: list[str] | None = None) -> list[Family]:
    """Every class, or those of the model types `names`."""
    families = []
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if names and config_class.model_type not in names:
            continue
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
        families.append(examine(config_class, model_class))
        print(*(f"{part}" for part in (families[-1].name, families[-1].verdict, families[-1].reason[:150])), flush=True)
    return families


def main(folder: str, *names: str) -> None:
    """Write the record of the installed transformers into `folder`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    families = sweep(list(names))
    record = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "families": [asdict(f) for f in families],
    }
    path = Path(folder) / f"families-{transformers.__version__}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
