"""The lab from corpus to figures, at a size of seconds: every kind of drafter is trained, decoded and reported."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from experiments.lab import __main__ as lab
from experiments.lab import corpora
from experiments.lab.experiment import KINDS, DrafterRecipe, Lab, measure, training_config
from experiments.lab.target import encode
from experiments.lab.variants import VariantTrainer
from hf_dflow import DFlowDrafter, tokenizer_fingerprint
from hf_dflow.errors import DFlowError


def toy_corpus():
    """Counting in words: held-out documents begin at other numbers."""
    words = [f"w{i}" for i in range(30)]
    documents = [" ".join(words[(i + j) % 30] for j in range(40)) for i in range(30)]
    return corpora.Corpus(
        "toy", documents[:24], documents[24:], True, lambda ids: ids[:5], tasks={"easy": documents[24:26]}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lab.CORPORA, "toy", toy_corpus)
        for arguments in (
            f"prepare toy {folder} --updates 12 --num-prompts 16 --num-held-out 3 --max-new-tokens 24",
            f"run {folder} --updates 3 --num-layers 1",
            f"tasks toy {folder}",
            f"sample {folder} --kinds dflow",
            f"report {folder} --json {folder}/report.json",
            f"export {folder} {folder}/pair",
        ):
            result = CliRunner().invoke(lab.app, arguments.split())
            assert result.exit_code == 0, (arguments, result.output, result.exception)
    return folder


def test_every_kind_is_trained_decoded_and_lossless(folder):
    """Catches: a kind that is left out or not comparable, a drafter that changes the target's text."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == list(KINDS)
    for line in lines:
        counts = line["counts"]
        assert counts["identical"] == [1] * 3
        assert all(0 < steps <= tokens for tokens, steps in zip(counts["tokens"], counts["steps"], strict=True))
        assert line["recipe"]["updates"] == 3 and line["training_seconds"] > 0
    assert {line["kind"] for line in lines if "probe" in line} == {"dflash"}
    assert {line["kind"] for line in lines if "counts_relay_off" in line} == {"dflow"}
    record = json.loads((folder / "report.json").read_text())["corpora"][folder.name]
    assert {"dflash", "dflow", "dflow, relay off", "multi_round", "autoregressive", "probe", "tasks"} <= record.keys()
    assert set(record["sampled"]) == {"T=1, token verification", "T=1, block verification"}
    assert record["texts_identical"] == "12 of 12" and "gain_over_dflash" in record["tasks"]["easy"]["dflow"]


def test_a_variant_is_trained_as_one(folder, tmp_path, monkeypatch):
    """Bug: a variant's name under which another kind is trained, or a relay that is never switched off."""
    shutil.copytree(folder, tmp_path / "lab", ignore=shutil.ignore_patterns("runs", "results.jsonl"))
    followed, follow = [], VariantTrainer.follow
    monkeypatch.setattr(VariantTrainer, "follow", lambda self, *given: followed.append(1) or follow(self, *given))
    options = ["--updates", "2", "--num-layers", "1"]
    done = CliRunner().invoke(lab.app, ["run", str(tmp_path / "lab"), *options, "--kinds", "dflow_half"])
    assert done.exit_code == 0, (done.output, done.exception)
    (line,) = map(json.loads, (tmp_path / "lab" / "results.jsonl").read_text().splitlines())
    assert len(followed) == 4 and "counts_relay_off" in line and len(line["last_losses"]) == 3
    assert DFlowDrafter.from_pretrained(tmp_path / "lab" / "drafters" / "dflow_half-0").relay is not None
    wrong = CliRunner().invoke(lab.app, ["run", str(tmp_path / "lab"), *options, "--kinds", "dflow_hafl"])
    assert isinstance(wrong.exception, DFlowError) and "dflow_half" in str(wrong.exception)


def test_exported_pair_loads_and_takes_plain_prompts(folder):
    """Catches: a pair that cannot be loaded by itself, weights of another size than the card says, a chat template."""
    target = AutoModelForCausalLM.from_pretrained(folder / "pair" / "target")
    drafter = DFlowDrafter.from_pretrained(folder / "pair" / "drafter")
    tokenizer = AutoTokenizer.from_pretrained(folder / "pair" / "target")
    assert target.dtype == drafter.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "w3 w4"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == "w3 w4"
    assert drafter.config.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)


def test_steps_are_what_the_target_was_asked(folder):
    """Catches: steps counted by the drafter's own book-keeping, in which another loop would look better."""
    loaded = Lab.load(folder)
    drafter = DFlowDrafter.from_pretrained(folder / "drafters" / "dflow-0").float().eval()
    row = loaded.held_out[0]
    asked = []
    handle = loaded.target.register_forward_hook(lambda *_: asked.append(1))
    counts = measure(loaded, drafter, [row])
    handle.remove()
    assert counts["steps"] == [len(asked) - 1] and counts["tokens"] == [row.answer_length - 1]


def test_kinds_differ_only_in_rounds_and_relay():
    """Catches: a comparison of unequal runs."""
    configs = {kind: vars(training_config(kind, DrafterRecipe(), 2)) for kind in KINDS[:3]}
    stages = {kind: vars(config.pop("stages")[0]) for kind, config in configs.items()}
    assert [stages[kind].pop("relay_rounds") for kind in configs] == [0, 2, 2]
    assert [config.pop("use_relay") for config in configs.values()] == [False, False, True]
    assert stages["dflash"] == stages["multi_round"] == stages["dflow"]
    assert configs["dflash"] == configs["multi_round"] == configs["dflow"]


def test_word_tokens_keep_values_apart_and_unknown_corpora_are_named():
    """Catches: a word cut into pieces, a document without its end, a bare KeyError."""
    tokenizer = corpora.make_tokenizer(toy_corpus(), 40)
    ids = encode(["w3 w29"], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(ids) == ["w3", "w29", "<eos>"]
    with pytest.raises(DFlowError, match="airports"):
        lab._corpus("novels", None, None)
