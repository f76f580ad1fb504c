"""Parts of insitu that its core reads without: estimators, feature columns, exported models and their server.

The core finds each by an entry point, as it finds plug-ins of others (`base/plugins.py`); scripts find the
names of `insitu`. Inner rooms, each of which may import those to its right: `estimator`, `exports`,
`features`. Begin reading with `estimator/training.py`.
"""
