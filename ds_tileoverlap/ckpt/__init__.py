"""Checkpoints of DeepSpeed MoE models on disk: what they hold, and their way to Hugging Face's safetensors and back.

    open_checkpoint -> Checkpoint -> inspection.report
                                  -> planning.Plan -> conversion.convert: a folder of the other kind

``files.py`` reads and writes files of tensors, ``checkpoint.py`` knows the two kinds of folders, ``names.py`` the names
that a tensor has in each. Nothing here needs a GPU, a process group or the model's code.
"""
