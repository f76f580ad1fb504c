"""Random files, moves and removals on nodes in this process, whose metadata store is lost then."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

from file_nodes import FileNodes
from memory_metadata import LosingMetadata

from insitu.base.errors import ClusterError
from insitu.base.spec import NodeId
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.cluster.files import FileClient, NameService, NamesGuard, NamesReport, drop_replaced, survey_names
from insitu.cluster.files.upkeep import ManifestUpkeep
from insitu.grid.shared_files import Entry, read_state, rebuild_names

NAMES = ("a", "b", "c")
VOLUME = "v"


class Disturbed(FileClient):
    """A client of which a writer dies before it publishes, if it is told so."""

    dies = False

    def _change(self, kind: str, volume: str, path: str, **fields: object) -> dict[str, object]:
        if kind == "publish" and self.dies:
            raise ClusterError("killed")
        return super()._change(kind, volume, path, **fields)


class Volume:
    """What should be in a volume, and the nodes that hold it."""

    def __init__(self, lab: FileNodes, rng: random.Random) -> None:
        self.lab, self.rng = lab, rng
        self.lab.client.__class__ = Disturbed
        self.system = InsituFileSystem(home=str(lab.folder))
        self.system._cluster, self.system.client = lab.open_cluster(), lab.client
        self._begin()
        #: What files hold, by path.
        self.truth: dict[str, bytes] = {}
        #: When a path was written last, and moved or removed, of which nodes don't hear at once.
        self.written: dict[str, float] = {}
        self.moved: dict[str, float] = {}

    def _begin(self) -> None:
        """Begin with the metadata store that the head has now."""
        guard = NamesGuard(self.lab.metadata, self.lab.peers)
        self.check = lambda: guard.check(self.lab.view())
        self.lab.service = NameService(self.lab.metadata, self.check)
        self.upkeep = ManifestUpkeep(self.lab.metadata, self.lab.client, self.lab.peers)

    def _note(self, paths: Iterable[str]) -> None:
        self.moved |= dict.fromkeys(paths, time.time())

    def below(self, path: str) -> list[str]:
        return [each for each in self.truth if each.startswith(f"{path}/")]

    def draw_path(self) -> str:
        return "/".join(self.rng.choices(NAMES, k=self.rng.choice((1, 2, 2, 3))))

    def step(self) -> None:
        """Do one thing."""
        kind = self.rng.choices(
            ("write", "append", "move", "move folder", "remove", "die", "keep up"), (6, 4, 4, 2, 2, 2, 3)
        )[0]
        path, data = self.draw_path(), self.rng.randbytes(self.rng.randrange(1, 50))
        match kind:
            case "write" | "die" if self.is_writable(path):
                self.lab.client.dies = kind == "die"
                try:
                    self.system.pipe(f"{VOLUME}/{path}", data)
                    self.truth[path] = data
                    self.written[path] = time.time()
                except ClusterError:
                    assert kind == "die"
                self.lab.client.dies = False
            case "append" if self.is_writable(path):
                with self.system.open(f"{VOLUME}/{path}", "ab") as file:
                    file.write(data)
                self.truth[path] = self.truth.get(path, b"") + data
                self.written[path] = time.time()
            case "move" if self.truth:
                source = self.rng.choice(sorted(self.truth))
                if self.is_writable(path) and not path.startswith(f"{source}/"):
                    self.lab.client.rename(VOLUME, source, path)
                    self._note([source, path])
                    self.truth[path] = self.truth.pop(source)
            case "move folder":
                self._move_folder(path, self.draw_path())
            case "remove" if path in self.truth or self.below(path):
                self.system.rm(f"{VOLUME}/{path}", recursive=True)
                gone = [path, *self.below(path)]
                self._note(gone)
                self.truth = {p: data for p, data in self.truth.items() if p not in gone}
            case "keep up":
                self.keep_up()

    def is_writable(self, path: str) -> bool:
        """Return whether a file can be at a path."""
        names = path.split("/")
        above = ["/".join(names[:count]) for count in range(1, len(names))]
        is_folder = not isinstance(self.lab.tree.look(VOLUME, path), Entry | None)
        return not is_folder and not any(each in self.truth for each in above)

    def _move_folder(self, source: str, target: str) -> None:
        moved = self.below(source)
        is_free = self.lab.tree.look(VOLUME, target) is None and self.is_writable(target)
        if not moved or not is_free or f"{target}/".startswith(f"{source}/"):
            return
        self.lab.client.rename(VOLUME, source, target)
        self._note([*moved, *(target + path[len(source) :] for path in moved)])
        self.truth = {
            target + path[len(source) :] if path in moved else path: data for path, data in self.truth.items()
        }

    def keep_up(self) -> None:
        """Have the head keep up what is on nodes."""
        self.check()
        self.lab.collect_garbage()
        self.upkeep.advance(self.lab.view(), 0.0, at_once=True)

    def lose_manifests(self, count: int) -> None:
        """Lose all copies of some manifests."""
        keys = {key for held in self.list_manifests().values() for key in held}
        for key in self.rng.sample(sorted(keys), min(count, len(keys))):
            for store in self.lab.stores.values():
                store.blocks.drop(VOLUME, [key])

    def list_manifests(self) -> dict[NodeId, set[str]]:
        """Return the manifests of each node."""
        found = {n: s.blocks.list_held(VOLUME, manifests=True) for n, s in self.lab.stores.items()}
        return {node: set(held) for node, held in found.items()}

    def lose_node(self) -> None:
        """Lose a node, with all that it holds."""
        node = self.rng.choice(sorted(self.lab.alive))
        blocks = self.lab.stores[node].blocks
        blocks.drop(VOLUME, [*blocks.list_held(VOLUME), *blocks.list_held(VOLUME, manifests=True)])
        self.lab.down.add(node)
        self.lab.alive.discard(node)
        self.lab.nodes.remove(node)

    def lose_names(self) -> None:
        """Have another head with an empty metadata store."""
        self.lab.replace_metadata(LosingMetadata())
        self.system.client = self.lab.client
        self._begin()

    def survey(self) -> NamesReport:
        """Look through the nodes."""
        lab = self.lab
        return survey_names(read_state(lab.metadata), lab.tree, lab.client, lab.peers, lab.view())

    def rebuild(self, report: NamesReport) -> dict[str, bytes]:
        """Put names back. Return what is there then."""
        files: dict[str, dict[str, Entry]] = {}
        for each in report.found:
            files.setdefault(each.volume, {})[each.path] = each.entry
        rebuild_names(self.lab.metadata, files, report.generation, is_whole=report.is_whole)
        drop_replaced(report, self.lab.peers, self.lab.view())
        paths = self.system.find(VOLUME) if files else []
        return {path.removeprefix(f"{VOLUME}/"): self.system.cat(path) for path in paths}
