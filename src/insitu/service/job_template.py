"""Chooses the model for a cache by its columns and its label, and writes the script that trains it.

All is decided here without looking at a disk: `insitu.cli.init` reads the rows.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from insitu.base.errors import InputError
from insitu.base.spec import Column

MOST_CLASSES = 1000
"""Different values of a label up to which it names classes."""
_FEW_CLASSES = 20
"""Different whole numbers up to which a label names classes, whatever they are."""
_ROWS_OF_CLASS = 10
"""Rows of each class, on the mean, that many whole numbers need to be classes."""
_LEAST_SIDE, _MOST_SIDE = 8, 1024
"""Pixels of an image's sides. What has less is no image to a convolution."""
_CHANNELS = (1, 3, 4)
_DARK = 127
"""The largest number of a sample of images up to which white isn't 255: drawings have 16 or 1."""
_TEXT_WORDS = 4.0
"""Words of a text on the mean from which on its words are looked at, and not the text as a whole."""
_MOST_WORDS, _LEAST_WORDS = 256, 8
_MOST_BATCH, _LEAST_BATCH = 256, 8
_STEPS = 20
"""Steps of an epoch that small caches have at least."""


@dataclass(frozen=True, slots=True)
class FeatureFacts:
    """What a sample of rows shows of a column."""

    #: The column.
    column: Column
    #: Different values in the sample; 0 for tensors.
    different: int = 0
    #: Words of a text: on the mean, and how many all but 5 % of the texts have at most; 0 for numbers.
    words: float = 0.0
    many_words: int = 0
    #: Whether a number isn't finite.
    has_missing: bool = False
    #: The largest number of a tensor of uint8; 0 for others.
    largest: int = 0


@dataclass(frozen=True, slots=True)
class LabelFacts:
    """What all rows of a cache show of its label."""

    #: The column.
    column: Column
    #: The different values in order; None: more than MOST_CLASSES.
    values: tuple[Any, ...] | None
    #: Rows of the cache.
    rows: int
    #: Names of the values 0, 1, ..., if they come from names of files.
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """The script for a cache, as far as it depends on data."""

    #: Names of caches: of rows that train, of rows held out, and of rows by which the best epoch is found;
    #: "" for none.
    train: str
    test: str
    validation: str
    #: The column of labels.
    label: str
    #: Values of the label that are classes 0, 1, ...; None: the label is a number to be predicted.
    classes: tuple[Any, ...] | None
    #: The column of images, and the shape of one as [height, width, channels]; None if there is none.
    image: Column | None
    image_shape: tuple[int, int, int] | None
    #: The number that stands for white in an image.
    white: int
    #: Columns of numbers, those of names to be looked up as a whole, and texts of several words.
    numbers: tuple[Column, ...]
    categories: tuple[FeatureFacts, ...]
    texts: tuple[FeatureFacts, ...]
    #: Whether numbers may be missing.
    has_missing: bool
    #: Rows of a step.
    batch: int
    #: Why columns aren't used, by name.
    left_out: tuple[tuple[str, str], ...]


def choose_label(columns: Sequence[Column], given: str | None, cache: str) -> Column:
    """Return the column that is predicted: the `given` one, or `label`. Raises InputError."""
    names = ", ".join(each.name for each in columns)
    found = next((each for each in columns if each.name == (given or "label")), None)
    if found is None:
        raise InputError(
            f"--label names the column of {cache} that is predicted. Received: "
            f"{given or 'none, and no column of the name label'}. Give --label with one of {names}"
        )
    if found.shape or found.dtype.endswith("[*]"):
        raise InputError(
            f"The label has one value a row. Received: column {found.name} of {found.dtype}"
            f"{list(found.shape) if found.shape else ''}. Give --label with another one of {names}"
        )
    if len(columns) == 1:
        raise InputError(
            f"A cache has columns beside the label. Received: {found.name} alone in {cache}. Name another "
            "cache"
        )
    return found


