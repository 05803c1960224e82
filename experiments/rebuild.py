"""`python -m experiments.rebuild OUTPUT`: follows the recipe of the bundled drafter for any target.

The recipe (`recipe.json` beside the bundled drafter) says how the target answers, which mask-round stages all kinds of
drafters share, and the last stage of each kind. Every part resumes.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflow.bench.smollm2 import smollm2_folder
from hf_dflow.errors import DFlowError

RECIPE = Path(__file__).parents[1] / "hf_dflow" / "drafters" / "smollm2-135m-instruct-b8" / "recipe.json"
TRUNK = "trunk"
ANSWER_KEYS = ("prompts", "limit", "temperatures", "max_new_tokens", "batch", "dtype")


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe at `path`.

    Raises:
        DFlowError: Parts are missing, or two of them would share a folder or a file.
    """
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        stems = [Path(source["prompts"]).stem for source in recipe["answers"]]
        lacking = [key for source in recipe["answers"] for key in ANSWER_KEYS if key not in source]
        kinds, is_whole = list(recipe["kinds"]), {"common", TRUNK} <= recipe.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DFlowError(f"{path}: not a recipe with answers, common, {TRUNK} and kinds ({error!r})") from error
    if lacking or not is_whole or not stems:
        raise DFlowError(f"{path}: a recipe needs common, {TRUNK}, and answers with {', '.join(ANSWER_KEYS)}")
    if len(set(stems)) < len(stems) or any(not re.fullmatch(r"[\w-]+", kind) or kind == TRUNK for kind in kinds):
        raise DFlowError(
            f"{path}: sources of prompts need different names, and kinds names of letters other than {TRUNK}"
        )
    teachers = {bool({**recipe["common"], **recipe[TRUNK]}.get("distillation"))}
    teachers |= {
        bool({**recipe["common"], **last_stage}.get("distillation")) for last_stage in recipe["kinds"].values()
    }
    if len(teachers) > 1:
        raise DFlowError(f"{path}: all parts share features, so either all or none need distillation above 0")
    return recipe


def kinds_of(recipe: dict[str, Any]) -> list[str]:
    """The kinds of drafters of the recipe."""
    return list(recipe["kinds"])


def configuration(recipe: dict[str, Any], part: str, updates: int | None = None) -> Any:
    """The training run of the shared stages ("trunk") or of the last stage of a kind.

    Args:
        updates (`int`, *optional*): Updates of all trunk stages together, or of the last stage; else the recipe's.

    Raises:
        TrainingConfigError: The recipe holds an invalid training configuration.
    """
    from hf_dflow.training.config import TrainingConfig

    own = recipe[TRUNK] if part == TRUNK else recipe["kinds"][part]
    training = TrainingConfig.from_dict({**recipe["common"], **own}, f"{RECIPE.name}, {part}")
    return training if updates is None else training.with_updates(updates)


def main(
    output: Annotated[
        Path, typer.Argument(help="For answers, features, runs; the drafter ends in OUTPUT/KIND/drafter.")
    ],
    kind: Annotated[str, typer.Option(help="dflow (the bundled drafter), dflash or multi_round.")] = "dflow",
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; SmolLM2-135M-Instruct by default.")] = None,
    recipe_path: Annotated[Path, typer.Option("--recipe", help="The bundled drafter's by default.")] = RECIPE,
    limit: Annotated[int, typer.Option(min=0, help="Prompts of each source; 0: the recipe's.")] = 0,
    trunk_updates: Annotated[int | None, typer.Option(min=1, help="Updates of all shared stages together.")] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Of the last stage.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all by default.")] = None,
) -> None:
    """Write the target's answers, train the shared stages, then the last stage of one kind of drafter."""
    recipe = read_recipe(recipe_path)
    if output.exists() and not output.is_dir():
        raise DFlowError(f"{output} is a file; name a folder")
    if kind not in kinds_of(recipe):
        raise DFlowError(f"--kind {kind}: use one of {', '.join(kinds_of(recipe))}")
    parts = {TRUNK: configuration(recipe, TRUNK, trunk_updates), kind: configuration(recipe, kind, updates)}

    from hf_dflow.console import use_threads
    from hf_dflow.training import commands, run

    use_threads(threads)
    name = str(target or smollm2_folder())
    output.mkdir(parents=True, exist_ok=True)
    files = []
    for source in recipe["answers"]:
        files.append(output / f"{Path(source['prompts']).stem}.jsonl")
        commands.data(
            name,
            files[-1],
            prompts=[source["prompts"]],
            limit=limit or source["limit"],
            part="train",
            temperature=source["temperatures"],
            max_new_tokens=source["max_new_tokens"],
            batch=source["batch"],
            dtype=source["dtype"],
        )
    start_from = None
    for part, training in parts.items():
        folder = output / part
        if start_from is not None:
            _same_start(folder, Path(start_from))
        typer.echo(f"{part}: {training.updates} updates")
        # A finished part makes no update, and refuses another configuration. All parts share the features.
        run.train(name, files, folder, training, start_from=start_from, features=output / "features")
        start_from = str(folder / "drafter")
    typer.echo(start_from)


def _same_start(folder: Path, trunk: Path) -> None:
    """Refuse to resume a kind that began from another trunk."""
    digest = hashlib.sha256((trunk / "model.safetensors").read_bytes()).hexdigest()
    note = folder / "started_from.sha256"
    if note.exists() and note.read_text(encoding="utf-8") != digest:
        raise DFlowError(f"{folder} began from another trunk than {trunk}; remove it, or use another output folder")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(digest, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
