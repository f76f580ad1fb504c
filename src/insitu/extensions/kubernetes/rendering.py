"""Writes the objects of a cluster as YAML."""

from __future__ import annotations

from insitu.base.errors import InputError
from insitu.extensions.kubernetes.objects import TOKEN_KEY, TOKEN_SECRET, make_objects
from insitu.extensions.kubernetes.options import ClusterOptions


def format_objects(options: ClusterOptions) -> str:
    """Return a document of YAML for each object. Raises InputError without the library."""
    try:
        import yaml
    except ImportError:
        raise InputError(
            "`insitu k8s` needs the client of Kubernetes. Received: an environment without it. Install it: "
            "pip "
            "install 'insitu[kubernetes]'"
        ) from None
    namespace = options.namespace or "default"

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True  # parts that are alike are written out: not all tools follow references

    def write_text(dumper: Plain, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Plain.add_representer(str, write_text)

    head = (
        "# The secret with the cluster's token isn't here. `insitu k8s up` makes it. Without that:\n"
        f"# kubectl --namespace {namespace} create secret generic {TOKEN_SECRET} "
        f'--from-literal={TOKEN_KEY}="$(openssl rand -hex 32)"\n'
    )
    return head + "".join(
        f"---\n{yaml.dump(each, Dumper=Plain, sort_keys=False, width=1000)}" for each in make_objects(options)
    )
