"""Histories of clients that change names at the same time, and whether they can have come about.

All runs in this process: the store hands over from client to client before each of its calls, by drawn
numbers. Answers are lost, and transactions arrive late. Each client must have been answered as a plain tree
would have answered, in some order that agrees with the times.
"""

from __future__ import annotations

import errno
import math
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memory_metadata import MemoryMetadata

from insitu.base.errors import StoreUnavailable
from insitu.grid.shared_files import Block, Entry, Folder, NameTree, UsedUp
from insitu.metadata import Compare, MetadataStore, Operation, Outcome

Tree = dict[str, Any]
"""By path: "folder", or the number in a file and its version; None: it isn't known."""
UNKNOWN = object()
NAMES = ("a", "b", "c")


def _error(number: int) -> tuple[str, int]:
    return "error", number


def _parents(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names))]


def _with(tree: Tree, path: str, value: Any) -> Tree:
    return {**tree, **dict.fromkeys(_parents(path), "folder"), path: value}


def _below(tree: Tree, path: str) -> list[str]:
    return [each for each in tree if each.startswith(f"{path}/")]


def _is_blocked(tree: Tree, path: str) -> bool:
    return any(tree.get(parent, "folder") != "folder" for parent in _parents(path))


def _publish(tree: Tree, path: str, number: int, expected: int | None, answer: Any) -> tuple[Any, Tree]:
    found = tree.get(path)
    if _is_blocked(tree, path):
        return _error(errno.ENOTDIR), tree
    if found == "folder":
        return _error(errno.EISDIR), tree
    if expected == 0 and found is not None:
        return _error(errno.EEXIST), tree
    if expected:
        known = None if found is None else found[1]
        is_other = found is None or (
            known != expected if known is not None else answer == _error(errno.ESTALE)
        )
        if is_other:
            return _error(errno.ESTALE), tree
    version = answer if type(answer) is int else None
    return answer if version else 0, _with(tree, path, (number, version))


def _rename(tree: Tree, source: str, target: str) -> tuple[Any, Tree]:
    if source not in tree:
        return _error(errno.ENOENT), tree
    if source == target:
        return None, tree
    is_folder, there = tree[source] == "folder", tree.get(target)
    if is_folder and target.startswith(f"{source}/"):
        return _error(errno.EINVAL), tree
    if _is_blocked(tree, target) or (is_folder and there not in (None, "folder")):
        return _error(errno.ENOTDIR), tree
    if is_folder and _below(tree, target):
        return _error(errno.ENOTEMPTY), tree
    if not is_folder and there == "folder":
        return _error(errno.EISDIR), tree
    moved = {path: tree[path] for path in _below(tree, source)}
    left = {path: value for path, value in tree.items() if path != source and path not in moved}
    value = "folder" if is_folder else (tree[source][0], None)
    return None, {**_with(left, target, value), **{target + p[len(source) :]: v for p, v in moved.items()}}


def apply(tree: Tree, kind: str, args: Sequence[Any], answer: Any) -> tuple[Any, Tree]:
    """Return what a plain tree answers, and the tree afterwards. `answer`: what was answered, since versions
    can't be known before."""
    path = args[0]
    match kind:
        case "publish":
            return _publish(tree, path, args[1], args[2], answer)
        case "rename":
            return _rename(tree, path, args[1])
        case "mkdir":
            if tree.get(path, "folder") != "folder":
                return _error(errno.EEXIST), tree
            return (
                (_error(errno.ENOTDIR), tree)
                if _is_blocked(tree, path)
                else (None, _with(tree, path, "folder"))
            )
        case "remove":
            if path not in tree:
                return _error(errno.ENOENT), tree
            below = _below(tree, path)
            if below and not args[1]:
                return _error(errno.ENOTEMPTY), tree
            return None, {each: value for each, value in tree.items() if each != path and each not in below}
        case "list":
            children = sorted(each for each in _below(tree, path) if "/" not in each[len(path) + 1 :])
            return tuple(children), tree
    found = tree.get(path)
    if type(found) is tuple and found[1] is None and type(answer) is tuple:
        found = (found[0], answer[1])
        tree = {**tree, path: found}
    return found, tree


def do(names: NameTree, kind: str, args: Sequence[Any], change: str = "", again: bool = False) -> Any:
    """Have the real names do it. Raises StoreUnavailable, UsedUp."""
    change = change or secrets.token_hex(16)
    try:
        match kind:
            case "publish":
                block = Block(f"{args[1]:032x}", 1, f"xxh3:{0:032x}")
                entry = Entry(1, 0.0, 1, (), (block,))
                return names.publish("v", args[0], entry, args[2], change, again=again)
            case "rename":
                return names.rename("v", args[0], args[1], change, again=again)
            case "mkdir":
                return names.make_folder("v", args[0], change, again=again)
            case "remove":
                return names.remove("v", args[0], change, recursive=args[1], again=again)
            case "list":
                return tuple(each.path for each in names.list_children("v", args[0], "", 1000))
        found = names.look("v", args[0])
        if isinstance(found, Entry):
            return int(found.blocks[0].key, 16), found.version
        return "folder" if isinstance(found, Folder) else None
    except OSError as error:
        return _error(error.errno or 0)