def choose_classes(label: LabelFacts) -> tuple[Any, ...] | None:
    """Return the values of a label that are classes, or None if it is a number to be predicted.

    Texts and truth values are classes. Whole numbers are if they are few, or if they count from 0 without a
    gap and each has some rows. Other numbers are if there are two of them. Raises InputError for a label that
    is neither.
    """
    name, values = label.column.name, label.values
    if values is not None and len(values) == 1 and not label.names:
        raise InputError(
            f"A label has different values. Received: {values[0]!r} in all rows of {name}. Give --label with "
            "another column"
        )
    if label.names:
        return tuple(range(len(label.names)))
    if label.column.dtype == "str":
        if values is None:
            raise InputError(
                f"A label of texts names classes, up to {MOST_CLASSES}. Received: more in {name}. Give "
                "--label with another column"
            )
        return values
    if values is None:
        return None
    if label.column.dtype == "bool":
        return values
    if "int" in label.column.dtype:
        counts = values == tuple(range(len(values))) and label.rows >= _ROWS_OF_CLASS * len(values)
        return values if len(values) <= _FEW_CLASSES or counts else None
    return values if len(values) == 2 and all(math.isfinite(each) for each in values) else None


def find_image_shape(column: Column) -> tuple[int, int, int] | None:
    """Return [height, width, channels] of a column of images, or None if it has none.

    Images are uint8 of shape [h, w], [h, w, c] or [n] with a square n, as drawings come, or floats of shape
    [h, w, c].
    """
    shape = column.shape
    if column.dtype == "uint8" and len(shape) == 1 and math.isqrt(shape[0]) ** 2 == shape[0]:
        shape = (math.isqrt(shape[0]),) * 2
    if column.dtype == "uint8" and len(shape) == 2:
        shape = (*shape, 1)
    if column.dtype != "uint8" and not column.dtype.startswith("float"):
        return None
    if len(shape) != 3 or shape[2] not in _CHANNELS:
        return None
    sides = min(shape[:2]) >= _LEAST_SIDE and max(shape[:2]) <= _MOST_SIDE
    return (shape[0], shape[1], shape[2]) if sides else None


