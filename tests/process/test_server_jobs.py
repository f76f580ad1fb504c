"""A job with parameter servers: it trains, ends well, and tells where everything was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from server_jobs import EPOCHS, HYBRID, ROWS, run_job
from training_jobs import assert_every_row_once


def test_workers_train_on_servers_that_end_with_the_job(tmp_path: Path):
    job, results, said = run_job(tmp_path, "--ps", "2", mode="async")
    assert [task["code"] for task in job["task_list"]] == [0, 0, 0, 0]
    assert_every_row_once(job, EPOCHS)
    assert results[0]["weights"] == results[1]["weights"]
    assert all(result["history"]["accuracy"][-1] > 0.8 for result in results)
    steps = -(-ROWS // 32)
    assert [server["server"] for server in job["servers"]] == [0, 1]
    for server in job["servers"]:
        assert server["mode"] == "async"
        assert sum(server["staleness"]["counts"]) == server["applied"] >= steps * EPOCHS
        assert server["bytes"] == sum(size for *_, size in server["pieces"]) > 0
    assert sum(server["bytes"] for server in job["servers"]) == 4 * (8 * 16 + 16 + 16 * 2 + 2)
    accounts = {account["task"]: account["seconds"] for account in job["goodput"]["other_tasks"]}
    for name in ("ps:0", "ps:1"):
        assert sum(accounts[name].values()) == pytest.approx(job["goodput"]["wall"], rel=0.01)
        assert accounts[name]["update"] > 0 and accounts[name]["wait"] > 0
    for line in ("ps:0", "ps:1", "staleness 0:", "each row once"):
        assert line in said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync", "bounded"])
@pytest.mark.parametrize("victim", ["worker", "server"])
def test_a_death_costs_one_task_and_no_row(tmp_path: Path, mode: str, victim: str):
    kills = [["worker:1", "worker", 1, 1, 5]] if victim == "worker" else [["worker:0", "ps", 1, 1, 5]]
    job, results, said = run_job(tmp_path, "--ps", "2", "--ps-backups", "1", kills=kills, mode=mode)
    assert (tmp_path / "out" / f"killed-{kills[0][0]}").exists()
    assert len(job["attempts"]) == 1, said
    dead = "worker:1" if victim == "worker" else "ps:1"
    assert {t["task"]: t["attempt"] for t in job["task_list"]} == {
        name: 2 if name == dead else 1 for name in ("worker:0", "worker:1", "ps:0", "ps:1")
    }
    assert_every_row_once(job, EPOCHS)
    np.testing.assert_array_equal(results[0]["weights"][0], results[1]["weights"][0])
    pushed = [dict(server["applied_by_shard"]) for server in job["servers"]]
    assert pushed[0] == pushed[1], said
    assert all(server["lost"] == 0 for server in job["servers"])


@pytest.mark.slow
def test_without_mirrors_a_dead_server_costs_what_came_after_its_checkpoint(tmp_path: Path):
    kills = [["worker:0", "ps", 1, 2, 5]]
    job, results, said = run_job(tmp_path, "--ps", "2", kills=kills, mode="sync")
    assert (tmp_path / "out" / "killed-worker:0").exists()
    assert len(job["attempts"]) == 2, said
    assert "ps:1 was killed by SIGKILL" in said
    assert_every_row_once(job, EPOCHS)
    assert results[0]["weights"] == results[1]["weights"]
    steps = -(-ROWS // 32) * EPOCHS
    for server in job["servers"]:
        assert {sequence for _, sequence in server["applied_by_shard"]} <= {steps - 1, steps}, said
        assert 0 <= server["lost"] <= 2 * (11 + 5), said


LATE = """
class Rows(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="rows")
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.total + 0


strategy = insitu.ParameterServerStrategy(**options)
rows = np.random.default_rng(0).normal(size=(480, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Rows()])


class Late(keras.callbacks.Callback):
    \"\"\"Has worker 1 begin once the others have done all of their steps.\"\"\"

    def on_train_batch_begin(self, batch, logs=None):
        while me.index == 1 and len(list(out.glob("*.done"))) < 2:
            time.sleep(0.05)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 19:
            (out / f"{me.index}.done").touch()


