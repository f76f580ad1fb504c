"""Asks an export of train.py about new people: python ask.py FILE

FILE is a .keras file that train.py has published. It is a Keras model: no job is needed, and no model_dir.
"""

import sys

import census_columns  # noqa: F401  registers the function that scales hours
import keras
import numpy as np
from make_people import INCOMES, people

from insitu import estimator  # noqa: F401  registers the layers of the canned estimators
from insitu import feature_column as fc

rows = people(1000, seed=1)
rows["hours"] = [np.nan if hours is None else hours for hours in rows["hours"]]
asked = {name: np.array(values) for name, values in rows.items() if name != "income"}
model = keras.saving.load_model(sys.argv[1], compile=False)
inputs = {}
for layer in model.layers:
    if isinstance(layer, fc.DenseFeatures):
        inputs |= layer.transform(asked)
found = model.predict(inputs, batch_size=500, verbose=0)
for row in range(5):
    about = ", ".join(str(asked[name][row]) or "?" for name in ("age", "education", "occupation"))
    chance = found["probabilities"][row, 1]
    print(f"{about}: {INCOMES[1]} with probability {chance:.2f}; it is {rows['income'][row]}")
right = found["class_ids"][:, 0] == [INCOMES.index(income) for income in rows["income"]]
print(f"right for {right.mean():.1%} of {len(right)} people")
