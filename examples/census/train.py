"""Learns who earns much with a wide and a deep part: see README.md.

insitu start --workers 2 --evaluator people/train examples/census train.py
insitu start --workers 2 --ps 1 --evaluator people/train examples/census train.py --servers async
"""

import argparse

import keras
from census_columns import FEATURES, deep, wide
from make_people import INCOMES

import insitu
from insitu import estimator

parser = argparse.ArgumentParser()
parser.add_argument("--parts", choices=("wide", "deep", "both"), default="both")
parser.add_argument("--steps", type=int, default=800, help="updates of the model, counted over all workers")
parser.add_argument("--servers", choices=("sync", "async", "bounded"), help="keep the variables on ps tasks")
parser.add_argument("--batch", type=int, default=256, help="rows of a step, over all workers")
chosen = parser.parse_args()


def read_train():
    return insitu.dataset("people/train", features=FEATURES, label="income").shuffle().batch(chosen.batch)


def read_held_out():
    return insitu.dataset("people/test", features=FEATURES, label="income").batch(512)


model = estimator.DNNLinearCombinedClassifier(
    linear_feature_columns=wide if chosen.parts != "deep" else None,
    linear_optimizer=lambda: keras.optimizers.Ftrl(0.5),
    dnn_feature_columns=deep if chosen.parts != "wide" else None,
    dnn_optimizer=lambda: keras.optimizers.Adagrad(0.1),
    dnn_hidden_units=[32, 16],
    label_vocabulary=INCOMES,
    config=estimator.RunConfig(
        save_checkpoints_steps=max(1, chosen.steps // 4),
        # Not given: all workers hold the variables.
        train_distribute=insitu.ParameterServerStrategy(mode=chosen.servers) if chosen.servers else None,
    ),
)

scores, exports = estimator.train_and_evaluate(
    model,
    # In all tasks the same: each does what its role says.
    estimator.TrainSpec(read_train, max_steps=chosen.steps, hooks=[insitu.StepLog(every=100)]),
    estimator.EvalSpec(
        read_held_out,
        steps=None,
        start_delay_secs=0,
        throttle_secs=0,
        exporters=[estimator.BestExporter(), estimator.FinalExporter()],
    ),
)
# Not None where the evaluations were: in the evaluator, or in the chief of a job without one.
if scores is not None:
    names = ("accuracy", "accuracy_baseline", "auc", "loss")
    print(f"{chosen.parts}: held-out " + ", ".join(f"{name} {scores[name]:.3f}" for name in names))
    print("the last export:", exports[-1])
