"""Make tests/vectors/*.json: inputs and outputs of every rule of the wire, for nodes in other languages.

Everything follows from constants below, so the files only change when the protocol does:

    python scripts/make_vectors.py            # write them
    python scripts/make_vectors.py --check    # exit 1 if a file differs from what the code makes

`docs/protocol.md` describes the rules. Byte strings are hex; a map with the one key "hex" is a byte string
inside a message; 64-bit seeds are decimal strings; float32 values are the hex of their bits.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from delta_vectors import delta_vectors  # noqa: E402

from protocol import chunks, envelope, messages, noise, run_spec, tasks  # noqa: E402
from protocol.base import Message  # noqa: E402
from protocol.encoding import encode  # noqa: E402
from protocol.identity import Identity, node_name  # noqa: E402
from protocol.invite import Invite, format_invite  # noqa: E402

FOLDER = ROOT / "tests" / "vectors"
SEEDS = [bytes(32), bytes(range(32)), bytes([255] * 32)]
LEARNER = Identity.from_seed(SEEDS[0])
WORKER = Identity.from_seed(SEEDS[1])
GROUP = bytes.fromhex("11" * 32)


def example_run_spec() -> run_spec.RunSpec:
    """A fleet's run with two task families, and every field that has a default left at it or set."""
    return run_spec.RunSpec(
        name="vectors",
        nonce=bytes(range(16)),
        preset="fleet",
        model=run_spec.BaseModelRef(
            name="tiny",
            assets=[
                run_spec.Asset(path="config.json", size_bytes=300, chunks=[chunks.chunk_hash(b"\x01" * 300)]),
                run_spec.Asset(path="merges.txt", size_bytes=0, chunks=[]),
            ],
            weights=[
                run_spec.WeightsFile(
                    path="model.safetensors", size_bytes=400, chunks=[chunks.chunk_hash(b"\x02" * 400)]
                )
            ],
        ),
        tasks=[
            tasks.TaskSpec(
                environment="reasoning_gym",
                name="chain_sum",
                config={"min_terms": 2, "max_terms": 3, "allow_negation": False},
                weight=3.0,
            ),
            tasks.TaskSpec(environment="reasoning_gym", name="spell_backward", config={}, weight=0.5),
        ],
        sampling=messages.SamplingContract(temperature=0.75, max_new_tokens=8, group_size=2),
        max_staleness=4,
        adapter=run_spec.AdapterSpec(r=8, target_modules=["q_proj", "mlp.down_proj"]),
        learners=[LEARNER.key],
    )


def example_group() -> messages.RolloutGroup:
    """A group that a learner of `example_run_spec` at version 8 accepts."""
    spec = example_run_spec()
    return messages.RolloutGroup(
        task=tasks.assigned_task(spec.tasks, spec.run_id, WORKER.key, LEARNER.key, 7, 3),
        policy=LEARNER.key,
        version=7,
        counter=3,
        prompt_hash=messages.prompt_hash([1, 5, 70_000]),
        sampling=spec.sampling,
        engine="transformers",
        completions=[
            messages.Completion.build([4, 65_537, 2], [-0.5, -0.25, -1.5], [(7, 2), (8, 1)], "stop", "é!"),
            messages.Completion.build([9] * 8, [-0.125] * 8, [(7, 8)], "length"),
        ],
        rewards=[1.0, 0.0],
    )


