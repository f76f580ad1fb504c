"""Loads the models that train.py has saved, without parameter servers, and prints their AUC on new clicks.

    python serve.py FOLDER

FOLDER is the code/ folder of the job's folder, which `insitu describe JOB` prints. train.py has saved
recommender.keras and served/ there.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from make_clicks import clicks

import insitu

folder = Path(sys.argv[1])
questions = clicks(20_000, seed=1)
labels = questions.pop("label")
insitu.layers  # noqa: B018  importing it registers its classes with Keras
model = keras.saving.load_model(folder / "recommender.keras", compile=False)
answers = model.predict(questions, batch_size=4096, verbose=0)[:, 0]
auc = keras.metrics.AUC()
auc.update_state(labels, answers)
print(f"AUC {float(auc.result()):.3f}")
if (folder / "served").exists() and keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    served = tf.saved_model.load(str(folder / "served"))
    same = served.serve({name: tf.constant(keys[:100]) for name, keys in questions.items()})
    print("the exported model agrees:", np.allclose(same[:, 0], answers[:100], atol=1e-5))
