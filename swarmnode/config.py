"""A node's configuration: one TOML file, unknown keys are errors, `swarmnode config` prints the resolved
one."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import Name
from protocol.messages import Role
from protocol.run_spec import AdapterSpec, AlgorithmSpec


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line that says what, where and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NetworkConfig(Section):
    """How this node is reached and whom it dials first."""

    listen: Annotated[list[str], Field(min_length=1)] = ["/ip4/0.0.0.0/tcp/0"]
    announce: list[str] = []
    """Addresses told to others instead of the listening ones (a container's DNS name, a port-mapped host)."""
    seeds: list[str] = []
    """Addresses dialed at start, beside those of the invite. Losing all of them stops nothing."""
    max_upload_mbps: Annotated[float, Field(gt=0)] | None = None
    """Megabits per second for weights and model files going out, over all peers together; None: what the line
    carries. Messages are never held back."""
    max_download_mbps: Annotated[float, Field(gt=0)] | None = None
    """The same for what comes in."""
    presence_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Seconds between presence messages in a small swarm; the interval grows with the number of nodes."""
    gone_after_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A node not heard of for this long is shown as gone."""


class ApiConfig(Section):
    """The page, JSON and metrics."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    token: str | None = None
    """Needed when `host` is not loopback; also read from SWARMNODE_API_TOKEN."""


class EngineConfig(Section):
    """What generates rollouts."""

    type: Literal["transformers"] = "transformers"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    max_batch_sequences: Annotated[int, Field(ge=1, le=65536)] = 64
    groups_in_hand: Annotated[int, Field(ge=1, le=1024)] = 8
    """Groups asked of the engine at once."""


class LearnerConfig(Section):
    """How this node trains, when it does."""

    device: str = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    token_budget: Annotated[int, Field(ge=1)] = 8192
    """Most tokens that a process computes at once: the larger, the more memory."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes on this machine that hold and train the policy together: one per GPU."""
    gradient_checkpointing: bool = False
    """Keep only what goes into each layer and compute the rest twice: less memory, a third more time."""
    fp32_head: bool = True
    """Whether the last layer computes in float32 when dtype is bfloat16."""
    eval_every: Annotated[int, Field(ge=1)] = 10
    """Updates between evaluations on held-out seeds."""
    eval_prompts: Annotated[int, Field(ge=1, le=100_000)] = 128
    max_updates: int | None = None
    max_seconds: float | None = None
    """Training stops after this long, with a final evaluation; the node goes on serving."""
    checkpoint_keep: Annotated[int, Field(ge=1, le=100)] = 3
    checkpoint_every: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Versions between checkpoints. After a crash the updates since the last one are made again."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Training halts when the effective share of tokens under their weights π/μ stays below this."""
    min_entropy: Annotated[float, Field(ge=0)] = 1e-3
    """Training halts when the policy's entropy, in nats per token, stays below this."""
    halt_after: Annotated[int, Field(ge=1)] = 5
    """Updates in a row below one of these floors that halt training."""


class SharingConfig(Section):
    """What a node of preset `swarm` does with its own groups and those of others."""

    announce: Literal["all", "informative", "none"] = "all"
    candidates_per_group: Annotated[int, Field(ge=1, le=64)] = 2
    """External groups kept ready for each one that a batch uses."""


class RunSection(Section):
    """The run that `swarmnode init` or `run --create` makes. Later changes here make another run."""

    name: str = "swarm"
    preset: Literal["fleet", "swarm"] = "fleet"
    mode: Literal["async", "sequential"] = "async"
    model: str = "tiny"
    """`tiny` (shipped), a Hugging Face folder, or a hub id."""
    tasks: list[dict[str, Any]] = []
    """Each with environment, name, config, weight; empty means the tiny model's demo tasks."""
    group_size: Annotated[int, Field(ge=2, le=64)] = 8
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=32768)] = 8
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 4
    publish_every: Annotated[int, Field(ge=1, le=10_000)] = 1
    local_groups: Annotated[int, Field(ge=1, le=65_536)] = 16
    external_groups: Annotated[int, Field(ge=0, le=65_536)] = 0
    pacing_batches: Annotated[int, Field(ge=1, le=10_001)] = 2
    partial_credit: bool = False
    """Whether nearly right answers earn a fraction: helps a model that wraps right answers in words."""
    adapter: AdapterSpec | None = None
    """A low-rank adapter to train instead of all weights."""
    algorithm: AlgorithmSpec = AlgorithmSpec()

    @model_validator(mode="after")
    def _consistent(self) -> "RunSection":
        if self.mode == "sequential" and self.max_staleness != 0:
            raise ValueError("mode = 'sequential' needs max_staleness = 0")
        if self.max_staleness < self.publish_every - 1:
            raise ValueError(
                "publish_every may be at most max_staleness + 1: otherwise groups are too stale before "
                "the next version is published"
            )
        return self


class NodeConfig(Section):
    """Everything about one node."""

    role: Role | None = None
    """None: what the run needs most, a worker in a fleet, a peer in preset `swarm`."""
    name: Name | None = None
    """What others see (printable, at most 64 characters); None: the name that follows from the node's key."""
    model: str | None = None
    """Where this node finds the run's model; None: the shipped one if it is that, else fetched from peers."""
    network: NetworkConfig = NetworkConfig()
    api: ApiConfig = ApiConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    sharing: SharingConfig = SharingConfig()
    run: RunSection | None = None


def parse_config(values: dict[str, Any], where: str) -> NodeConfig:
    """Validate plain values. Raises `ConfigError` naming `where`, the key and the problem."""
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        problem = first["msg"]
        if first["type"] == "extra_forbidden":
            problem = f"unknown key; known here: {', '.join(_known_keys(first['loc']))}"
        raise ConfigError(f"{where}: {key}: {problem}") from error


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: Any = NodeConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next(option for option in options if hasattr(option, "model_fields"))
    return list(model.model_fields)


def load_config(path: Path) -> NodeConfig:
    """Read a TOML file. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror}); make one with 'swarmnode init'"
        ) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(values, str(path))


def with_overrides(config: NodeConfig, overrides: dict[str, Any]) -> NodeConfig:
    """`config` with dotted keys replaced, such as {"api.port": 0}; None values are ignored."""
    values = config.model_dump()
    for key, value in overrides.items():
        if value is None:
            continue
        target = values
        *path, last = key.split(".")
        for part in path:
            target = target[part]
        target[last] = value
    return parse_config(values, "command line")


def to_toml(config: NodeConfig) -> str:
    """The whole resolved configuration as TOML (keys that are None are left out)."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
