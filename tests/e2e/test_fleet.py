"""A fleet of real processes: it trains, takes in a guest, refuses attacks, survives kill -9, stops in order.

The tests share one swarm and run in the order written; each leaves it working.
"""

import signal
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacker import Attacker, attacker
from live_swarm import LiveSwarm, live_swarm, run_cli, wait_for, wait_gone

from peers.base import TransportError
from peers.swarm import RPC_PROTOCOL
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.limits import MAX_ENVELOPE_BYTES
from protocol.messages import GroupPush, Refusal
from protocol.refusals import RefusalReason, Refused
from swarmnode.data_directory import DataDirectory
from swarmnode.demo.layout import DemoNode, free_ports
from swarmnode.models import TINY_MODEL_DIR

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    with live_swarm(tmp_path_factory.mktemp("fleet"), "fleet") as swarm:
        wait_for("three versions", lambda: swarm.learner_version() >= 3, 120)
        yield swarm


def test_both_workers_are_accepted_and_versions_reach_everybody(fleet: LiveSwarm) -> None:
    for name in ("worker-1", "worker-2"):
        wait_for(
            f"groups of {name}", lambda name=name: fleet.row("learner", name).get("accepted", 0) >= 4, 60
        )
        assert fleet.state(name)["my_contribution"]["accepted"] > 0
    wait_for(
        "the relay to hold a version", lambda: (fleet.row("learner", "relay").get("version") or 0) >= 1, 30
    )
    state = fleet.state("learner")
    assert state["refused"] == {}
    assert state["max_staleness_seen"] <= state["run"]["max_staleness"]
    assert {row["name"] for row in state["nodes"]} == {"learner", "relay", "worker-1", "worker-2"}


def test_status_tells_who_i_am_and_what_counts(fleet: LiveSwarm) -> None:
    directory = fleet.nodes["worker-1"].node.directory.root
    shown = run_cli("status", "--data", str(directory))
    assert shown.returncode == 0, shown.stderr
    assert "I am" in shown.stdout and "worker-1 (worker)" in shown.stdout
    assert "my groups" in shown.stdout and "accepted" in shown.stdout
    assert run_cli("health", "--data", str(directory)).returncode == 0


def test_a_guest_with_the_invite_is_accepted_within_a_minute(fleet: LiveSwarm, tmp_path: Path) -> None:
    invite = run_cli("invite", "--data", str(fleet.nodes["learner"].node.directory.root)).stdout.strip()
    assert invite.startswith("swarm1-")
    started = time.monotonic()
    fleet.add(DemoNode("guest", "worker", DataDirectory(tmp_path / "guest"), free_ports(1)[0]))
    wait_for(
        "a group of the guest",
        lambda: fleet.state("guest").get("my_contribution", {}).get("accepted", 0) >= 1,
        60,
    )
    assert time.monotonic() - started < 60
    # It leaves as a person would: Ctrl-C, exit code 0, within ten seconds.
    process = fleet.nodes.pop("guest").process
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0


async def test_attacks_are_refused_counted_and_named_to_their_sender(fleet: LiveSwarm) -> None:
    before = dict(fleet.state("learner")["refused"])
    key = bytes.fromhex(fleet.state("learner")["node"]["key"])
    async with attacker(fleet.layout.invite, key, TINY_MODEL_DIR) as mallory:
        version = fleet.learner_version()
        honest = await mallory.push(mallory.group(version))
        assert honest.accepted, (
            f"the group that attacks start from must pass: {honest.reason} {honest.detail}"
        )
        await _spoilt_groups_get_receipts_that_say_why(mallory, version)
        await _bad_envelopes_get_refusals(mallory, version)
    expected = {
        "ragged_group",
        "bad_logprobs",
        "too_stale",
        "future_version",
        "wrong_seed",
        "prompt_mismatch",
        "reward_mismatch",
        "wrong_sender",
        "wrong_run",
        "bad_signature",
        "malformed",
        "oversized",
        "replayed",
    }

    def counted() -> bool:
        after = fleet.state("learner")["refused"]
        return all(after.get(reason, 0) > before.get(reason, 0) for reason in expected)

    wait_for("every reason to be counted", counted, 10)
    version = fleet.learner_version()
    wait_for("training to go on", lambda: fleet.learner_version() > version, 30)


