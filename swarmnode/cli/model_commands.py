"""`eval` and `export`: measure a version on held-out tasks, and take it home as a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from protocol.identity import node_name
from protocol.run_spec import RunSpec
from swarmnode.cli.errors import UserError
from swarmnode.cli.options import DEFAULT_DATA, Data
from swarmnode.config import NodeConfig, load_config
from swarmnode.data_directory import DataDirectory
from swarmnode.runtime.run_setup import find_model, load_spec
from swarmnode.runtime.version_store import WEIGHTS_NAME, StoredVersion, VersionStore

EVALUATION_BATCH = 64

Version = Annotated[int | None, typer.Option(help="Which version; by default the newest here.")]


def export(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    data: Data = DEFAULT_DATA,
    version: Version = None,
) -> None:
    """Write a version as a Hugging Face folder that `from_pretrained` loads."""
    spec, config, directory = _open(data)
    stored = _find_version(spec, directory, version)
    model_path = _model_path(spec, config, directory)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: the folder is not empty; name a new one")
    out.mkdir(parents=True, exist_ok=True)
    for asset in spec.model.assets:
        shutil.copyfile(model_path / asset.path, out / asset.path)
    assert stored.weights_path is not None
    shutil.copyfile(stored.weights_path, out / WEIGHTS_NAME)
    config_path = out / "config.json"
    values = json.loads(config_path.read_text(encoding="utf-8"))
    values["dtype"] = "bfloat16"
    config_path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    typer.echo(
        f"Version {stored.manifest.version} of {node_name(stored.manifest.policy)} is in {out}; "
        f"load it with AutoModelForCausalLM.from_pretrained({str(out)!r})"
    )


def evaluate(
    data: Data = DEFAULT_DATA,
    version: Version = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out tasks to answer.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Accuracy of a version on held-out tasks, sampled as the run samples."""
    spec, config, directory = _open(data)
    stored = _find_version(spec, directory, version)
    model_path = _model_path(spec, config, directory)
    from swarmnode.engines.transformers_engine import TransformersEngine
    from swarmnode.environments import build_environment
    from swarmnode.environments.prompt import load_tokenizer
    from swarmnode.processes.evaluation import evaluate as evaluate_engine

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("loading the model", total=prompts)
        engine = TransformersEngine(
            model_path,
            device=config.engine.device,
            dtype=config.engine.dtype,
            threads=config.engine.threads,
            max_batch_sequences=config.engine.max_batch_sequences,
        )
        assert stored.weights_path is not None
        engine.load(stored.weights_path, stored.manifest.version)
        progress.update(bar, description="answering")
        result = evaluate_engine(
            engine,
            build_environment(spec.tasks, spec.partial_credit),
            load_tokenizer(model_path),
            spec,
            count=prompts,
            batch_size=EVALUATION_BATCH,
            on_progress=lambda done: progress.update(bar, completed=done),
        )
    assert result is not None, "nothing asked the evaluation to stop"
    if as_json:
        values = {"accuracy": result.accuracy, "by_task": result.by_task, "count": result.count}
        typer.echo(json.dumps({"version": stored.manifest.version, **values}))
        return
    typer.echo(f"version {stored.manifest.version}: {result.accuracy:.3f} of {result.count} held-out tasks")
    for name, accuracy in sorted(result.by_task.items()):
        typer.echo(f"  {name}: {accuracy:.3f}")


def _open(data: Path) -> tuple[RunSpec, NodeConfig, DataDirectory]:
    directory = DataDirectory(data)
    spec, _ = load_spec(directory)
    return spec, load_config(directory.config_path), directory


def _find_version(spec: RunSpec, directory: DataDirectory, version: int | None) -> StoredVersion:
    versions = VersionStore(directory.policies_path, spec.run_id)
    versions.scan()
    own = directory.load_identity().key
    policy = own if versions.complete(own) else next(iter(spec.learners), own)
    held = {stored.version: stored for stored in versions.complete(policy)}
    stored = held.get(max(held, default=0) if version is None else version)
    if stored is None:
        here = (
            f"versions here: {', '.join(map(str, held))}"
            if held
            else "no version is here yet; run the node first"
        )
        raise UserError(f"version {'' if version is None else version} of {node_name(policy)}: {here}")
    return stored


def _model_path(spec: RunSpec, config: NodeConfig, directory: DataDirectory) -> Path:
    configured = config.model or (config.run.model if config.run else None)
    path = find_model(spec, configured, directory)
    if path is None:
        raise UserError(
            f"the files of model {spec.model.name!r} are not here yet; run the node once to fetch them"
        )
    return path