seen = []
for fit in range(2):
    given = {"batch_size": 24, "shuffle": False, "callbacks": [Late()]}
    seen.append(model.fit(rows, rows.sum(1), verbose=0, **given).history["rows"])
updates = int(model.optimizer.iterations.numpy())
result = {"weights": [w.tolist() for w in model.get_weights()], "updates": updates, "rows": seen}
(out / f"{me.index}.json").write_text(json.dumps(result))
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_fit_ends_whose_last_worker_comes_late(tmp_path: Path, mode: str):
    backups = {"replicas_to_aggregate": 2} if mode == "sync" else {}
    options = ("--workers", "3", "--ps", "1", "--stall-timeout", "30", "--max-restarts", "0")
    job, results, said = run_job(tmp_path, *options, script=LATE, tail="", mode=mode, **backups)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"], said
    (server,) = job["servers"]
    assert [result["updates"] for result in results] == [server["version"]] * 3
    assert dict(server["applied_by_shard"]) == {0: 39, 1: 39, 2: 39}
    # The first of what comes late was computed on old weights; the rest is applied.
    assert server["dropped"] >= (mode == "sync")
    assert server["applied"] + server["dropped"] == 3 * 40
    if mode == "sync":
        # Of the first fit, the one that ends last knows of all rows but those that it pushed in vain.
        assert results[1]["rows"][0] == [480 - 8], said
        assert min(results[0]["rows"][0], results[2]["rows"][0]) >= [19 * 16], said
        assert 20 + 19 + 20 <= server["version"] < 3 * 40 - 1, (
            "the second fit takes two gradients a step again"
        )


HISTORY = """
rng = np.random.default_rng(0)
x, y = rng.normal(size=(53, 3)).astype("float32"), rng.normal(size=(53, 1)).astype("float32")


def trained():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", keras.metrics.AUC(name="auc")])
    return model


def numbers(model):
    fit = dict(batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x[:20], y[:20]))
    history = model.fit(x, (y > 0).astype("float32"), **fit).history
    scores = model.evaluate(x, y > 0, verbose=0, return_dict=True)
    return {"history": history, "scores": scores, "updates": int(model.optimizer.iterations.numpy())}


right = numbers(trained())
with insitu.ParameterServerStrategy(**options).scope():
    model = trained()
(out / f"{me.index}.json").write_text(json.dumps([right, numbers(model)]))
"""


@pytest.mark.long
def test_each_worker_of_a_synchronous_fit_reports_what_plain_keras_does(tmp_path: Path):
    _, results, said = run_job(tmp_path, "--ps", "2", script=HISTORY, tail="", mode="sync")
    for right, came in results:
        assert came["updates"] == right["updates"] == 12
        for kind in ("history", "scores"):
            for name, value in right[kind].items():
                np.testing.assert_allclose(came[kind][name], value, rtol=2e-5, err_msg=f"{name}\n{said}")


@pytest.mark.slow
def test_rows_of_gradients_that_came_late_are_in_the_ledger(tmp_path: Path):
    job, _, said = run_job(tmp_path, "--ps", "1", mode="sync", replicas_to_aggregate=1)
    assert_every_row_once(job, EPOCHS)
    (server,) = job["servers"]
    assert sum(epoch["left_out"] for epoch in job["ledger"]) == server["dropped_rows"] > 0, said
    assert "LEFT OUT" in said


TESTS = """
strategy = insitu.ParameterServerStrategy(**options)
data = insitu.dataset("numbers").batch(100)
whole = dict(np.load(out.parent / "numbers.npz"))
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])


class Tests(keras.callbacks.Callback):
    seen, dies = [], False

    def on_epoch_end(self, epoch, logs=None):
        of_data = model.evaluate(data, verbose=0, return_dict=True)
        of_rows = model.evaluate(whole["x"], whole["label"], batch_size=100, verbose=0, return_dict=True)
        self.seen.append([{"accuracy": logs["val_accuracy"], "loss": logs["val_loss"]}, of_data, of_rows])

    def on_test_batch_end(self, batch, logs=None):
        injected = out / "killed"
        if kills and me.index == 1 and batch == 5 and not injected.exists():
            injected.touch()
            os.kill(os.getpid(), signal.SIGKILL)


tests = Tests()
model.fit(data, epochs=3, verbose=0, validation_data=data, callbacks=[tests])
of_data = model.evaluate(data, verbose=0, return_dict=True)
of_rows = model.evaluate(whole["x"], whole["label"], batch_size=100, verbose=0, return_dict=True)
(out / f"{me.index}.json").write_text(json.dumps([*tests.seen, [of_data, of_data, of_rows]]))
"""


