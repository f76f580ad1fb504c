"""Agents on hosts of their own: links are cut, hosts lose their power. Run by `make test-hosts`.

What fails, and the tests that hold what happens then; those without a file are here:

- a task: test_host_jobs.py, test_a_task_that_dies_on_a_host_is_replaced_...
- the server of a host's tasks: test_host_jobs.py, test_agents_head_and_controller_may_die_...
- agents: the same, test_tasks_read_on_where_the_head_and_all_agents_are_killed; test_agents.py,
  test_a_killed_agent_is_lost_and_comes_back_...
- a holder of Ray: test_hosts_ray.py, test_agents_and_holders_that_are_killed_come_back
- a raylet: test_hosts_ray.py, test_the_raylet_of_a_host_of_a_job_is_killed_...
- a host: test_a_host_that_vanishes_costs_its_tasks_alone, test_a_host_with_data_vanishes_...,
  test_an_owner_that_loses_its_power_during_an_import_...
- a link: test_a_host_that_is_cut_off_ends_its_tasks_..., test_a_link_that_is_away_for_a_moment_costs_no_task
- a port, large packets: test_a_port_that_is_closed_..., test_a_network_that_loses_large_packets_is_named
- the controller: test_a_job_has_the_bits_of_one_machine_also_where_its_controller_dies
- the supervisor: test_stop_and_the_end_of_a_supervisor_leave_nothing_on_hosts
- the head: test_agents_outlive_the_head_...
- the head's machine, for good: test_hosts_replaced_head.py
- one of two hosts, with the head: test_agents.py, test_what_is_left_of_two_hosts_goes_on_with_another_head
- Ray's head, with its state: test_hosts_ray_head.py; without: test_hosts_ray.py,
  test_ray_asks_for_its_own_token_and_its_end_ends_the_agents
- a notice that a node goes: test_moving_jobs.py; from Ray: test_hosts_ray.py,
  test_a_node_that_ray_takes_away_is_drained_...
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import insitu, wait_until
from host_cluster import Cluster, count_tasks
from host_jobs import HostJobs, make_images, run_undisturbed
from hosts_lab import Host, HostsLab

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import VANISHED_SECONDS
from insitu.cluster.job_files import read_controller
from insitu.cluster.job_hosts.host_server import LEASE_SECONDS
from insitu.cluster.wire import records
from insitu.cluster.wire.node_list import read_nodes
from insitu.grid import Catalog, bring_up, import_cache
from insitu.grid.transfer import ServerAddress, fetch_partition

pytestmark = pytest.mark.hosts


def assert_nothing_left(lab: HostsLab) -> None:
    for host in lab.hosts:
        assert host.processes() == {} and host.listeners() == [] and host.shared_memory() == [], host.name


def test_three_hosts_come_up_and_leave_nothing_behind(cluster: Cluster) -> None:
    hosts = cluster.lab.hosts
    said = cluster.up()
    assert "3 of 3 hosts up" in said and f"The head is at {cluster.lab.gateway}:" in said
    found = cluster.nodes()
    assert {n: f["host"] for n, f in found.items()} == {h.name: h.name for h in hosts}
    for host in hosts:
        assert found[host.name]["address"].startswith(f"{host.address}:")  # not 127.0.0.1, not 0.0.0.0
        assert all(address.split(":")[0] != "00000000" for address in host.listeners())
        listed = cluster.on(host, "nodes", "--json").stdout
        assert {each["node"] for each in json.loads(listed)} == found.keys()
    insitu(cluster.head, "down")
    assert_nothing_left(cluster.lab)
    # What they store stays on their disks.
    assert [records.read_head(cluster.paths) is not None, *(h.home.exists() for h in hosts)] == [True] * 4
    cluster.up()
    assert {n: f["store_id"] for n, f in cluster.nodes().items()} == {
        n: f["store_id"] for n, f in found.items()
    }
    insitu(cluster.head, "down", "--force")
    assert_nothing_left(cluster.lab)
    assert [list(Paths(h.home).nodes.iterdir()) for h in hosts] == [[], [], []]


def test_a_cut_link_is_noticed_on_both_sides_and_heals(cluster: Cluster) -> None:
    cluster.up()
    first = cluster.lab.hosts[0]
    before = first.processes()
    first.cut()
    wait_until(lambda: cluster.states()[0] == "silent", "silence")
    wait_until(lambda: cluster.states() == ("lost", "alive", "alive"), "the loss")
    assert first.processes() == before  # it continues serving those who reach it
    first.heal()
    wait_until(lambda: cluster.states() == ("alive", "alive", "alive"), "the return")
    assert first.processes() == before


def test_a_link_that_is_away_for_a_moment_is_no_loss(cluster: Cluster) -> None:
    cluster.up()
    first = cluster.lab.hosts[0]
    since = cluster.nodes()["host1"]
    first.cut()
    wait_until(lambda: cluster.states()[0] == "silent", "silence")
    first.heal()
    wait_until(lambda: cluster.states()[0] == "alive", "the return")
    assert cluster.nodes()["host1"]["store_id"] == since["store_id"]


def test_hosts_that_cannot_reach_each_other_are_named(cluster: Cluster) -> None:
    """The head reaches both, so that nothing else would say it before something hangs."""
    first, _, third = cluster.lab.hosts
    route = ("ip", "-n", first.namespace, "route")
    subprocess.run([*route, "add", "prohibit", f"{third.address}/32"], check=True)
    try:
        said = " ".join(cluster.up(code=1).split())
        assert "3 of 3 hosts up" in said and "2 pairs that can't talk" in said
        assert "host1 can't reach host3: " in said and "host3 can't reach host1: " in said
        assert cluster.states() == ("alive", "alive", "alive")
        assert "host1 can't reach host3" in insitu(cluster.head, "nodes", "--check", code=1).stderr
    finally:
        subprocess.run([*route, "del", "prohibit", f"{third.address}/32"], check=True)
    assert "All nodes reach each other" in insitu(cluster.head, "nodes", "--check").stderr


def test_a_port_that_is_closed_to_one_host_is_named(cluster: Cluster) -> None:
    """As by a firewall that says nothing: all others reach it, and that host reaches its other ports."""
    first, _, third = cluster.lab.hosts
    cluster.up()
    address = cluster.nodes()["host3"]["address"]
    port = address.rpartition(":")[2]
    rule = ("to", third.address, "ipproto", "tcp", "dport", port, "blackhole")
    subprocess.run(["ip", "-n", first.namespace, "rule", "add", *rule], check=True)
    try:
        said = " ".join(insitu(cluster.head, "nodes", "--check", code=1).stderr.split())
        assert "1 pair that can't talk" in said and f"host1 can't reach host3: {address}: " in said
    finally:
        subprocess.run(["ip", "-n", first.namespace, "rule", "del", *rule], check=True)


@contextlib.contextmanager
def large_packets_lost(host: Host, hosts: list[Host]) -> Iterator[None]:
    """Let the switch drop packets of more than 1,300 bytes to and from a host, without a word. With less than
    1,280 it would lose its addresses of IPv6 for good."""
    for each in hosts:  # what isn't cut into packets by the host isn't dropped here
        command = ["ip", "-n", each.namespace, "link", "set", "dev", "eth0", "gso_max_segs", "1"]
        subprocess.run(command, check=True)
    subprocess.run(["ip", "link", "set", "dev", host.link, "mtu", "1300"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", "dev", host.link, "mtu", "1500"], check=True)
        for each in hosts:
            command = ["ip", "-n", each.namespace, "link", "set", "dev", "eth0", "gso_max_segs", "65535"]
            subprocess.run(command, check=True)


@pytest.mark.slow
def test_a_network_that_loses_large_packets_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Connections are made with small ones, so a job would hang at its first sum."""
    first, *_ = cluster.lab.hosts
    cluster.up()
    jobs = HostJobs(cluster.head, tmp_path / "job")
    with large_packets_lost(first, cluster.lab.hosts):
        said = " ".join(insitu(cluster.head, "nodes", "--check", code=1).stderr.split())
        for other in ("host2", "host3"):
            address = cluster.nodes()[other]["address"]
            assert f"host1 can't reach {other}: {address}: small packets arrive, and those of " in said
            assert f"{other} can't reach host1: " in said
        script = ("--workers", "3", "-", str(jobs.code), "train.py", str(jobs.meeting))
        refused = " ".join(insitu(cluster.head, "start", *script, code=None).stderr.split())
        assert "host1 can't reach host2" in refused and "small packets arrive" in refused, refused


