"""Agents and reservations on the nodes of a Ray cluster. Begin reading with `ray_cluster.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.ray.ray_cluster import (
        Died,
        RayCluster,
        RayNode,
        connect_to_ray,
        find_gcs_obstacle,
        make_namespace,
    )
    from insitu.cluster.ray.ray_holder import HolderAnswer, HolderSettings

__getattr__, __dir__ = export_lazily(__name__)
