"""Datasets, which scripts iterate: rows of a cache by shard, in an order that (seed, epoch, shard) fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from insitu.base.context import Context
from insitu.base.errors import InputError
from insitu.base.spec import CacheSpec, ShardMap
from insitu.base.wording import format_count
from insitu.grid.layout import (
    BatchPlan,
    ChosenOrder,
    FileOrder,
    Rows,
    ShuffledPlan,
    WindowedOrder,
    batch_sizes,
    draw_rows,
    rows_before,
    steps_of_shard,
)
from insitu.grid.partitions import TEXT
from insitu.grid.reading.cache_reader import CacheReader
from insitu.grid.reading.column_maps import (
    LABEL,
    ColumnMap,
    Hash,
    Lookup,
    Tokenize,
    find_place,
    is_of_texts,
    make_lookup,
    make_time_parts,
    make_tokenize,
)
from insitu.grid.reading.data_position import PositionedData
from insitu.grid.reading.read_ahead import WindowedColumns
from insitu.grid.reading.reads import READS
from insitu.grid.reading.selection import Filter, Selection, Step, Take
from insitu.grid.reading.structure import (
    Pad,
    Structure,
    apply_maps,
    check_parameters,
    concatenate,
    has_lists,
    map_leaves,
    name_leaves,
    spec_of,
)
from insitu.grid.reading.vocabularies import find_vocabularies


@dataclass(frozen=True, slots=True)
class Batch:
    """One shard's part of one step."""

    #: The structure of arrays, each with `rows` rows; None if `rows` is 0.
    data: Structure
    #: 0 if the shard has run out before the longest one.
    rows: int
    #: Pairs of a partition's index and int64 row indices in it, in the order of the batch's rows.
    origins: tuple[tuple[int, Rows], ...]


NO_ROWS = Batch(None, 0, ())
EXACT_BYTES = 1 << 30
"""Caches of up to so many bytes are shuffled as a whole unless the script says otherwise."""
WINDOW_BYTES = 128 << 20
"""Rows of about so many bytes are mixed in larger caches. Two windows are in memory."""
WINDOW_ROWS = 1 << 24
"""The most rows of a window whose bytes the script leaves open. To order many more takes a minute and
gigabytes. Rows of 8 bytes or more are never so many."""

_ORIGIN_ROWS = 1 << 26
"""Rows of a shuffled shard whose origins are given at once."""