def test_a_host_without_power_is_lost_and_comes_back_with_its_store(cluster: Cluster) -> None:
    cluster.up()
    second = cluster.lab.hosts[1]
    before = cluster.nodes()["host2"]
    second.kill()
    wait_until(lambda: cluster.states() == ("alive", "lost", "alive"), "the loss")
    second.start()
    assert "3 of 3 hosts up" in cluster.up()
    assert cluster.states() == ("alive", "alive", "alive")
    assert cluster.nodes()["host2"]["store_id"] == before["store_id"]


def test_a_host_that_starts_again_at_once_need_not_wait_for_its_loss_to_be_known(cluster: Cluster) -> None:
    cluster.up()
    second = cluster.lab.hosts[1]
    second.kill()
    second.start()
    assert "3 of 3 hosts up" in cluster.up()
    assert cluster.states() == ("alive", "alive", "alive")


def test_down_names_what_it_cannot_reach_and_ends_it_later(cluster: Cluster) -> None:
    cluster.up()
    first, *others = cluster.lab.hosts
    first.cut()
    done = insitu(cluster.head, "down", code=1)
    assert f"{first.address}: {first.address} times out" in done.stderr
    assert f"Received: {first.address}, host1 can't be reached" in done.stderr
    assert [len(host.processes()) for host in others] == [0, 0] and len(first.processes()) == 1
    first.heal()
    insitu(cluster.head, "down")
    assert_nothing_left(cluster.lab)