def example_messages() -> dict[str, Message]:
    """One message of each kind."""
    group, spec = example_group(), example_run_spec()
    manifest = messages.Manifest(
        policy=LEARNER.key,
        version=8,
        size_bytes=1500,
        chunk_size=1024,
        chunks=[chunks.chunk_hash(bytes(1024)), chunks.chunk_hash(bytes(476))],
        delta=messages.Delta(
            parent=7,
            parent_state=b"\x22" * 32,
            size_bytes=700,
            chunk_size=512,
            chunks=[chunks.chunk_hash(b"\x02" * 512), chunks.chunk_hash(b"\x02" * 188)],
        ),
        probe=messages.Probe(tokens=[1, 2, 3], logprobs=[-0.5, -2.0]),
    )
    address = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWExample"
    progress = messages.PolicyProgress(policy=LEARNER.key, version=8, served_versions=[7, 8])
    sealed_spec = envelope.seal(LEARNER, spec.run_id, "run_spec", 0, spec.encode())
    sealed_group = envelope.seal(WORKER, spec.run_id, "rollout_group", 41, group.encode())
    return {
        "hello": messages.Hello(
            name=WORKER.name,
            role="worker",
            software="swarmnode 0.1",
            addresses=[address],
            policies=[progress],
        ),
        "presence": messages.Presence(
            name=WORKER.name,
            role="worker",
            software="swarmnode 0.1",
            addresses=[address],
            policies=[progress],
            groups_per_min=12.5,
            tokens_per_s=300.0,
            accepted=10,
            refused=1,
            updates=0,
            reward=0.5,
            accuracy=None,
            rss_mb=640.0,
            leaving=False,
        ),
        "peers_request": messages.PeersRequest(),
        "peers_reply": messages.PeersReply(
            peers=[messages.PeerAddresses(key=LEARNER.key, addresses=[address])]
        ),
        "run_spec_request": messages.RunSpecRequest(),
        "signed_reply": messages.SignedReply(envelope=sealed_spec),
        "offer": messages.Offer(price_per_hour=0.25, groups_per_min=12.5, tokens_per_s=300.0, device="cpu"),
        "activation": messages.Activation(policy=LEARNER.key, state="active", reason="capacity is short"),
        "rollout_group": group,
        "rollout_announcement": messages.RolloutAnnouncement(
            group=messages.group_id(WORKER.key, group.encode()),
            policy=LEARNER.key,
            version=7,
            size_bytes=len(sealed_group),
            mean_reward=0.5,
            informative=True,
        ),
        "group_request": messages.GroupRequest(groups=[GROUP]),
        "group_reply": messages.GroupReply(groups=[sealed_group]),
        "group_push": messages.GroupPush(envelope=sealed_group),
        "receipt": messages.Receipt(
            group=GROUP, accepted=False, reason="too_stale", detail="5 versions behind, the bound is 4"
        ),
        "credit_request": messages.CreditRequest(policy=LEARNER.key, version=8, wanted=4),
        "credit": messages.Credit(granted=3, version=8, retry_after_s=0.5, reason=""),
        "manifest": manifest,
        "manifest_announcement": messages.ManifestAnnouncement(
            policy=LEARNER.key, version=8, manifest=b"\x33" * 32
        ),
        "manifest_request": messages.ManifestRequest(policy=LEARNER.key, version=None),
        "chunk_session": messages.ChunkSession(file=manifest.state_hash),
        "refusal": messages.Refusal(reason="wrong_kind", detail="a hello is not expected here"),
    }


