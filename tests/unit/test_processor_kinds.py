"""The list of processors that may be applied to a path at will, checked against what transformers ships."""

import copy
import inspect

import pytest
import torch
from internals import POSITION_INDEPENDENT, PURE, path_processor
from transformers import LogitsProcessor
from transformers.generation import logits_process as lp

VOCAB_SIZE, PROMPT_LENGTH, NUM_DRAFTS, EOS = 40, 6, 5, 3
PROMPT = torch.randint(0, VOCAB_SIZE, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
MAKERS = {
    "TemperatureLogitsWarper": lambda: lp.TemperatureLogitsWarper(0.7),
    "TopKLogitsWarper": lambda: lp.TopKLogitsWarper(5),
    "TopPLogitsWarper": lambda: lp.TopPLogitsWarper(0.8),
    "MinPLogitsWarper": lambda: lp.MinPLogitsWarper(0.1),
    "TopHLogitsWarper": lambda: lp.TopHLogitsWarper(0.5),
    "TypicalLogitsWarper": lambda: lp.TypicalLogitsWarper(0.8),
    "EpsilonLogitsWarper": lambda: lp.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda: lp.EtaLogitsWarper(0.05),
    "InfNanRemoveLogitsProcessor": lambda: lp.InfNanRemoveLogitsProcessor(),
    "SuppressTokensLogitsProcessor": lambda: lp.SuppressTokensLogitsProcessor([1, 4, 9]),
    "LogitNormalization": lambda: lp.LogitNormalization(),
    "MinLengthLogitsProcessor": lambda: lp.MinLengthLogitsProcessor(9, EOS),
    "MinNewTokensLengthLogitsProcessor": lambda: lp.MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 3, EOS),
    "RepetitionPenaltyLogitsProcessor": lambda: lp.RepetitionPenaltyLogitsProcessor(1.4),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda: lp.EncoderRepetitionPenaltyLogitsProcessor(1.4, PROMPT),
    "NoRepeatNGramLogitsProcessor": lambda: lp.NoRepeatNGramLogitsProcessor(1),
    "EncoderNoRepeatNGramLogitsProcessor": lambda: lp.EncoderNoRepeatNGramLogitsProcessor(1, PROMPT),
    "NoBadWordsLogitsProcessor": lambda: lp.NoBadWordsLogitsProcessor([[2], [5, 6]], EOS),
    "SequenceBiasLogitsProcessor": lambda: lp.SequenceBiasLogitsProcessor({(2,): 3.0, (5, 6): -4.0}),
    "ForcedBOSTokenLogitsProcessor": lambda: lp.ForcedBOSTokenLogitsProcessor(2),
    "ForcedEOSTokenLogitsProcessor": lambda: lp.ForcedEOSTokenLogitsProcessor(9, EOS),
    "ExponentialDecayLengthPenalty": lambda: lp.ExponentialDecayLengthPenalty((1, 1.3), EOS, PROMPT_LENGTH),
    "SuppressTokensAtBeginLogitsProcessor": lambda: lp.SuppressTokensAtBeginLogitsProcessor([1, 2], PROMPT_LENGTH),
}
# What transformers ships beyond that, and why it is judged row by row, without drafts.
LEFT_OUT = {
    "PrefixConstrainedLogitsProcessor": "calls the user's function, which may be an automaton",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "keeps the cache of a second branch",
    "SynthIDTextWatermarkLogitsProcessor": "keeps the contexts that it has seen",
    "WatermarkLogitsProcessor": "reseeds a generator that it owns",
    "ClassifierFreeGuidanceLogitsProcessor": "wants a doubled batch; encoder-decoder music models",
    "DiaClassifierFreeGuidanceLogitsProcessor": "the same",
    "DiaEOSChannelFilterLogitsProcessor": "audio codebooks",
    "DiaEOSDelayPatternLogitsProcessor": "audio codebooks",
    "AlternatingCodebooksLogitsProcessor": "audio codebooks",
    "BarkEosPrioritizerLogitsProcessor": "audio codebooks",
    "WhisperTimeStampLogitsProcessor": "speech, encoder-decoder",
    "WhisperNoSpeechDetection": "speech, encoder-decoder; keeps probabilities",
}


