"""Trains a byte-level MoE language model on the Python standard library's sources, with expert parallelism.

    deepspeed --num_gpus 2 examples/train_moe.py --deepspeed_config configs/train_moe.json --swap-demo

The model is written for DeepSpeed's own MoE layer; the ``"tile_overlap"`` block of the ds_config alone decides what
runs it. With ``--swap-demo`` the first steps run with that block off, then their checkpoint is continued with it on.
"""

from __future__ import annotations

import gc
import sys

import deepspeed
import torch
from corpus import standard_library
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from lm import LanguageModel, count_parameters, moe_layers
from loss_curve import draw
from options import (
    UsageError,
    check,
    choose_settings,
    comparable,
    find_checkpoint,
    make_save_dir,
    parse_arguments,
    read_config,
)
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

# Largest difference of the evaluation losses around the swap, nats per byte: the same arithmetic in another order.
SWAP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 2e-3}


def start(run: Run, ds_config: dict) -> deepspeed.DeepSpeedEngine:
    """A fresh model in a fresh engine; DeepSpeed initialises a model only once."""
    settings, ep_size = run.settings, run.identity["ep_size"]
    # DeepSpeed's expert-parallel groups are runs of consecutive ranks.
    model = LanguageModel(settings.shape, settings.seq_len, ep_size, run.rank % ep_size, run.args.seed)
    parameters = {"params": list(model.parameters()), "name": "all"}
    engine, *_ = ds_tileoverlap.initialize(
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
        config=ds_config,
        lr_scheduler=warmup_then_cosine(settings.steps),
    )
    run.seconds, run.tokens = 0.0, 0
    run.say(f"engine: {len(moe_layers(model))} MoE layers on {backend_of(engine)}, ep_size {ep_size}")
    return engine


def swap(run: Run, ds_config: dict) -> deepspeed.DeepSpeedEngine:
    """Trains with DeepSpeed's layers, then loads that checkpoint into ours, which must evaluate to the same loss."""
    swap_step = run.args.swap_step or max(1, run.settings.steps // 4)
    engine = start(run, {**ds_config, "tile_overlap": {**ds_config["tile_overlap"], "enabled": False}})
    before = train(engine, run, swap_step)
    save(engine, run)
    tolerance = SWAP_TOLERANCE[next(engine.module.parameters()).dtype]
    engine.destroy()
    del engine
    gc.collect()
    get_accelerator().empty_cache()

    engine = start(run, ds_config)
    load(engine, run, run.args.save_dir, swap_step)
    after = evaluate(engine, run)
    run.history["swap"] = swap_step
    difference = abs(after - before)
    verdict = f"<= {tolerance:g}: ok" if difference <= tolerance else f"> {tolerance:g}: NOT EQUAL"
    run.say(f"swap: stock eval_loss={before:.6f} ours eval_loss={after:.6f} |difference|={difference:.1e} ({verdict})")
    if not difference <= tolerance:  # also where a loss is not a number
        raise UsageError("swap: the checkpoint does not give the same loss after the swap")
    return engine


def main() -> None:
    args = parse_arguments(__doc__.splitlines()[0])
    ranks, settings = world_size(), choose_settings(args)
    check(args, settings, ranks)
    ds_config = read_config(args, settings)
    identity = comparable(args, settings, ranks)
    checkpoint = find_checkpoint(args.resume, identity, settings.steps)
    make_save_dir(args.save_dir)

    def losses(engine, batch):
        loss, auxiliary = engine(batch)
        return loss, loss + args.aux_coefficient * auxiliary

    start_ranks(args.verbose)
    run = Run(args, settings, identity, standard_library(), losses, checkpoint[1] if checkpoint else 0)

    engine = swap(run, ds_config) if args.swap_demo else start(run, ds_config)
    if checkpoint:
        load(engine, run, *checkpoint)
        run.say(f"resumed: {args.resume} at step {run.first_step}")
    eval_loss = train(engine, run, settings.steps)
    save(engine, run)
    if run.rank == 0:
        draw(run.history, args.save_dir / "loss_curve.png", "Byte-level MoE language model")
    run.bar.close()
    run.say(
        f"final: step={engine.global_steps} train_loss={run.history['train'][-1][1]:.4f} eval_loss={eval_loss:.4f} "
        f"tokens_per_s={run.tokens_per_s:.0f} params={count_parameters(engine.module, identity['ep_size'])} "
        f"backend={backend_of(engine)}"
    )


if __name__ == "__main__":
    sys.exit(run_main(main, "train_moe"))
