"""The layout that vLLM reads with this package's plugin (hf_dflow.engines.vllm): z-lab's, with relay and correction.

Its architecture is one that vLLM refuses without the plugin. Otherwise it would draft without the relay, and nobody
would be told.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hf_dflow.checkpoints.dflash import DFlashLayout, export_dflash
from hf_dflow.checkpoints.layout import Export, refuse, refuse_export

# vLLM takes the architecture of a DFlash drafter as it is only where it begins so (its EAGLEConfig renames others).
ARCHITECTURE = "DFlashDFlowDraftModel"
OWN_WEIGHTS = ("relay.", "causal_correction.")
KEY = "dflow_config"
# Fields of `DFlowDrafterConfig` by their key in `dflow_config`.
FIELDS = {
    "relay": {
        "intermediate_size": "relay_intermediate_size",
        "hidden_act": "relay_hidden_act",
        "norm_affine": "relay_norm_affine",
    },
    "causal_correction": {"intermediate_size": "correction_intermediate_size", "top_k": "correction_top_k"},
}


class VllmLayout(DFlashLayout):
    """DFlash v1 with relay and causal correction."""

    holds_own_parts = True
    architecture = ARCHITECTURE
    description = f"'architectures': ['{ARCHITECTURE}'] (this package's export for vLLM)"

    def read_fields(self, raw, path, stored, overrides):
        fields = super().read_fields({key: raw[key] for key in raw if key != KEY}, path, stored, overrides)
        try:
            return {**fields, **own_part_fields(raw)}
        except (KeyError, TypeError, AttributeError) as error:
            refuse(path, f"'{KEY}' is {raw.get(KEY)!r} and lacks {error}; export the drafter again")


def own_part_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DFlowDrafterConfig` for relay and correction in the content `raw` of a config.json."""
    parts = raw[KEY]
    fields: dict[str, Any] = {"use_relay": parts["relay"] is not None}
    for name, keys in FIELDS.items():
        if parts[name] is not None:
            fields |= {field: parts[name][key] for key, field in keys.items()}
    return fields


def export_vllm(config: Any, weights: dict[str, torch.Tensor], num_target_layers: int | None) -> Export:
    """A drafter's configuration and weights, its relay and correction among them."""
    refuse_export(
        "vllm",
        {
            "it has convolutions or a selector (DFlash 2), which vLLM runs by other code": config.conv_kernel_size
            is not None
            or config.selector_rank is not None,
            "its embeddings are scaled": config.input_embedding_scale != 1.0,
            "its logits are scaled or capped": config.output_multiplier != 1.0
            or config.final_logit_softcapping is not None,
        },
    )
    parts = {name: weight for name, weight in weights.items() if name.startswith(OWN_WEIGHTS)}
    layers = {name: weight for name, weight in weights.items() if name not in parts}
    export = export_dflash(config, layers, num_target_layers)
    present = {"relay": config.use_relay, "causal_correction": config.correction_intermediate_size is not None}
    own = {
        name: {key: getattr(config, field) for key, field in keys.items()} if present[name] else None
        for name, keys in FIELDS.items()
    }
    raw = {**export.config, "architectures": [ARCHITECTURE], KEY: own}
    return Export(VllmLayout(), raw, {**export.weights, **parts})
