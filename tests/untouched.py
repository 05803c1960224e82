"""What transformers generates without this package: also run as a script that never imports hf_dflow."""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "sampled batch": {"do_sample": True, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "assisted greedy": {"do_sample": False},
    "assisted sampled": {"do_sample": True, "temperature": 1.5},
}


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """Ours to use where tests/kit.py, which imports hf_dflow, may not be."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def generate_all() -> dict[str, dict[str, list]]:
    """Tokens and the exact bits of the scores for every mode."""
    target, assistant = tiny_llama(0), tiny_llama(1)
    prompt = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(2))
    generated = {}
    for name, options in MODES.items():
        set_seed(7)
        if name.startswith("assisted"):
            options = {**options, "assistant_model": assistant}
        inputs = prompt.repeat(2, 1) if "batch" in name else prompt
        out = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=24,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        scores = torch.stack(out.scores).contiguous().view(torch.int32)
        generated[name] = {"tokens": out.sequences.tolist(), "scores": [int(scores.sum()), int(scores[::2].sum())]}
    return generated


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = generate_all()
    assert not any(name.startswith("hf_dflow") for name in sys.modules)
    print(json.dumps(results))