@pytest.mark.long
def test_workers_of_a_synchronous_fit_evaluate_all_rows_of_a_dataset_together(tmp_path: Path):
    _, results, said = run_job(tmp_path, "--ps", "1", script=TESTS, tail="", mode="sync")
    assert results[0] == results[1] and len(results[0]) == 4, said
    for by_validation, of_data, of_rows in results[0]:
        assert by_validation == of_data
        assert of_data == pytest.approx(of_rows, rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_waits_for_no_worker_that_is_past_it(tmp_path: Path):
    _, results, said = run_job(tmp_path, "--ps", "1", kills=[1], script=TESTS, tail="", mode="sync")
    assert (tmp_path / "out" / "killed").exists()
    assert "leaves out rows of shards" in said
    # Of the epoch in whose validation it was killed, its new life knows nothing.
    assert results[0][1:] == results[1]
    for by_validation, of_data, of_rows in results[1]:
        assert by_validation == of_data
        assert of_data == pytest.approx(of_rows, rel=1e-5)


ROWS_RIGHT_AFTER = """
if me.index == 1:  # the others end their steps before its last push

    def push_late(*args, push=insitu.parameters.Client.push, **options):
        time.sleep(0.5)
        return push(*args, **options)

    insitu.parameters.Client.push = push_late
strategy = insitu.HybridStrategy(table_optimizer=keras.optimizers.SGD(1.0))
with strategy.scope():
    key = keras.Input((), dtype="int64")
    row = insitu.layers.Embedding(1, name="table", embeddings_initializer="zeros")(key)
    weight = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    model = keras.Model(key, weight(row))
    model.compile(keras.optimizers.SGD(1.0), "mse")
keys, ones = np.zeros(64, "int64"), np.ones(64, "float32")
seen = []
for fit in range(2):
    model.fit(keys, ones, batch_size=64, shuffle=False, verbose=0)
    seen.append(float(model.predict(keys[:2], verbose=0)[0, 0]))
(out / f"{me.index}.json").write_text(json.dumps(seen))
"""


@pytest.mark.long
def test_rows_that_are_read_right_after_a_fit_have_all_pushes(tmp_path: Path):
    _, results, said = run_job(tmp_path, "--ps", "1", script=ROWS_RIGHT_AFTER, tail="")
    # Each of the two shards moves a row by rate * 2 * (1 - row), from what it was before the step.
    assert results == [[4.0, 4.0 + 2 * 2 * (1 - 4.0)]] * 2, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [[], [["worker:1", "worker", 1, 1, 5]], [["worker:1", "worker", 1, EPOCHS - 1, -(-ROWS // 32) - 1]]],
    ids=["undisturbed", "killed", "killed after its last step"],
)
def test_dense_layers_train_together_around_tables_on_servers(tmp_path: Path, kills: list[list[object]]):
    job, results, said = run_job(tmp_path, "--ps", "2", kills=kills, script=HYBRID)
    assert [(out_of.name, out_of.exists()) for out_of in (tmp_path / "out").glob("killed-*")] == [
        (f"killed-{kill[0]}", True) for kill in kills
    ]
    dense = [[np.asarray(w) for w in result["weights"]] for result in results]
    for mine, theirs in zip(*dense, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=said)
    assert all(result["history"]["accuracy"][-1] > 0.9 for result in results)
    # Of each of two shards, the rows' gradients of each step; the table's keys are spread over both servers.
    steps = -(-ROWS // 32) * EPOCHS
    for server in job["servers"]:
        pushed = dict(server["applied_by_shard"])
        assert set(pushed) == {0, 1}
        assert all(steps - len(kills) <= last + 1 <= steps for last in pushed.values()), said
        assert 0 < server["tables"]["table"]["rows"] < 40
        assert server["pieces"] == []
