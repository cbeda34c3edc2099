"""Builders of the compiled operators, in DeepSpeed's form; installed as ``ds_tileoverlap.op_builder``.

This file must neither import deepspeed nor define the name by which DeepSpeed recognises its own folder of builders.
"""