def test_agents_outlive_the_head_and_follow_the_next_one(cluster: Cluster) -> None:
    cluster.up()
    record = records.read_head(cluster.paths)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    cluster.write_hosts(cluster.lab.hosts[0].address)
    cluster.up()
    wait_until(lambda: cluster.states() == ("alive", "alive", "alive"), "the return of all")
    insitu(cluster.head, "down")
    assert_nothing_left(cluster.lab)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of the job of `HostJobs` with three workers on one machine."""
    return run_undisturbed(tmp_path_factory.mktemp("alone") / "run", 3)


@contextlib.contextmanager
def without_ipv4(hosts: list[Host]) -> Iterator[None]:
    """Take the IPv4 addresses of hosts away."""
    for host in hosts:
        subprocess.run(["ip", "-n", host.namespace, "-4", "addr", "flush", "dev", "eth0"], check=True)
    try:
        yield
    finally:
        for host in hosts:
            command = ["ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0"]
            subprocess.run(command, check=True)


def test_hosts_of_ipv6_alone_take_rows_and_train(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str]
) -> None:
    cluster.write_hosts(*(host.address6 for host in cluster.lab.hosts))
    with without_ipv4(cluster.lab.hosts):
        said = cluster.up()
        assert f"The head is at [{cluster.lab.gateway6}]:" in said
        assert all(f["address"].startswith("[fd00:") for f in cluster.nodes().values())
        source = str(make_images(tmp_path / "images"))
        insitu(cluster.head, "import", "images", source, "--partitions", "6", "--backups", "1")
        assert "verified: 12 files" in insitu(cluster.head, "describe", "images", "--verify").stdout
        jobs = HostJobs(cluster.head, tmp_path / "job")
        jobs.let_go()
        job = jobs.start(workers=3)
        found, weights = jobs.finish(job)
        assert weights == undisturbed and found["attempt"] == 1
        assert sorted(where[0] for where in jobs.where(job).values()) == ["host1", "host2", "host3"]
        insitu(cluster.head, "down")


@contextlib.contextmanager
def second_network(lab: HostsLab) -> Iterator[tuple[str, dict[str, str]]]:
    """Give each host an eth1 of another network. Yields this machine's address there, and those of hosts."""
    bridge, own = f"ilb{os.getpid()}", os.getpid()
    prefix = f"172.{16 + own % 16}.{own // 16 % 250}"
    links = {host.name: f"{bridge}-{host.number}" for host in lab.hosts}
    addresses = {host.name: f"{prefix}.{host.number}" for host in lab.hosts}

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{prefix}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in lab.hosts:
            link, there = links[host.name], ("-n", host.namespace)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth1", "netns", host.namespace)
            ip("link", "set", link, "master", bridge)
            ip("link", "set", link, "up")
            ip(*there, "addr", "add", f"{addresses[host.name]}/24", "dev", "eth1")
            ip(*there, "link", "set", "eth1", "up")
        yield f"{prefix}.254", addresses
    finally:
        for link in (*links.values(), bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True)


