"""Targets that see images: the language model inside is decoded, images belong to the prompt and to nobody else."""

from functools import cache

import pytest
import torch
from internals import capture_features, holds_holes, no_holes
from kit import PatternDrafter, assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_drafter
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_dflow import UnsupportedGenerationError

IMAGE, PATCHES, NEW_TOKENS = 62, 4, 24
PATTERN = [3, 0, 7, 1, 5]


@cache
def target():
    """LLaVA of a tiny Llama and a tiny CLIP, four patches an image."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, image_token_id=IMAGE, tie_word_embeddings=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        model.get_output_embeddings().weight[IMAGE:] *= 0.01  # it says neither images nor the mask token
    model.generation_config.pad_token_id = 0
    return model.double().eval().requires_grad_(False)


def prompt(seed: int) -> torch.Tensor:
    return torch.cat([prompt_of(4, seed), torch.full((1, PATCHES), IMAGE), prompt_of(5, seed + 1)], 1)


PROMPTS = [prompt(seed) for seed in range(40) if (prompt(seed) == IMAGE).sum() == PATCHES][:2]
WIDTH = PROMPTS[0].shape[1]


def image(seed: int) -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IMAGES = torch.cat([image(0), image(1)])


@cache
def texts() -> list[torch.Tensor]:
    """What each prompt says with its image."""
    return [
        plain_greedy(target(), PROMPTS[i], NEW_TOKENS + 8, pixel_values=IMAGES[i : i + 1]) for i in range(len(PROMPTS))
    ]


def drafter_for(rows):
    drafter = tiny_drafter(target(), 8, drafter_class=PatternDrafter)
    drafter.pattern, drafter.offset = PATTERN, 2
    return drafter.follow_rows([(texts()[row], WIDTH) for row in rows])


class Given:
    """Everything that the drafter's own methods are given."""

    def __init__(self, drafter):
        self.tensors = []
        for name in ("embed", "project_context", "draft_hidden", "compute_logits"):
            setattr(drafter, name, self.watched(getattr(drafter, name)))

    def watched(self, method):
        def call(*args, **kwargs):
            assert not kwargs
            self.tensors.extend(one for one in args if isinstance(one, torch.Tensor))
            return method(*args)

        return call


def test_text_about_an_image():
    """C10: an image that is forgotten, asked for in every block, or handed to the drafter."""
    drafter, recorded = drafter_for([0]), []
    given = Given(drafter)
    tower = next(module for name, module in target().named_modules() if name.endswith("vision_tower"))
    handle = tower.register_forward_pre_hook(lambda *_: recorded.append(1))
    try:
        output = dflow_greedy(target(), drafter, PROMPTS[0], pixel_values=IMAGES[:1], max_new_tokens=NEW_TOKENS)
    finally:
        handle.remove()
    assert torch.equal(output.sequences, texts()[0][:, : WIDTH + NEW_TOKENS])
    assert not torch.equal(texts()[0], plain_greedy(target(), PROMPTS[0], NEW_TOKENS + 8, pixel_values=IMAGES[1:]))
    assert_not_vacuous(output.statistics)
    assert len(recorded) == 1 and given.tensors and all(one.ndim < 4 for one in given.tensors)


def test_tapped_states_are_the_language_models():
    """C7: states of the vision tower, or layers counted from the first module of the whole model."""
    language_model = next(module for name, module in target().named_modules() if name.endswith("language_model"))
    ids, recorded = [0, 2, 3], {}
    for i in ids[:2]:
        language_model.layers[i].register_forward_hook(
            lambda module, args, out, i=i: recorded.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
    language_model.norm.register_forward_hook(lambda module, args, out: recorded.__setitem__(3, out))
    states = target()(PROMPTS[0], pixel_values=IMAGES[:1], output_hidden_states=True).hidden_states
    assert torch.equal(capture_features(states, ids), torch.cat([recorded[i] for i in ids], dim=-1))


def test_text_alone():
    """C10: a call without an image refused, alone or in a batch, because the target could have had one."""
    prompts = [prompt_of(9, seed=3), prompt_of(5, seed=4)]
    plain = [plain_greedy(target(), one, NEW_TOKENS) for one in prompts]
    ids = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (4, 0))])
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    drafter = tiny_drafter(target(), 8, drafter_class=PatternDrafter)
    drafter.pattern = PATTERN
    drafter.follow_rows([(text, one.shape[1]) for text, one in zip(plain, prompts, strict=True)])
    output = dflow_greedy(target(), drafter, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    for row, (text, one) in enumerate(zip(plain, prompts, strict=True)):
        assert output.sequences[row, 9:].tolist() == text[0, one.shape[1] :].tolist()
    assert_not_vacuous(output.statistics)


def batch(**options):
    return dflow_greedy(
        target(), drafter_for([0, 1]), torch.cat(PROMPTS), pixel_values=IMAGES, max_new_tokens=NEW_TOKENS, **options
    )


def test_images_of_a_batch():
    """C10: a row's text about its neighbour's image; or an error from deep inside where rows go one by one."""
    if not holds_holes(target()):
        with pytest.raises(UnsupportedGenerationError, match="which row for pixel_values"):
            batch()
        return
    output = batch()
    for row, text in enumerate(texts()):
        assert torch.equal(output.sequences[row], text[0, : WIDTH + NEW_TOKENS])
    assert_not_vacuous(output.statistics)


def test_images_of_rows_that_go_one_by_one_are_refused(monkeypatch):
    """C10: all images shown to each row."""
    no_holes(monkeypatch)
    with pytest.raises(UnsupportedGenerationError, match=r"belongs to which row for (pixel_values|mm_encoder_outputs)"):
        batch()


def test_images_in_chunks_are_refused():
    """C10: an image shown to each chunk of the prompt."""
    with pytest.raises((UnsupportedGenerationError, ValueError), match=r"chunk.*(pixel_values|mm_encoder_outputs)"):
        dflow_greedy(
            target(), drafter_for([0]), PROMPTS[0], pixel_values=IMAGES[:1], max_new_tokens=4, prefill_chunk_size=5
        )
