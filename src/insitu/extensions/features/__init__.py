"""Feature columns: how features of the data become inputs of a model.

Numbers, ids and hashes are made by NumPy before the graph; embeddings and the like by a Keras layer.
Begin reading with `feature_column.py`, which has the names that users see.
"""

from insitu.extensions.features import feature_column
from insitu.extensions.features.categorical import CategoricalColumn
from insitu.extensions.features.column_layer import find_transform
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.tf_columns import convert_column
from insitu.extensions.features.transform import FeatureTransform, check_dense
