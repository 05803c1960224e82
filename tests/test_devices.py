"""Target and drafter on different devices. Each needs a GPU, and is skipped without one."""

import pytest
import torch
from batches import padded
from kit import PatternDrafter, assert_not_vacuous, dflow_greedy, plain_greedy, prompt_of, tiny_drafter, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW_TOKENS = 20
PROMPTS = [prompt_of(length, seed=length) for length in (3, 12, 1)]
PLACES = [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")]


def check(target, drafter, batch_size: int, device: str, do_sample: bool):
    prompts = [one.to(device) for one in PROMPTS[:batch_size]]
    ids, mask = padded(prompts)
    texts = [(plain_greedy(target, one, NEW_TOKENS + 8).cpu(), one.shape[1]) for one in prompts]
    options = {"attention_mask": mask.to(device), "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    if do_sample:
        sampled = target.generate(
            ids,
            assistant_model=drafter.follow_rows(texts),
            speculation_type="dflow",
            do_sample=True,
            top_k=0,
            **options,
        )
        assert sampled.sequences.device.type == device
        return
    output = dflow_greedy(target, drafter.follow_rows(texts), ids, **options)
    assert output.sequences.device.type == device
    for row, (text, length) in enumerate(texts):
        assert output.sequences[row, ids.shape[1] :].tolist() == text[0, length : length + NEW_TOKENS].tolist()
    assert_not_vacuous(output.statistics)


def scripted_drafter(target):
    drafter = tiny_drafter(target, 8, drafter_class=PatternDrafter)
    drafter.pattern, drafter.offset = [3, 0, 7, 1, 5], 2
    return drafter


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("target_device", "drafter_device"), PLACES)
def test_two_devices(target_device, drafter_device, batch_size, do_sample):
    """C10: tensors, masks or random numbers made on the wrong device."""
    target = tiny_target("llama", attention="sdpa").to(target_device)
    drafter = scripted_drafter(target).to(drafter_device)
    check(target, drafter, batch_size, target_device, do_sample)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_split_target(batch_size):
    """C10: tapped states of layers that live on another device than the head."""
    from accelerate import dispatch_model

    target = tiny_target("llama", attention="sdpa")
    drafter = scripted_drafter(target).to("cuda")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else 0 for i in range(4)}
    target = dispatch_model(target, places, main_device="cuda:0")
    check(target, drafter, batch_size, "cuda", False)
