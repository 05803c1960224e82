"""transformers' own DFlash assistants (`"model_type": "muse_glimmer_assistant"`).

Their loop passes the output of the target's embedding module, scaling included, and applies the target's head without a
cap. Sliding layers are bidirectional and see `|q - k| <= W`. The file does not give the vocabulary, which is the
target's.
"""

from hf_dflow.checkpoints.layout import LAYER_SIZES, TOKEN_IDS, Layout, refuse

REQUIRED = (
    *(key for key in LAYER_SIZES if key != "vocab_size"),
    *("rms_norm_eps", "hidden_act", "rope_parameters", "layer_types"),
    *("block_size", "mask_token_id", "target_layer_ids"),
)
OPTIONAL = ("sliding_window", "attention_dropout", "initializer_range", *TOKEN_IDS)


class NativeLayout(Layout):
    model_types = ("muse_glimmer_assistant",)
    description = f"'model_type': '{model_types[0]}' (transformers' DFlash assistant)"
    renamed = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}

    def matches(self, raw):
        return raw.get("model_type") in self.model_types

    def read_fields(self, raw, path, stored, overrides):
        for key in REQUIRED:
            if raw.get(key) is None and overrides.get(key) is None:
                refuse(path, f"'{key}' is missing and has no safe default; add it, or pass {key}= to from_pretrained")
        return {
            **{key: raw[key] for key in (*REQUIRED, *OPTIONAL) if raw.get(key) is not None},
            "vocab_size": raw.get("vocab_size"),
            "input_embedding": "target",
            "output_head": "target",
            "window_is_inclusive": True,
            "use_relay": False,
        }