@pytest.mark.slow
def test_of_two_networks_the_named_interface_is_used_for_all(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str]
) -> None:
    """Hosts don't reach each other by the other one, on which their names and routes are."""
    with second_network(cluster.lab) as (gateway, addresses):
        cluster.write_hosts(*(f"{host.address} interface=eth1" for host in cluster.lab.hosts))
        rules = [
            ("ip", "-n", host.namespace, "rule", what, "to", f"{cluster.lab.prefix}.0/24", "prohibit")
            for what in ("add", "del")
            for host in cluster.lab.hosts
        ]
        for rule in rules[:3]:
            subprocess.run([*rule, "pref", "1"], check=True)
        try:
            assert f"The head is at {gateway}:" in cluster.up("--interface", gateway)
            found = {name: node["address"].split(":")[0] for name, node in cluster.nodes().items()}
            assert found == addresses
            jobs = HostJobs(cluster.head, tmp_path / "job")
            jobs.let_go()
            job = jobs.start(workers=3)
            assert jobs.finish(job)[1] == undisturbed
            insitu(cluster.head, "down")
        finally:
            for rule in rules[3:]:
                subprocess.run([*rule, "pref", "1"], check=True)


def test_a_partition_goes_from_host_to_host(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up()
    np.save(tmp_path / "x.npy", np.arange(100_000))
    (cache,) = import_cache(cluster.paths, "digits", [str(tmp_path / "x.npy")], partitions=1)
    source, target = cluster.lab.hosts[0], Paths(tmp_path / "reader")
    there = Paths(source.home).partition(source.name, "digits", 1, 0)
    there.parent.mkdir(parents=True)
    there.write_bytes(cluster.paths.partition("node-0", "digits", 1, 0).read_bytes())
    (member,) = [m for m in read_nodes(cluster.paths)[0] if m.facts.node == source.name]
    address = ServerAddress(member.facts.address, member.facts.port, member.facts.certificate)
    token = records.read_token(cluster.paths).encode()
    fetched = fetch_partition(target, NodeId("r"), cache, 0, [address], token)
    assert fetched.read_bytes() == there.read_bytes()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{0} interface=10.1.2.3", "--interface names an interface of this machine"),
        ("{0} interface=lo", "Other hosts must reach the address of an agent"),
        ("{0} interface=eth0 name=twice", "Each node has a name of its own"),
        ("10.1.2.3", "no route to 10.1.2.3"),
    ],
)
def test_one_host_that_cannot_join_is_named(cluster: Cluster, line: str, problem: str) -> None:
    first, second, _ = cluster.lab.hosts
    cluster.write_hosts(f"{second.address} name={'twice' if 'twice' in line else 'ok'}")
    cluster.up()
    cluster.write_hosts(line.format(first.address))
    said = " ".join(cluster.up("--interface", cluster.lab.gateway, code=1).split())
    assert problem in said and "0 of 1 host up" in said
    assert first.processes() == {}


def start_three(cluster: Cluster, folder: Path) -> tuple[HostJobs, str]:
    """Start a job with a worker on each host, and wait until all are in the middle."""
    cluster.up()
    jobs = HostJobs(cluster.head, folder / "job")
    job = jobs.start(workers=3)
    jobs.wait_in_the_middle(job, 3)
    found = {task: where[:2] for task, where in jobs.where(job).items()}
    assert found == {f"worker:{n}": [f"host{n + 1}", f"host{n + 1}"] for n in range(3)}
    return jobs, job


def has_no_task(host: Host) -> bool:
    return count_tasks(host) == 0


def assert_no_job_left(hosts: list[Host]) -> None:
    for host in hosts:
        wait_until(partial(has_no_task, host), "the end of tasks")
        assert host.shared_memory() == [] and len(host.listeners()) == 1, host.name
        assert list(Paths(host.home).jobs.iterdir()) == []


def test_a_job_has_the_bits_of_one_machine_also_where_its_controller_dies(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str]
) -> None:
    jobs, job = start_three(cluster, tmp_path)
    controller = read_controller(cluster.paths.job(job).controller)
    assert controller is not None
    os.kill(controller.pid, signal.SIGKILL)
    wait_until(lambda: "a new one has taken over" in jobs.output(job), "another controller")
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == undisturbed and found["attempt"] == 1
    assert [t["attempt"] for t in found["task_list"]] == [1, 1, 1]
    assert_no_job_left(cluster.lab.hosts)