class Dataset(PositionedData):
    """The rows of one version of a cache, in the shards of a job. Made by `insitu.dataset`.

    Immutable: `shuffle`, `batch`, `map`, `filter`, `take` and `repeat` return new ones. Iterating gives the
    batches of this task's shards as NumPy arrays, epoch 0 first, then epoch 1, and so on; `all_shards()` has
    those of all tasks. `model.fit` under an insitu strategy takes it apart by shard. Every row comes once an
    epoch, but for `filter`, `take` and `repeat`. Arrays of an unshuffled dataset may be read-only views of
    the file.

    Example:
        >>> rows = insitu.dataset("digits/train").shuffle().batch(32)
        >>> images, labels = next(iter(rows))
        >>> images.shape, images.dtype, labels.shape
        ((32, 64), dtype('float32'), (32,))
        >>> scaled = rows.map(lambda images, labels: (images / 16, labels))
    """

    def __init__(
        self,
        reader: CacheReader,
        context: Context,
        chain: Chain | None = None,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        self._reader = reader
        self._selection = selection or Selection(reader)
        self._context = context
        self._chain = chain or Chain()
        self._element_spec: Structure = None
        self._has_lists = False
        #: This dataset over the rows of the epoch that was asked for last. Written by `at_epoch`.
        self._later: Dataset | None = None

    def shuffle(
        self, seed: int | None = None, *, exact: bool | None = None, window_bytes: int | None = None
    ) -> Dataset:
        """Take the rows of each shard in a new order each epoch. `seed` in [0, 2**63); None: the job's.

        With `exact=True` every order of a shard's rows is equally likely. That is best for data that fits
        into memory; from a disk, rows are read one by one. With `exact=False` the shard is read in blocks of
        about a mebibyte, which come in a random order, and the rows of a window of `window_bytes` are mixed:
        None for 128 MiB, or 2^24 rows if these are fewer bytes. The default is exact for caches of up to 1
        GiB, on any machine, and for what `filter` and `take` leave. Orders follow from these arguments and
        the cache alone. Raises InputError.
        """
        seed = self._check_seed(seed, "shuffle")
        if window_bytes is not None and not window_bytes > 0:
            raise InputError(f"window_bytes must be positive. Received: {window_bytes}")
        block_rows = self.cache.block_rows
        if exact is None:
            exact = self.cache.raw_bytes <= EXACT_BYTES or not block_rows or self.is_selected
        if not exact and self.is_selected:
            raise InputError(
                f"What filter and take leave is shuffled as a whole. Received: exact=False for {self!r}. "
                f"Leave exact out"
            )
        if not exact and not block_rows:
            raise InputError(
                f"shuffle(exact=False) needs a cache that was imported in blocks. Received: version "
                f"{self.cache.version} of {self.cache.name}, which is older. Import it again with --overwrite"
            )
        if exact and not self.is_selected and self._reader.exceeds_memory:
            raise InputError(
                f"Rows of a compressed cache that are shuffled as a whole must fit into half of the memory, "
                f"decompressed. Received: {self!r}, shuffled with exact=True, which is the default of small "
                f"caches. Give exact=False, or import the cache again without --compress"
            )
        blocks = None if exact else self._count_blocks(window_bytes)
        return self._chained(replace(self._chain, seed=seed, window_blocks=blocks))

    def _check_seed(self, seed: int | None, name: str) -> int:
        """Return the seed, or that of the job if it is None. Raises InputError."""
        seed = self._context.seed if seed is None else seed
        if not 0 <= seed < 2**63:
            raise InputError(f"The seed of {name} must be in [0, 2**63). Received: {seed}")
        return int(seed)

    def _count_blocks(self, window_bytes: int | None) -> int:
        """Return the number of blocks that have about so many bytes; 1 at least. None: see `shuffle`."""
        block_bytes = self.cache.block_rows * self.cache.raw_bytes / max(1, self.cache.rows)
        blocks = round((window_bytes or WINDOW_BYTES) / max(1.0, block_bytes))
        if window_bytes is None:
            blocks = min(blocks, WINDOW_ROWS // max(1, self.cache.block_rows))
        return max(1, blocks)

    def batch(self, global_size: int, *, pad: Any = None, length: int | None = None) -> Dataset:
        """Take `global_size` rows a step over all shards together, spread as evenly as can be.

        The last batch of each shard holds what is left. With `pad` and `length`, rows of different lengths,
        of ragged columns or as an object array of lists or arrays that a map makes, are filled up with `pad`
        to `length` values, the same in each batch and shard. Raises InputError if a shard would get no row,
        and in an iteration if a row is longer.
        """
        if isinstance(global_size, bool) or not isinstance(global_size, (int, np.integer)):
            raise InputError(f"The global batch is a whole number of rows. Received: {global_size!r}")
        batch_sizes(int(global_size), self.num_shards)
        if (pad is None) is not (length is None):
            raise InputError(f"pad and length go together. Received: pad={pad!r}, length={length!r}")
        padding = None if length is None else Pad(pad, int(length))
        return self._chained(replace(self._chain, batch_size=int(global_size), pad=padding))

    def map(self, fn: Callable[..., Any]) -> Dataset:
        """Apply `fn` to each shard's batches: `fn(features, label)` to a tuple, `fn(batch)` to others.

        It gets NumPy arrays of whole batches, never single rows, and returns any structure of arrays with
        as many rows. Several maps compose in their order. An error in `fn` has a note that says what it got.
        Raises InputError for a function that takes another number of arguments.
        """
        if not callable(fn):
            raise InputError(f"Dataset.map takes a function of a batch. Received: {fn!r}")
        if not self._chain.maps:  # what a map returns is known when it is called
            check_parameters(fn, *(("features", "label") if self.label is not None else ("features",)))
        return self._chained(replace(self._chain, maps=(*self._chain.maps, fn)))

    def lookup(
        self, *columns: str, vocabulary: Sequence[Any] | None = None, max_tokens: int | None = None
    ) -> Dataset:
        """Replace texts or whole numbers in columns by their ids in a vocabulary, int64, on every backend.

        Ids of features are those of keras.layers.StringLookup and IntegerLookup: 0 for values that aren't in
        the vocabulary, then the most frequent value first, and equally frequent ones in falling order. Labels
        count from 0, and one that isn't in the vocabulary is an error.

        Without `vocabulary`, which is for one column, it is that of all rows of the cache. All tasks of a job
        find it together, in one pass over the partitions, so call it in all of them; a task that is started
        again finds the same. `max_tokens` is its length at most. Other data needs the same ids: pass it
        `vocabulary=train.vocabulary(column)`. Raises InputError.

            train = insitu.dataset("people", label="income").lookup("city")
            test = insitu.dataset("test", label="income").lookup("city", vocabulary=train.vocabulary("city"))
        """
        if not columns or (vocabulary is not None and len(columns) > 1):
            raise InputError(
                f"lookup takes columns, or one column and its vocabulary. Received: {columns!r}"
                f"{' and a vocabulary' if vocabulary is not None else ''}. Call it for each column"
            )
        if max_tokens is not None and (vocabulary is not None or max_tokens < 2):
            raise InputError(
                f"max_tokens is 2 or more, and cuts a vocabulary that lookup finds. Received: {max_tokens!r}"
                f"{' and a vocabulary' if vocabulary is not None else ''}"
            )
        places = {column: self._find_place(column, "lookup") for column in columns}
        found = {columns[0]: vocabulary} if vocabulary is not None else self._find_vocabularies(places)
        data = self
        for column, place in places.items():
            convert = make_lookup(column, found[column], is_label=place is LABEL, most=max_tokens)
            data = data._mapped(ColumnMap(column, place, convert, f"lookup({column!r})"))
        return data

    def tokenize(
        self,
        column: str,
        *,
        length: int,
        vocabulary: Sequence[str] | None = None,
        max_tokens: int | None = None,
    ) -> Dataset:
        """Replace the texts of a feature by ids of their words, int64[rows, length], on every backend.

        Words and ids are those of keras.layers.TextVectorization(output_sequence_length=length): lower case
        without punctuation, cut at white space; 0 behind the last word, 1 for words that aren't in the
        vocabulary, then the most frequent word first. Words behind the first `length` are left out.

        Without `vocabulary` it is that of all rows of the cache, found as by `lookup`. `max_tokens` is its
        length at most, with those two. Other data needs the same ids: pass it
        `vocabulary=train.vocabulary(column)`. Raises InputError.

            train = insitu.dataset("reviews", label="stars").tokenize("text", length=200, max_tokens=20_000)
            test = insitu.dataset("test", label="stars").tokenize(
                "text", length=200, vocabulary=train.vocabulary("text")
            )
        """
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise InputError(f"tokenize makes a length of 1 id or more for each text. Received: {length!r}")
        if max_tokens is not None and (vocabulary is not None or max_tokens < 3):
            raise InputError(
                f"max_tokens is 3 or more, and cuts a vocabulary that tokenize finds. Received: "
                f"{max_tokens!r}{' and a vocabulary' if vocabulary is not None else ''}"
            )
        place = self._find_place(column, "tokenize")
        if place is LABEL:
            raise InputError(f"tokenize takes a feature. Received: the label {column!r}. lookup takes labels")
        if vocabulary is None:
            vocabulary = self._find_vocabularies({column: place}, of_words=True)[column]
        convert = make_tokenize(column, vocabulary, int(length), max_tokens)
        return self._mapped(ColumnMap(column, place, convert, f"tokenize({column!r}, length={length})"))

    def _find_vocabularies(
        self, places: Mapping[str, Any], *, of_words: bool = False
    ) -> Mapping[str, Sequence[Any]]:
        columns, call = list(places), "tokenize" if of_words else "lookup"
        if self.is_selected:
            raise InputError(
                f"A vocabulary is of all rows of a cache. Received: {call} of {', '.join(columns)} behind "
                f"filter or take, in {self!r}. Call {call} before them, or pass it a vocabulary"
            )
        labels = [column for column, place in places.items() if place is LABEL]
        maps, named = self._chain.maps, {column.name for column in self.cache.columns}
        if not named.issuperset(columns) or any(
            not isinstance(fn, ColumnMap) or fn.column in columns for fn in maps
        ):
            return find_vocabularies(self, places, labels, of_words=of_words)
        # No map has changed these columns, so the others needn't be read.
        alone = Dataset(self._reader.read_others(columns), self._context)
        here = dict.fromkeys(columns) if len(columns) == 1 else {column: column for column in columns}
        return find_vocabularies(alone, here, labels, of_words=of_words)

    def vocabulary(self, column: str) -> list[Any]:
        """Return the vocabulary of a column, the value of each id, as `lookup` or `tokenize` has used it. If
        neither was called it is found as by `lookup`, so call it in all tasks. Raises InputError."""
        used = [fn.convert for fn in self._chain.maps if isinstance(fn, ColumnMap) and fn.column == column]
        found = next((convert for convert in used if isinstance(convert, Lookup | Tokenize)), None)
        return list(found.vocabulary) if found is not None else self.lookup(column).vocabulary(column)

    def hash(self, *columns: str, bins: int) -> Dataset:
        """Replace texts or whole numbers in columns by their hashes in [0, bins), int64, on every backend.

        They are those of keras.layers.Hashing(bins): different values may have the same, and no vocabulary is
        needed. Raises InputError.
        """
        if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1 or not columns:
            raise InputError(
                f"hash takes columns, and bins of 1 or more. Received: {columns!r}, bins={bins!r}"
            )
        data = self
        for column in columns:
            place, call = self._find_place(column, "hash"), f"hash({column!r}, bins={bins})"
            data = data._mapped(ColumnMap(column, place, Hash(column, int(bins)), call))
        return data

    def times(self, column: str, *parts: str) -> Dataset:
        """Replace a column of times by parts of them, int32: features such as `since_hour` of `since`.

        Parts are "year", "month" (1 to 12), "day", "weekday" (0 is Monday), "hour", "minute" and "second", in
        the time zone of the column. Call it before `map`. Raises InputError.

            insitu.dataset("people", label="income").times("since", "month", "weekday")
        """
        place = self._find_place(column, "times")
        if any(not isinstance(fn, ColumnMap) or fn.column == column for fn in self._chain.maps):
            raise InputError(
                f"times takes a column as it was imported. Received: {column!r} of {self!r}. Call times "
                f"before map, lookup and hash"
            )
        found = next((c for c in self.cache.columns if c.name == column), None)
        if found is None or place is LABEL:
            raise InputError(f"times takes a feature that is a column. Received: {column!r} of {self!r}")
        call = f"times({', '.join(map(repr, [column, *parts]))})"
        return self._mapped(ColumnMap(column, place, make_time_parts(found, parts), call))

    def _find_place(self, column: str, call: str) -> Any:
        return find_place(self.element_spec, self.feature_name, self.label, column, call)

    def _mapped(self, fn: ColumnMap) -> Dataset:
        found = self._chained(replace(self._chain, maps=(*self._chain.maps, fn)))
        _ = found.element_spec  # what it can't take is an error at the script's line
        return found

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Leave the rows for which `predicate` returns True, before they are shuffled and batched.

        It gets whole batches, as functions given to `map` do, after all maps so far, and returns one bool per
        row. Every task applies it once to all shards, which reads them, to know the number of steps. The
        ledger of a job doesn't apply to what is left: none is kept.
        """
        if not callable(predicate):
            raise InputError(f"Dataset.filter takes a function of a batch. Received: {predicate!r}")
        return self._selected("filter", Filter(predicate, self._chain.maps))

    def take(self, count: int) -> Dataset:
        """Leave `count` rows, each shard its share of them, in stored order.

        They follow from the number of shards. If there are fewer, all are left. The ledger of a job doesn't
        apply to what is left: none is kept.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise InputError(f"Dataset.take takes a number of rows, 0 or more. Received: {count!r}")
        return self._selected("take", Take(int(count)))

    def sample(self, count: int, seed: int | None = None) -> Structure:
        """Return `count` rows that are drawn at random from all shards, as one batch after all maps.

        No row comes twice; if there are fewer, all come. `seed` in [0, 2**63); None: the job's. Nothing but
        these rows is read, or the blocks that hold them. Raises InputError, CorruptPartition.
        """
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise InputError(f"Dataset.sample takes a number of rows, 1 or more. Received: {count!r}")
        counts = [self.rows_of_shard(shard) for shard in range(self.num_shards)]
        if not sum(counts):
            raise InputError(f"filter and take must leave a row. Received: none of {self.cache.rows:,} rows")
        parts, places = [], []
        for shard, here, rows in draw_rows(counts, int(count), self._check_seed(seed, "sample")):
            positions = self._selection.positions(shard)
            parts.append(self._reader.read_positions(shard, rows if positions is None else positions[rows]))
            places.append(here)
        order = np.argsort(np.concatenate(places))
        return self._finish(map_leaves(lambda leaf: leaf[order], concatenate(parts)), len(order))

    def repeat(self, count: int | None = None) -> Dataset:
        """Make `count` passes over the rows in each epoch; None: without end, so that `fit` needs
        `steps_per_epoch`.

        Each pass ends with a batch of the rest, as in tf.data's `batch(n).repeat(count)`; if rows are
        shuffled, each has an order of its own. The ledger of a job accounts for passes in place of epochs.
        """
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise InputError(
                f"Dataset.repeat takes a number of passes, 1 or more, or None. Received: {count!r}"
            )
        if self.is_refreshed:
            raise InputError(
                f"With --refresh an epoch is one pass over the rows. Received: repeat({count or ''}). Leave "
                f"repeat out, and give fit more epochs"
            )
        passes = self._chain.passes
        total = None if count is None or passes is None else passes * count
        return self._chained(replace(self._chain, passes=total))

    def as_tf_dataset(self) -> Any:
        """Return a tf.data.Dataset of this task's batches, with text as strings, for TensorFlow's own tools.

        Each iteration is the next epoch. `fit` under a strategy takes this dataset itself, which knows the
        shards of all tasks.
        """
        return convert_to_tensorflow(self)

    def _selected(self, name: str, step: Filter | Take) -> Dataset:
        if self._chain.seed is not None or self._chain.batch_size is not None:
            raise InputError(
                f"Dataset.{name} chooses rows as they are: call it before shuffle and batch. Received: "
                f"{self!r}"
            )
        return Dataset(self._reader, self._context, self._chain, self._selection.then(step))

    def _chained(self, chain: Chain) -> Dataset:
        return Dataset(self._reader, self._context, chain, self._selection)

    def _over(self, reader: CacheReader) -> Dataset:
        return Dataset(reader, self._context, self._chain, self._selection.over(reader))

    @property
    def cache(self) -> CacheSpec:
        """The version of the cache that is read."""
        return self._reader.cache

    @property
    def shard_map(self) -> ShardMap:
        return self._reader.shard_map

    @property
    def num_shards(self) -> int:
        return len(self._reader.shard_map.shards)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of this task."""
        return self._reader.shards

    @property
    def rows(self) -> int:
        """Rows of all shards, in one pass."""
        if not self.is_selected:
            return self.cache.rows
        return sum(self.rows_of_shard(shard) for shard in range(self.num_shards))

    @property
    def is_selected(self) -> bool:
        """Whether `filter` or `take` leave some of the rows only, for which no ledger is kept."""
        return bool(self._selection.steps)

    @property
    def is_refreshed(self) -> bool:
        """Whether later epochs may have other rows, which `insitu start --refresh` reads."""
        return self._reader.is_refreshed

    def at_epoch(self, epoch: int | None) -> Dataset:
        """Return this dataset over the rows of an epoch (None: the newest), maybe itself.

        The first call of a job's tasks for such an epoch reads them. Raises GridError.
        """
        reader = self._reader.at_epoch(epoch)
        if reader is self._reader:
            return self
        if self._later is None or self._later._reader is not reader:
            self._later = self._over(reader)
        return self._later

    def all_shards(self) -> Dataset:
        """Return this dataset over the shards of all tasks, for one that needs all rows. Without `shuffle`
        they come in the order of the rows that `predict` returns under a strategy."""
        return self._over(self._reader.for_shards(range(self.num_shards)))

    @property
    def passes(self) -> int | None:
        """Passes over the rows in an epoch; None without end."""
        return self._chain.passes

    @property
    def label(self) -> str | None:
        """The column of labels; None without one."""
        return self._reader.label

    @property
    def feature_name(self) -> str | None:
        """The column that is the only feature; None if there are several."""
        return self._reader.features[0] if len(self._reader.features) == 1 else None

    def rows_of_shard(self, shard: int) -> int:
        return self._selection.count(shard)

    @property
    def seed(self) -> int | None:
        """The seed of the order of rows; None if they come in stored order."""
        return self._chain.seed

    @property
    def batch_size(self) -> int:
        """Rows of a step over all shards. Raises InputError without `batch`."""
        if self._chain.batch_size is None:
            raise InputError(
                f"This dataset isn't batched, so it can't be iterated. Call .batch(global size) first. "
                f"Received: {self!r}"
            )
        return self._chain.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of a pass over the rows: what the shard that needs most needs. Raises InputError if `filter`
        and `take` leave no row."""
        sizes = batch_sizes(self.batch_size, self.num_shards)
        steps = max(steps_of_shard(self.rows_of_shard(s), size) for s, size in enumerate(sizes))
        if not steps:
            raise InputError(f"filter and take must leave a row. Received: none of {self.cache.rows:,} rows")
        return steps

    @property
    def own_steps(self) -> int:
        """Steps of a pass in which this task's shards have rows."""
        sizes = batch_sizes(self.batch_size, self.num_shards)
        return max((steps_of_shard(self.rows_of_shard(s), sizes[s]) for s in self.shards), default=0)

    def __len__(self) -> int:
        if self.passes is None:
            # A caller that asks for a length in vain, such as a progress bar, expects a TypeError.
            raise TypeError("repeat() without a count has no end, and so no length. Pass a count to it")
        return self.passes * self.num_steps

    @property
    def element_spec(self) -> Structure:
        """The structure of a batch, after all maps, with an ArraySpec (shape, dtype) for each array.

        Found by reading two rows.
        """
        if self._element_spec is None:
            data, rows = self._reader.probe()
            found = self._finish(data, rows)
            self._has_lists = has_lists(found)
            self._element_spec = spec_of(found)
        return self._element_spec

    def refuse_texts(self) -> None:
        """Raise InputError if arrays are texts, which tensors of JAX and PyTorch can't be."""
        spec = self.element_spec
        if self._has_lists:
            return
        parts = spec if isinstance(spec, tuple) else (spec,)
        names = [self.feature_name or "features", self.label or "label", "sample_weight"]
        named = name_leaves(dict(zip(names, parts, strict=False)))
        texts = [name for name, array in named if is_of_texts(array)]
        if texts:
            raise InputError(
                f"Models of JAX and PyTorch take numbers. Received: {self!r}, with text in "
                f"{', '.join(map(repr, texts))}. Make ids of it, by dataset.lookup({texts[0]!r}) or "
                f"dataset.hash({texts[0]!r}, bins=100), or leave the column out: features= of insitu.dataset"
            )

    def refuse_lists(self) -> None:
        """Raise InputError if rows are lists of different lengths, of which no tensor can be made."""
        if self.element_spec is not None and self._has_lists:
            raise InputError(
                f"Rows of a tensor have one length. Received: {self!r}, whose rows are lists. Give batch() a "
                f"length and what fills rows up, such as .batch(64, pad=0, length=128)"
            )

    def shard_batches(self, shard: int, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one shard in one epoch, from `start_step` on. Reads no others.

        Batches without rows follow if other shards last longer. Raises CorruptPartition.
        """
        size = batch_sizes(self.batch_size, self.num_shards)
        if not 0 <= shard < self.num_shards:
            raise InputError(f"A shard is in [0, {self.num_shards}). Received: {shard}")
        if epoch < 0 or start_step < 0:
            raise InputError(f"Epoch and step count from 0. Received: epoch {epoch}, step {start_step}")
        return self.at_epoch(epoch)._shard_batches(shard, epoch, start_step, size[shard])

    def partition_batches(self, shard: int, partition: int, lock: Lock, size: int = 1 << 18) -> Any:
        """Yield the rows of one partition of a shard, in stored order, in batches of `size`, as after `map`.

        Functions of `map` run while `lock` is held. Raises InputError after `filter` and `take`.
        """
        if self.is_selected:
            raise InputError(f"Partitions are read whole. Received: {self!r}. Leave filter and take out")
        k, rows = self.shard_map.shards[shard].index(partition), self.cache.partitions[partition].rows
        for start in range(0, rows, size):
            ranges = [(k, start, min(rows, start + size))]
            data, count, _ = self._reader.read_ranges(shard, ranges, share_texts=True)
            with lock:
                batch = self._finish(data, count)
            yield batch
        READS.publish()

    def _shard_batches(self, shard: int, epoch: int, start_step: int, size: int) -> Iterator[Batch]:
        reader = self._reader
        starts, order = reader.starts(shard), self._order(shard, epoch)
        plan = BatchPlan(starts, size) if order is None else ShuffledPlan(starts, size, order)
        windows: WindowedColumns | None = None
        if isinstance(order, (WindowedOrder, FileOrder)):
            windows = reader.read_windows(shard, order, lambda: self._order(shard, epoch + 1))
        else:
            reader.reopen_cut_files(shard)
        try:
            for step in range(start_step, self.num_steps):
                if step >= plan.steps:
                    yield NO_ROWS
                    continue
                if step == plan.steps // 2 and self._chain.window_blocks is None and self.seed is not None:
                    reader.orders.prepare(self.rows_of_shard(shard), self.seed, epoch + 1, shard)
                if isinstance(plan, ShuffledPlan):
                    data, rows, origins = reader.read_rows(shard, windows, plan, step)
                else:
                    data, rows, origins = reader.read_ranges(shard, plan.ranges(step))
                yield Batch(self._finish(data, rows), rows, origins)
        finally:
            if windows is not None:
                windows.close()
            READS.publish()

    def _finish(self, data: Structure, rows: int) -> Structure:
        """Return a batch as the script gets it, of one that was read."""
        maps, pad = self._chain.maps, self._chain.pad
        data = apply_maps(maps, data, rows) if maps else data
        return data if pad is None else map_leaves(pad.fill, data)

    def _order(self, shard: int, epoch: int) -> Any:
        """Return the positions of the shard's rows in the order of an epoch.

        None: all in stored order, in a cache that isn't read in windows.
        """
        positions, chain = self._selection.positions(shard), self._chain
        if chain.seed is None:
            large = self.cache.raw_bytes > EXACT_BYTES or self._reader.exceeds_memory
            if positions is None and self.cache.block_rows and large:
                blocks = self._count_blocks(None)
                return FileOrder(self._reader.starts(shard), self.cache.block_rows, blocks)
            return positions
        if chain.window_blocks is None:
            order = self._reader.orders.get(self.rows_of_shard(shard), chain.seed, epoch, shard)
            if positions is None:
                return order
            return positions[order] if isinstance(order, np.ndarray) else ChosenOrder(positions, order)
        starts, key = self._reader.starts(shard), {"seed": chain.seed, "epoch": epoch, "shard": shard}
        return WindowedOrder(starts, self.cache.block_rows, chain.window_blocks, **key)

    def shard_origins(self, shard: int, epoch: int, stop_step: int) -> Iterator[tuple[int, Rows]]:
        """Yield the origins of the rows of the shard's first `stop_step` batches of `epoch`.

        They are pairs of a partition's index and int64 row indices in it. They follow from (seed, epoch,
        shard) alone; no rows are read.
        """
        later = self.at_epoch(epoch) if stop_step > 0 else self
        if later is not self:
            yield from later.shard_origins(shard, epoch, stop_step)
            return
        starts, held = self._reader.starts(shard), self.shard_map.shards[shard]
        whole = self.rows_of_shard(shard)
        rows = min(whole, stop_step * batch_sizes(self.batch_size, self.num_shards)[shard])
        order = self._order(shard, epoch) if rows > 0 else None
        if isinstance(order, (WindowedOrder, FileOrder)):
            yield from ((held[k], found) for k, found in rows_before(order, starts, rows))
        elif order is not None:
            for start in range(0, rows, _ORIGIN_ROWS):
                some = order[start : min(rows, start + _ORIGIN_ROWS)]
                plan = ShuffledPlan(starts, len(some), some)
                yield from ((held[k], found) for k, found in plan.rows_of_batch(0))
        elif rows > 0:
            ranges = BatchPlan(starts, rows).ranges(0)
            yield from ((held[k], np.arange(start, stop)) for k, start, stop in ranges)

    def __iter__(self) -> Iterator[Structure]:
        """Yield this task's batches of one epoch: each step's rows of its shards, in their order."""
        if self.seed is not None:
            self._position.warn_of_restart(self._context.incarnation, self)
        return self._position.read_epoch(self._pass, self.passes, self.num_steps)

    def _pass(self, epoch: int, start_step: int) -> Iterator[Structure | None]:
        """Yield the batches of a pass, None for one without rows here."""
        streams = [self.shard_batches(shard, epoch, start_step) for shard in self.shards]
        for batches in zip(*streams, strict=True):
            parts = [batch.data for batch in batches if batch.rows]
            yield concatenate(parts) if parts else None

    def __repr__(self) -> str:
        cache, steps = self.cache, describe_chain(self._selection.steps, self._chain)
        columns = describe_columns_of(cache, self._reader.names)
        rows = "" if self.is_selected else f"; {self.rows:,} rows"
        held = sum(self._reader.starts(s)[-1] for s in self.shards)
        return (
            f"<insitu.dataset({cache.name!r}){steps}: version {cache.version}, {columns}{rows or ';'} "
            f"in {format_count(self.num_shards, 'shard')}, here {held:,} in "
            f"{', '.join(map(str, self.shards)) or 'none'}>"
        )


# Pure: the settings of a dataset that its calls have made, and how they are written


_NAMES = {Filter: "filter", Take: "take"}


@dataclass(frozen=True, slots=True)
class Chain:
    """The settings that shuffle, batch, map and repeat have made."""

    #: None without shuffle.
    seed: int | None = None
    #: Blocks of a window in which rows are mixed; None: the whole shard is.
    window_blocks: int | None = None
    #: Rows of a step over all shards; None without batch.
    batch_size: int | None = None
    #: Functions of a batch, in the order in which they are applied.
    maps: tuple[Callable[..., Any], ...] = ()
    #: The value that fills up rows of different lengths, and the length; None: there are none.
    pad: Pad | None = None
    #: Passes over the rows in an epoch; None without end.
    passes: int | None = 1


def describe_chain(steps: Sequence[Step], chain: Chain) -> str:
    """Return the calls that have made a dataset, as in `.shuffle(0).batch(64)`."""
    exact = "" if chain.window_blocks is None else f", windows of {chain.window_blocks} blocks"
    text = "".join(f".{_NAMES[type(step)]}(...)" for step in steps)
    text += "" if chain.seed is None else f".shuffle({chain.seed}{exact})"
    text += "" if chain.batch_size is None else f".batch({chain.batch_size})"
    text += "" if chain.passes == 1 else f".repeat({chain.passes or ''})"
    return text + "".join(
        f".{fn.call}" if isinstance(fn, ColumnMap) else f".map({getattr(fn, '__name__', fn)})"
        for fn in chain.maps
    )


def describe_columns_of(cache: CacheSpec, names: Sequence[str]) -> str:
    """Return names, dtypes and shapes of some columns."""
    return ", ".join(
        f"{c.name}: {'text' if c.dtype == TEXT else c.dtype}{list(c.shape) or ''}"
        for c in cache.columns
        if c.name in names
    )


# Converts datasets for libraries that this room doesn't import: rooms above say how


_converters: dict[str, Callable[[Any], Any]] = {}
"""Functions of a dataset, by the name of the library. Written by `register_converter`."""


def register_converter(library: str, convert: Callable[[Any], Any]) -> None:
    """Have `convert` make the library's own dataset of one of insitu's."""
    _converters[library] = convert


def convert_to_tensorflow(dataset: Any) -> Any:
    """Return the dataset as a tf.data.Dataset. Raises InputError if nothing can convert it."""
    if "tensorflow" not in _converters:
        raise InputError("A dataset for TensorFlow needs insitu's package. Import insitu first")
    return _converters["tensorflow"](dataset)
