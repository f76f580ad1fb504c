"""The feature columns of the census scripts, wide and deep."""

import keras
import numpy as np
from make_people import EDUCATIONS, OCCUPATIONS, RELATIONSHIPS

from insitu import feature_column as fc


@keras.saving.register_keras_serializable(package="census")
def scale_hours(hours):
    """Return hours about 0, of a width of 1. Who didn't say works 40."""
    return (np.nan_to_num(hours, nan=40.0) - 40) / 12


age = fc.numeric_column("age")
hours = fc.numeric_column("hours", normalizer_fn=scale_hours)
ages = fc.bucketized_column(age, [25, 30, 35, 40, 45, 50, 55, 60, 65])
# An empty text is a missing value: it has no id, and adds nothing.
education = fc.categorical_column_with_vocabulary_list("education", EDUCATIONS)
occupation = fc.categorical_column_with_vocabulary_list("occupation", OCCUPATIONS)
relationship = fc.categorical_column_with_vocabulary_list("relationship", RELATIONSHIPS)
# Nobody has a list of the employers.
employer = fc.categorical_column_with_hash_bucket("employer", 1000)

# The wide part keeps a weight for each pair that there is.
wide = [
    fc.crossed_column(["education", "occupation"], 2000),
    fc.crossed_column([ages, "relationship"], 500),
]
# The deep part finds what ages, hours and words have in common.
deep = [
    hours,
    ages,
    fc.embedding_column(education, 4),
    fc.embedding_column(occupation, 4),
    fc.indicator_column(relationship),
    fc.embedding_column(employer, 4),
]
FEATURES = ["age", "education", "employer", "hours", "occupation", "relationship"]