@pytest.mark.parametrize("number", [1, 3])
def test_a_host_that_vanishes_costs_its_tasks_alone(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str], number: int
) -> None:
    jobs, job = start_three(cluster, tmp_path)
    cluster.lab.hosts[number - 1].kill()
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == undisturbed and found["attempt"] == 1
    assert [t["attempt"] for t in found["task_list"]] == [1 + (n + 1 == number) for n in range(3)]
    assert f"host{number} acknowledged nothing for 1.5 s, and no other host reaches it" in jobs.output(job)
    assert found["task_list"][number - 1]["node"] != f"host{number}"
    assert_no_job_left([host for host in cluster.lab.hosts if host.number != number])


def test_a_link_that_is_away_for_a_moment_costs_no_task(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str]
) -> None:
    """Nor one to the supervisor alone: the others still reach the host, so it lives."""
    jobs, job = start_three(cluster, tmp_path)
    second = cluster.lab.hosts[1]
    second.cut()
    time.sleep(0.3)
    second.heal()
    second.wait_for_link()
    route = ("ip", "-n", second.namespace, "route")
    subprocess.run([*route, "add", "blackhole", f"{cluster.lab.gateway}/32"], check=True)
    time.sleep(3 * VANISHED_SECONDS)
    subprocess.run([*route, "del", "blackhole", f"{cluster.lab.gateway}/32"], check=True)
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == undisturbed and [t["attempt"] for t in found["task_list"]] == [1, 1, 1]
    assert "count as killed" not in jobs.output(job)


def test_a_host_that_is_cut_off_ends_its_tasks_while_others_go_on(
    cluster: Cluster, tmp_path: Path, undisturbed: set[str]
) -> None:
    jobs, job = start_three(cluster, tmp_path)
    second = cluster.lab.hosts[1]
    second.cut()
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == undisturbed and found["attempt"] == 1
    # It hears nothing of this, and ends them by itself.
    deadline = time.monotonic() + 2 * LEASE_SECONDS
    while count_tasks(second):
        assert time.monotonic() < deadline, second.processes()
        time.sleep(0.2)
    second.heal()
    wait_until(lambda: cluster.states() == ("alive", "alive", "alive"), "the return")
    assert_no_job_left(cluster.lab.hosts)


def test_stop_and_the_end_of_a_supervisor_leave_nothing_on_hosts(cluster: Cluster, tmp_path: Path) -> None:
    jobs, job = start_three(cluster, tmp_path)
    insitu(cluster.head, "stop", job)
    assert_no_job_left(cluster.lab.hosts)
    shutil.rmtree(jobs.meeting)
    jobs.meeting.mkdir()
    job = jobs.start(workers=3)
    jobs.wait_in_the_middle(job, 3)
    jobs.kill_supervisor(job)
    assert_no_job_left(cluster.lab.hosts)


