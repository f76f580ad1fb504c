"""insitu on Kubernetes: `insitu k8s`.

Begin reading with `objects.py`, which makes all objects of a cluster by pure functions; `cluster.py` applies
them.
"""