def _rows():
    """Raw logits `[1, N + 1, V]` and the path `[1, T + N]` below them."""
    generator = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(1, NUM_DRAFTS + 1, VOCAB_SIZE, generator=generator)
    drafts = torch.randint(0, VOCAB_SIZE, (1, NUM_DRAFTS), generator=generator)
    return torch.cat([PROMPT, drafts], dim=1), logits


def _by_hand(processor, path, logits):
    """Each row on its own, by a fresh copy, as plain decoding would."""
    rows = [
        copy.deepcopy(processor)(path[:, : PROMPT_LENGTH + i].clone(), logits[:, i].clone())
        for i in range(logits.shape[1])
    ]
    return torch.stack(rows, dim=1)


def test_every_class_of_transformers_is_accounted_for():
    """Catches a processor that a new release brings, and a name that it renames: both would silently become slow."""
    shipped = {
        name
        for name, value in vars(lp).items()
        if inspect.isclass(value) and issubclass(value, LogitsProcessor) and value is not LogitsProcessor
    }
    pure = {kind.__name__ for kind in PURE}
    assert pure == set(MAKERS)
    assert shipped - pure - set(LEFT_OUT) == set()
    assert not pure & set(LEFT_OUT)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pure_processor_is_a_function_of_prefix_and_logits(name):
    """Catches a processor with memory in the list: it would be asked about rejected drafts, in any order."""
    processor = MAKERS[name]()
    path, logits = _rows()
    expected = _by_hand(processor, path, logits)
    assert not torch.equal(expected, logits) or name == "InfNanRemoveLogitsProcessor" or name.startswith("ForcedBOS")
    order = [3, 0, 5, 5, 1, 4, 2, 0, 3]
    for i in order:
        prefix = path[:, : PROMPT_LENGTH + i].clone()
        other = (prefix + 1) % VOCAB_SIZE
        assert torch.equal(processor(prefix.clone(), logits[:, i].clone()), expected[:, i]), (name, i)
        processor(other, logits[:, i].flip(-1))  # a rejected path in between


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_path_equals_row_by_row(name, infinite):
    """Catches a processor taken for position-independent that reads the prefix or its neighbours' rows, and logits
    overwritten in place."""
    processor = MAKERS[name]()
    path, logits = _rows()
    if infinite:
        logits[..., 7] = -torch.inf  # the mask token of a draft, or what an earlier processor removed
    before = logits.clone()
    processors = path_processor(processor)
    assert not processors.is_lazy
    expected = _by_hand(MAKERS[name](), path, logits)
    assert torch.equal(processors.target(path, logits), expected)
    assert torch.equal(logits, before)
    if type(processor) in POSITION_INDEPENDENT:
        assert processors.drafts_at_once
        assert torch.equal(processors.drafts(logits), expected)
        other = (path + 1) % VOCAB_SIZE
        assert torch.equal(_by_hand(MAKERS[name](), other, logits), expected)
    else:
        assert not processors.drafts_at_once
    for i in range(NUM_DRAFTS + 1):
        assert torch.equal(processors.draft_row(path[:, : PROMPT_LENGTH + i], logits[:, i].clone()), expected[:, i])
    assert torch.equal(logits, before)


def test_a_subclass_is_unknown():
    """Catches isinstance in place of an exact type: a subclass may keep state."""

    class Remembering(lp.TopKLogitsWarper):
        pass

    processors = path_processor(lp.TemperatureLogitsWarper(0.5), Remembering(3))
    assert processors.is_lazy and processors.unknown == ["Remembering"]
    _, logits = _rows()
    assert torch.equal(processors.drafts(logits), logits / 0.5)  # drafts are processed by what is known, and only that