def read_rows(cluster: Cluster, host: Host, cache: str) -> str:
    """The digest of all rows of a cache, read by a process on a host after it has fetched what it lacks."""
    cluster.on(host, "fetch", cache)
    program = (
        "import hashlib, insitu, numpy as np; "
        f"rows = np.sort(np.concatenate([np.asarray(b) for b in insitu.dataset('{cache}').batch(1000)])); "
        "print(hashlib.sha256(rows.tobytes()).hexdigest())"
    )
    done = cluster.run_on(host, f'{sys.executable} -c "{program}"')
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_an_owner_that_loses_its_power_during_an_import_costs_the_import_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The old version stands, nothing is left over, and the next import has the bytes of a local one."""
    cluster.up()
    rows = np.random.default_rng(0).permutation(8 << 20)
    np.save(tmp_path / "small.npy", rows[:10_000])
    np.save(tmp_path / "x.npy", rows)
    options = ("--partitions", "6", "--backups", "1")
    insitu(cluster.head, "import", "d", str(tmp_path / "small.npy"), *options)
    second = cluster.lab.hosts[1]
    staging = Paths(second.home).staging
    command = [sys.executable, "-m", "insitu", "import", "d", str(tmp_path / "x.npy"), *options]
    with subprocess.Popen(
        [*command, "--overwrite"],
        env={**os.environ, "INSITU_HOME": str(cluster.head)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: any(staging.rglob("part-*")), "the first bytes on host2")
            second.kill()
            _, said = process.communicate(timeout=250)
        finally:
            process.kill()
    assert process.returncode == 1 and "Received: host2: " in said and "Nothing was imported" in said
    assert [(c.version, c.rows) for c in Catalog(cluster.paths).caches()] == [(1, 10_000)]
    first, third = cluster.lab.hosts[0], cluster.lab.hosts[2]
    for host in (first, third):
        assert not list(Paths(host.home).staging.rglob("part-*"))
    second.start()
    cluster.up()
    wait_until(lambda: not list(staging.rglob("part-*")), "the end of the import that died on host2")
    expected = hashlib.sha256(np.sort(rows[:10_000]).tobytes()).hexdigest()
    assert read_rows(cluster, second, "d") == expected

    insitu(cluster.head, "import", "d", str(tmp_path / "x.npy"), *options, "--overwrite")
    cache = Catalog(cluster.paths).get("d")
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    (alike,) = import_cache(local, "d", [str(tmp_path / "x.npy")], partitions=6, backups=1)
    assert [p.checksum for p in cache.partitions] == [p.checksum for p in alike.partitions]
    expected = hashlib.sha256(np.sort(rows).tobytes()).hexdigest()
    wait_until(lambda: Catalog(Paths(third.home)).get("d").version == cache.version, "the catalogue")
    assert read_rows(cluster, third, "d") == expected
    assert "verified: 12 files" in insitu(cluster.head, "describe", "d", "--verify").stdout


def test_hosts_read_what_all_of_them_see(cluster: Cluster, tmp_path: Path) -> None:
    """From paths and URLs, to the bytes of a local import; a file that they don't see is named with them."""
    cluster.up()
    rows = np.random.default_rng(0).integers(0, 255, (30_000, 100), dtype=np.uint8)
    for number in range(3):
        np.save(tmp_path / f"x-{number}.npy", rows[number * 10_000 : (number + 1) * 10_000])
    options = ("--partitions", "6", "--backups", "1")
    said = insitu(cluster.head, "import", "d", f"{tmp_path}/x-*.npy", *options, "--read-on", "nodes").stderr
    assert "Sent" not in said
    insitu(cluster.head, "import", "e", f"file://{tmp_path}/x-*.npy", *options)
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    (alike,) = import_cache(local, "d", [f"{tmp_path}/x-*.npy"], partitions=6, backups=1)
    for name in "de":
        cache = Catalog(cluster.paths).get(name)
        assert [p.checksum for p in cache.partitions] == [p.checksum for p in alike.partitions]
    # Each host has shared memory of its own, so what is there is seen here alone.
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".npy") as alone:
        np.save(alone, rows)
        alone.flush()
        refused = insitu(cluster.head, "import", "f", alone.name, "--read-on", "nodes", code=2).stderr
        refused = " ".join(refused.split())
        assert "Received: files that this host sees, but not host1, host2, host3" in refused
        assert "--read-on here" in refused
        insitu(cluster.head, "import", "f", alone.name, "--read-on", "here")


def test_a_host_with_data_vanishes_and_its_rows_are_read_from_backups(
    cluster: Cluster, tmp_path: Path
) -> None:
    source = str(make_images(tmp_path / "images"))
    options = ("--partitions", "6", "--backups", "1", "--label-from-filename")
    alone = HostJobs(tmp_path / "alone", tmp_path / "alone-job")
    insitu(alone.home, "up", "--nodes", "3")
    insitu(alone.home, "import", "images", source, *options)
    alone.let_go()
    _, undisturbed = alone.finish(alone.start(workers=3, cache="images"))
    cluster.up()
    insitu(cluster.head, "import", "images", source, *options)
    jobs = HostJobs(cluster.head, tmp_path / "job")
    job = jobs.start(workers=3, cache="images")
    jobs.wait_in_the_middle(job, 3)
    cluster.lab.hosts[1].kill()
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == undisturbed and found["attempt"] == 1
    assert ("replaced", ["worker:1"]) in [(r["how"], r["tasks"]) for r in found["recoveries"]]
    assert found["task_list"][1]["node"] in ("host1", "host3")
    assert_no_job_left([cluster.lab.hosts[0], cluster.lab.hosts[2]])
