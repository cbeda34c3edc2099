"""What of a checkpoint goes where on the other side, and what stands against it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from .checkpoint import DEEPSPEED, HF, Checkpoint, num_experts
from .files import DTYPES, Entry, count_nonfinite, read
from .names import Names

# DeepSeek-V3 routes wrongly with less precision.
KEEPS_DTYPE = ".e_score_correction_bias"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OF_MOE_LAYER = re.compile(r"(.+)\.(?:experts\.\d+\..+|gate\.weight)")


class Plan:
    """Which tensor of the source becomes which one of the target.

    Attributes:
        source: target name -> tensor of the source.
        target: target name -> the same with the dtype that it gets.
        faults: tensors of the source that would get one name.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Names, to: str, config: dict[str, Any], dtype: torch.dtype | None = None
    ):
        self.names, self.to, self.config = names, to, config
        self.source: dict[str, Entry] = {}
        self.faults: list[str] = []
        rename = names.hf if to == HF else names.deepspeed
        for entry in checkpoint.tensors():
            name = rename(entry.key)
            if self.source.setdefault(name, entry) is not entry:
                other = self.source[name].key
                self.faults.append(f"{entry}: becomes {name} as {other} does, expected a name of its own")
        if to == DEEPSPEED and config.get("tie_word_embeddings") and EMBEDDINGS in self.source:
            # A state dict has a tied weight under both of its names, safetensors under one.
            self.source.setdefault(HEAD, self.source[EMBEDDINGS])
        self.target = {
            name: replace(entry, dtype=dtype if dtype and _follows(entry) else entry.dtype)
            for name, entry in self.source.items()
        }

    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.target.values())

    def unlike_family(self) -> Iterator[str]:
        """What Hugging Face's side does not have as config.json says; transformers would fill it with random values."""
        view = {entry.key if self.to == DEEPSPEED else name: entry for name, entry in self.source.items()}
        prefixes = sorted({match[1] for name in view if (match := _OF_MOE_LAYER.fullmatch(name))})
        places = [prefix for prefix in prefixes if re.fullmatch(rf"model\.layers\.\d+\.{self.names.block}", prefix)]
        if not places or places != prefixes:
            other = ", ".join(sorted(set(prefixes) - set(places))) or "no MoE layer"
            yield f"got {other}, expected MoE layers at model.layers.<N>.{self.names.block} (try --map)"
        for prefix in places:
            yield from self._layer_faults(prefix, {n: e for n, e in view.items() if n.startswith(f"{prefix}.")})
        layers = {int(match[1]) for name in view if (match := re.match(r"model\.layers\.(\d+)\.", name))}
        for layer in sorted(set(range(self.config.get("num_hidden_layers", 0))) - layers):
            yield f"model.layers.{layer}: missing, expected as many layers as config.json has in num_hidden_layers"
        for name, entry in view.items():
            if "deepspeed_moe" in name:
                yield f"{entry}: has no name on Hugging Face's side (try --map)"
            if entry.dtype not in DTYPES.values():
                yield f"{entry}: got {entry.dtype}, expected a dtype that safetensors files have"

    def _layer_faults(self, prefix: str, view: dict[str, Entry]) -> Iterator[str]:
        number, projections = num_experts(self.config), self.names.projections
        sizes = {"E": number, "H": self.config.get("hidden_size")}
        sizes["I"] = self.config.get("moe_intermediate_size") or self.config.get("intermediate_size")
        wanted = {f"{prefix}.experts.{e}.{name}": kind for e in range(number) for name, kind in projections.items()}
        wanted[f"{prefix}.gate.weight"] = "EH"
        for name, kind in wanted.items():
            shape = tuple(sizes[letter] for letter in kind)
            if name not in view:
                yield f"{name}: missing, expected shape {list(shape)} as of config.json (or a name by --map)"
            elif view[name].shape != shape:
                yield f"{view[name]}: got shape {list(view[name].shape)}, expected {list(shape)} as of config.json"
        for name, entry in view.items():
            if name.startswith(f"{prefix}.experts.") and name not in wanted:
                yield f"{entry}: got {name}, expected {', '.join(projections)} of {number} experts (or --map)"
            if name.startswith(f"{prefix}.coefficient."):
                yield f"{entry}: got a residual MoE, expected one without use_residual (no family has any)"

    def unfit_values(self) -> Iterator[str]:
        """NaN and inf, also those that a narrower dtype makes."""
        for (name, entry), value in zip(self.source.items(), self.values("check")):
            if count := count_nonfinite(value):
                yield f"{entry}: got {count} NaN or inf in {self.target[name].dtype}, expected finite values"

    def values(self, doing: str, names: list[str] | None = None) -> Iterator[torch.Tensor]:
        """The target's values in the order of ``names``, one at a time, with a progress bar."""
        names = list(self.source) if names is None else names
        total = sum(self.source[name].nbytes for name in names)
        with tqdm(desc=doing, total=total, unit="B", unit_scale=True, disable=None) as bar:
            for name, value in zip(names, read(self.source[name] for name in names)):
                yield value.to(self.target[name].dtype)
                bar.update(self.source[name].nbytes)


def _follows(entry: Entry) -> bool:
    """Whether a tensor gets another dtype when the model does."""
    return entry.dtype.is_floating_point and not entry.key.endswith(KEEPS_DTYPE)