def plain(value: Any) -> Any:
    """Message fields as JSON: byte strings become {"hex": …}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def float_bits(values: npt.NDArray[np.float32]) -> list[str]:
    """IEEE 754 bits, most significant first: 1.0 is 3f800000."""
    return [f"{word:08x}" for word in values.view(np.uint32).tolist()]


def identity_vectors() -> Any:
    return [
        {"seed": seed.hex(), "key": Identity.from_seed(seed).key.hex(), "name": Identity.from_seed(seed).name}
        for seed in SEEDS
    ] + [{"seed": None, "key": GROUP.hex(), "name": node_name(GROUP)}]


def encoding_vectors() -> Any:
    values: list[Any] = [None, True, 0, 127, 128, 65_536, -1, -33, -32_769, 0.5, -0.0, "é", b"", b"\x00\xff"]
    values += [[1, [2, "x"]], {"b": 1, "a": {"c": []}}, "x" * 32, [0] * 16]
    return [{"value": plain(value), "encoded": encode(value).hex()} for value in values]


def message_vectors() -> Any:
    spec = example_run_spec()
    known = example_messages() | {"run_spec": spec}
    return [
        {
            "kind": kind,
            "fields": plain(message.model_dump()),
            "body": message.encode().hex(),
            "sequence": sequence,
            "sender_seed": WORKER.private_seed().hex(),
            "run_id": spec.run_id.hex(),
            "envelope": envelope.seal(WORKER, spec.run_id, kind, sequence, message.encode()).hex(),
        }
        for sequence, (kind, message) in enumerate(known.items())
    ]


def run_vectors() -> Any:
    spec, group = example_run_spec(), example_group()
    return {
        "spec": spec.encode().hex(),
        "run_id": spec.run_id.hex(),
        "config_hashes": [task.config_hash.hex() for task in spec.tasks],
        "prompt": {"token_ids": [1, 5, 70_000], "prompt_hash": group.prompt_hash.hex()},
        "group": {
            "sender": WORKER.key.hex(),
            "body": group.encode().hex(),
            "group_id": messages.group_id(WORKER.key, group.encode()).hex(),
        },
        "assignments": [
            {
                "node": node.key.hex(),
                "policy": LEARNER.key.hex(),
                "version": version,
                "counter": counter,
                "task": plain(
                    tasks.assigned_task(
                        spec.tasks, spec.run_id, node.key, LEARNER.key, version, counter
                    ).model_dump()
                ),
                "group_seed": str(tasks.group_seed(spec.run_id, node.key, LEARNER.key, version, counter)),
            }
            for node in (LEARNER, WORKER)
            for version in (0, 7)
            for counter in (0, 1, 2, 2**40)
        ],
        "held_out": [plain(task.model_dump()) for task in tasks.held_out_tasks(spec.tasks, 8)],
    }


def noise_vectors() -> Any:
    cases = [(0, 0, 0, 10), (0x0123456789ABCDEF, 3, 17, 9), (2**64 - 1, 63, 32_767, 6)]
    uniforms = np.array([0.5, 2**23 - 0.5, 5_931_641.5, 5_931_642.5, 1.5, 3_086_024.5], np.float32)
    uniforms = (uniforms * np.float32(2.0**-23)).astype(np.float32)
    return {
        "noise": [
            {
                "group_seed": str(seed),
                "completion": completion,
                "position": position,
                "bits": [int(word) for word in noise.random_bits(seed, completion, position, size)],
                "gumbel_float32": float_bits(noise.gumbel_noise(seed, completion, position, size)),
            }
            for seed, completion, position, size in cases
        ],
        "log": [
            {"x_float32": x, "log_float32": y}
            for x, y in zip(float_bits(uniforms), float_bits(noise.exact_log(uniforms)), strict=True)
        ],
    }


def chunk_vectors() -> Any:
    data = bytes(index * 7 % 256 for index in range(2500))
    digests = chunks.chunk_hashes(data, 1024)
    return {
        "file": {
            "rule": "byte i is 7 i mod 256",
            "size_bytes": len(data),
            "chunk_size": 1024,
            "ranges": [list(span) for span in chunks.chunk_ranges(len(data), 1024)],
            "chunks": [digest.hex() for digest in digests],
        },
        "state_hash": chunks.state_hash(len(data), 1024, digests).hex(),
    }


def invite_vectors() -> Any:
    seeds = [
        "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWExample",
        "/dns4/seed.example.org/tcp/4001/p2p/12D3KooWExample",
    ]
    run_id = example_run_spec().run_id
    return [
        {
            "run_id": run_id.hex(),
            "seeds": some,
            "network_key": None if key is None else key.hex(),
            "invite": format_invite(Invite(run_id=run_id, seeds=some, network_key=key)),
        }
        for some, key in ((seeds[:1], None), (seeds, b"\x44" * 32))
    ]


FILES = {
    "identity.json": identity_vectors,
    "encoding.json": encoding_vectors,
    "messages.json": message_vectors,
    "run.json": run_vectors,
    "noise.json": noise_vectors,
    "chunks.json": chunk_vectors,
    "delta.json": delta_vectors,
    "invite.json": invite_vectors,
}


def render(name: str) -> str:
    """The text of one file as the code makes it now."""
    return json.dumps(FILES[name](), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the protocol's test vectors.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    check = parser.parse_args().check
    changed = 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        path, text = FOLDER / name, render(name)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        changed += 1
        if check:
            print(f"{path} differs from what the code makes")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
