"""Writes the objects of a cluster as YAML."""

from __future__ import annotations

from insitu.base.errors import InputError
from insitu.extensions.kubernetes.objects import TOKEN_KEY, TOKEN_SECRET, Object, make_objects
from insitu.extensions.kubernetes.options import ClusterOptions

TOKEN_COMMAND = (
    f"kubectl --namespace {{namespace}} create secret generic {TOKEN_SECRET} "
    f'--from-literal={TOKEN_KEY}="$(openssl rand -hex 32)"'
)


def format_objects(options: ClusterOptions) -> str:
    """Return a document of YAML for each object. Raises InputError without the library."""
    head = (
        "# The secret with the cluster's token isn't here. `insitu k8s up` makes it. Without that:\n"
        f"# {TOKEN_COMMAND.format(namespace=options.namespace or 'default')}\n"
    )
    return head + "".join(f"---\n{format_object(each)}" for each in make_objects(options))


def format_object(each: Object) -> str:
    """Return an object as YAML. Raises InputError without the library."""
    try:
        import yaml
    except ImportError:
        raise InputError(
            "`insitu k8s` needs the client of Kubernetes. Received: an environment without it. Install it: "
            "pip "
            "install 'insitu[kubernetes]'"
        ) from None

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True  # parts that are alike are written out: not all tools follow references

    def write_text(dumper: Plain, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Plain.add_representer(str, write_text)
    return str(yaml.dump(each, Dumper=Plain, sort_keys=False, width=1000))
