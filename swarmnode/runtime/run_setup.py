"""How a node comes to its run: make one, or fetch its signed spec and model files by an invite."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.messages import Role, SamplingContract
from protocol.refusals import RefusalReason, Refused
from protocol.run_spec import RunSpec
from protocol.tasks import TaskSpec
from swarmnode.config import ConfigError, RunSection
from swarmnode.data_directory import DataDirectory, DataError, atomic_write
from swarmnode.models import ModelNotFound, resolve_model
from swarmnode.models.tiny_tasks import DEMO_TASKS
from swarmnode.runtime.model_files import base_model, model_matches


def build_spec(section: RunSection, identity: Identity) -> RunSpec:
    """The spec of a new run whose owner is `identity`. Raises `ConfigError`."""
    try:
        model_path = resolve_model(section.model)
    except ModelNotFound as error:
        raise ConfigError(f"run.model: {error}") from error
    try:
        return RunSpec(
            name=section.name,
            nonce=os.urandom(16),
            preset=section.preset,
            mode=section.mode,
            # In preset swarm every node begins its own policy from the base model's weights, and an adapter
            # is nothing without them; else the newest version is all the weights that anybody needs.
            model=base_model(
                Path(section.model).name,
                model_path,
                with_weights=section.preset == "swarm" or section.adapter is not None,
            ),
            tasks=[TaskSpec.model_validate(task) for task in section.tasks or DEMO_TASKS],
            sampling=SamplingContract(
                temperature=section.temperature,
                max_new_tokens=section.max_new_tokens,
                group_size=section.group_size,
            ),
            max_staleness=section.max_staleness,
            publish_every=section.publish_every,
            local_groups=section.local_groups,
            external_groups=section.external_groups,
            pacing_batches=section.pacing_batches,
            partial_credit=section.partial_credit,
            adapter=section.adapter,
            algorithm=section.algorithm,
            learners=[identity.key] if section.preset == "fleet" else [],
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"run{'.' + where if where else ''}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"run.model: {error}") from error


def save_spec(directory: DataDirectory, spec: RunSpec, identity: Identity) -> None:
    """Sign a new run's spec and write it into the data directory. Raises `DataError` if one is there."""
    if directory.spec_path.exists():
        raise DataError(
            f"{directory.spec_path}: a run is there already; choose another directory with --data"
        )
    encoded = seal(identity, spec.run_id, "run_spec", 0, spec.encode())
    atomic_write(directory.spec_path, encoded)


def open_spec(encoded: bytes, run_id: bytes | None = None) -> RunSpec:
    """The spec of a signed envelope; its hash must be the run it claims (and `run_id`, if given). Raises
    `Refused`."""
    envelope = open_envelope(encoded, run_id=run_id)
    spec = RunSpec.decode(envelope.body)
    if spec.run_id != envelope.run_id:
        raise Refused(RefusalReason.WRONG_RUN, "the spec's hash is not the run's id")
    return spec


def load_spec(directory: DataDirectory) -> tuple[RunSpec, bytes]:
    """The run of a data directory and its envelope. Raises `DataError`."""
    path = directory.spec_path
    try:
        encoded = path.read_bytes()
        return open_spec(encoded), encoded
    except FileNotFoundError as error:
        raise DataError(
            f"{directory.root}: no run is here; join one with 'swarmnode join INVITE' or make one with "
            "'swarmnode init'"
        ) from error
    except (OSError, Refused) as error:
        raise DataError(f"{path}: the run's description is damaged ({error}); join again") from error


def find_model(spec: RunSpec, configured: str | None, directory: DataDirectory) -> Path | None:
    """A folder with exactly the run's model files: the configured one, the shipped one, or one fetched
    before.

    None when it must be fetched from peers. Raises `ConfigError` when the configured one is another model.
    """
    model = spec.model
    if configured is not None:
        try:
            path = resolve_model(configured)
        except ModelNotFound as error:
            raise ConfigError(f"model: {error}") from error
        # Where every node trains a policy of its own, it may begin from weights of its own.
        # An adapter fits the weights that it was trained on.
        own_weights = spec.preset == "swarm" and spec.adapter is None
        if not model_matches(path, model, weights=not own_weights):
            exact = model.weights and not own_weights
            what = "its weights, configuration" if exact else "its configuration"
            raise ConfigError(
                f"model: {path} is not the run's model {model.name!r}: {what} or tokenizer files differ"
            )
        return path
    for name in ("tiny", str(directory.model_path)):
        try:
            path = resolve_model(name) if name == "tiny" else Path(name)
        except ModelNotFound:
            continue
        if path.is_dir() and model_matches(path, model):
            return path
    return None


def resolve_role(configured: Role | None, spec: RunSpec, identity: Identity) -> Role:
    """The role that a node takes in a run. Raises `ConfigError` for one that could do nothing there."""
    if spec.preset == "swarm":
        if configured not in (None, "peer", "relay"):
            raise ConfigError(
                f"role {configured!r}: in preset 'swarm' every node trains its own policy; "
                "join as --role peer or relay"
            )
        return configured or "peer"
    trains = configured in ("learner", "peer")
    if trains and (configured == "peer" or not spec.may_publish(identity.key)):
        raise ConfigError(
            f"role {configured!r}: this node's key ({identity.name}) does not train in this fleet; "
            "join as --role worker or relay, or import the learner's key and run as learner"
        )
    return configured or "worker"


def vocabulary_size(model_path: Path) -> int:
    """How many token ids the model has. Raises `ConfigError`."""
    path = model_path / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot find the vocabulary's size ({error})") from error
