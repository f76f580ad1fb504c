"""Finds tasks that look values up in different vocabularies: weights are compared, and don't show it.

A vocabulary isn't a variable of its model. A file of it may differ between nodes, and then a word has another
id on each: gradients are summed over rows of the wrong words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import keras
import xxhash

from insitu.errors import CheckpointError, TrainingError
from insitu.exchange import Group
from insitu.train.collectives import all_gather_json
from insitu.train.features import list_vocabulary_files

_MOST = 24
"""Vocabularies that are compared one by one, as many as a message has room for; the others count as one."""
_OTHERS = "other vocabularies"


def find_vocabularies(model: Any) -> dict[str, str]:
    """Return a digest of each vocabulary that a model looks values up in, or that this task has read as a
    file, by a name. `model` may be None."""
    found = {f"the file {path}": digest for path, digest in list_vocabulary_files().items()}
    kinds = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
    layers = model._flatten_layers(include_self=False) if isinstance(model, keras.Model) else ()
    for number, layer in enumerate(each for each in layers if isinstance(each, kinds)):
        words = json.dumps([str(word) for word in layer.get_vocabulary()])
        found[f"lookup layer {number}, {layer.name}"] = xxhash.xxh3_64_hexdigest(words.encode())
    return found


def check_same_vocabularies(group: Group, found: Mapping[str, str]) -> None:
    """Raise TrainingError, in all tasks of a group, where two have different vocabularies of one name.

    One that only some tasks have is theirs. Collective.
    """
    own = dict(sorted(found.items())[:_MOST])
    if len(found) > _MOST:
        rest = json.dumps(sorted(found.items())[_MOST:])
        own[_OTHERS] = xxhash.xxh3_64_hexdigest(rest.encode())
    names = {_shorten(name): name for name in own}
    answers = all_gather_json(group, {short: own[name] for short, name in names.items()})
    different = sorted({short for a in answers for short in a if _differs(short, answers)})
    if different:
        named = [names.get(short, "one that this task doesn't have") for short in different]
        ranks = [
            str(rank)
            for rank, a in enumerate(answers)
            if any(a.get(d) != answers[0].get(d) for d in different)
        ]
        refuse_vocabularies(named, f"task(s) {', '.join(ranks)} have another one than task 0")


def refuse_vocabularies(names: Sequence[str], who: str) -> NoReturn:
    """Raise TrainingError for vocabularies of these names; `who` says which tasks differ."""
    raise TrainingError(
        f"All tasks look words up in the same vocabulary. Received: {'; '.join(names)}: {who}. Give all "
        "nodes the same file, or pass vocabulary_list"
    )


def check_saved_vocabularies(more: Any, model: Any) -> None:
    """Raise CheckpointError where `model`, or what `find_vocabularies` has found of it, has another
    vocabulary than the task that saved `more` beside its weights."""
    saved = more.get("vocabularies") if isinstance(more, Mapping) else None
    if not isinstance(saved, Mapping) or not saved:
        return
    own = model if isinstance(model, Mapping) else find_vocabularies(model)
    different = [name for name, digest in saved.items() if own.get(name, digest) != digest]
    if different:
        raise CheckpointError(
            "A checkpoint is read by a task that looks words up in the vocabulary that it was trained with. "
            f"Received: another one in {'; '.join(different)}. Give this task the same file or "
            "vocabulary_list, or use another directory"
        )


def _shorten(name: str) -> str:
    return xxhash.xxh3_64_hexdigest(name.encode())[:12]


def _differs(short: str, answers: list[dict[str, str]]) -> bool:
    return len({answer[short] for answer in answers if short in answer}) > 1