async def _spoilt_groups_get_receipts_that_say_why(mallory: Attacker, version: int) -> None:
    good = mallory.group(version)
    stale = version - mallory.spec.max_staleness - 1
    rewards = [1.0 - good.rewards[0], *good.rewards[1:]]
    attacks = {
        "ragged_group": good.model_copy(update={"completions": good.completions[:-1]}),
        "bad_logprobs": mallory.group(
            version, completions=[mallory.completion(float("nan"), version), *good.completions[1:]]
        ),
        "future_version": mallory.group(version + 1000),
        "wrong_seed": good.model_copy(update={"counter": good.counter + 1}),
        "prompt_mismatch": mallory.group(version, prompt_hash=b"x" * 32),
        "reward_mismatch": mallory.group(version, rewards=rewards),
    }
    if stale >= 0:
        attacks["too_stale"] = mallory.group(stale)
    else:
        raise AssertionError(f"version {version} is too young to send a group that is too stale")
    for reason, group in attacks.items():
        receipt = await mallory.push(group)
        assert (receipt.accepted, receipt.reason) == (False, reason), receipt
        assert receipt.detail
    # Positive log-probs too, and a whole group of them.
    positive = mallory.group(version, completions=[mallory.completion(0.5, version)] * len(good.completions))
    assert (await mallory.push(positive)).reason == "bad_logprobs"


async def _bad_envelopes_get_refusals(mallory: Attacker, version: int) -> None:
    swarm = mallory.swarm
    somebody = Identity.generate()
    stolen = seal(somebody, swarm.run_id, "rollout_group", 1, mallory.group(version).encode())
    with pytest.raises(Refused) as caught:
        await mallory.push_envelope(stolen)
    assert caught.value.reason is RefusalReason.WRONG_SENDER
    request = swarm.seal(GroupPush(envelope=swarm.seal(mallory.group(version))))
    other_run = seal(swarm.identity, b"r" * 32, "group_push", 10**6, GroupPush(envelope=b"x").encode())
    attacks = {
        RefusalReason.MALFORMED: b"\xffgarbage that nobody signed",
        RefusalReason.BAD_SIGNATURE: request[:-1] + bytes([request[-1] ^ 1]),
        RefusalReason.WRONG_RUN: other_run,
        RefusalReason.OVERSIZED: struct.pack(">B", 0xC6) + b"\0" * (MAX_ENVELOPE_BYTES + 1000),
    }
    for reason, data in attacks.items():
        assert await _refusal(mallory, data) == reason
    first = await swarm.transport.request(
        mallory.learner, RPC_PROTOCOL, request, timeout_s=30, max_response_bytes=MAX_ENVELOPE_BYTES
    )
    assert open_envelope(first, run_id=swarm.run_id).kind == "receipt"
    assert await _refusal(mallory, request) == RefusalReason.REPLAYED
    try:
        enormous = await _refusal(mallory, b"\0" * (2 * MAX_ENVELOPE_BYTES))
    except TransportError:
        enormous = RefusalReason.OVERSIZED  # The stream ended before it was read.
    assert enormous == RefusalReason.OVERSIZED


async def _refusal(mallory: Attacker, data: bytes) -> str:
    answer = await mallory.swarm.transport.request(
        mallory.learner, RPC_PROTOCOL, data, timeout_s=30, max_response_bytes=MAX_ENVELOPE_BYTES
    )
    envelope = open_envelope(answer, run_id=mallory.swarm.run_id)
    assert envelope.kind == "refusal"
    return Refusal.decode(envelope.body).reason


