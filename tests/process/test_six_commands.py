"""From a file as people have it to a served model with two workers, in six commands at most."""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from job_runs import Insitu, insitu_at
from PIL import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


class Shell:
    """A person's shell, which counts commands."""

    def __init__(self, insitu: Insitu) -> None:
        self.insitu, self.commands = insitu, 0
        insitu.environment |= {"KERAS_BACKEND": "jax", "NO_COLOR": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.commands += 1
        return self.insitu.run(*arguments, cwd=self.insitu.folder, code=None)

    def import_as_advised(self, *arguments: str) -> None:
        """Import, and if that fails give the command that is printed."""
        done = self.run("import", *arguments)
        if done.returncode:
            found = re.search(r"(?:as in: |`)insitu (.*?)`?$", done.stderr.strip(), re.MULTILINE)
            assert found, done.stderr
            done = self.run(*shlex.split(found[1]))
        assert done.returncode == 0, done.stderr

    def train(self, *arguments: str) -> str:
        """Write a script by `insitu init`, and run the command that it prints. Returns the job's id."""
        printed = self.run("init", "my_job", *arguments)
        assert printed.returncode == 0, printed.stderr
        assert "--workers 2" in printed.stdout
        done = self.run(*shlex.split(printed.stdout)[1:])
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (job,) = self.insitu.json("ps", "--all")
        return str(job["job_id"])

    @contextmanager
    def served(self, job: str) -> Iterator[str]:
        """Yield the address of predictions."""
        self.commands += 1
        command = self.insitu.command("serve", job, "--port", "0")
        with subprocess.Popen(
            command,
            env=self.insitu.environment,
            cwd=self.insitu.folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as server:
            assert server.stderr is not None
            try:
                lines = []
                for line in server.stderr:
                    lines.append(line)
                    if found := re.search(r"http://\S+:predict", line):
                        yield found[0]
                        break
                else:
                    raise AssertionError("".join(lines))
            finally:
                server.send_signal(signal.SIGINT)


def ask(address: str, instances: list[Any]) -> list[Any]:
    request = urllib.request.Request(address, json.dumps({"instances": instances}).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["predictions"])


def test_an_untidy_table(tmp_path: Path) -> None:
    """Semicolons, decimal commas, cp1252, missing numbers."""
    rng = random.Random(0)
    with insitu_at(tmp_path) as insitu:
        shell = Shell(insitu)
        lines = ["größe;besuche;stadt;gekauft"]
        for _ in range(2000):
            size, visits, city = rng.uniform(0, 10), rng.randint(0, 9), rng.choice(["Köln", "Bonn"])
            bought = int(size + visits + 5 * (city == "Köln") > 11)
            shown = "" if rng.random() < 0.05 else visits
            lines.append(f"{size:.2f};{shown};{city};{bought}".replace(".", ","))
        (insitu.folder / "kunden.csv").write_text("\n".join(lines), encoding="cp1252")
        shell.import_as_advised("kunden", "kunden.csv")
        job = shell.train("--cache", "kunden", "--label", "gekauft")
        with shell.served(job) as address:
            low = {"größe": [0.1], "besuche": [1], "besuche_is_null": [False], "stadt": ["Bonn"]}
            high = {"größe": [9.9], "besuche": [9], "besuche_is_null": [False], "stadt": ["Köln"]}
            first, second = (np.ravel(each) for each in ask(address, [low, high]))
            assert first.tolist() != second.tolist()
        assert shell.commands <= 6


def test_a_folder_of_images(tmp_path: Path) -> None:
    """Sizes and modes differ, and the class is the folder."""
    rng = np.random.default_rng(0)
    with insitu_at(tmp_path) as insitu:
        shell = Shell(insitu)
        for label, colour in (("cat", 40), ("dog", 200)):
            (insitu.folder / "photos" / label).mkdir(parents=True)
            for number in range(60):
                side = 12 if number % 3 else 14
                pixels = rng.integers(colour - 30, colour + 30, (side, 12, 3)).astype(np.uint8)
                image = Image.fromarray(pixels).convert("RGBA" if number % 2 else "RGB")
                image.save(insitu.folder / "photos" / label / f"{number}.png")
        shell.import_as_advised("photos", "photos")
        job = shell.train("--cache", "photos")
        with shell.served(job) as address:
            dark, light = (np.full((12, 12, 3), level).tolist() for level in (40, 200))
            first, second = ask(address, [dark, light])
            assert np.argmax(first) != np.argmax(second) or np.ravel(first)[0] != np.ravel(second)[0]
        assert shell.commands <= 6


def test_a_delta_table(tmp_path: Path) -> None:
    """Of the version before a mistake, with times, decimals, categories and missing numbers. Run by `make
    test-stores`, in whose environment the library is."""
    deltalake = pytest.importorskip("deltalake")
    rng = np.random.default_rng(0)
    count = 2000
    amount = rng.integers(1, 10_000, count)
    shop = np.array(["north", "south", "west"])[rng.integers(0, 3, count)]
    age = np.where(rng.random(count) < 0.1, np.nan, rng.integers(18, 80, count))
    columns = {
        "amount": pa.array([Decimal(int(each)) / 100 for each in amount], pa.decimal128(8, 2)),
        "shop": pa.array(shop),
        "age": pa.array(age, pa.float64(), from_pandas=True).cast(pa.int32()),
        "at": pa.array(rng.integers(0, 2**31, count) * 1_000_000, pa.timestamp("us", "UTC")),
        "returned": pa.array((amount > 5000) ^ (shop == "west")),
    }
    with insitu_at(tmp_path) as insitu:
        shell = Shell(insitu)
        folder = str(insitu.folder / "orders")
        deltalake.write_deltalake(folder, pa.table(columns))
        deltalake.DeltaTable(folder).delete("shop = 'west'")
        shell.import_as_advised("orders", "delta://orders", "--table-version", "0")
        assert {each["name"]: each["rows"] for each in insitu.json("caches")}["orders"] == count
        job = shell.train("--cache", "orders", "--label", "returned")
        with shell.served(job) as address:
            row = {"age": [30], "age_is_null": [False], "at": [0]}
            low, high = row | {"amount": [1.0], "shop": ["north"]}, row | {"amount": [99.0], "shop": ["west"]}
            first, second = (np.ravel(each) for each in ask(address, [low, high]))
            assert first.tolist() != second.tolist()
        assert shell.commands <= 6