def choose_batch(rows: int) -> int:
    """Return the rows of a step: a power of two, of which small caches have some steps."""
    fitting = max(_LEAST_BATCH, min(_MOST_BATCH, rows // _STEPS))
    return 1 << (fitting.bit_length() - 1)


def make_template(
    train: str, test: str, validation: str, label: LabelFacts, features: Sequence[FeatureFacts]
) -> JobTemplate:
    """Return the template of a job that trains on `train`. `features` are all columns but the label.

    A column of images makes a convolutional network of it alone. Otherwise numbers, names and texts enter
    together. Raises InputError if no column can.
    """
    images = [(each.column, find_image_shape(each.column)) for each in features]
    image, shape = next(((column, shape) for column, shape in images if shape), (None, None))
    numbers: list[Column] = []
    categories: list[FeatureFacts] = []
    texts: list[FeatureFacts] = []
    left_out: list[tuple[str, str]] = []
    for each in features:
        column = each.column
        if image is not None:
            if column != image:
                left_out.append((column.name, f"the network sees {image.name} alone"))
        elif column.dtype.endswith("[*]"):
            left_out.append(
                (column.name, "its lists have different lengths; docs/how-to/features.md has columns for it")
            )
        elif column.dtype == "str":
            (texts if each.words >= _TEXT_WORDS else categories).append(each)
        else:
            numbers.append(column)
    if not (image or numbers or categories or texts):
        listed = ", ".join(f"{each.column.name} {each.column.dtype}" for each in features)
        raise InputError(
            f"A script can be written for images, numbers and texts. Received: {listed} beside the label. "
            "Import them as numbers"
        )
    return JobTemplate(
        train,
        test,
        validation,
        label.column.name,
        choose_classes(label),
        image,
        shape,
        _find_white([each.largest for each in features if each.column == image]),
        tuple(sorted(numbers, key=lambda column: column.name)),
        tuple(categories),
        tuple(texts),
        any(each.has_missing for each in features if each.column in numbers),
        choose_batch(label.rows),
        tuple(left_out),
    )


def _find_white(largest: Sequence[int]) -> int:
    """Return the number that stands for white: 255, unless a sample has much smaller ones alone."""
    found = max(largest, default=0)
    return found if 0 < found <= _DARK else 255


# Writes the script


def render_script(template: JobTemplate, job_dir: str) -> str:
    """Return the text of train.py. `job_dir`: its folder, for the command that runs it."""
    is_image = template.image is not None
    pieces = [_render_head(template, job_dir), _render_constants(template), *_render_reading(template)]
    pieces.append("\n".join(_render_image_model(template) if is_image else _render_columns_model(template)))
    pieces.append(_render_training(template))
    text = "\n".join(pieces)
    return text.replace("import numpy as np\n", "") if "np." not in text else text


def _render_head(template: JobTemplate, job_dir: str) -> str:
    what = "classes" if template.classes is not None else "numbers"
    return f'''"""Learns the {what} in column {template.label} of {template.train}. Change it as you like.

It runs on TensorFlow, JAX and PyTorch, as KERAS_BACKEND says, by any number of workers, or alone:

    insitu start --workers 2 {template.train} {job_dir} train.py
    python {job_dir}/train.py
"""
{chr(10) + "import re" + chr(10) if template.texts else ""}
import keras
import numpy as np

import insitu
{"" if template.image else "from insitu import feature_column as fc" + chr(10)}'''


def _render_constants(template: JobTemplate) -> str:
    constants: list[tuple[str, Any]] = [("TRAIN", template.train)]
    constants += [(n, v) for n, v in (("VALIDATION", template.validation), ("TEST", template.test)) if v]
    constants += [("LABEL", template.label)]
    if template.classes is not None:
        constants += [("CLASSES", len(template.classes) if _are_numbered(template) else [*template.classes])]
    constants += [("BATCH", template.batch), ("EPOCHS", 10)]
    if template.image is not None:
        constants += [("IMAGE", template.image.name)]
    else:
        constants += [(name, names) for name, names in _group_features(template) if names]
    if template.texts:
        words = max(each.many_words for each in template.texts)
        words = min(_MOST_WORDS, max(_LEAST_WORDS, 1 << (words - 1).bit_length()))
        constants += [("WORDS", words)]
    lines = []
    for name, value in constants:
        text = f"{name} = {_format(value, len(name) + 3)}"
        lines += [text + (f"  # {_COMMENTS[name]}" if name in _COMMENTS and "\n" not in text else "")]
    return "\n".join([*lines, ""])


_COMMENTS = {
    "BATCH": "rows of a step, over all workers",
    "NUMBERS": "normalized",
    "CATEGORIES": "looked up as a whole",
    "TEXTS": "looked up word by word",
    "WORDS": "of a text at most; those behind them are left out",
}


def _group_features(template: JobTemplate) -> list[tuple[str, list[str]]]:
    """Return the names of the columns that enter the model, by the constant that lists them."""
    return [
        ("NUMBERS", [each.name for each in template.numbers]),
        ("CATEGORIES", [each.column.name for each in template.categories]),
        ("TEXTS", [each.column.name for each in template.texts]),
    ]


def _are_numbered(template: JobTemplate) -> bool:
    """Return whether labels are the numbers of their classes, so that none is looked up."""
    values = template.classes
    return values is not None and values == tuple(range(len(values))) and type(values[0]) is int


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _format(value: Any, indent: int) -> str:
    """Return a constant as Python has it, on further lines if it is long."""
    if not isinstance(value, list):
        return _quote(value) if isinstance(value, str) else repr(value)
    items = [_quote(each) if isinstance(each, str) else repr(each) for each in value]
    line = f"[{', '.join(items)}]"
    if len(line) + indent <= _WIDTH:
        return line
    rows = textwrap.wrap(", ".join(items), _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    if any(" " in each for each in items):  # a row must not end within a text
        rows = [f"{each}," for each in items]
    return "[\n" + "".join(f"    {row}\n" for row in rows) + "]"


_WIDTH = 100
_SPLIT_WORDS = '''
def split_words(texts):
    """Return the words of each text, str[rows, WORDS]; "" stands for none."""
    found = [re.findall(r"\\w+", str(text).lower())[:WORDS] for text in texts]
    return np.array([[*words, *[""] * (WORDS - len(words))] for words in found])
'''
_STACK_NUMBERS = '''
def stack_numbers(name):
    """Return the numbers of all rows of a cache, as batches of float32[rows, numbers]."""

    def stack(row):
        parts = [{one} for number in NUMBERS]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    return insitu.dataset(name, features=NUMBERS, label=None).batch(4096).map(stack)
'''


def _render_reading(template: JobTemplate) -> list[str]:
    """Return the functions that read a cache."""
    pieces = [_SPLIT_WORDS] if template.texts else []
    if template.numbers:
        # A single column comes as an array, and several ones as a dict.
        one = "row" if len(template.numbers) == 1 else "row[number]"
        filled = f"np.nan_to_num({one})" if template.has_missing else one
        pieces += [_STACK_NUMBERS.replace("{one}", f'np.asarray({filled}, "float32")')]
    names = [name for name, listed in _group_features(template) if listed]
    wanted = "IMAGE" if template.image else " + ".join(names)
    prepared = "" if template.image and _are_numbered(template) else ".map(prepare)"
    if prepared:
        pieces += ["\n".join(["", *_render_prepare(template), ""])]
    pieces += [
        f'''
def read(name):
    """Return the rows of a cache, as pairs of features and label."""
    return insitu.dataset(name, features={wanted}, label=LABEL){prepared}

'''
    ]
    return pieces


def _render_prepare(template: JobTemplate) -> list[str]:
    """Return the function that makes what the model takes out of a batch."""
    takes, columns = "image", [name for _, listed in _group_features(template) for name in listed]
    lines = []
    if template.image is None:
        takes = "row"
        if len(columns) == 1:
            lines += [f"    row = {{{_quote(columns[0])}: row}}"]
        elif template.texts or template.has_missing:
            lines += ["    row = dict(row)"]
        if template.has_missing:
            lines += [
                "    for name in NUMBERS:",
                "        row[name] = np.nan_to_num(row[name])  # 0 if missing",
            ]
        if template.texts:
            lines += ["    for name in TEXTS:", "        row[name] = split_words(row[name])"]
    label = "label"
    if template.classes is None:
        label = 'np.asarray(label, "float32")[:, None]'
    elif not _are_numbered(template):
        lines += ["    # A KeyError names a label that wasn't there when this script was written."]
        label = "np.array([NUMBER_OF_CLASS[each] for each in label.tolist()])"
    features = takes if template.image else "transform(row)"
    described = f'    """Return a batch as the model takes it. {"Images" if template.image else "Values"} are'
    described += ' NumPy arrays."""'
    return [f"def prepare({takes}, label):", described, *lines, f"    return {features}, {label}"]


def _render_image_model(template: JobTemplate) -> list[str]:
    if template.image is None or template.image_shape is None:
        raise ValueError("a template without images has no network for them")
    height, width, _ = template.image_shape
    layers = [f"keras.Input({template.image.shape})"]
    if template.image.shape != template.image_shape:
        layers += [f"keras.layers.Reshape({template.image_shape})"]
    if template.image.dtype == "uint8":
        layers += [f"keras.layers.Rescaling(1 / {template.white})"]
    filters = 32
    while min(height, width) >= _LEAST_SIDE // 2 and filters <= 256:
        layers += [
            f'keras.layers.Conv2D({filters}, 3, padding="same", activation="relu")',
            "keras.layers.MaxPooling2D()",
        ]
        height, width, filters = height // 2, width // 2, filters * 2
    small = max(height, width) <= _LEAST_SIDE
    layers += ["keras.layers.Flatten()" if small else "keras.layers.GlobalAveragePooling2D()"]
    layers += ['keras.layers.Dense(128, activation="relu")', "keras.layers.Dropout(0.3, seed=0)"]
    layers += _list_outputs(template)
    return [
        *_render_before_scope(template),
        "with strategy.scope():",
        *_render_unscale(template),
        "    model = keras.Sequential(",
        "        [",
        *(f"            {each}," for each in layers),
        "        ]",
        "    )",
        *_render_compile(template),
        "",
    ]


def _render_columns_model(template: JobTemplate) -> list[str]:
    parts = [
        name for name, there in (("numbers", template.numbers), ("words", _has_words(template))) if there
    ]
    lines = []
    if template.numbers:
        shapes = [f", shape={each.shape}" if each.shape else "" for each in template.numbers]
        if any(shapes):
            columns = zip(template.numbers, shapes, strict=True)
            listed = [f"    fc.numeric_column({_quote(each.name)}{shape})," for each, shape in columns]
            lines += ["numbers = [", *listed, "]"]
        else:
            lines += ["numbers = [fc.numeric_column(name) for name in NUMBERS]"]
    if _has_words(template):
        lines += ["# Hashes need no list of words, and are the same on each backend.", "words = ["]
        for name, buckets, width in _list_embeddings(template):
            hashed = f"fc.categorical_column_with_hash_bucket({_quote(name)}, {buckets})"
            lines += [f"    fc.embedding_column({hashed}, {width}),"]
        lines += ["]"]
    both = len(parts) == 2
    lines += [
        f"columns = {'numbers + words' if both else parts[0]}",
        "transform = fc.FeatureTransform(columns)",
    ]
    lines += [*_render_before_scope(template), "with strategy.scope():", *_render_unscale(template)]
    lines += ["    inputs = fc.make_inputs(columns)"]
    if template.numbers:
        lines += [
            "    normalize = keras.layers.Normalization()",
            "    insitu.adapt(normalize, stack_numbers(TRAIN))  # by all rows",
            "    x = normalize(fc.DenseFeatures(numbers)(inputs))",
        ]
    if _has_words(template):
        found = "fc.DenseFeatures(words)(inputs)"
        lines += [f"    x = keras.layers.concatenate([x, {found}])" if both else f"    x = {found}"]
    lines += ["    for units in (64, 32):", '        x = keras.layers.Dense(units, activation="relu")(x)']
    outputs = [f"    x = {layer}(x)" for layer in _list_outputs(template)]
    return [*lines, *outputs, "    model = keras.Model(inputs, x)", *_render_compile(template), ""]


def _has_words(template: JobTemplate) -> bool:
    return bool(template.categories or template.texts)


def _list_embeddings(template: JobTemplate) -> list[tuple[str, int, int]]:
    """Return name, buckets and width of each embedding."""
    found = [(each.column.name, _choose_buckets(each.different), 8) for each in template.categories]
    return found + [(each.column.name, 20_000, 32) for each in template.texts]


def _choose_buckets(different: int) -> int:
    """Return the number of buckets for names of which a sample has so many: few names share one."""
    return max(64, min(100_000, 1 << (4 * max(1, different) - 1).bit_length()))


def _render_before_scope(template: JobTemplate) -> list[str]:
    lines = []
    if template.classes is not None and not _are_numbered(template):
        lines += ["NUMBER_OF_CLASS = {name: number for number, name in enumerate(CLASSES)}"]
    if template.classes is None:
        lines += [
            "targets = insitu.dataset(TRAIN, features=LABEL, label=None).batch(4096)",
            'targets = targets.map(lambda values: np.asarray(values, "float32")[:, None])',
        ]
    return [*lines, "strategy = insitu.MultiWorkerMirroredStrategy()"]


def _render_unscale(template: JobTemplate) -> list[str]:
    """Return the last layer of a model that predicts a number: it gives numbers of the label's own scale."""
    if template.classes is not None:
        return []
    return [
        "    unscale = keras.layers.Normalization(invert=True)  # to the scale of the label",
        "    insitu.adapt(unscale, targets)",
    ]


def _list_outputs(template: JobTemplate) -> list[str]:
    if template.classes is None:
        return ["keras.layers.Dense(1)", "unscale"]
    return [f"keras.layers.Dense({'CLASSES' if _are_numbered(template) else 'len(CLASSES)'})"]


def _render_compile(template: JobTemplate) -> list[str]:
    if template.classes is None:
        return ['    model.compile("adam", "mse", metrics=["mae"])']
    return [
        "    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        '    model.compile("adam", loss, metrics=["accuracy"])',
    ]


def _render_training(template: JobTemplate) -> str:
    monitor = "val_loss" if template.validation else "loss"
    held_out = "validation_data=read(VALIDATION).batch(1024)" if template.validation else ""
    lines = [
        "callbacks = [",
        "    insitu.BackupAndRestore(),  # a job that is interrupted continues in the middle of an epoch",
        f'    keras.callbacks.ModelCheckpoint("best.keras", monitor="{monitor}", save_best_only=True),',
        "]",
        "train = read(TRAIN).shuffle().batch(BATCH)",
        f"model.fit(train, epochs=EPOCHS{f', {held_out}' if held_out else ''}, callbacks=callbacks)",
        'model.save("model.keras")  # the chief alone writes it',
    ]
    if template.test:
        lines += [
            "scores = model.evaluate(read(TEST).batch(1024), verbose=0, return_dict=True)",
            "if insitu.context().is_chief:",
            '    print("held-out rows:", ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))',
        ]
    return "\n".join([*lines, ""])