def draw(
    rng: random.Random, number: int, versions: Sequence[int], names: Sequence[str] = NAMES
) -> tuple[str, Any]:
    """Draw something to do."""

    def path() -> str:
        return "/".join(rng.choices(names, k=rng.choice((1, 1, 2, 2, 3))))

    match rng.choices(("publish", "rename", "mkdir", "remove", "look", "list"), (6, 5, 1, 2, 5, 2))[0]:
        case "publish":
            return "publish", (path(), number, rng.choice((None, 0, *versions[-1:])))
        case "rename":
            return "rename", (path(), path())
        case "remove":
            return "remove", (path(), rng.random() < 0.6)
        case kind:
            return kind, (path(),)


@dataclass(slots=True)
class Call:
    """What a client has asked for, and what it was answered."""

    kind: str
    args: Sequence[Any]
    begun: float
    ended: float = math.inf
    answer: Any = UNKNOWN


class Turns(MemoryMetadata):
    """A store that hands over before each call, loses answers, and makes some transactions later."""

    def __init__(self, rng: random.Random, losses: float) -> None:
        super().__init__()
        self._rng = rng
        self._losses = losses
        self._late: list[Callable[[], Outcome]] = []
        self._own = threading.local()
        self._main = threading.Semaphore(0)
        self._waiting: list[threading.Semaphore] = []
        self.time = 0
        self.before = lambda call: self._pause()
        self.lost = 0

    def tick(self) -> int:
        """Return a time that is later than those before."""
        self.time += 1
        return self.time

    def _pause(self) -> None:
        turn = getattr(self._own, "turn", None)
        if turn is not None:
            self._waiting.append(turn)
            self._main.release()
            turn.acquire()

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        def make() -> Outcome:
            return MemoryMetadata.transact(self, compare, operations, id)

        drawn = self._rng.random() if getattr(self._own, "turn", None) is not None else 1.0
        if drawn < self._losses:
            self.lost += 1
            if drawn < self._losses / 2:
                self._late.append(make)
            else:
                make()
            raise StoreUnavailable("no answer")
        return make()

    def run(self, clients: Sequence[Callable[[], None]]) -> None:
        """Run clients to their ends, one call of the store after another."""
        threads = [threading.Thread(target=self._be_client, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
            self._main.acquire()
        left = len(threads)
        while left:
            if self._late and self._rng.random() < 0.1:
                self._late.pop(self._rng.randrange(len(self._late)))()
            before = len(self._waiting)
            turn = self._waiting.pop(self._rng.randrange(before))
            turn.release()
            self._main.acquire()
            left -= len(self._waiting) < before
        for thread in threads:
            thread.join()
        for late in self._late:
            late()

    def _be_client(self, client: Callable[[], None]) -> None:
        self._own.turn = threading.Semaphore(0)
        self._pause()
        try:
            client()
        finally:
            self._own.turn = None
            self._main.release()


def play(seed: int, clients: int, calls: int, losses: float) -> tuple[list[Call], int]:
    """Return what clients have asked for and were answered, and how many answers were lost."""
    rng = random.Random(seed)
    store = Turns(rng, losses)
    names, history = NameTree(store), list[Call]()
    numbers = iter(range(1, 1000))

    def be_client() -> None:
        versions: list[int] = []
        for _ in range(calls):
            kind, args = draw(rng, next(numbers), versions)
            call = Call(kind, args, store.tick())
            history.append(call)
            change, again = f"{rng.getrandbits(128):032x}", False
            for _ in range(5):
                try:
                    call.answer = do(names, kind, args, change, again)
                except StoreUnavailable:
                    again = True
                    continue
                except UsedUp:
                    change, again = f"{rng.getrandbits(128):032x}", False
                    continue
                call.ended = store.tick()
                break
            if type(call.answer) is int:
                versions.append(call.answer)
            elif type(call.answer) is tuple and call.kind == "look" and call.answer[0] != "error":
                versions.append(call.answer[1])

    store.run([be_client] * clients)
    for path in sorted({p for call in history for p in call.args[:2] if type(p) is str} | set(NAMES)):
        for kind in ("look", "list"):
            at = store.tick()
            history.append(Call(kind, (path,), at, at, do(names, kind, (path,))))
    return history, store.lost


def play_in_threads(store: MetadataStore, seed: int, clients: int, calls: int) -> list[Call]:
    """Return what clients that run at the same time have asked for and were answered, on any store."""
    names, history, lock, clock = NameTree(store), list[Call](), threading.Lock(), [0]

    def tick() -> int:
        with lock:
            clock[0] += 1
            return clock[0]

    def be_client(number: int) -> None:
        rng, versions = random.Random(f"{seed} {number}"), list[int]()
        for step in range(calls):
            kind, args = draw(rng, 1 + number * calls + step, versions)
            call = Call(kind, args, tick())
            history.append(call)
            call.answer = do(names, kind, args)
            call.ended = tick()
            versions += [call.answer] if type(call.answer) is int else []

    threads = [threading.Thread(target=be_client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return history


def explain(history: list[Call]) -> bool:
    """Return whether a plain tree can have given these answers (linearizability)."""
    seen: set[tuple[int, frozenset[Any]]] = set()
    stack: list[tuple[int, Tree]] = [(0, {})]
    certain = sum(1 << n for n, call in enumerate(history) if call.answer is not UNKNOWN)
    while stack:
        done, tree = stack.pop()
        if done & certain == certain:
            return True
        if (key := (done, frozenset(tree.items()))) in seen:
            continue
        seen.add(key)
        left = [n for n in range(len(history)) if not done >> n & 1]
        first_end = min(history[n].ended for n in left)
        for number in left:
            call = history[number]
            if call.begun > first_end:
                continue
            answer, after = apply(tree, call.kind, call.args, call.answer)
            if call.answer is UNKNOWN or answer == call.answer:
                stack.append((done | 1 << number, after))
    return False
