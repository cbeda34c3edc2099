"""Fine-tunes a Hugging Face MoE model through DeepSpeed's AutoEP, its experts on our stages.

    deepspeed --num_gpus 2 examples/finetune_hf.py --deepspeed_config configs/finetune_hf.json --demo
    deepspeed --num_gpus 2 examples/finetune_hf.py --deepspeed_config configs/finetune_hf.json --model FOLDER --lora

The result, ``runs/finetune_hf/model`` or ``adapter``, is a Hugging Face folder, or with ``--lora`` a peft adapter of
the attention, that needs neither this package nor DeepSpeed. ``--demo`` makes a tiny model first. Adapters train under
ZeRO 0 or 3: DeepSpeed's ZeRO 1 and 2 want experts that train.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

import deepspeed
import torch
import transformers
from corpus import Corpus, Encode, as_bytes, from_files, standard_library
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from loss_curve import draw
from options import (
    Parser,
    RunSize,
    UsageError,
    add_run_options,
    add_sizes,
    filled,
    find_checkpoint,
    make_save_dir,
    read_json,
)
from torch import nn
from training_loop import (
    Run,
    backend_of,
    evaluate,
    load,
    run_main,
    save,
    start_ranks,
    train,
    warmup_then_cosine,
    world_size,
)

import ds_tileoverlap
from ds_tileoverlap.hf_export import save_pretrained

DEFAULTS = RunSize(seq_len=128, micro_batch=8, steps=200, lr=1e-5, eval_every=50, eval_windows=64)
LORA_LR, DEMO_LR = 2e-4, 3e-3
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    add_run_options(parser, "runs/finetune_hf")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="Hugging Face folder: configuration, safetensors, maybe a tokenizer")
    model.add_argument("--demo", action="store_true", help="a tiny random Qwen3-MoE that reads bytes")
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders (default: Python's standard library)")
    parser.add_argument("--lora", action="store_true", help="train adapters of the attention's projections, no weights")
    add_sizes(parser.add_argument_group("sizes"), RunSize)
    args = parser.parse_args()
    args.output = args.save_dir / ("adapter" if args.lora else "model")
    return args


def choose_size(args: argparse.Namespace) -> RunSize:
    given = {f.name: getattr(args, f.name) for f in fields(RunSize) if getattr(args, f.name) is not None}
    lr = DEMO_LR if args.demo else LORA_LR if args.lora else DEFAULTS.lr
    return replace(DEFAULTS, **{"lr": lr, **given})


def check(args: argparse.Namespace, size: RunSize, ranks: int) -> None:
    """Raises one :class:`UsageError` that lists everything wrong with the options."""
    faults = size.faults(ranks)
    if args.model and not (args.model / "config.json").is_file():
        faults.append(f"--model: got {args.model}, expected a folder with a config.json")
    faults += [f"--text: got {path}, which does not exist" for path in args.text or () if not path.exists()]
    if args.output.exists():
        faults.append(f"--save-dir: {args.output} exists already, expected a folder without a result")
    if faults:
        raise UsageError("; ".join(faults))


def complete_config(args: argparse.Namespace, size: RunSize, ranks: int, dtype: torch.dtype) -> dict:
    """The ds_config with its ``"auto"`` values filled in."""
    more = {
        ("bf16", "enabled"): dtype != torch.float32,
        ("zero_optimization", "stage"): 0 if args.lora else 2,
        ("expert_parallel", "autoep_size"): ranks,
    }
    config = filled(read_json(args.deepspeed_config), size, more)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if args.lora and stage in (1, 2):
        raise UsageError(f"zero_optimization.stage: got {stage}, expected 0 or 3 with --lora, as no expert is trained")
    return config


def make_demo(folder: Path, seed: int) -> None:
    """Writes a tiny random model once, on rank 0."""
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(seed)
        config = transformers.Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
            max_position_embeddings=1024, bos_token_id=None, eos_token_id=0,
        )  # fmt: skip
        dtype = torch.float32 if get_accelerator().device_name() == "cpu" else torch.bfloat16
        transformers.Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)
    dist.barrier()


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase | None:
    has_one = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return transformers.AutoTokenizer.from_pretrained(folder) if has_one else None


def encoder(tokenizer: transformers.PreTrainedTokenizerBase | None) -> Encode:
    if tokenizer is None:
        return as_bytes
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: bytes) -> torch.Tensor:
        ids = tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids + end, dtype=torch.int32)

    return encode


def check_text(corpus: Corpus, config: transformers.PretrainedConfig, seq_len: int) -> None:
    """What a model would otherwise fail at, or not notice, in mid-training."""
    largest = max((int(part.max()) for part in (corpus.train, corpus.held_out) if len(part)), default=0)
    if largest >= config.vocab_size:
        raise UsageError(
            f"--text: got token {largest}, expected less than the model's vocab_size, {config.vocab_size} "
            "(without a tokenizer in the model's folder tokens are bytes)"
        )
    longest = getattr(config, "max_position_embeddings", seq_len + 1) - 1
    if seq_len > longest:
        raise UsageError(f"--seq-len: got {seq_len}, expected at most {longest}, which the model can place")


def with_adapters(model: transformers.PreTrainedModel, seed: int) -> nn.Module:
    import peft

    attention = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "attn" in name
    }
    torch.manual_seed(seed)
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=sorted(attention))
    )


def start(run: Run, model: nn.Module, ds_config: dict) -> deepspeed.DeepSpeedEngine:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counts = [sum(parameter.numel() for parameter in part) for part in (trained, model.parameters())]
    engine, *_ = ds_tileoverlap.initialize(
        model=model,
        model_parameters=trained,
        config=ds_config,
        lr_scheduler=warmup_then_cosine(run.settings.steps),
    )
    run.say(f"engine: trains {counts[0]} of {counts[1]} parameters")
    return engine


def losses(engine: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
    return loss, loss


def export(engine: deepspeed.DeepSpeedEngine, run: Run) -> None:
    """Writes the result; where that fails, on every rank alike, at least a checkpoint."""
    try:
        save_pretrained(engine, run.args.output)
    except (ValueError, RuntimeError) as error:
        save(engine, run)
        raise UsageError(f"{error}\nThe weights are in {run.args.save_dir}, as a checkpoint of DeepSpeed") from error


def main() -> None:
    args, ranks = parse_arguments(), world_size()
    size = choose_size(args)
    check(args, size, ranks)
    source = args.model or args.save_dir / "demo"
    identity = {"model": str(source), "lora": args.lora, "seq_len": size.seq_len, "seed": args.seed, "ranks": ranks}
    checkpoint = find_checkpoint(args.resume, identity, size.steps)
    make_save_dir(args.save_dir)

    start_ranks(args.verbose)
    if not args.verbose:
        transformers.utils.logging.disable_progress_bar()
    if args.demo:
        make_demo(source, args.seed)
    tokenizer = load_tokenizer(source)
    corpus = from_files(args.text, encoder(tokenizer)) if args.text else standard_library(encoder(tokenizer))
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    check_text(corpus, model.config, size.seq_len)
    ds_config = complete_config(args, size, ranks, model.dtype)
    run = Run(args, size, identity, corpus, losses, checkpoint[1] if checkpoint else 0)

    engine = start(run, with_adapters(model, args.seed) if args.lora else model, ds_config)
    if checkpoint:
        load(engine, run, *checkpoint)
        run.say(f"resumed: {args.resume} at step {run.first_step}")
    else:
        evaluate(engine, run)
    eval_loss = train(engine, run, size.steps)
    export(engine, run)
    if run.rank == 0:
        if tokenizer is not None:
            tokenizer.save_pretrained(args.output)
        unit = "nats per byte" if tokenizer is None else "nats per token"
        draw(run.history, args.save_dir / "loss_curve.png", f"Fine-tuning of {source.name}", unit)
    run.bar.close()
    run.say(
        f"final: step={engine.global_steps} train_loss={run.history['train'][-1][1]:.4f} "
        f"eval_loss={eval_loss:.4f} (before: {run.history['eval'][0][1]:.4f}) tokens_per_s={run.tokens_per_s:.0f} "
        f"backend={backend_of(engine)} saved={args.output}"
    )


if __name__ == "__main__":
    sys.exit(run_main(main, "finetune_hf"))
