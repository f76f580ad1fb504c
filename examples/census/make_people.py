"""Writes made-up people: python make_people.py FILE [ROWS], as .csv or .ndjson by the name of FILE.

A row is a person: numbers, texts, and whether the income is above a limit. That depends on age and hours by
smooth curves, and on each pair of an education and an occupation by a number that follows from nothing else.
Some texts are empty and some hours are missing.
"""

import csv
import json
import sys

import numpy as np

EDUCATIONS = (
    "9th",
    "10th",
    "11th",
    "12th",
    "HS-grad",
    "Some-college",
    "Assoc-voc",
    "Bachelors",
    "Masters",
    "PhD",
)
OCCUPATIONS = (
    "Clerical",
    "Craft",
    "Executive",
    "Farming",
    "Handlers",
    "Machines",
    "Protective",
    "Sales",
    "Tech",
    "Transport",
)
RELATIONSHIPS = ("Husband", "Wife", "Not-in-family", "Own-child", "Unmarried")
INCOMES = ("<=50K", ">50K")


def people(rows: int, seed: int) -> dict[str, list]:
    """Return the columns of `rows` people. What the columns say about incomes is the same for each seed."""
    rules, rng = np.random.default_rng(2024), np.random.default_rng(seed)
    of_pair = rules.normal(0, 2, (len(EDUCATIONS), len(OCCUPATIONS)))
    of_relationship = rules.normal(0, 0.5, len(RELATIONSHIPS))
    age = rng.integers(17, 80, rows)
    hours = np.clip(rng.normal(40, 12, rows), 1, 99).round()
    education, occupation, relationship = (
        rng.integers(0, len(names), rows) for names in (EDUCATIONS, OCCUPATIONS, RELATIONSHIPS)
    )
    score = 0.5 - ((age - 48) / 14) ** 2 / 2 + np.tanh((hours - 40) / 10)
    score += of_pair[education, occupation] + of_relationship[relationship]
    rich = rng.random(rows) < 1 / (1 + np.exp(-2 * score))
    columns = {
        "age": age.tolist(),
        "hours": hours.tolist(),
        "education": [EDUCATIONS[number] for number in education],
        "occupation": [OCCUPATIONS[number] for number in occupation],
        "relationship": [RELATIONSHIPS[number] for number in relationship],
        "employer": [f"employer-{number}" for number in rng.zipf(1.3, rows) % 5000],
        "income": [INCOMES[number] for number in rich.astype(int)],
    }
    for name, share, missing in (("hours", 0.05, None), ("education", 0.02, ""), ("occupation", 0.05, "")):
        for row in np.flatnonzero(rng.random(rows) < share):
            columns[name][row] = missing
    return columns


if __name__ == "__main__":
    columns = people(int(sys.argv[2]) if len(sys.argv) > 2 else 30_000, seed=0)
    rows = zip(*columns.values(), strict=True)
    with open(sys.argv[1], "w", newline="") as file:
        if sys.argv[1].endswith(".ndjson"):
            file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
        else:
            out = csv.writer(file)
            out.writerow(columns)
            out.writerows(rows)