def test_a_killed_worker_is_shown_gone_and_comes_back_as_itself(fleet: LiveSwarm) -> None:
    key = fleet.state("worker-1")["node"]["key"]
    accepted = fleet.row("learner", "worker-1")["accepted"]
    orphans = fleet.kill("worker-1")
    killed = time.monotonic()
    wait_for("worker-1 to be shown gone", lambda: fleet.row("learner", "worker-1")["state"] == "gone", 15)
    assert time.monotonic() - killed < 15
    wait_gone(orphans, 5)
    version = fleet.learner_version()
    wait_for("training without worker-1", lambda: fleet.learner_version() >= version + 2, 60)
    fleet.restart("worker-1")
    wait_for(
        "worker-1 to be accepted again",
        lambda: (
            fleet.row("learner", "worker-1")["state"] == "live"
            and fleet.row("learner", "worker-1")["accepted"] > accepted
        ),
        60,
    )
    assert fleet.state("worker-1")["node"]["key"] == key


def test_a_killed_learner_resumes_and_its_ledger_balances(fleet: LiveSwarm) -> None:
    version = fleet.learner_version()
    bound = fleet.state("learner")["run"]["max_staleness"]
    orphans = fleet.kill("learner")
    wait_gone(orphans, 10)
    # The workers pause: without the learner there is no credit, so nothing is generated to go stale.
    workers = ("worker-1", "worker-2")
    for name in workers:
        wait_for(
            f"{name} to wait for the learner",
            lambda name=name: "waiting for the learner" in fleet.state(name)["node"]["state"],
            20,
        )
    first = [fleet.state(name)["my_contribution"]["accepted"] for name in workers]
    time.sleep(2)
    assert [fleet.state(name)["my_contribution"]["accepted"] for name in workers] == first
    fleet.restart("learner")
    wait_for("the learner to resume", lambda: fleet.learner_version() >= version - 1, 90)
    assert fleet.learner_version() >= version - 1
    wait_for("training after the restart", lambda: fleet.learner_version() >= version + 3, 90)
    state = fleet.state("learner")
    assert state["max_staleness_seen"] <= bound
    assert not [event for event in state["events"] if "were not waiting" in event["text"]]
    groups = state["groups"]
    assert groups["accepted"] == groups["consumed"] + groups["waiting"] + groups["stale"]


def test_sigterm_stops_every_node_within_ten_seconds_and_nothing_is_lost(fleet: LiveSwarm) -> None:
    directory = fleet.nodes["learner"].node.directory
    accepted = sum(fleet.row("learner", name)["accepted"] for name in ("worker-1", "worker-2"))
    started = time.monotonic()
    assert fleet.processes.stop() == []
    assert time.monotonic() - started < 10.5
    for node in fleet.nodes.values():
        assert node.process.returncode == 0
    ledger = sqlite3.connect(directory.store_path)
    rows = ledger.execute("SELECT state, consumed_version FROM groups").fetchall()
    assert len(rows) >= accepted
    assert {state for state, _ in rows} <= {"accepted", "consumed", "stale"}
    per_version: dict[int, int] = {}
    for state, version in rows:
        if state == "consumed":
            per_version[version] = per_version.get(version, 0) + 1
    # Every update that the weights have seen used exactly one batch: nothing twice or lost. Killed once,
    # the learner leaves two numbers without one: the version that it had published before its checkpoint, and
    # the next, under which it published what it went on from.
    assert len(set(range(1, max(per_version) + 1)) - set(per_version)) <= 2
    assert set(per_version.values()) == {16}


def test_the_trained_version_can_be_exported_and_evaluated(fleet: LiveSwarm, tmp_path: Path) -> None:
    root = str(fleet.nodes["learner"].node.directory.root)
    out = tmp_path / "exported"
    done = run_cli("export", str(out), "--data", root)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.num_parameters() > 500_000
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out)("12")["input_ids"])
    evaluated = run_cli("eval", "--data", root, "--prompts", "64", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert '"count": 64' in evaluated.stdout
