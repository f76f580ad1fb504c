"""Searches hyper-parameters with Optuna. Each trial is a job of insitu: see README.md.

pip install optuna
KERAS_BACKEND=jax python examples/search/search.py --trials 10
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

JOB_DIR = Path(__file__).parent / "job"
METRIC = "val_accuracy"
WENT_WELL = "finished"
ENDED = (WENT_WELL, "failed", "stopped")


def insitu(*arguments: str) -> dict:
    """Run a command of insitu that prints JSON, and return what it prints."""
    command = [sys.executable, "-m", "insitu", *arguments, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def start(trial: Trial, epochs: int) -> None:
    """Start the job of a trial. Its id is in the study, so that another process can follow it."""
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    units = trial.suggest_int("units", 2, 64, log=True)
    command = ["train.py", "--rate", str(rate), "--units", str(units), "--epochs", str(epochs)]
    options = ["--detach", "--json", "--workers", "2", "--name", f"trial-{trial.number}"]
    started = [sys.executable, "-m", "insitu", "start", *options, "-", str(JOB_DIR), *command]
    job = json.loads(subprocess.run(started, stdout=subprocess.PIPE, check=True).stdout)
    trial.set_user_attr("job", job["job_id"])


def read_history(folder: str) -> list[float]:
    """Return the metric of each epoch so far."""
    path = Path(folder, "code", "history.csv")
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row[METRIC]) for row in csv.DictReader(file) if row.get(METRIC)]


def follow(study: optuna.Study, trial: Trial) -> None:
    """Report the epochs of a trial's job until it ends, or stop it if it isn't promising."""
    job = trial.user_attrs["job"]
    while True:
        found = insitu("describe", job)
        history = read_history(found["folder"])
        reported = len(study.trials[trial.number].intermediate_values)  # maybe by an earlier process
        for epoch, value in enumerate(history[reported:], reported):
            trial.report(value, epoch)
        if found["state"] in ENDED:
            break
        if history and trial.should_prune():
            subprocess.run([sys.executable, "-m", "insitu", "stop", job], capture_output=True, check=False)
            study.tell(trial, state=TrialState.PRUNED)
            print(f"trial {trial.number} ({job}) is pruned after {len(history)} epochs")
            return
        time.sleep(0.5)
    if found["state"] == WENT_WELL:
        study.tell(trial, max(history))
        print(f"trial {trial.number} ({job}) has {METRIC} {max(history):.4f}")
    else:
        study.tell(trial, state=TrialState.FAIL)
        sys.exit(f"trial {trial.number}, job {job}, is {found['state']}: {found['reason']}")


def take_up(study: optuna.Study) -> None:
    """Follow the jobs of trials that an earlier process of this study has left: they kept running."""
    for frozen in study.get_trials(states=(TrialState.RUNNING,)):
        if "job" in frozen.user_attrs:
            print(f"trial {frozen.number} is taken up")
            follow(study, Trial(study, frozen._trial_id))
        else:  # it had no job yet
            study.tell(frozen.number, state=TrialState.FAIL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10, help="trials of the study in all")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--storage", default="sqlite:///search.db", help="where Optuna keeps the study")
    chosen = parser.parse_args()
    study = optuna.create_study(
        storage=chosen.storage,
        study_name="circle",
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    take_up(study)
    while len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))) < chosen.trials:
        trial = study.ask()
        start(trial, chosen.epochs)
        follow(study, trial)
    best = study.best_trial
    print(f"best: trial {best.number} ({best.user_attrs['job']}), {METRIC} {best.value:.4f}, {best.params}")


if __name__ == "__main__":
    main()
