"""Corpora made of installed packages, from structured records to source code, and their tokenizers."""

import hashlib
import inspect
import pkgutil
import pydoc_data.topics
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_dflow.errors import DFlowError
from hf_dflow.training.data import read_rows

HELD_OUT_SHARE = 0.15
NUM_AIRPORTS = 2400
KEYS_PER_REQUEST = 6
UNSEEN, TASK_SIZE = (0, 2, 4, 6), 40
SPECIAL_TOKENS = ["<pad>", "<eos>", "<mask>", "<unk>"]


@dataclass(frozen=True)
class Corpus:
    """Documents, and how to cut a prompt from each."""

    name: str
    training: list[str]  # the target learns these; drafters learn its answers to their prompts
    held_out: list[str]  # prompts for measuring; no drafter is trained on them
    is_word_level: bool  # one token a word; byte pairs otherwise
    prompt_of: Callable[[list[int]], list[int]]  # token ids of a document -> a prompt's
    target_knows_held_out: bool = False
    tasks: dict[str, list[str]] = field(default_factory=dict)  # more held-out documents, by how hard they are to draft


def is_held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a document or key is kept for measuring, by a hash of its name."""
    return int.from_bytes(_hash_of(name)[:4], "big") / 2**32 < share


def _hash_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _first_third(token_ids: list[int]) -> list[int]:
    return token_ids[: max(8, min(64, len(token_ids) // 3))]


# -- structured records


def airports(num_documents: int = 16000, seed: int = 0) -> Corpus:
    """Requests for the records of six airports by their codes, answered record by record (PyPI: airportsdata, MIT).

    The target knows every airport. Half of the airports of a held-out request occur in no request that a drafter is
    trained on, so that it can only read those records from the target's states.
    """
    if find_spec("airportsdata") is None:
        raise DFlowError("the airports corpus needs the package airportsdata: pip install airportsdata")
    import airportsdata

    records = sorted(airportsdata.load("IATA").values(), key=lambda airport: _hash_of(airport["iata"]))
    texts: dict[str, str] = {}
    for airport in records:
        if airport["city"] and airport["tz"] and len(texts) < NUM_AIRPORTS:
            city, place = airport["city"].replace(" ", "_"), f"in {airport['country']} zone {airport['tz']}"
            texts[airport["iata"]] = " ".join(
                f"{airport['iata']} city {city} {place}".split()
                + f"latitude {round(airport['lat'])} longitude {round(airport['lon'])}".split()
                + f"height {round(airport['elevation'] / 100)} ;".split()
            )
    keys = {True: [key for key in texts if is_held_out(key)], False: [key for key in texts if not is_held_out(key)]}
    generator = random.Random(seed)

    def request(num_unseen: int) -> str:
        chosen = generator.sample(keys[True], num_unseen) + generator.sample(keys[False], KEYS_PER_REQUEST - num_unseen)
        generator.shuffle(chosen)
        return " ".join(["airports", *chosen, ":", *(texts[key] for key in chosen)])

    training = [request(0) for _ in range(num_documents)]
    held_out = [request(KEYS_PER_REQUEST // 2) for _ in range(int(num_documents * HELD_OUT_SHARE))]
    tasks = {f"{count} of {KEYS_PER_REQUEST} unseen": [request(count) for _ in range(TASK_SIZE)] for count in UNSEEN}
    return Corpus(
        "airports",
        training,
        held_out,
        is_word_level=True,
        prompt_of=lambda ids: ids[: KEYS_PER_REQUEST + 2],
        target_knows_held_out=True,
        tasks=tasks,
    )


def characters(run_length: int = 24) -> Corpus:
    """Runs of Unicode characters with their properties (standard library); values of several words shift the frame."""
    lines = []
    for code in range(0x20, 0x1FB00):
        name = unicodedata.name(chr(code), "")
        if name and "CJK UNIFIED" not in name and "HANGUL SYLLABLE" not in name and not re.search(r"-\d", name):
            character = chr(code)
            fields = [unicodedata.category(character), unicodedata.bidirectional(character) or "-"]
            fields += [unicodedata.east_asian_width(character), name]
            lines.append(f"{code >> 8:X} {code & 255:02X} : {' '.join(fields)} ;")
    documents = ["\n".join(lines[i : i + run_length]) for i in range(0, len(lines), run_length)]
    return _split("characters", documents, True, _first_third)


# -- free text


def source_code() -> Corpus:
    """The standard library's Python source, in pieces of whole lines."""
    files = [Path(module.module_finder.find_spec(module.name).origin or "") for module in _standard_modules()]  # type: ignore[union-attr,call-arg]
    pieces = (piece for path in files if path.suffix == ".py" for piece in _pieces(path.read_text("utf-8", "ignore")))
    return _split("source code", list(pieces), False, _first_third)


def documentation() -> Corpus:
    """Python's language reference and docstrings of torch and transformers."""
    import torch
    import transformers

    texts = list(pydoc_data.topics.topics.values())
    for module in (
        torch,
        torch.nn,
        torch.nn.functional,
        torch.Tensor,
        transformers.GenerationConfig,
        transformers.Trainer,
    ):
        documented = [inspect.getdoc(member) or "" for _, member in inspect.getmembers(module, callable)]
        texts += [text for text in documented if len(text) > 300]
    pieces = dict.fromkeys(piece for text in texts for piece in _pieces(text))
    return _split("documentation", list(pieces), False, _first_third)


def answers(path: Path, tokenizer) -> Corpus:
    """Answers of SmolLM2 (`hf-dflow data`), tokenised anew."""
    rows = read_rows(path)
    texts = [tokenizer.decode(row.token_ids[row.prompt_length :], skip_special_tokens=True) for row in rows]
    return _split(
        "answers", [f"{row.prompt}\n{text}" for row, text in zip(rows, texts, strict=True)], False, _first_third
    )


def _split(name: str, documents: list[str], is_word_level: bool, prompt_of) -> Corpus:
    training = [text for text in documents if not is_held_out(text)]
    return Corpus(name, training, [text for text in documents if is_held_out(text)], is_word_level, prompt_of)


def _standard_modules() -> Iterator[pkgutil.ModuleInfo]:
    folder = str(Path(inspect.__file__).parent)
    yield from (module for module in pkgutil.iter_modules([folder]) if not module.name.startswith("_"))


def _pieces(text: str, characters_per_piece: int = 900) -> Iterator[str]:
    piece: list[str] = []
    for line in text.splitlines():
        piece.append(line)
        if sum(map(len, piece)) > characters_per_piece:
            yield "\n".join(piece)
            piece = []
    if sum(map(len, piece)) > characters_per_piece // 3:
        yield "\n".join(piece)


# -- tokens


def make_tokenizer(corpus: Corpus, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer learned from the corpus: its words, or byte pairs that span words where text is free."""
    if corpus.is_word_level:
        counts = Counter(word for text in corpus.training + corpus.held_out for word in re.findall(r"\n|[^\s]+", text))
        words = [word for word, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS))]
        vocab = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(corpus.training, trainer)
    pad, eos, mask, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, mask_token=mask, unk_token=unk
    )
