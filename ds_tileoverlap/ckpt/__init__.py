"""Checkpoints of DeepSpeed MoE models on disk: what they hold, and their way to Hugging Face's safetensors and back.

    open_checkpoint -> Checkpoint -> inspection.report
                                  -> planning.Plan -> conversion.convert: a folder of the other kind

``files.py`` reads and writes files of tensors, ``checkpoint.py`` knows the two kinds of folders, ``names.py`` the names
that a tensor has in each. Nothing here needs a GPU, a process group or the model's code, and no code in a source is
run.

``convert`` takes model weights between checkpoints of ``deepspeed.moe.layer.MoE`` and Hugging Face folders of Mixtral,
Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, bit for bit unless ``--dtype`` says otherwise. It checks the whole
source first and names every fault; it holds one expert in memory; the target appears when it is complete, or not at
all; the source is not changed. One file for each global expert loads at every ``ep_size``. Optimizer state, and with it
ZeRO's fp32 copies, stays behind: it is cut to one ``ep_size`` and number of ranks, and Hugging Face folders have none.

On DeepSpeed's side the MoE module stands at the block's place (``model.layers.N.mlp``) and experts have ``gate_proj``,
``up_proj`` and ``down_proj``; for models with other names ``--map`` takes a YAML or JSON file of regular expressions,
such as configs/checkpoint_names.yaml for modules at ``mlp.moe`` and experts with w1, w2 and w3.

Weights are converted, not computation: DeepSpeed's gate normalises its top-k weights, as Mixtral and Qwen3-MoE
(``norm_topk_prob``) do and others do not. DeepSpeed cannot save a MoE module with shared experts inside: put the module
beside them.
"""
