"""The part of a head and of `insitu up` for an etcd that holds the metadata."""

from __future__ import annotations

import contextlib
import logging
import secrets

from insitu.base.errors import InputError, MetadataError
from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_members import OWN_ETCD, HostCommands, Report, make_members, start_members
from insitu.cluster.failover.metadata_moving import finish_move
from insitu.cluster.leases import Lead, give_up_home, parse_won, win
from insitu.cluster.wire import (
    HeadRecord,
    answers_as_head,
    change_head,
    is_locked,
    list_agents,
    read_head,
    read_token,
    start_record,
)
from insitu.grid import Catalog
from insitu.metadata import (
    HEAD_KEY,
    MetadataSettings,
    drop_etcd,
    open_etcd,
    read_leader,
    read_settings,
    read_url,
    write_fence,
    write_settings,
)

logger = logging.getLogger("insitu")


def prepare_etcd(paths: Paths, url: str) -> None:
    """Have the cluster of this home keep its metadata in the etcd that a URL names.

    Raises InputError for a cluster that was made with another store, and for an etcd of another cluster;
    MetadataError if etcd can't be used.
    """
    record, before = read_head(paths), read_settings(paths)
    known = record or before
    cluster = secrets.token_hex(16) if known is None else known.cluster
    wanted = read_url(url, cluster)
    if record is not None and record.has_metadata and before is None:
        raise _make_refusal(url, f"a cluster whose metadata is in {paths.metadata}")
    if wanted == before:
        return
    if before is not None and before.peers:
        raise _make_refusal(url, "a cluster whose etcd insitu runs itself")
    is_new = before is None and (record is None or not record.has_metadata)
    try:
        open_etcd(wanted, create=is_new).close()
    except InputError as error:
        if before is None:
            raise
        raise _make_refusal(url, f"a cluster whose metadata is in {before.url} ({error})") from error
    change_head(paths, cluster=cluster, has_metadata=True)
    write_settings(paths, wanted)


def bring_up_members(paths: Paths, commands: HostCommands, report: Report, *, asked: str) -> None:
    """Start the members of an etcd that insitu runs itself, if the cluster has one or will have one, unless
    its head runs: then agents do.

    Raises InputError for a cluster that was made with another store; ClusterError, MetadataError.
    """
    record, settings = read_head(paths), read_settings(paths)
    if asked == OWN_ETCD and settings is None and record is not None and record.has_metadata:
        raise _make_refusal(asked, f"a cluster whose metadata is in {paths.metadata}")
    if asked == OWN_ETCD and settings is not None and not settings.peers:
        raise _make_refusal(asked, f"a cluster whose metadata is in {settings.url}")
    if is_locked(paths.head_lock):
        return
    if asked == OWN_ETCD and settings is None:
        settings = make_members(paths, commands)
        write_settings(paths, settings)
    if settings is not None and settings.peers:
        record = read_head(paths)
        is_new = record is None or not record.has_metadata
        start_members(paths, settings, commands, report, is_new=is_new)
        change_head(paths, has_metadata=True)


def _make_refusal(url: str, received: str) -> InputError:
    return InputError(
        f"A cluster keeps the metadata store that it was made with. Received: --metadata {url}, and "
        f"{received}. Leave --metadata out, or move it by `insitu repair --metadata` after `insitu down`. "
        f"For a new cluster in another store set INSITU_HOME to another folder"
    )


def begin_to_lead(
    paths: Paths, settings: MetadataSettings, address: str, won_text: str
) -> tuple[HeadRecord, Lead]:
    """Become the head of this home's cluster, which listens at `address`, by the key that was won, or win it.

    Returns its record, and its lease. Raises ClusterError if another head leads, GridError, MetadataError.
    """
    record = read_head(paths)
    store = open_etcd(settings, create=record is not None and not record.has_metadata)
    try:
        finish_move(paths, settings, store)
    except BaseException:
        store.close()
        raise
    known = [agent.epoch for agent in list_agents(paths).values()]
    epoch = max([0 if record is None else record.epoch, *known])
    own = "" if record is None or _is_copied(paths, record, address) else record.instance
    try:
        won = parse_won(won_text) or win(store, epoch, own=own, after_down=True)
    except BaseException:
        store.close()
        raise
    lead = Lead(store, won)
    try:
        record = start_record(
            paths,
            address,
            cluster=settings.cluster,
            epoch=lead.won.epoch,
            instance=lead.won.instance,
            has_metadata=True,
            replaced_by="",
        )
        write_fence(paths, lead.announce(address))
        Catalog(paths).take_over()
        return change_head(paths, **lead.read_options()), lead
    except BaseException:
        lead.resign()
        store.close()
        raise


def _is_copied(paths: Paths, record: HeadRecord, address: str) -> bool:
    """Return whether a head with this record runs elsewhere than at `address`, on which this process listens.
    It isn't of this home, whose lock this process holds."""
    return record.address not in ("", address) and answers_as_head(record.address, read_token(paths))


def end_leading(paths: Paths, lead: Lead, *, down: bool) -> bool:
    """Let another head lead, or with `down` none. Returns whether another one has taken over before."""
    is_over = bool(lead.ended)
    lead.resign(down=down)
    lead.store.close()
    if not down and read_head(paths) is not None:
        give_up_home(paths, lead.successor)
    return is_over


def end_cluster(paths: Paths, record: HeadRecord, *, has_answered: bool = False) -> dict[str, str]:
    """Have no agent become head, after the head of this home has ended. Returns who may, and why, if etcd
    doesn't answer. Raises ClusterError if another head leads.

    `has_answered`: the head has said that agents have ended, and so has written that down before.
    """
    settings = read_settings(paths)
    if settings is None or (settings.peers and (has_answered or not record.has_metadata)):
        return {}
    try:
        with contextlib.closing(open_etcd(settings)) as store:
            leader = read_leader(store.get([HEAD_KEY])[0].get(HEAD_KEY))
            if leader is None or not leader.is_down:
                Lead(store, win(store, record.epoch, own=record.instance)).resign(down=True)
    except MetadataError as error:
        if settings.peers:
            return {}  # its members have ended before, or end with the agents of hosts, which are named
        return {"agents that are away": f"one of them may become head, as etcd can't be asked. {error}"}
    return {}


def drop_cluster(paths: Paths) -> None:
    """Remove all that etcd holds of the cluster of this home, which was ended. That of members that insitu
    runs went with these. Raises MetadataError."""
    settings = read_settings(paths)
    if settings is not None and not settings.peers:
        drop_etcd(settings)
