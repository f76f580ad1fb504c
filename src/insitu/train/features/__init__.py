"""Feature columns: how features of the data become inputs of a model.

Numbers, ids and hashes are made by NumPy before the graph; embeddings and the like by a Keras layer.
Begin reading with `feature_column.py`, which has the names that users see.
"""

from insitu.train.features import feature_column
from insitu.train.features.categorical import CategoricalColumn
from insitu.train.features.column_layer import find_transform
from insitu.train.features.numeric import NumericColumn
from insitu.train.features.tf_columns import convert_column
from insitu.train.features.transform import FeatureTransform, check_dense
