"""What only the caller decides: lossy options, the options that exist, and the precision around a call."""

import kit
import pytest
import torch
from transformers import GenerationConfig

from hf_dflow import DFlowDecoder, DFlowGenerationConfig, UnsupportedGenerationError
from hf_dflow.generation import configuration


@pytest.fixture
def drafter(target):
    return kit.scripted(kit.PatternDrafter, target, kit.prompt_of(7), 24, block_size=4, pattern=[2, 0, 3, 1])


@pytest.fixture
def warnings(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(configuration.logger, "warning_once", texts.append)
    return texts


def test_a_checkpoint_cannot_make_output_lossy(target, drafter, warnings):
    """N2: `acceptance_threshold` in a downloaded config.json accepts wrong tokens, and only a log line mentions it."""
    plain = kit.plain_greedy(target, kit.prompt_of(7), 24)
    drafter.config.generation_defaults = {"acceptance_threshold": 1e-9, "num_draft_tokens": 3}
    output = kit.decode(target, drafter, kit.prompt_of(7), 24)
    assert torch.equal(output.sequences, plain) and output.statistics.lossless
    assert "acceptance_threshold" in warnings[0] and "ignored" in warnings[0]
    lossy = kit.decode(target, drafter, kit.prompt_of(7), 24, acceptance_threshold=1e-9)
    assert not lossy.statistics.lossless and not torch.equal(lossy.sequences, plain)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tree_buget", "tree_budget"), ("seed", "seeds"), ("acceptance_treshold", "acceptance_threshold"),
        ("max_new_token", "max_new_tokens"), ("useRelay", "use_relay"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_refused_with_the_nearest(name, nearest):
    """N3: a misspelt option vanishes, and the call runs without it."""
    with pytest.raises(UnsupportedGenerationError, match=f"{name!r}.*{nearest!r}"):
        DFlowGenerationConfig(**{name: 3})


def test_options_are_keywords_of_generate(target, drafter):
    """N3: `generate(num_draft_tokens=3)` fails with transformers' "model_kwargs are not used"."""
    call = {"assistant_model": drafter, "speculation_type": "dflow", "max_new_tokens": 24, "do_sample": False}
    output = target.generate(kit.prompt_of(7), num_draft_tokens=2, return_dict_in_generate=True, **call)
    assert max(output.statistics.per_step_drafted) == 2
    configured = DFlowGenerationConfig(num_draft_tokens=3, return_dict_in_generate=True)
    output = target.generate(kit.prompt_of(7), num_draft_tokens=2, generation_config=configured, **call)
    assert max(output.statistics.per_step_drafted) == 2, "a keyword wins over the configuration"
    with pytest.raises(UnsupportedGenerationError, match=r"'num_draft_token'.*'num_draft_tokens'"):
        target.generate(kit.prompt_of(7), num_draft_token=2, **call)
    states = target.generate(kit.prompt_of(7), output_hidden_states=True, return_dict_in_generate=True, **call)
    assert len(states.hidden_states) == 24, "generate hands this field on to the model, which is no misspelling"
    with pytest.raises(ValueError, match="not used by the model"):  # no option's misspelling: transformers' own words
        target.generate(kit.prompt_of(7), pixel_vlaues=2, **call)


def test_every_field_of_a_plain_configuration_is_taken(tmp_path):
    """N3, the other way round: a field that transformers knows is refused, or a saved file cannot be read again."""
    plain = {name: value for name, value in vars(GenerationConfig()).items() if not name.startswith("_")}
    DFlowGenerationConfig(**{**plain, "speculation_type": "dflow"})
    DFlowGenerationConfig(tree_budget=3, max_new_tokens=4).save_pretrained(tmp_path)
    assert DFlowGenerationConfig.from_pretrained(tmp_path).tree_budget == 3
    with pytest.raises(TypeError, match="tree_buget"):
        DFlowDecoder(kit.shared_drafter(), tree_buget=3)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("around", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("drafts_in", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_of_any_kind_around_a_drafter_of_any_type(drafts_in, around, do_sample):
    """N5: `torch.cat` of float16 and bfloat16 under autocast, where plain decoding works."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    drafter = kit.tiny_drafter(target, 4).to(drafts_in)
    with torch.autocast("cpu", dtype=around):
        output = kit.decode(target, drafter, kit.prompt_of(7), 12, do_sample=do_sample)
    assert output.sequences.shape == (1, 19) and output.statistics.num_draft_forwards > 0


def test_autocast_leaves_the_drafter_in_its_own_type(monkeypatch):
    """N5: a drafter that computes in another type under autocast drafts other tokens, and is accepted less."""
    target = kit.tiny_target("llama", dtype=torch.float32)
    drafter, states = kit.tiny_drafter(target, 4).float(), []
    forward = drafter.draft_hidden
    monkeypatch.setattr(drafter, "draft_hidden", lambda *args: states.append(forward(*args)) or states[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kit.decode(target, drafter, kit.prompt_of(7), 8)
    assert states and {state.dtype for state in states} == {torch.float32}
